"""Flower's grid as a transport of frames."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

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

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def push(self, node: int, data: bytes, patience: float) -> str:
        """Send a frame to a node."""
        message = Message(content_of(data), dst_node_id=node,
                          message_type=MessageType.QUERY, ttl=patience + LATE)
        ids = list(self._grid.push_messages([message]))
        # What Flower does not take, as a message to a node that has just left, has no answer.
        return ids[0] if ids and ids[0] else f"{UNSENT} {next(self._unsent)}"

    def pull(self, ids: Collection[str]) -> Mapping[str, bytes | str]:
        """Return the answers that have come."""
        found: dict[str, bytes | str] = {id_: "the node has left" for id_ in ids
                                         if id_.startswith(UNSENT)}
        sent = [id_ for id_ in ids if id_ not in found]
        for reply in self._grid.pull_messages(sent) if sent else ():
            # A node that died has an error in its place, which comes from another one.
            found[reply.metadata.reply_to_message_id] = _content(reply)
        return found


def _content(reply: Message) -> bytes | str:
    if reply.has_error():
        return f"Flower says: {reply.error.reason or reply.error.code}"[:500]
    try:
        return frame_of(reply.content)
    except ValueError as error:
        return str(error)
