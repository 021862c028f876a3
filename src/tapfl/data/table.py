"""Tables: rows with named columns, from the hub, from a mirror of it, or from local files.

The datasets library reads them. It is imported when rows are needed, not before: what was prepared
earlier is found by the table's digest alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError, one_line

Row = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
CHUNK = 256  # rows at a time


@dataclass(frozen=True)
class Table:
    """``where`` names it in messages; ``digest`` tells its content apart from any other."""

    where: str
    digest: str
    load: Callable[[], Any]

    @functools.cached_property
    def rows(self) -> Any:
        """The table as the datasets library has it, pictures as stored bytes."""
        datasets = _library()
        with one_line(f"{self.where}: cannot read this data set"):
            found = self.load()
            for name, feature in found.features.items():
                if isinstance(feature, datasets.Image):
                    found = found.cast_column(name, datasets.Image(decode=False))
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def need(self, columns: Sequence[str]) -> None:
        """Refuse a table that lacks a column."""
        there = self.rows.column_names
        for name in columns:
            if name not in there:
                raise TapflError(f"{self.where}: column '{name}' is missing; "
                                 f"there are: {', '.join(there)}")

    def with_files(self, column: str, folder: Path) -> Table:
        """Return the same table, told apart also by the files that a column names."""
        named = sorted({v for v in self.rows[column] if isinstance(v, str)})
        return dataclasses.replace(self, digest=f"{self.digest} {checksums(folder, named)}")

    def class_names(self, column: str) -> tuple[str, ...]:
        """Return the names of a label column, where the table has them."""
        return tuple(getattr(self.rows.features.get(column), "names", None) or ())

    def chunks(self) -> Iterator[tuple[int, list[Row]]]:
        """Go through the rows: the first one's number, and some hundred of them."""
        for start in range(0, len(self), CHUNK):
            columns = self.rows[start:start + CHUNK]
            names = list(columns)
            yield start, [dict(zip(names, values, strict=True))
                          for values in zip(*columns.values(), strict=True)]


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
        return Table(where, f"hub:{rows._fingerprint}", lambda: rows)
    local = Path(folder) / id_
    if not local.is_dir():
        raise TapflError(f"{folder}: holds no folder '{id_}'; expected a mirror of hub ids "
                         "(--data DIR or TAPFL_DATA)")
    return Table(where, f"{subset}/{split}:{content(local)}",
                 lambda: _load(where, str(local), subset, split=split))


def file_table(path: Path, split: str | None = None) -> Table:
    """Return a CSV, JSON lines or parquet file, or a folder of pictures, one folder a class."""
    where = str(path)
    if path.is_dir():
        return Table(where, f"{split}:{content(path)}",
                     lambda: _load(where, "imagefolder", data_dir=str(path),
                                   split=split or "train"))
    if path.suffix.lower() not in FORMATS:
        raise TapflError(f"{path}: expected a folder of pictures or one of "
                         + ", ".join(sorted(FORMATS)))
    if not path.is_file():
        raise TapflError(f"{path}: no such file")
    format_ = FORMATS[path.suffix.lower()]
    options: dict[str, Any] = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    return Table(where, content(path), lambda: _load(
        where, format_, data_files={"train": str(path)}, split="train", **options))


def content(path: Path) -> str:
    """Return a checksum of a file, or of all files below a folder and their names."""
    if path.is_file():
        return checksums(path.parent, [path.name])
    names = (p.relative_to(path) for p in path.rglob("*") if p.is_file())
    return checksums(path, sorted(
        str(name) for name in names if not any(w.startswith(".") for w in name.parts)))


def checksums(folder: Path, names: Sequence[str]) -> str:
    """Return a checksum of some files and their names; one that cannot be read has none."""
    def one(name: str) -> str:
        with contextlib.suppress(OSError, ValueError), (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
        return ""

    whole = hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(names, pool.map(one, names), strict=True):
            whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()


def _load(where: str, *arguments: Any, **options: Any) -> Any:
    datasets = _library()
    with one_line(f"{where}: cannot read this data set"):
        return datasets.load_dataset(*arguments, **options)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise TapflError("real data needs the datasets library: "
                         "pip install 'tapfl[data]'") from None
    datasets.disable_progress_bars()
    return datasets
