"""A figure of the bound: how it moves as pairs are added, and which blocks cost most."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapfl.engine.files import replacing
from tapfl.errors import TapflError
from tapfl.report.plotting import COLOURS, TWO, look, short_text, style
from tapfl.theory.analysis import Analysis
from tapfl.theory.bound import TERMS

KINDS = ("svg", "pdf", "png")
DATES = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
BLOCKS = 12


def check_file(path: Path) -> Path:
    """Refuse a file whose kind cannot be drawn."""
    if path.suffix[1:].lower() not in KINDS:
        raise TapflError(f"--figure {path}: expected a name that ends in .svg, .pdf or .png")
    return path


def write_figure(found: Analysis, path: Path) -> None:
    """Draw the figure into a file."""
    def draw(figure: Any) -> None:
        pairs, blocks = figure.subplots(1, 2)
        figure.legend(*_pairs(pairs, found), loc="outside upper center", ncols=5)
        _blocks(blocks, found)

    save(path, draw, 3.0)


def save(path: Path, draw: Callable[[Any], None], height: float) -> None:
    """Write what ``draw`` puts into a figure, in the style of the reports."""
    check_file(path)
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(TWO, height), layout="constrained")
        draw(figure)
        kind = path.suffix[1:].lower()
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=200, metadata=DATES[kind])


def _pairs(axes: Any, found: Analysis) -> tuple[list[Any], list[str]]:
    """Stack the terms of the bound as pairs are added, C_K beside them; return the legend."""
    places = range(len(found.pairs))
    below = [0.0] * len(found.pairs)
    for term, color in zip(TERMS, COLOURS, strict=False):
        values = [bounds["theorem"].terms[term] for _, _, bounds in found.pairs]
        axes.bar(places, values, bottom=below, width=0.7, color=color, label=term)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set_xticks(places, [short_text(pair, 22) for pair, _, _ in found.pairs], rotation=30,
                    ha="right", rotation_mode="anchor")
    axes.set_ylabel("right side of the theorem")
    axes.set_title("pairs added one by one")
    other = axes.twinx()
    other.spines["right"].set_visible(True)
    other.grid(False)
    mark = look(6)
    other.plot(places, [sum(1 / k for k in owned.owners.values()) for _, owned, _ in found.pairs],
               color=mark.color, marker=mark.marker, label="C_K (right axis)")
    other.set_ylim(0)
    other.set_ylabel("C_K")
    lines, names = axes.get_legend_handles_labels()
    more, also = other.get_legend_handles_labels()
    return lines + more, names + also


def _blocks(axes: Any, found: Analysis) -> None:
    """Draw the most costly blocks."""
    theorem = found.bounds["theorem"]
    owners = found.owned.owners
    order = sorted(theorem.costs, key=lambda name: -theorem.costs[name])[:BLOCKS]
    drawn = axes.barh(range(len(order)), [theorem.costs[name] for name in order], color=COLOURS[0])
    axes.bar_label(drawn, [f"K_r = {owners[name]}" for name in order], fontsize=5, padding=1)
    axes.set_yticks(range(len(order)), [short_text(name, 36) for name in order], fontsize=5)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("what a block adds to the bound")
    axes.set_title("the most costly blocks")
    axes.grid(False, axis="y")
