"""Tables: rows with named columns, from the hub, from a mirror of it, or from local files.

Data sets of the hub and parquet files are read with the datasets library, which is imported when
rows are needed, not before: what was prepared earlier is found by the table's digest alone. CSV and
JSON lines are read as they are written: a label ``01`` stays one, and a line that cannot be read is
a broken row, not the end. Nothing here opens a pipe or a device: reading one may never end.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.data.cache import library_folder
from tapfl.errors import TapflError, as_tapfl_error, one_line, shown
from tapfl.reading import SURROGATE, exists, is_dir, is_file, open_regular

Row = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT_FILES = (".csv", ".tsv", ".jsonl")
FILES = (*TEXT_FILES, ".parquet")
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
CHUNK = 256  # rows at a time
MAX_VALUE = 131_072  # characters of a CSV value: beyond, a quote is missing somewhere


@dataclass(frozen=True)
class Content:
    """What a table holds. A row that cannot be read is a text that says why.

    ``names`` are the names of classes, for columns that number them.
    """

    columns: Sequence[str]
    rows: Callable[[int, int], Sequence[Row | str]]
    count: int
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """``where`` names it in messages; ``digest`` identifies its content."""

    where: str
    digest: str
    load: Callable[[], Content]

    @functools.cached_property
    def content(self) -> Content:
        """The table itself, read when it is needed."""
        return self.load()

    def __len__(self) -> int:
        return self.content.count

    def need(self, columns: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        for name in columns:
            if name not in self.content.columns:
                raise TapflError(f"{self.where}: column '{name}' is missing; "
                                 f"there are: {', '.join(self.content.columns)}")
            if list(self.content.columns).count(name) > 1:
                raise TapflError(f"{self.where}: two columns are called '{name}'")

    def with_files(self, column: str, folder: Path) -> Table:
        """Return the same table, whose digest includes the files that a column names."""
        named = sorted({row[column] for _, rows in self.chunks() for row in rows
                        if isinstance(row, dict) and isinstance(row.get(column), str)})
        return dataclasses.replace(self, digest=f"{self.digest} {checksums(folder, named)}",
                                   load=lambda: self.content)

    def chunks(self) -> Iterator[tuple[int, Sequence[Row | str]]]:
        """Iterate over the rows in chunks: the first one's number, and some hundred rows."""
        for start in range(0, len(self), CHUNK):
            yield start, self.content.rows(start, min(start + CHUNK, len(self)))


def mirror(folder: str | None) -> str | None:
    """Return the folder that mirrors the hub, if there is one."""
    return folder or os.environ.get("TAPFL_DATA") or None


def hub_table(id_: str, split: str, subset: str | None = None,
              folder: str | Path | None = None) -> Table:
    """Return a data set of the hub, or of a folder that mirrors it: ``folder/owner/name``."""
    if not HUB_ID.fullmatch(id_):
        raise TapflError(f"'{id_}' is not a hub id; expected owner/name")
    where = " ".join(filter(None, (id_, subset, split)))
    if folder is None:
        rows = _load(where, id_, subset, split=split)
        return Table(where, f"hub:{rows._fingerprint}", lambda: _content(where, rows))
    local = Path(folder) / id_
    if not is_dir(local):
        raise TapflError(f"{folder}: holds no folder '{id_}'; expected a mirror of hub ids "
                         "(--data DIR or TAPFL_DATA)")
    with as_tapfl_error(f"{local}: cannot be read"):
        digest = content(local)
    return Table(where, f"{subset}/{split}:{digest}", lambda: _content(
        where, _load(where, str(local), subset, split=split, cache_dir=library_folder(digest))))


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
            return Table(where, content(place), lambda: _pictures(place))
        if suffix not in FILES:
            raise TapflError(f"{path}: expected a folder of pictures or one of {', '.join(FILES)}")
        if not is_file(path):
            raise TapflError(f"{path}: not a regular file" if exists(path) else
                             f"{path}: no such file or folder")
        digest = content(path)
    if suffix in TEXT_FILES:
        return Table(where, f"{digest} {encoding or ''}",
                     lambda: text_rows(path, encoding, strict=False))
    return Table(where, digest, lambda: _content(where, _load(
        where, "parquet", data_files={"train": where}, split="train",
        cache_dir=library_folder(digest))))


