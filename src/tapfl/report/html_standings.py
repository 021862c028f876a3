"""All methods against the best of each data set, as a table of a report."""

from __future__ import annotations

from tapfl.report.html_results import SIGNS
from tapfl.report.markup import Cell, Html, counted, number, table, tag
from tapfl.report.standings import BEST, Leader, Standings

STYLES = {BEST: "good", "equivalent": "good", "worse": "bad"}


def standings_table(found: Standings | None) -> Html:
    """Return methods by data sets, the best first; nothing where two methods say it all."""
    if found is None:
        return Html("")
    rows = [[method, number(found.good(method), 0), number(found.count(method, "worse"), 0),
             *(_cell(method, leader) for leader in found.leaders)] for method in found.ranked]
    first = found.ranked[0]
    return tag("div", tag("p", tag("strong", first), f" is best, or equivalent to the best, on "
                          f"{found.good(first)} of {counted(len(found.leaders), 'data set')}, and "
                          f"worse on {found.count(first, 'worse')}."),
               table("All methods: ★ the best mean of a data set, = equivalent to it, ▼ worse than "
                     "it (* also after Holm's correction), ? not told apart. The best one is found "
                     "on these same results.",
                     ["method", "best or =", "worse", *(each.dataset for each in found.leaders)],
                     rows))


def _cell(method: str, leader: Leader) -> Cell:
    """Return how a method stands on a data set."""
    word, star, _ = leader.standing(method).partition("*")
    sign = "★" if word == BEST else SIGNS.get(word, "")
    return Cell(sign + star, word, STYLES.get(word, "same"))
