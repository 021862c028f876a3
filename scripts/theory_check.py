"""Check the theorem by simulation: python scripts/theory_check.py docs/figures/theory.svg

Prints the tables of docs/theory.md and draws its figure; needs matplotlib. Exits with 1 if a left
side is above its bound.
"""

import sys
from pathlib import Path

from tapfl.report.plotting import COLOURS
from tapfl.theory.check import problems, sweeps
from tapfl.theory.figure import save


def figure(path, found, swept):
    """Draw the problems as bars and the sweeps as lines, on logarithmic axes."""
    def draw(figure):
        first, *rest = figure.subplots(2, 3).flat
        series = (("left side", [c.side for c in found], COLOURS[0]),
                  ("theorem", [c.theorem for c in found], COLOURS[1]),
                  ("left side, weighted", [c.weighted_side for c in found], COLOURS[5]),
                  ("weighted form", [c.weighted for c in found], COLOURS[2]))
        for place, (name, values, color) in enumerate(series):
            first.bar([i + 0.2 * (place - 1.5) for i in range(len(found))], values, width=0.2,
                      color=color, label=name)
        _logarithmic(first)
        first.set_xticks(range(len(found)), ["separable", "no noise", "coupled", "network"],
                         fontsize=5)
        first.set_title("models that have a way to go")
        for axes, (name, points) in zip(rest, swept.items(), strict=True):
            values = [value for value, _ in points]
            lines = ([c.side for _, c in points], [c.theorem for _, c in points],
                     [c.weighted_side for _, c in points], [c.weighted for _, c in points])
            for (_, _, color), line in zip(series, lines, strict=True):
                axes.plot(values, line, color=color, marker="o")
            axes.set_xscale("log", base=2)
            _logarithmic(axes)
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.set_title(name)
        figure.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=4)

    save(path, draw, 3.8)


def _logarithmic(axes):
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def table(rows):
    """Print left sides beside bounds."""
    print("| | left side | theorem | proof | times | weighted left side | weighted form | times |")
    print("|---|---|---|---|---|---|---|---|")
    for name, c in rows:
        print(f"| {name} | {c.side:.3g} | {c.theorem:.3g} | {c.proof:.3g} | "
              f"{c.theorem / c.side:.2g} | {c.weighted_side:.3g} | {c.weighted:.3g} | "
              f"{c.weighted / c.weighted_side:.2g} |")
    print()


def main():
    """Check, print and draw."""
    found, swept = problems(), sweeps()
    table([(c.name, c) for c in found])
    for name, points in swept.items():
        print(name)
        table([(f"{value:g}", c) for value, c in points])
    if len(sys.argv) > 1:
        figure(Path(sys.argv[1]), found, swept)
    everything = [*found, *(c for points in swept.values() for _, c in points)]
    return int(not all(c.holds for c in everything))


if __name__ == "__main__":
    sys.exit(main())
