"""A cache of prepared data: memory-mapped files, found by what they were made from.

An entry is a folder named by a checksum of its key. It is made under another name and renamed when
it is whole, under a lock, so that two processes never see half of one, nor do the work twice. A
file that was cut short is noticed by its size and made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tapfl.errors import TapflError

Entry = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and notes that JSON can hold
TENSORS, NOTES = "tensors.safetensors", "notes.json"


def root() -> Path:
    """Return where prepared data are kept: TAPFL_CACHE, or a folder of the user's."""
    try:
        return Path(os.environ.get("TAPFL_CACHE") or Path.home() / ".cache" / "tapfl")
    except RuntimeError:
        raise TapflError("cache: this user has no home folder; set TAPFL_CACHE to a folder "
                         "for prepared data") from None


def library_folder(digest: str) -> str:
    """Return where the datasets library keeps its copy of files with this checksum.

    Where the cache cannot be written, that is a folder which is removed with the process.
    """
    folder = root() / "tables" / digest[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError:
        return str(Path(_temporary().name) / digest[:32])


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tapfl-")


def cached(key: Mapping[str, Any], make: Callable[[], Entry],
           say: Callable[[str], None]) -> Entry:
    """Return the entry of a key, making it if it is not there."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    folder = root() / "data" / digest
    made: Entry | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(folder) + ".lock"):
            found = _read(folder)
            if found is None:
                made = make()
                _write(folder, made)
                found = _read(folder)
            if found is not None:
                return found
    except OSError as error:
        say(f"cache: {folder} cannot be used ({error.strerror or error}); going on without it")
    return made or make()


def _write(folder: Path, entry: Entry) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    for path in (partial, folder):
        shutil.rmtree(path, ignore_errors=True)
    partial.mkdir()
    tensors, notes = entry
    try:
        save_file(tensors, str(partial / TENSORS))
        size = (partial / TENSORS).stat().st_size
        (partial / NOTES).write_text(json.dumps({"size": size, "notes": notes}), encoding="utf-8")
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
        raise error if isinstance(error, OSError) else OSError(str(error)) from None


def _read(folder: Path) -> Entry | None:
    """Return a complete entry; an incomplete one counts as missing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        record = json.loads((folder / NOTES).read_text(encoding="utf-8"))
        if (folder / TENSORS).stat().st_size == record["size"]:
            return load_file(folder / TENSORS), record["notes"]
    return None
