"""The one exception that means "your input is wrong", as opposed to a fault in tapfl."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class TapflError(ValueError):
    """Bad input, told in one line: what is wrong, where, and what was expected.

    The command line prints the line and exits with status 2.
    """


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'flava'?`` or the list of what there is."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


@contextlib.contextmanager
def as_tapfl_error(message: str) -> Iterator[None]:
    """Turn whatever a library raises into one line that begins with ``message``."""
    try:
        yield
    except TapflError:
        raise
    except Exception as raised:
        error: BaseException = raised
        while error.__cause__ is not None:  # a library's own words may only say that it failed
            error = error.__cause__
        lines = str(error).strip().splitlines()
        raise TapflError(f"{message} ({lines[0][:300] if lines else type(error).__name__})"
                         ) from None
