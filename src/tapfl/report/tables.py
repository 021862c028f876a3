"""Tables of results: methods by data sets, for people and for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapfl.errors import TapflError
from tapfl.evaluation.constant import CONSTANT
from tapfl.report import formats
from tapfl.report.sheets import Rows, Sheet, build, split

FORMATS = ("terminal", "markdown", "latex", "csv")
WIDTH = 4
TITLE = "mean ± deviation over clients and seeds; best bold, second underlined"


def render(rows: Rows, methods: Sequence[str] | None = None, format: str = "terminal",
           paper: str | None = None, averages: bool = True,
           kinds: Mapping[str, str] | None = None, width: int = WIDTH) -> str:
    """Return a table of results as text.

    ``rows`` are those of results.csv, of any number of seeds. ``methods`` are the lines, in this
    order (all that there are, by default). ``paper`` puts published figures under each method: a
    key of ``tapfl.report.paper.SETTINGS``. ``averages`` adds those of families, as in the paper.
    ``kinds`` gives the kind of task of data sets that the paper does not have. At most ``width``
    columns (on a terminal) or data sets (elsewhere) stand side by side.
    """
    if format not in FORMATS:
        raise TapflError(f"--format {format}: expected {', '.join(FORMATS)}")
    if methods is None:
        methods = list(dict.fromkeys(row["method"] for row in rows))
    elif any(row["method"] == CONSTANT for row in rows):
        methods = [*methods, CONSTANT]  # whoever lists methods does not list the yardstick
    sheet = build(rows, methods, paper, averages, kinds)
    if format == "csv":
        return formats.as_csv(sheet)
    sheets = split(sheet, width, by_dataset=format != "terminal")
    if format == "terminal":
        return "\n".join([formats.terminal(sheets, TITLE), *_remarks(sheet)])
    return (formats.markdown if format == "markdown" else formats.latex)(sheets)


def show(rows: Rows, methods: Sequence[str]) -> None:
    """Print methods by data sets."""
    print(render(rows, methods, averages=False))


def _remarks(sheet: Sheet) -> list[str]:
    """Say what metrics depend on that are shown by a short name."""
    return [f"{name}: {rest.rstrip(')').replace(',', ', layer ')}"
            for name, bracket, rest in sorted({c.metric.partition("(") for c in sheet.columns})
            if bracket]
