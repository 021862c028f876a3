"""HTML, put together so that nothing is forgotten to be escaped: what is not ``Html`` is text.

Names of clients and tasks, paths and reasons may hold anything.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tapfl.errors import one_line

LONG_WORD = 30  # characters; a longer one may break anywhere


class Html(str):
    """Markup that goes into a page as it is."""

    __slots__ = ()


Attribute = str | float | bool | None


def text(value: object) -> Html:
    """Return a text as markup that shows it: one line, no control characters."""
    return Html(html.escape(one_line(str(value))))


def counted(count: int, noun: str) -> str:
    """Return ``1 seed`` or ``3 seeds``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def join(pieces: Iterable[object], between: str = "") -> Html:
    """Return pieces one after the other; what is not markup is escaped."""
    return Html(html.escape(between).join(
        piece if isinstance(piece, Html) else text(piece) for piece in pieces))


def tag(name: str, *children: object, **attributes: Attribute) -> Html:
    """Return an element. ``class_`` is class, ``aria_sort`` is aria-sort; None leaves one out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{_attribute(value)}"')
        for key, value in attributes.items() if value is not None and value is not False)
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(value: Attribute) -> Html:
    """Return an attribute's value; a number has no more digits than a picture needs."""
    if isinstance(value, Html):  # such as the points of a long line, which a text would cut
        return value
    return text(f"{value:.6g}" if isinstance(value, float) else value)


def picture(address: Html, meaning: str, side: int) -> Html:
    """Return a square picture that is part of the page; ``meaning`` says what it shows."""
    return Html(f'<img src="{address}" alt="{text(meaning)}" width="{side}" height="{side}">')


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what it shows, what it sorts by, and a class for its style."""

    shown: object
    value: float | str | None = None
    style: str = ""


def number(value: float, digits: int, sign: bool = False) -> Cell:
    """Return a cell with a number; what is not finite says so, and sorts last."""
    if not math.isfinite(value):
        return Cell("not a number" if math.isnan(value) else "infinite", math.nan)
    return Cell(f"{value:{'+' if sign else ''}.{digits}f}", value)


def table(caption: object, columns: Sequence[object], rows: Iterable[Sequence[object]], *,
          sortable: bool = True) -> Html:
    """Return a table that scrolls in its own frame; its headings are buttons that sort it.

    The first cell of a row is its heading. Columns of numbers stand on the right.
    """
    lines = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    numeric = [any(isinstance(line[i].value, float | int) for line in lines if i < len(line))
               for i in range(len(columns))]
    head = tag("tr", *(
        tag("th", tag("button", name, type="button") if sortable else name, scope="col",
            class_="n" if is_number else None, aria_sort="none" if sortable else None)
        for name, is_number in zip(columns, numeric, strict=True)))
    body = join(tag("tr", *(_cell(cell, place == 0, numeric[place])
                            for place, cell in enumerate(line))) for line in lines)
    return tag("div", tag("table", tag("caption", caption), tag("thead", head),
                          tag("tbody", body)),
               class_="scroll", tabindex="0", role="group", aria_label=_plain(caption))


def _cell(cell: Cell, heading: bool, is_number: bool) -> Html:
    longest = max(map(len, str(cell.shown).split()), default=0)
    is_long = longest > LONG_WORD and not isinstance(cell.shown, Html)
    classes = " ".join(c for c in ("n" if is_number else "", "long" if is_long else "", cell.style)
                       if c)
    value = cell.value
    sorts = None if value is None else ("" if value != value else str(value))
    if heading:
        return tag("th", cell.shown, scope="row", class_=classes or None, data_v=sorts)
    return tag("td", cell.shown, class_=classes or None, data_v=sorts)


def _plain(caption: object) -> str:
    """Return a caption for an attribute: markup has its place in the caption alone."""
    return "table" if isinstance(caption, Html) else str(caption)


def folded(summary: object, *children: object, id_: str | None = None,
           open_: bool = False) -> Html:
    """Return what shows when it is asked for."""
    return tag("details", tag("summary", summary), *children, id=id_, open=open_)
