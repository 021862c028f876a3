"""Tables: rows with named columns, and those of the hub or of a mirror of it.

Data sets of the hub and parquet files are read with the datasets library, which is imported when
rows are needed, not before: what was prepared earlier is found by the table's digest alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tapfl.data.cache import library_folder
from tapfl.data.checksums import checksum, checksums
from tapfl.errors import TapflError, as_tapfl_error, one_line, shown
from tapfl.reading import is_dir

Row = dict[str, Any]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
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


def whole_number(value: Any) -> int:
    """Return a label that is a whole number: 1, "1" or 1.0, but neither 0.7 nor true."""
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}(\.0*)?\s*", value):
        return int(value.partition(".")[0])
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise ValueError(f"label {shown(value)} is not a whole number")


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
        rows = load_rows(where, id_, subset, split=split)
        return Table(where, f"hub:{rows._fingerprint}", lambda: library_content(where, rows))
    local = Path(folder) / id_
    if not is_dir(local):
        raise TapflError(f"{folder}: holds no folder '{id_}'; expected a mirror of hub ids "
                         "(--data DIR or TAPFL_DATA)")
    with as_tapfl_error(f"{local}: cannot be read"):
        digest = checksum(local)
    return Table(where, f"{subset}/{split}:{digest}", lambda: library_content(
        where, load_rows(where, str(local), subset, split=split, cache_dir=library_folder(digest))))


def load_rows(where: str, *arguments: Any, **options: Any) -> Any:
    """Load a data set. Local ones have a ``cache_dir`` for their content alone.

    By itself the library distinguishes folders by their README and name, not by their files, and
    would give the rows of another mirror.
    """
    datasets = _library()
    with as_tapfl_error(f"{where}: cannot read this data set"):
        return datasets.load_dataset(*arguments, **options)


def library_content(where: str, rows: Any) -> Content:
    """Return what a data set of the library holds."""
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
