"""The one exception that means "your input is wrong", as opposed to a fault in tapfl."""

from __future__ import annotations

import contextlib
import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator

LONGEST = 2000  # characters of a message; a message quotes input, which may be of any length
SHOWN = 200  # characters of a value that a message quotes
COMPARED = 2000  # choices that a misspelt word is compared with: the comparison is slow
LISTED = 50  # choices that a message lists

# What would break a line, move the cursor of a terminal or cannot be encoded.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: str, limit: int = LONGEST) -> str:
    """Return a text that fits in one line and can be printed; the middle of a long one is cut."""
    plain = _UNPRINTABLE.sub(
        lambda found: " " if found[0] in "\n\r\t" else ascii(found[0])[1:-1], _cut(text, limit))
    return _cut(plain, limit)  # escapes are longer than what they stand for


def _cut(text: str, limit: int) -> str:
    half = limit // 2 - 1
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


class TapflError(ValueError):
    """Bad input, in one line: what is wrong, where, and what was expected.

    The command line prints the line and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(str(message).strip()))


class _Short(reprlib.Repr):
    """Quotes a value without first building the whole text of it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, 100, 100, 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write an integer of thousands of digits.
        return f"a number of {x.bit_length()} bits" if x.bit_length() > 512 else repr(x)


_short = _Short()


def shown(value: object) -> str:
    """Return how a message quotes a value: in one line, and never longer than ``SHOWN``."""
    try:
        text = _short.repr(value)
    except Exception:  # a value of a library's own type may refuse to be written
        text = type(value).__name__
    return one_line(text, SHOWN)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'flava'?`` or the list of what there is."""
    known = sorted(choices)
    close = difflib.get_close_matches(word[:SHOWN], known[:COMPARED], n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"; known: {', '.join(known[:LISTED])}{more}"


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
