"""Draw tables of results: on a terminal, as Markdown, as LaTeX, as CSV.

Terminal and CSV use the names that commands take, Markdown and LaTeX those of the paper.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Sequence

from tapfl.evaluation.metrics import PERCENT, metric_kind
from tapfl.report.paper import dataset_name, method_name, metric_name
from tapfl.report.sheets import PAPER, Cell, Column, Line, Sheet
from tapfl.tasks import IMAGE_CLASSIFICATION, IMAGE_GENERATION, TEXT_CLASSIFICATION, TEXT_GENERATION

AVERAGES = {IMAGE_CLASSIFICATION: "Avg. Class.", TEXT_CLASSIFICATION: "Avg. Class.",
            IMAGE_GENERATION: "Avg. Gen.", TEXT_GENERATION: "Avg. Gen."}
_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
          "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
          "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}"}


def _digits(metric: str, fine: bool) -> int:
    """Return how many digits a value has; as many as the paper prints if ``fine``."""
    return (1 if metric_kind(metric) in PERCENT else 3) + fine


def _values(cell: Cell, column: Column, fine: bool) -> tuple[str, str]:
    """Return a cell's mean and deviation as text; an average has no deviation."""
    digits = _digits(column.metric, fine)
    return (f"{cell.mean:.{digits}f}",
            "" if cell.spread is None else f"{cell.spread:.{digits}f}")


def _plain(cell: Cell, column: Column, fine: bool) -> str:
    mean, spread = _values(cell, column, fine)
    return f"{mean} ±{spread}" if spread else mean


def _arrow(column: Column) -> str:
    return "↓" if column.lower_is_better else "↑"


def _heading(column: Column) -> str:
    """Return the paper's name for a column's data set, or for a family's average."""
    return (AVERAGES.get(column.kind, "Avg.") if column.average
            else dataset_name(column.dataset))


def _fine(sheet: Sheet) -> bool:
    return any(line.source == PAPER for line in sheet.lines)


def terminal(sheets: Sequence[Sheet], title: str) -> str:
    """Return the tables as a terminal shows them, with styles if it takes any."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = Console()
    styles = {1: "bold", 2: "underline"}
    with console.capture() as captured:
        for number, sheet in enumerate(sheets):
            drawn = Table(title_justify="left", title=None if number else title)
            drawn.add_column("method", no_wrap=True)
            for column in sheet.columns:
                drawn.add_column(escape(_terminal_title(column)), justify="right")
            for line, following in itertools.zip_longest(sheet.lines, sheet.lines[1:]):
                cells = [(line.cells.get(column), column) for column in sheet.columns]
                drawn.add_row(
                    Text("  paper" if line.source == PAPER else line.method),
                    *(Text("") if cell is None else
                      Text(_plain(cell, column, _fine(sheet)), styles.get(cell.rank, ""))
                      for cell, column in cells),
                    end_section=following is not None and following.apart)
            console.print(drawn)
    return str(captured.get()).rstrip("\n")


def _terminal_title(column: Column) -> str:
    short = column.metric.partition("(")[0]
    name = f"average {column.kind}" if column.average else column.dataset
    return f"{name} {short} {_arrow(column)}"


def markdown(sheets: Sequence[Sheet]) -> str:
    """Return the tables as Markdown: best bold, second best underlined."""
    return "\n\n".join(_markdown(sheet) for sheet in sheets)


def _markdown(sheet: Sheet) -> str:
    marks = {1: ("**", "**"), 2: ("<u>", "</u>")}

    def draw(cell: Cell, column: Column) -> str:
        before, after = marks.get(cell.rank, ("", ""))
        return f"{before}{_plain(cell, column, _fine(sheet))}{after}"

    titles = [f"{_heading(c)} {metric_name(c.metric)} {_arrow(c)}" for c in sheet.columns]
    lines = ["| " + " | ".join(markdown_text(t) for t in ["method", *titles]) + " |",
             "|---" * (len(titles) + 1) + "|"]
    for line in sheet.lines:
        name = markdown_text(_label(line))
        cells = [f"*{name}*" if line.apart else name, *_cells(line, sheet, draw)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown_text(text: str) -> str:
    """Return a text that a Markdown table shows as it is."""
    return text.replace("|", "\\|")


def _label(line: Line) -> str:
    name = method_name(line.method)
    return f"{name} (paper)" if line.source == PAPER else name


def _cells(line: Line, sheet: Sheet, draw: Callable[[Cell, Column], str]) -> list[str]:
    """Draw a line's cells; a client may lack what another has."""
    return [draw(line.cells[column], column) if column in line.cells else ""
            for column in sheet.columns]


def latex(sheets: Sequence[Sheet]) -> str:
    """Return the tables as LaTeX, for the package booktabs."""
    return "\n\n".join(_latex(sheet) for sheet in sheets)


def _latex(sheet: Sheet) -> str:
    first, rules, place = ["Method"], [], 2
    for heading, columns in itertools.groupby(sheet.columns, key=lambda c: (_heading(c), c.kind)):
        width = len(list(columns))
        name = latex_text(heading[0])
        first.append(rf"\multicolumn{{{width}}}{{c}}{{{name}}}" if width > 1 else name)
        rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
        place += width
    arrows = {True: r"$(\downarrow)$", False: r"$(\uparrow)$"}
    second = ["", *(f"{latex_text(metric_name(c.metric))} {arrows[c.lower_is_better]}"
                    for c in sheet.columns)]
    lines = [rf"\begin{{tabular}}{{l{'c' * len(sheet.columns)}}}", r"\toprule",
             latex_row(first), " ".join(rules), latex_row(second), r"\midrule"]
    for line in sheet.lines:
        if line.apart:
            lines.append(r"\midrule")
        lines.append(latex_row([latex_text(_label(line)), *_cells(line, sheet, _latex_cell)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def latex_row(cells: Sequence[str]) -> str:
    """Return a row of a LaTeX table."""
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell, column: Column) -> str:
    mean, spread = _values(cell, column, fine=True)
    if not math.isfinite(cell.mean):
        return mean
    marks = {1: rf"\mathbf{{{mean}}}", 2: rf"\underline{{{mean}}}"}
    return f"${marks.get(cell.rank, mean)}" + (rf" \scriptstyle\pm {spread}$" if spread else "$")


def latex_text(text: str) -> str:
    """Return a text that LaTeX prints as it is."""
    return "".join(_LATEX.get(c, c) for c in text)


def as_csv(sheet: Sheet) -> str:
    """Return the table as tidy CSV: a row per method, data set and metric, all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["method", "source", "kind", "dataset", "metric", "mean", "deviation", "count",
                     "rank"])
    for line in sheet.lines:
        for column, cell in line.cells.items():
            writer.writerow([
                line.method, line.source or "tapfl", column.kind,
                "average" if column.average else column.dataset, column.metric, repr(cell.mean),
                "" if cell.spread is None else repr(cell.spread), cell.clients or "",
                cell.rank or ""])
    return out.getvalue().rstrip("\n")
