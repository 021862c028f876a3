"""The command line: thin, a verb is a function.

Everything heavy is imported inside the verbs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tapfl import __version__
from tapfl.errors import TapflError


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
        options.run(options)
    except TapflError as error:
        print(f"tapfl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tapfl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tapfl",
        description="Personalise multi-modal, multi-task foundation models in federated learning.",
        epilog="Start with: tapfl model mini",
    )
    parser.add_argument("--version", action="version", version=f"tapfl {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_model(verbs)
    _add_presets(verbs)
    return parser


def _add_model(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = verbs.add_parser(
        "model", help="count a model's parameters and bytes, block by block",
        description="Count the parameters of a preset's server model and of every kind of client, "
                    "without and with TAP's second copy. Loads no weights.",
        epilog="examples:\n  tapfl model flava\n  tapfl model vilt --json\n"
               "  tapfl model flava --set backbone.layers_per_stage=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("preset", metavar="PRESET|FILE.yaml", help="see 'tapfl presets'")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_model)


def _model(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.model.summary import render, summarize

    summary = summarize(load_config(options.preset, options.overrides))
    print(json.dumps(summary, indent=2) if options.json else render(summary, options.preset))


def _add_presets(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = verbs.add_parser("presets", help="list the shipped presets",
                            description="List the shipped presets.")
    verb.set_defaults(run=_presets)


def _presets(options: argparse.Namespace) -> None:
    from tapfl.config import preset_summaries

    for name, summary in preset_summaries().items():
        print(f"{name:<16} {summary}")
