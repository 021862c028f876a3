"""A client's label mix in a cell of a table: a small picture, a few words, the rest to hear."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tapfl.engine.labels import TaskLabels
from tapfl.report.markup import Cell, Html, join, tag

WIDTH, HEIGHT = 84, 18
BARS = 42  # labels beyond share a bar with their neighbours
NAMED = 2  # labels that are named in the cell
HEARD = 12  # labels that a screen reader says


def label_mix(labels: TaskLabels | None, names: Sequence[str]) -> Cell:
    """Return the mix; it sorts by how even it is, from one label alone (0) to all equal (1)."""
    if labels is None or not sum(labels.counts):
        return Cell("", "")
    counts, total = labels.counts, sum(labels.counts)
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: (-counts[i], i))

    def name(label: int) -> str:
        return names[label] if label < len(names) else str(label)

    most = ", ".join(f"{name(i)} {100 * counts[i] / total:.0f}%" for i in order[:NAMED])
    left = f" and {len(order) - HEARD} more" if len(order) > HEARD else ""
    heard = ", ".join(f"{name(i)} {counts[i]}" for i in order[:HEARD]) + left
    return Cell(join([bars(counts), tag("small", f" {len(order)} of {len(counts)} labels, "
                                                 f"most: {most}"),
                      tag("span", f"; counts: {heard}", class_="hidden")]),
                f"{evenness(counts):.4f}", "mix")


def evenness(counts: Sequence[int]) -> float:
    """Return the entropy of the labels as a share of the greatest possible."""
    total = sum(counts)
    if len(counts) < 2 or not total:
        return math.nan
    entropy = math.fsum(n / total * math.log(total / n) for n in counts if n)
    return entropy / math.log(len(counts))


def bars(counts: Sequence[int]) -> Html:
    """Draw a bar for every label, in the order of the labels: clients can be compared."""
    width = math.ceil(len(counts) / BARS)
    heights = [sum(counts[i:i + width]) for i in range(0, len(counts), width)]
    step, most = WIDTH / len(heights), max(heights)
    path = "".join(f"M{place * step:.1f} {HEIGHT}v{-height / most * HEIGHT:.1f}h{step * 0.85:.1f}V"
                   f"{HEIGHT}z" for place, height in enumerate(heights) if height)
    return tag("svg", tag("path", d=Html(path)), viewBox=f"0 0 {WIDTH} {HEIGHT}",
               width=str(WIDTH), height=str(HEIGHT), aria_hidden="true", class_="bars")
