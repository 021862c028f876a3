"""Figures for papers: one style, one colour for each method, files that are the same every time.

Every figure is drawn twice: for one column of a paper (NAME) and across two (NAME-wide), as PDF
with its fonts inside and as SVG.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.engine.files import replacing
from tapfl.errors import TapflError, one_line

ONE, TWO = 3.3, 6.9  # inches
PANEL = 1.35  # height of a small panel, inches
# Okabe and Ito's colours can be told apart by people who see fewer.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "osD^vPX<>"
# A method has the same look in every figure of a paper.
METHODS = ("tap", "fedavg", "tap-soft", "fedavg+post2", "fedavg+post", "ditto", "local", "apfl",
           "tap-nokd", "perfedavg", "disentafl", "feddat", "fedprox", "fedper", "fedrep", "fedala",
           "perfedavg+post", "disentafl+post", "feddat+post", "disentafl+post2", "tap-gap")
HELPED, HURT, SAME = "#009E73", "#D55E00", "#8C8C8C"
STYLE = {
    "font.family": "serif", "font.serif": ["STIXGeneral", "DejaVu Serif"],
    "mathtext.fontset": "stix", "text.parse_math": False, "font.size": 7, "axes.titlesize": 7,
    "axes.labelsize": 7, "xtick.labelsize": 6, "ytick.labelsize": 6, "legend.fontsize": 6,
    "axes.linewidth": 0.5, "xtick.major.width": 0.5, "ytick.major.width": 0.5,
    "xtick.major.size": 2, "ytick.major.size": 2, "lines.linewidth": 1.0, "lines.markersize": 2.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "grid.linewidth": 0.4, "legend.frameon": False, "legend.handlelength": 2.2,
    "pdf.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "tapfl",
    "axes.unicode_minus": False}


@dataclass(frozen=True)
class Look:
    """How a line is drawn."""

    color: str
    dashes: Any
    marker: str


def look(place: int) -> Look:
    """Return the look of a place in a list: colours first, then dashes."""
    return Look(COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)],
                MARKERS[place % len(MARKERS)])


def looks_of(methods: Sequence[str]) -> dict[str, Look]:
    """Return the look of every method; those that are not known come after those that are."""
    others = sorted(set(methods) - set(METHODS))
    return {name: look(METHODS.index(name) if name in METHODS
                       else len(METHODS) + others.index(name)) for name in methods}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the paper's style, without a display."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise TapflError("--figures: matplotlib is not installed; pip install 'tapfl[figures]' "
                         "brings it") from None
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # a user's own matplotlibrc would change the files
        mpl.rcParams.update(STYLE)
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # shown as a box
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        yield


def save(folder: Path, name: str, draw: Callable[[Any, float], None], height: float,
         wide_height: float) -> list[Path]:
    """Draw a figure for one column and for two; return its files."""
    from matplotlib.figure import Figure

    paths = []
    for ending, width, tall in (("", ONE, height), ("-wide", TWO, wide_height)):
        figure = Figure(figsize=(width, tall), layout="constrained")
        draw(figure, width)
        figure.draw_without_rendering()  # lays it out; once is enough for both formats
        figure.set_layout_engine("none")
        for kind, dates in (("pdf", {"CreationDate": None}), ("svg", {"Date": None})):
            path = folder / f"{name}{ending}.{kind}"
            with replacing(path) as temporary:
                figure.savefig(temporary, format=kind, metadata=dates)
            paths.append(path)
    return paths


def panels(count: int, width: float) -> tuple[int, int]:
    """Return rows and columns of small panels."""
    columns = min(count, 2 if width < 5 else 4)
    return math.ceil(count / columns), columns


def panel_height(count: int, width: float) -> float:
    """Return how high a figure of small panels with a legend is."""
    return PANEL * panels(count, width)[0] + 0.45


@dataclass(frozen=True)
class Lines:
    """A panel of lines. ``ticks`` are names of the places 0, 1, ... on the axis."""

    title: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    ticks: Sequence[str] = ()


def line_panels(figure: Any, width: float, found: Sequence[Lines], x_label: str,
                looks: Mapping[str, Look], steps: bool = False,
                label: Callable[[str], str] = str) -> None:
    """Draw small panels of lines with one legend above them, under the paper's names."""
    rows, columns = panels(len(found), width)
    grid = figure.subplots(rows, columns, squeeze=False)
    shown: dict[str, Any] = {}
    for place, axes in enumerate(grid.flat):
        if place >= len(found):
            axes.set_visible(False)
            continue
        panel = found[place]
        for name, points in panel.lines.items():
            kept = [point for point in points if math.isfinite(point[1])]
            mark = looks[name].marker if len(kept) <= 12 and not steps else ""
            drawn, = axes.plot([x for x, _ in kept], [y for _, y in kept], color=looks[name].color,
                               linestyle=looks[name].dashes, marker=mark,
                               drawstyle="steps-post" if steps else "default")
            shown.setdefault(name, drawn)
        axes.set_title(short_text(panel.title, 40))
        axes.set_ylabel(short_text(panel.y_label, 24))
        if panel.ticks:
            turned = max(map(len, panel.ticks)) > 6
            axes.set_xticks(range(len(panel.ticks)), [short_text(t, 16) for t in panel.ticks],
                            rotation=25 if turned else 0, ha="right" if turned else "center",
                            rotation_mode="anchor")
        if place >= len(found) - columns:
            axes.set_xlabel(x_label)
    figure.legend(shown.values(), [short_text(label(name), 30) for name in shown],
                  loc="outside upper center", ncols=min(len(shown), 3 if width < 5 else 6))


def short_text(value: str, limit: int) -> str:
    """Return a name for a figure: one line, and not too long."""
    plain = one_line(value)
    return plain if len(plain) <= limit else f"{plain[:limit - 1]}…"
