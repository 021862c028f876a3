"""Flower's grid as a transport of frames.

Flower puts an answer together before anybody looks at it, and a node may have sent anything: what
that raises is the fault of the answer, unless the SuperLink itself does not answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import httpx
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from tapfl.engine.flower.records import content_of, frame_of

LATE = 10.0  # seconds that Flower keeps a message longer than its answer is waited for
UNSENT = "not sent"  # how the id of such a message begins


class GridTransport:
    """Pushes frames to Flower's nodes and pulls their answers."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._unsent = itertools.count()
        self._node: dict[str, int] = {}  # of each message
        self._apart = False  # whether nodes are asked for answers one by one

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def push(self, node: int, data: bytes, patience: float) -> str:
        """Send a frame to a node."""
        message = Message(content_of(data), dst_node_id=node,
                          message_type=MessageType.QUERY, ttl=patience + LATE)
        ids = list(self._grid.push_messages([message]))
        if not ids or not ids[0]:
            # What Flower does not take, as a message to a node that has just left, has no answer.
            return f"{UNSENT} {next(self._unsent)}"
        self._node[ids[0]] = node
        return ids[0]

    def pull(self, ids: Collection[str]) -> Mapping[str, bytes | str]:
        """Return the answers that have come."""
        found: dict[str, bytes | str] = {id_: "the node has left" for id_ in ids
                                         if id_.startswith(UNSENT)}
        by_node: dict[int, list[str]] = {}
        for id_ in ids:
            if id_ not in found:
                by_node.setdefault(self._node[id_], []).append(id_)
        together = [id_ for sent in by_node.values() for id_ in sent]
        for sent in by_node.values() if self._apart else [together]:
            found |= self._pulled(sent, len(by_node) > 1 and not self._apart)
        for id_ in found:
            self._node.pop(id_, None)
        return found

    def _pulled(self, sent: Sequence[str], several: bool) -> dict[str, bytes | str]:
        """Return answers to messages that Flower took.

        One that cannot be put together takes those with it that came at the same time, so from
        then on a node's answers come by themselves. Flower says of those that are lost that they
        are gone.
        """
        try:
            # A node that died has an error in its place, which comes from another one.
            found = {reply.metadata.reply_to_message_id: _content(reply)
                     for reply in (self._grid.pull_messages(sent) if sent else ())}
        except httpx.HTTPError:
            raise
        except Exception as error:
            if several:
                self._apart = True
                return {}
            return dict.fromkeys(sent, f"its answer cannot be put together "
                                       f"({type(error).__name__})")
        return {id_: found[id_] for id_ in sent if id_ in found}  # what was asked, nothing else


def _content(reply: Message) -> bytes | str:
    if reply.has_error():
        return f"Flower says: {reply.error.reason or reply.error.code}"[:500]
    try:
        return frame_of(reply.content)
    except ValueError as error:
        return str(error)