# What the datasets library reads

def _load(where: str, *arguments: Any, **options: Any) -> Any:
    """Load a data set. Local ones have a ``cache_dir`` for their content alone.

    By itself the library distinguishes folders by their README and name, not by their files, and
    would give the rows of another mirror.
    """
    datasets = _library()
    with as_tapfl_error(f"{where}: cannot read this data set"):
        return datasets.load_dataset(*arguments, **options)


def _content(where: str, rows: Any) -> Content:
    datasets = _library()
    with as_tapfl_error(f"{where}: cannot read this data set"):
        for name, feature in rows.features.items():
            if isinstance(feature, datasets.Image):  # pictures stay the bytes that they are
                rows = rows.cast_column(name, datasets.Image(decode=False))
    names = {name: tuple(feature.names) for name, feature in rows.features.items()
             if isinstance(feature, datasets.ClassLabel)}

    def some(start: int, stop: int) -> list[Row | str]:
        try:
            columns = rows[start:stop]
        except Exception:  # e.g. a text that is not UTF-8: find out which row it is
            return [_one(rows, number) for number in range(start, stop)]
        return [dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)]

    return Content(rows.column_names, some, len(rows), names)


def _one(rows: Any, number: int) -> Row | str:
    try:
        return dict(rows[number])
    except Exception as error:  # whatever the library raises over a value
        return f"cannot be read ({one_line(str(error), 150)})"


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise TapflError("data sets of the hub and parquet files need the datasets library: "
                         "pip install 'tapfl[data]'") from None
    datasets.disable_progress_bars()
    # Their errors become one line; they are not also printed as they come.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return datasets


# What is read here

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


def whole_number(value: Any) -> int:
    """Return a label that is a whole number: 1, "1" or 1.0, but neither 0.7 nor true."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}(\.0*)?\s*", value):
        return int(value.partition(".")[0])
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise ValueError(f"label {shown(value)} is not a whole number")


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
    found = [_picture_row(p, folder) for p in _files(folder) if p.suffix.lower() in PICTURES]
    return Content(["image", "label"], lambda start, stop: found[start:stop], len(found))


def _picture_row(path: Path, folder: Path) -> Row | str:
    name = path.relative_to(folder)
    if SURROGATE.search(str(name)):
        return f"the file name {shown(str(name))} is not UTF-8"
    return {"image": path, "label": name.parts[0] if len(name.parts) > 1 else None}


def _files(folder: Path) -> list[Path]:
    """List the files below a folder, in order; hidden files are not data."""
    return [p for p in sorted(folder.rglob("*")) if not p.is_dir()
            and not any(part.startswith(".") for part in p.relative_to(folder).parts)]


# Checksums

def content(path: Path) -> str:
    """Return a checksum of a file, or of all files below a folder and their names."""
    if path.is_file():
        return _checksums(path.parent, (_stamp(path.parent, path.name),))
    return _checksums(path, tuple(_stamp(path, str(p.relative_to(path))) for p in _files(path)))


def checksums(folder: Path, names: Sequence[str]) -> str:
    """Return a checksum of some files and their names; one that cannot be read has none."""
    return _checksums(folder, tuple(_stamp(folder, name) for name in names))


Stamp = tuple[str, int, int]  # a file's name, size and time: to read it once per process


def _stamp(folder: Path, name: str) -> Stamp:
    with contextlib.suppress(OSError, ValueError):
        found = (folder / name).stat()
        if stat.S_ISREG(found.st_mode):
            return name, found.st_size, found.st_mtime_ns
    return name, -1, 0


def forget_checksums() -> None:
    """Read files again that were read before: to measure a start as a new process makes it."""
    _checksums.cache_clear()


@functools.lru_cache(maxsize=64)
def _checksums(folder: Path, stamps: tuple[Stamp, ...]) -> str:
    def one(stamp: Stamp) -> str:
        with contextlib.suppress(OSError, ValueError), open_regular(folder / stamp[0]) as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
        return ""

    whole = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for stamp, digest in zip(stamps, pool.map(one, stamps), strict=True):
            # A name may hold anything: bytes that are no text, spaces, line breaks.
            whole.update(f"{stamp[0]!a} {digest}\n".encode())
    return whole.hexdigest()
