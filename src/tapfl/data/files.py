"""Tables from local files: CSV, JSON lines, parquet, and folders of pictures.

CSV and JSON lines are read as they are written: a label ``01`` stays one, and a line that cannot be
read is a broken row, not the end. Nothing here opens a pipe or a device: reading one may never end.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tapfl.data.cache import library_folder
from tapfl.data.checksums import checksum, files_below
from tapfl.data.table import Content, Row, Table, library_content, load_rows
from tapfl.errors import TapflError, as_tapfl_error, shown
from tapfl.reading import SURROGATE, exists, is_dir, is_file, open_regular

TEXT_FILES = (".csv", ".tsv", ".jsonl")
FILES = (*TEXT_FILES, ".parquet")
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
MAX_VALUE = 131_072  # characters of a CSV value: beyond, a quote is missing somewhere


def file_table(path: Path, split: str | None = None, encoding: str | None = None) -> Table:
    """Return a CSV, JSON lines or parquet file, or a folder of pictures, one folder per class.

    ``encoding`` is that of CSV and JSON lines, UTF-8 by default.
    """
    where, suffix = str(path), path.suffix.lower()
    with as_tapfl_error(f"{path}: cannot be read"):
        if encoding and (is_dir(path) or suffix not in TEXT_FILES):
            raise TapflError(f"{path}: an encoding is for {', '.join(TEXT_FILES)}")
        if is_dir(path):
            place = _split_folder(path, split)
            return Table(where, checksum(place), lambda: _pictures(place))
        if suffix not in FILES:
            raise TapflError(f"{path}: expected a folder of pictures or one of {', '.join(FILES)}")
        if not is_file(path):
            raise TapflError(f"{path}: not a regular file" if exists(path) else
                             f"{path}: no such file or folder")
        digest = checksum(path)
    if suffix in TEXT_FILES:
        return Table(where, f"{digest} {encoding or ''}",
                     lambda: text_rows(path, encoding, strict=False))
    return Table(where, digest, lambda: library_content(where, load_rows(
        where, "parquet", data_files={"train": where}, split="train",
        cache_dir=library_folder(digest))))


# CSV and JSON lines

def text_rows(path: Path, encoding: str | None = None, strict: bool = True) -> Content:
    """Read CSV, with tabs or commas, or JSON lines; every CSV value is the text that it is.

    A file that is not written in the encoding (UTF-8 by default) is refused; if not ``strict``,
    only the rows are broken that are not.
    """
    suffix, codec = path.suffix.lower(), codecs.lookup(encoding or "utf-8").name
    undecoded = f"not {encoding}" if encoding else "not UTF-8; set `encoding`"
    # What cannot be decoded becomes surrogates, which no decoded text holds: the row is known.
    with as_tapfl_error(f"{path}: cannot be read"), open_regular(path) as file, io.TextIOWrapper(
            file, "utf-8-sig" if codec == "utf-8" else codec,
            "strict" if strict else "surrogateescape", "") as lines:
        if suffix == ".jsonl":
            found = [_json(line, undecoded) for line in lines if line.strip()]
            columns = list(dict.fromkeys(k for row in found if isinstance(row, dict) for k in row))
        else:
            with _long_values():
                columns, found = _csv(lines, "\t" if suffix == ".tsv" else ",", undecoded)
    return Content(columns, lambda start, stop: found[start:stop], len(found))


@contextlib.contextmanager
def _long_values() -> Iterator[None]:
    """Let the CSV reader take values of any length: its own limit ends in the middle of a row."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(lines: Iterable[str], delimiter: str,
         undecoded: str) -> tuple[list[str], list[Row | str]]:
    """Return the columns and the rows of a CSV file."""
    records = _records(lines, delimiter)
    columns = next(records, [])
    fault = columns if isinstance(columns, str) else _odd(columns, undecoded)
    if isinstance(columns, str) or fault:
        raise TapflError(f"its first line, with the names of columns: {fault}")

    def row(values: list[str] | str) -> Row | str:
        if isinstance(values, str):
            return values
        if len(values) != len(columns):
            return f"{len(values)} values, expected {len(columns)}"
        return _odd(values, undecoded) or dict(zip(columns, values, strict=True))

    return columns, [row(values) for values in records if values]


def _records(lines: Iterable[str], delimiter: str) -> Iterator[list[str] | str]:
    """Iterate over the records of a CSV file; a broken one is a text that says why."""
    taken: list[str] = []  # the lines of the record that is being read
    last: list[str] = []
    held: list[str] | str | None = None  # one is kept back: the last may be an open quote

    def feed() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    reader = csv.reader(feed(), delimiter=delimiter)
    while True:
        taken.clear()
        try:
            found: list[str] | str = next(reader)
        except StopIteration:
            break
        except csv.Error as error:  # the reader goes on with the next line
            found = f"not CSV ({error})"
        if any(len(value) > MAX_VALUE for value in found if isinstance(found, list)):
            found = f"a value of more than {MAX_VALUE} characters; is a quote never closed?"
        if held is not None:
            yield held
        held, last = found, list(taken)
    if held is not None and _never_closed(last, delimiter):
        yield "a quote that is never closed"
        yield from _records(last[1:], delimiter)  # the quote has taken in all lines after it
    elif held is not None:
        yield held


def _never_closed(lines: list[str], delimiter: str) -> bool:
    try:
        for _ in csv.reader(lines, delimiter=delimiter, strict=True):
            pass
    except csv.Error as error:
        return "end of data" in str(error)
    return False


def _odd(texts: Iterable[str], undecoded: str) -> str:
    """Return what is wrong with texts: bytes that were not decoded, or a NUL."""
    for text in texts:
        if SURROGATE.search(text):
            return undecoded
        if "\0" in text:
            return "holds a NUL character"
    return ""


def _json(line: str, undecoded: str) -> Row | str:
    if fault := _odd([line], undecoded):
        return fault
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    except RecursionError:
        return "not JSON (nested too deeply)"
    if not isinstance(row, dict):
        return "not a JSON object"
    # JSON can spell out what a file cannot hold.
    fault = _odd(_texts(row), "holds half a character (a lone surrogate)") if "\\u" in line else ""
    return fault or row


def _texts(value: Any) -> Iterator[str]:
    """Iterate over all texts in a JSON value, keys included."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            yield top
        elif isinstance(top, dict):
            stack += [*top, *top.values()]
        elif isinstance(top, list):
            stack += top


# Pictures

def _split_folder(path: Path, split: str | None) -> Path:
    """Return the folder of a split, where a folder of pictures has such: folders of folders."""
    inner = path / (split or "train")
    if inner.is_dir() and any(p.is_dir() for p in inner.iterdir()):
        return inner
    if split not in (None, "train"):
        raise TapflError(f"{path}: has no folder '{split}' with a folder of pictures per class")
    return path


def _pictures(folder: Path) -> Content:
    """List the pictures of a folder; the label of one is the name of the folder it is in."""
    found = [_picture_row(p, folder) for p in files_below(folder) if p.suffix.lower() in PICTURES]
    return Content(["image", "label"], lambda start, stop: found[start:stop], len(found))


def _picture_row(path: Path, folder: Path) -> Row | str:
    name = path.relative_to(folder)
    if SURROGATE.search(str(name)):
        return f"the file name {shown(str(name))} is not UTF-8"
    return {"image": path, "label": name.parts[0] if len(name.parts) > 1 else None}
