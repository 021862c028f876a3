"""Files that appear whole or not at all, and state files that say what they are.

A state file is safetensors. Its header names the method, the client and the round it belongs to,
and a checksum of all of that and the values: a flipped bit or a file in the wrong place is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tapfl.blocks import BlockState
from tapfl.errors import TapflError

CHECKSUM = "sha256"
HEADER = "tapfl"  # one entry, so that the same state makes the same bytes


@dataclass(frozen=True)
class Label:
    """What a state belongs to; the server has the client ``""``, a final model the last round."""

    method: str
    client: str
    round: int

    def __str__(self) -> str:
        return f"{self.client or 'the server'}, {self.method}, round {self.round}"


def write_state(path: Path, label: Label, state: BlockState, notes: Mapping[str, Any]) -> str:
    """Write blocks and notes as one file, whole or not at all; return its checksum."""
    state = state.to("cpu")
    facts = {**asdict(label), "notes": dict(notes)}
    digest = _state_digest(facts, state)
    with replacing(path) as temporary:
        state.save(temporary, {HEADER: json.dumps(facts | {CHECKSUM: digest})})
    return digest


def read_state(path: Path, label: Label | None = None) -> tuple[BlockState, dict[str, Any], str]:
    """Return a file's blocks, notes and checksum; refuse a damaged one, or another one's.

    Without a ``label`` any will do, also a file that says nothing of itself.
    """
    state = BlockState.load(path)
    facts = header(path)
    if facts is None and label is None:
        return state, {}, ""
    found = None if facts is None else Label(*(facts.get(key) for key in (
        "method", "client", "round")))  # type: ignore[arg-type]
    if facts is None or (label is not None and found != label):
        raise TapflError(f"{path}: not the state it should be: it is of {found}, expected {label}")
    digest = facts.pop(CHECKSUM, None)
    if digest != _state_digest(facts, state):
        raise TapflError(f"{path}: damaged (its checksum does not match)")
    return state, dict(facts["notes"]), str(digest)


def header_digest(path: Path) -> str | None:
    """Return the checksum that a file carries, without reading its values."""
    with contextlib.suppress(TapflError):
        return str((header(path) or {}).get(CHECKSUM))
    return None


def header(path: Path) -> dict[str, Any] | None:
    """Return what a file says of itself, if it says anything."""
    try:
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get(HEADER)
        return None if text is None else dict(json.loads(text))
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise TapflError(f"{path}: damaged (not readable: {error})") from None


def _state_digest(facts: Mapping[str, Any], state: BlockState) -> str:
    """Return a checksum of a state on the CPU and of what it says of itself."""
    shapes = {name: {key: list(shape) for key, shape in state.shapes[name].items()}
              for name in state}
    whole = hashlib.sha256(json.dumps([facts, shapes]).encode())
    for value in state.values():
        whole.update(value.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]
    return whole.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def write_checked_json(path: Path, value: Mapping[str, Any]) -> str:
    """Write a JSON object together with its checksum, which is returned."""
    digest = json_digest(value)
    write_json(path, {**value, CHECKSUM: digest})
    return digest


def read_checked_json(path: Path) -> dict[str, Any] | None:
    """Return what ``write_checked_json`` wrote, if it is there and whole."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict) and value.pop(CHECKSUM, None) == json_digest(value):
            return value
    return None


def json_digest(value: Mapping[str, Any]) -> str:
    """Return the checksum that a JSON object is written with."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write; it takes the place of ``path`` when it is complete and on disk."""
    temporary = path.with_name(f".{path.name}.partial")
    with on_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Say plainly when the disk does not take what is written."""
    try:
        yield
    except OSError as error:
        raise _refused(path, error) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> TapflError:
    return TapflError(f"{path}: cannot be written ({error}); what was written before is intact: "
                      "make room and continue with --resume")
