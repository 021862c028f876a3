"""How a command below `tapfl deploy` is added."""

from __future__ import annotations

import argparse
from typing import Any

Verbs = Any  # argparse's collection of subparsers


def new_verb(verbs: Verbs, name: str, run: Any, short: str, long: str,
             *examples: str) -> argparse.ArgumentParser:
    """Add a command with examples below its help; ``run`` carries it out."""
    verb: argparse.ArgumentParser = verbs.add_parser(
        name, help=short, description=long,
        epilog="examples:\n" + "\n".join(f"  {e}" for e in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(run=run)
    return verb
