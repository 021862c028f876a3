"""Work that is done once: two methods that would do the same to the same blocks share the result.

A memo belongs to a Worker. Results are found again by a key, which names the work, and by the
blocks that it starts from, compared bit for bit (where they lie, so nothing is copied or hashed).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from tapfl.blocks import BlockState

T = TypeVar("T")


class Memo:
    """Results of one client's turn, and those that may serve the next client as well."""

    def __init__(self) -> None:
        self._turn: dict[Hashable, list[tuple[BlockState, Any]]] = {}
        self._kept: dict[Hashable, tuple[BlockState, Any]] = {}

    def once(self, key: Hashable, start: BlockState, work: Callable[[], T],
             keep: bool = False) -> T:
        """Return what ``work`` returned for this key and these blocks, doing it if nobody has.

        With ``keep`` the result outlives the turn, until another one is kept under its key. Neither
        ``start`` nor the result may be changed in place.
        """
        found: T
        kept = [self._kept[key]] if key in self._kept else []
        for state, found in (*kept, *self._turn.get(key, ())):
            if state.equals(start):
                return found
        found = work()
        if keep:
            self._kept[key] = (start, found)
        else:
            self._turn.setdefault(key, []).append((start, found))
        return found

    def end_turn(self) -> None:
        """Give back what only this turn could use."""
        self._turn.clear()
