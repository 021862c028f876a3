"""What clients keep between their rounds in a run without checkpoints: in memory, nothing on disk.

Every turn of a client writes all its personal models, which a disk may not keep up with. A run that
may start again from the beginning does without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from tapfl.blocks import BlockState
from tapfl.engine.clientstore import ClientStore, Key
from tapfl.federated.context import Kept


class MemoryStore(ClientStore):
    """A store that has no files: whatever it holds ends with the federated run."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        super().__init__(folder, device=device)
        # A client's states by round. Notes are JSON, so that they come back as from a file.
        self._states: dict[Key, dict[int, tuple[BlockState, str]]] = {}
        # Who saved a state in this turn, and the copy. Methods that get one X from a memo, which
        # nobody changes, share it.
        self._saved: WeakKeyDictionary[BlockState, tuple[set[str], BlockState]] = (
            WeakKeyDictionary())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._states.clear()
        self._saved.clear()

    def load(self, owner: str, client: str, as_of: int) -> Kept | None:
        """Return the state of a client when a round was over: a copy."""
        versions = self._states.get((owner, client), {})
        newest = max((version for version in versions if version <= as_of), default=None)
        if newest is None:
            return None
        state, notes = versions[newest]
        return _copy(state, self._device), json.loads(notes)

    def save(self, owner: str, client: str, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep a copy of a client's state as of a round, in the host's memory."""
        self._states.setdefault((owner, client), {})[round_] = (
            self._in_memory(owner, state), json.dumps(notes))

    def prune(self, owner: str, client: str, as_of: int, kept: Iterable[int]) -> None:
        """Drop all but the newest: without checkpoints nobody goes back to a round."""
        self._saved.clear()
        versions = self._states.get((owner, client), {})
        for version in sorted(v for v in versions if v <= as_of)[:-1]:
            del versions[version]

    def _in_memory(self, owner: str, state: BlockState) -> BlockState:
        """Return a copy in the host's memory; who saves a state again may have changed it."""
        owners, copy = self._saved.get(state, ({owner}, None))
        if copy is None or owner in owners:
            owners, copy = self._saved[state] = (set(), _copy(state, "cpu"))
        owners.add(owner)
        return copy


def _copy(state: BlockState, device: str) -> BlockState:
    return BlockState({name: value.to(device, copy=True) for name, value in state.items()},
                      state.shapes)
