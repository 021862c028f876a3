"""`tapfl join` and `tapfl leave`: clients that come to a run later, or go."""

from __future__ import annotations

import argparse
from pathlib import Path

from tapfl.experiments.command import write_and_say
from tapfl.verbs import Verbs, add_verb


def add_join(verbs: Verbs) -> None:
    """Add ``tapfl join``."""
    verb = add_verb(
        verbs, "join", _join, "give newcomers personal models from a stored run",
        "Give clients that arrive later their personal models at once: the run's stored model,\n"
        "with fresh blocks where it has none (the decoder of an unknown task), personalised as\n"
        "the run's methods do in the end. DIR is a run's folder: predict, export, report and\n"
        "verdict work there. RUN is only read, and may have been stopped.",
        ["tapfl join runs/clinics --federation examples/clinics/newcomers.yaml "
         "--out runs/newcomers --alone",
         "tapfl join runs/clinics --federation examples/clinics/newcomers.yaml "
         "--out runs/trained-more --set post.steps=50"])
    verb.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run")
    verb.add_argument("--federation", type=Path, required=True, metavar="FILE",
                      help="a federation file with the newcomers and their tasks")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    verb.add_argument("--alone", action="store_true",
                      help="also train alone: as many steps from fresh blocks")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change a key of the run's configuration, by its dotted name")
    verb.add_argument("--data", metavar="DIR", help="a folder that mirrors the hub's data sets")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where methods of your own (module:Class) are imported from")
    verb.add_argument("--quiet", action="store_true", help="print the table at the end, no more")
    verb.add_argument("--no-report", action="store_true",
                      help="do not write DIR/report.html in the end")


def _join(options: argparse.Namespace) -> None:
    from tapfl.report.progress import progress
    from tapfl.report.tables import show
    from tapfl.use.join import join

    display = progress(options.quiet)
    try:
        joined = join(options.run_folder, options.federation, options.out, alone=options.alone,
                      overrides=options.overrides, data=options.data, device=options.device,
                      modules=options.modules, notify=display)
    finally:
        display.close()
    show(joined.rows, joined.config.methods)
    for method, why in joined.omitted.items():
        print(f"omitted: {method}: {why}")
    print(f"results: {options.out / 'results.csv'}   models: {options.out / 'models'}")
    if not options.no_report:
        write_and_say([options.out], options.out / "report.html")


def add_leave(verbs: Verbs) -> None:
    """Add ``tapfl leave``."""
    verb = add_verb(
        verbs, "leave", _leave, "let clients leave a run",
        "Let clients leave a run: from the next round on they are asked for nothing, and nothing\n"
        "of theirs is averaged. What they keep is not touched. The run may be under way, or be\n"
        "resumed later; a run that goes on from it (start) does without them, too.",
        ["tapfl leave runs/quickstart g0-1 g1-7"])
    verb.add_argument("run_folder", type=Path, metavar="RUN",
                      help="the folder of a run; of a deployment the server's")
    verb.add_argument("clients", nargs="+", metavar="CLIENT", help="the clients that leave, by id")


def _leave(options: argparse.Namespace) -> None:
    from tapfl.engine.departures import leave
    from tapfl.engine.record import read_record

    new = leave(options.run_folder, options.clients)
    for client in options.clients:
        if client not in new:
            print(f"{client}: has left already")
    if new:
        when = ("a run that starts from this one does without them"
                if read_record(options.run_folder).finished else
                "from the next round on the run does without them")
        print(f"leaving: {', '.join(new)}; {when}")
