"""Tables: rows with named columns, from the hub, from a mirror of it, or from local files.

Data sets of the hub and parquet files are read with the datasets library, which is imported when
rows are needed, not before: what was prepared earlier is found by the table's digest alone. CSV and
JSON lines are read as they are written: a label ``01`` stays one, and a line that cannot be read is
a broken row, not the end.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError, as_tapfl_error

Row = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT_FILES = (".csv", ".tsv", ".jsonl")
FILES = (*TEXT_FILES, ".parquet")
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"})
CHUNK = 256  # rows at a time


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
    """``where`` names it in messages; ``digest`` tells its content apart from any other."""

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

    def with_files(self, column: str, folder: Path) -> Table:
        """Return the same table, told apart also by the files that a column names."""
        named = sorted({row[column] for _, rows in self.chunks() for row in rows
                        if isinstance(row, dict) and isinstance(row.get(column), str)})
        return dataclasses.replace(self, digest=f"{self.digest} {checksums(folder, named)}",
                                   load=lambda: self.content)

    def chunks(self) -> Iterator[tuple[int, Sequence[Row | str]]]:
        """Go through the rows: the first one's number, and some hundred of them."""
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
    if not local.is_dir():
        raise TapflError(f"{folder}: holds no folder '{id_}'; expected a mirror of hub ids "
                         "(--data DIR or TAPFL_DATA)")
    return Table(where, f"{subset}/{split}:{content(local)}", lambda: _content(
        where, _load(where, str(local), subset, split=split)))


def file_table(path: Path, split: str | None = None) -> Table:
    """Return a CSV, JSON lines or parquet file, or a folder of pictures, one folder a class."""
    where, suffix = str(path), path.suffix.lower()
    with as_tapfl_error(f"{path}: cannot be read"):
        if path.is_dir():
            place = _split_folder(path, split)
            return Table(where, content(place), lambda: _pictures(place))
        if suffix not in FILES:
            raise TapflError(f"{path}: expected a folder of pictures or one of {', '.join(FILES)}")
        if not path.is_file():
            raise TapflError(f"{path}: no such file or folder")
    if suffix in TEXT_FILES:
        return Table(where, content(path), lambda: text_rows(path, errors="replace"))
    return Table(where, content(path), lambda: _content(
        where, _load(where, "parquet", data_files={"train": where}, split="train")))


# What the datasets library reads

def _load(where: str, *arguments: Any, **options: Any) -> Any:
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
        columns = rows[start:stop]
        return [dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)]

    return Content(rows.column_names, some, len(rows), names)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise TapflError("data sets of the hub and parquet files need the datasets library: "
                         "pip install 'tapfl[data]'") from None
    datasets.disable_progress_bars()
    # Their errors are told in one line, not also as they come.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return datasets


# What is read here

def text_rows(path: Path, errors: str = "strict") -> Content:
    """Read CSV, with tabs or commas, or JSON lines; every CSV value is the text that it is.

    ``errors`` tells what becomes of bytes that are no UTF-8, as in ``open``.
    """
    with as_tapfl_error(f"{path}: cannot be read"), path.open(encoding="utf-8-sig", errors=errors,
                                                        newline="") as file:
        if path.suffix.lower() == ".jsonl":
            found = [_json(line) for line in file if line.strip()]
            columns = list(dict.fromkeys(k for row in found if isinstance(row, dict) for k in row))
        else:
            reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            columns = next(reader, [])
            found = [dict(zip(columns, values, strict=True)) if len(values) == len(columns)
                     else f"{len(values)} values, expected {len(columns)}"
                     for values in reader if values]
    return Content(columns, lambda start, stop: found[start:stop], len(found))


def _json(line: str) -> Row | str:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    return row if isinstance(row, dict) else "not a JSON object"


def _split_folder(path: Path, split: str | None) -> Path:
    """Return the folder of a split, where a folder of pictures has such: folders of folders."""
    inner = path / (split or "train")
    if inner.is_dir() and any(p.is_dir() for p in inner.iterdir()):
        return inner
    if split not in (None, "train"):
        raise TapflError(f"{path}: has no folder '{split}' with a folder of pictures a class")
    return path


def _pictures(folder: Path) -> Content:
    """List the pictures of a folder; the label of one is the name of the folder it is in."""
    files = [p for p in sorted(folder.rglob("*")) if p.suffix.lower() in PICTURES and p.is_file()]
    found: list[Row | str] = [
        {"image": p, "label": p.relative_to(folder).parts[0] if p.parent != folder else None}
        for p in files]
    return Content(["image", "label"], lambda start, stop: found[start:stop], len(found))


# Checksums

def content(path: Path) -> str:
    """Return a checksum of a file, or of all files below a folder and their names."""
    if path.is_file():
        return _checksums(path.parent, (_stamp(path.parent, path.name),))
    names = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
    return _checksums(path, tuple(_stamp(path, str(name)) for name in sorted(names)
                                  if not any(w.startswith(".") for w in name.parts)))


def checksums(folder: Path, names: Sequence[str]) -> str:
    """Return a checksum of some files and their names; one that cannot be read has none."""
    return _checksums(folder, tuple(_stamp(folder, name) for name in names))


Stamp = tuple[str, int, int]  # a file's name, size and time: to read it once per process


def _stamp(folder: Path, name: str) -> Stamp:
    with contextlib.suppress(OSError, ValueError):
        found = (folder / name).stat()
        return name, found.st_size, found.st_mtime_ns
    return name, -1, 0


def forget_checksums() -> None:
    """Read files again that were read before: to measure a start as a new process makes it."""
    _checksums.cache_clear()


@functools.lru_cache(maxsize=64)
def _checksums(folder: Path, stamps: tuple[Stamp, ...]) -> str:
    def one(stamp: Stamp) -> str:
        with contextlib.suppress(OSError, ValueError), (folder / stamp[0]).open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
        return ""

    whole = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for stamp, digest in zip(stamps, pool.map(one, stamps), strict=True):
            whole.update(f"{stamp[0]} {digest}\n".encode())
    return whole.hexdigest()
