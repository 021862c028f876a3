"""Who has left a run, in a report: such a client has no results, and that is no fault."""

from __future__ import annotations

from tapfl.report.gather import Gathered
from tapfl.report.markup import Html, join, tag
from tapfl.report.timeline import Departure


def departures(gathered: Gathered) -> Html:
    """Return a line for every client that has left; nothing where nobody has."""
    found: dict[str, list[Departure]] = {}
    for each in gathered.timeline.left:
        found.setdefault(each.client, []).append(each)
    if not found:
        return join([])
    several = len(gathered.seeds) > 1
    return tag("ul", *(tag("li", _line(client, left, several)) for client, left in found.items()))


def _line(client: str, left: list[Departure], several: bool) -> str:
    since = [f"{each.method} went on without it from round {each.round + 1} on"
             + (f" (seed {each.seed})" if several else "") for each in left]
    return f"{client} has left: {', '.join(since)}. It has no final model there."
