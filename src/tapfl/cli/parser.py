"""The parser of all commands: what it refuses is one line, as all bad input."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tapfl.errors import one_line, shown


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where help is; the parsers below it do the same."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", int, _whole_number)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Leave with one line, without the usage, which may fill a screen."""
        fault = one_line(message.removeprefix("argument "))
        self.exit(2, f"{self.prog}: {fault} ({self.prog} --help)\n")

    # argparse calls this for the parser of a command, too, but leaves what it does not know to the
    # first parser, which cannot tell whose it is.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown words at once, in the name of the command that got them."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown))
        return options, unknown


def _unknown(words: Sequence[str]) -> str:
    options = [word for word in words if word.startswith("-")]
    return f"unknown option {options[0]}" if options else f"not expected: {' '.join(words)}"


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {shown(text)}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {shown(text)}") from None
