"""Checksums of files and folders: data that were prepared earlier are found by them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tapfl.reading import open_regular


def checksum(path: Path) -> str:
    """Return a checksum of a file, or of all files below a folder and their names."""
    if path.is_file():
        return checksums(path.parent, [path.name])
    return checksums(path, [str(p.relative_to(path)) for p in files_below(path)])


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


def files_below(folder: Path) -> list[Path]:
    """List the files below a folder, in order; hidden files are not data."""
    return [p for p in sorted(folder.rglob("*")) if not p.is_dir()
            and not any(part.startswith(".") for part in p.relative_to(folder).parts)]
