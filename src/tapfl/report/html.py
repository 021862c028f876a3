"""A report as one HTML file that needs nothing else: no network, no other file.

The page's script and style are inlined, as are pictures of samples; its content policy allows these
and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from tapfl import __version__
from tapfl.engine.files import replacing
from tapfl.report import html_learning as learning
from tapfl.report import html_record as record
from tapfl.report import html_results as results
from tapfl.report import html_samples
from tapfl.report.gather import Gathered, gather, seed_folders
from tapfl.report.html_departures import departures
from tapfl.report.html_standings import standings_table
from tapfl.report.markup import Html, counted, join, tag, text

FILE = "report.html"
SAMPLES = "samples"  # the section that has pictures
Section = tuple[str, str, Html]  # its id, heading and content
SELF, NOTHING = "'self'", "'none'"  # as a content policy writes them


def write_report(folders: Sequence[Path], out: Path | None = None, samples: bool = True) -> Path:
    """Write the report of a run, or of several seeds, and return where it is."""
    return write_page(render(gather(folders), samples), out or folders[0] / FILE)


def write_page(page: str, path: Path) -> Path:
    """Write a page; return where it is."""
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def render(gathered: Gathered, samples: bool = True, watched: bool = False) -> str:
    """Return the page of runs; a ``watched`` one asks its server for news."""
    return whole_page(_title(gathered), _about(gathered), sections_of(gathered, samples), watched,
                      "watched" if watched and not gathered.finished else "complete")


def _title(gathered: Gathered) -> str:
    """Return the run's name; seeds that stand together are called by their folder."""
    first, *others = (path.resolve() for path in gathered.paths)
    if not others:
        return first.name
    if all(path.parent == first.parent for path in others) and seed_folders(first.parent):
        return first.parent.name
    return f"{first.name} and {len(others)} more"


def whole_page(title: str, about: Html, sections: Sequence[Section], watched: bool = False,
               state: str = "complete") -> str:
    """Return sections as one page."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
              f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'; "
              f"connect-src {SELF if watched else NOTHING}; "
              f"img-src {'data:' if SAMPLES in {id_ for id_, *_ in sections} else NOTHING}")
    return Template(_asset("page.html")).substitute(
        policy=policy, title=text(title), style=style, script=script, about=about,
        links=_links(sections), sections=join(_section(*each) for each in sections), state=state,
        version=text(__version__))


def _asset(name: str) -> str:
    return (resources.files("tapfl") / "report" / name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """Return what a content policy calls an inlined script or style by."""
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def sections_of(gathered: Gathered, samples: bool) -> list[Section]:
    """Return the parts of the page; what a person wants first is first."""
    found: list[Section] = []
    if gathered.finished:
        found += [("verdict", "Verdict", join([results.headline(gathered),
                                               standings_table(gathered.standings)])),
                  ("results", "Results", join([results.main_table(gathered),
                                               results.comparisons(gathered)]))]
        if gathered.verdict is not None:
            found.append(("clients", "Who was helped, who was hurt",
                          join([departures(gathered), results.clients(gathered)])))
    else:
        found.append(("progress", "Progress", record.progress(gathered)))
    found += [("learning", "Learning", learning.learning(gathered)),
              ("replacements", "Replacements", learning.replacements(gathered)),
              ("map", "Map of the federation", join([departures(gathered),
                                                     learning.federation_map(gathered),
                                                     learning.blocks(gathered)]))]
    if samples:
        found.append((SAMPLES, "Samples", html_samples.samples(gathered)))
    return [*found, ("cost", "Footprint, time and memory", record.costs(gathered)),
            ("warnings", "Warnings", record.warnings(gathered)),
            ("versions", "Versions and data", record.versions(gathered)),
            ("again", "Make it again", record.again(gathered))]


def _section(id_: str, heading: str, content: Html) -> Html:
    return tag("section", tag("h2", heading, id=f"{id_}-heading"), content, id=f"section-{id_}",
               aria_labelledby=f"{id_}-heading")


def _links(sections: Sequence[Section]) -> Html:
    return join(tag("li", tag("a", heading.partition(": ")[0], href=f"#section-{id_}"))
                for id_, heading, _ in sections)


def _about(gathered: Gathered) -> Html:
    """Return in a line what was run."""
    first = gathered.record
    seeds = ", ".join(map(str, gathered.seeds))
    return tag("p", f"{counted(first.clients, 'client')}, "
                    f"{counted(len(first.federation.tasks), 'task')}, foundation "
                    f"{first.config.foundation.name}, "
                    f"{counted(first.config.train.rounds, 'round')}, "
                    f"seed{'s' if len(gathered.seeds) > 1 else ''} {seeds}")
