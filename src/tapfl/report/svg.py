"""Small charts as SVG: lines over rounds, gains with their intervals, a map of shades.

Colours are classes of the page's style (``c0`` to ``c7``, light and dark); lines differ in their
dashes as well. Every chart has a title and a description for who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapfl.report.markup import Html, join, tag, text

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 8, 36
LOOKS = 8  # colours
DASHES = (None, "6 3", "2 3", "8 3 2 3")
ROW = 17  # height of a line of text
SQUARE = 17


@dataclass(frozen=True)
class Series:
    """A line of a chart; ``look`` is its colour and its dashes."""

    name: str
    points: Sequence[tuple[float, float]]
    look: int


@dataclass(frozen=True)
class Gain:
    """A row of a chart of gains; ``style`` is ``helped``, ``hurt`` or empty."""

    name: str
    mean: float
    low: float
    high: float
    style: str


@dataclass(frozen=True)
class Square:
    """A square of a map: its shade from 0 to 1, a short mark in it, and what it means."""

    shade: float
    mark: str
    meaning: str


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round values that lie between two bounds, about as many as asked for."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999), rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        half = abs(low) / 10 or 1.0
        return low - half, high + half
    return low, high


def line_chart(id_: str, title: str, description: str, series: Sequence[Series], x_label: str,
               y_label: str, steps: bool = False,
               x_range: tuple[float, float] | None = None,
               x_names: Sequence[str] = ()) -> Html:
    """Return lines over a common axis; points that are not finite are left out.

    ``x_range`` is what the axis shows at least: charts side by side can be compared. ``x_names``
    are names of the places 0, 1, ... in place of numbers.
    """
    shown = [Series(s.name, [p for p in s.points if all(map(math.isfinite, p))], s.look)
             for s in series]
    points = [point for each in shown for point in each.points]
    if not points:
        return tag("p", "nothing to draw: no value is finite", class_="empty")
    x0, x1 = _bounds([*(x for x, _ in points), *(x_range or ())])
    y0, y1 = _bounds([y for _, y in points] + ([0.0] if steps else []))

    def across(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    grid = [tag("line", x1=float(LEFT), x2=float(WIDTH - RIGHT), y1=up(y), y2=up(y), class_="grid")
            + tag("text", f"{y:.4g}", x=float(LEFT - 5), y=up(y) + 4, text_anchor="end")
            for y in ticks(y0, y1)]
    grid += [tag("text", name, x=across(x), y=float(HEIGHT - BOTTOM + 15), text_anchor=anchor)
             for x, name, anchor in _x_ticks(x0, x1, x_names)]
    middle = (HEIGHT - BOTTOM + TOP) / 2
    labels = [tag("text", x_label, x=(WIDTH + LEFT) / 2, y=float(HEIGHT - 4),
                  text_anchor="middle", class_="label"),
              tag("text", y_label, x=10.0, y=middle, text_anchor="middle", class_="label",
                  transform=f"rotate(-90 10 {middle:g})")]
    lines = [_line([(across(x), up(y)) for x, y in each.points], each, steps)
             for each in shown if each.points]
    return _picture(id_, title, description, WIDTH, HEIGHT,
                    join([*map(Html, grid), *labels, *lines]))


def _x_ticks(x0: float, x1: float, names: Sequence[str]) -> list[tuple[float, str, str]]:
    """Return what stands below the axis; the outer names of places stay inside the picture."""
    if not names:
        return [(x, f"{x:.4g}", "middle") for x in ticks(x0, x1, 5)]
    last, room = len(names) - 1, max(6, 56 // len(names))
    return [(float(i), _cut(name, room), "start" if i == 0 < last else "end" if i == last > 0
             else "middle") for i, name in enumerate(names)]


def _line(places: Sequence[tuple[float, float]], series: Series, steps: bool) -> Html:
    look = f"c{series.look % LOOKS}"
    named = tag("title", series.name)
    if len(places) == 1:
        ((x, y),) = places
        return tag("circle", named, cx=x, cy=y, r=3.0, class_=f"dot {look}")
    if steps:
        places = [place for (x, y), (_, before) in zip(
            places, [places[0], *places], strict=False) for place in ((x, before), (x, y))]
    return tag("polyline", named, points=Html(" ".join(f"{x:.1f},{y:.1f}" for x, y in places)),
               class_=f"line {look}", stroke_dasharray=dashes(series.look))


def dashes(look: int) -> str | None:
    """Return the dashes of a line: they tell lines apart where colours do not."""
    return DASHES[(look + look // len(DASHES)) % len(DASHES)]


def legend(names: Mapping[str, int]) -> Html:
    """Return which look is whose."""
    def key(look: int) -> Html:
        line = tag("line", x1=1.0, x2=27.0, y1=6.0, y2=6.0, class_=f"line c{look % LOOKS}",
                   stroke_dasharray=dashes(look))
        return tag("svg", line, viewBox="0 0 28 12", width="28", height="12", aria_hidden="true")

    return tag("ul", *(tag("li", key(look), " ", name) for name, look in names.items()),
               class_="legend")


def gain_chart(id_: str, title: str, description: str, gains: Sequence[Gain],
               label: str) -> Html:
    """Return gains with their intervals, one under the other; a line marks 0."""
    finite = [value for g in gains for value in (g.mean, g.low, g.high) if math.isfinite(value)]
    if not finite:
        return tag("p", "nothing to draw: no gain is finite", class_="empty")
    low, high = _bounds([*finite, 0.0])
    left, width = 170, 560
    height = ROW * len(gains) + BOTTOM

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 14)

    drawn = [tag("line", x1=across(0), x2=across(0), y1=0.0, y2=float(height - BOTTOM),
                 class_="zero")]
    drawn += [tag("text", f"{v:+.4g}" if v else "0", x=across(v), y=float(height - BOTTOM + 15),
                  text_anchor="middle") for v in ticks(low, high, 5)]
    drawn.append(tag("text", label, x=(width + left) / 2, y=float(height - 4),
                     text_anchor="middle", class_="label"))
    for place, gain in enumerate(gains):
        y = ROW * place + ROW / 2
        drawn.append(tag("text", _cut(gain.name, 27), tag("title", gain.name), x=float(left - 6),
                         y=y + 4, text_anchor="end"))
        if not math.isfinite(gain.mean):
            drawn.append(tag("text", "not finite", x=across(0) + 4, y=y + 4))
            continue
        style = gain.style or "same"
        if math.isfinite(gain.low) and math.isfinite(gain.high):
            drawn.append(tag("line", x1=across(gain.low), x2=across(gain.high), y1=y, y2=y,
                             class_=f"range {style}"))
        drawn.append(_mark(across(gain.mean), y, style, f"{gain.name}: {gain.mean:+.4g}"))
    return _picture(id_, title, description, width, height, join(drawn), "wide")


def _mark(x: float, y: float, style: str, meaning: str) -> Html:
    """Return a mark whose shape says as much as its colour."""
    named = tag("title", meaning)
    if style == "same":
        return tag("circle", named, cx=x, cy=y, r=3.5, class_="mark same")
    tip = -5 if style == "helped" else 5
    corners = f"{x - 5:.1f},{y - tip:.1f} {x + 5:.1f},{y - tip:.1f} {x:.1f},{y + tip:.1f}"
    return tag("polygon", named, points=corners, class_=f"mark {style}")


def shade_map(id_: str, title: str, description: str, rows: Sequence[str],
              columns: Sequence[str], squares: Mapping[tuple[str, str], Square]) -> Html:
    """Return rows by columns; a place without a square stays empty."""
    left = 8 + 6.3 * min(40, max(map(len, rows)))
    top = 8 + 6.3 * min(14, max(map(len, columns)))
    width, height = left + SQUARE * len(columns) + 8, top + SQUARE * len(rows) + 8
    drawn = [tag("text", _cut(name, 14), tag("title", name), text_anchor="start",
                 transform=f"translate({left + SQUARE * i + 12:.1f} {top - 5:.1f}) rotate(-90)")
             for i, name in enumerate(columns)]
    for r, row in enumerate(rows):
        y = top + SQUARE * r
        drawn.append(tag("text", _cut(row, 40), tag("title", row), x=left - 5, y=y + 12,
                         text_anchor="end"))
        for c, column in enumerate(columns):
            square = squares.get((row, column))
            if square is None:
                continue
            x = left + SQUARE * c
            drawn.append(tag("rect", tag("title", square.meaning), x=x, y=y, width=SQUARE - 1.0,
                             height=SQUARE - 1.0,
                             class_=f"shade{min(5, math.ceil(square.shade * 5))}"))
            if square.mark:
                drawn.append(tag("text", square.mark, x=x + 8, y=y + 12, text_anchor="middle",
                                 class_="on" if square.shade > 0.6 else "in"))
    return _picture(id_, title, description, width, height, join(drawn), "wide map")


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[:length - 1]}…"


def _picture(id_: str, title: str, description: str, width: float, height: float, drawn: Html,
             style: str = "") -> Html:
    return tag("svg", tag("title", title, id=f"{id_}-t"), tag("desc", description, id=f"{id_}-d"),
               drawn, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", id=id_,
               width=f"{width:.0f}", height=f"{height:.0f}",
               aria_labelledby=f"{id_}-t {id_}-d", class_=text(f"chart {style}".strip()))
