"""What commands are put together from."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Verbs = Any  # argparse's collection of subparsers


def add_verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], None], short: str,
             long: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Add a command: what runs it, its help in short and at length, and examples."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=short, description=long,
        epilog="examples:\n" + "\n".join(f"  {e}" for e in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(run=run)
    return verb


def add_config(verb: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the configuration that a command takes."""
    verb.add_argument("preset", metavar="PRESET|FILE.yaml", nargs="?" if optional else None,
                      help="a shipped preset (see 'tapfl presets') or a configuration file")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name")


def beside(preset: str | None) -> Path | None:
    """Return the folder of a configuration file: a user's own methods may stand in it."""
    return Path(preset).parent if preset and Path(preset).is_file() else None
