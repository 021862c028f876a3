"""The command line: thin, a verb is a function.

Everything heavy is imported inside the verbs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from tapfl import __version__
from tapfl.bench.command import add_bench
from tapfl.cli.membership import add_join, add_leave
from tapfl.cli.models import add_export, add_model, add_predict, add_pretrain
from tapfl.cli.parser import Parser
from tapfl.cli.privacy import add_privacy
from tapfl.cli.results import add_footprint, add_report, add_table, add_verdict, add_watch
from tapfl.cli.run import add_run
from tapfl.cli.settings import add_presets, add_setup_metrics, add_show, add_validate
from tapfl.deploy.command import add_deploy
from tapfl.errors import TapflError
from tapfl.experiments.command import add_reproduce
from tapfl.theory.command import add_bound


def entry() -> None:
    """Run the command and leave with its exit status."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one line and status 2."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        with _terminable():
            options.run(options)
    except TapflError as error:
        print(f"tapfl: {_printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tapfl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
    return 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: what is complete is written down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _printable(line: str) -> str:
    """Return a line that any terminal takes: a name may hold bytes that are no text."""
    return line.encode("utf-8", "backslashreplace").decode()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="tapfl",
        description="Personalise multi-modal, multi-task foundation models in federated learning.",
        epilog="Start with: tapfl run quickstart",
    )
    parser.add_argument("--version", action="version", version=f"tapfl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (add_run, add_join, add_leave, add_report, add_watch, add_table, add_verdict,
                add_footprint, add_privacy, add_reproduce, add_deploy, add_predict, add_export,
                add_presets, add_show, add_validate, add_model, add_bound, add_pretrain,
                add_setup_metrics, add_bench):
        add(verbs)
    return parser
