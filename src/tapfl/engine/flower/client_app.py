"""Flower's half of a node: it passes every message to the node's resident process, and back.

Flower starts a process for each message, so this module imports nothing heavy. Node-config:
``socket`` is where the resident listens. It may take as long as the server waits for the answer.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tapfl.engine.flower.frames import FrameError, request_again
from tapfl.engine.flower.records import content_of, frame_of

app = ClientApp()


def _pass_on(message: Message, context: Context) -> Message:
    socket = context.node_config.get("socket")
    if socket is None:
        raise RuntimeError("the node-config has no 'socket'")
    try:
        answer = request_again(str(socket), frame_of(message.content), message.metadata.ttl)
    except (OSError, FrameError) as error:  # Flower tells the server what is raised here
        raise RuntimeError("the node's resident process does not answer "
                           f"({type(error).__name__})") from error
    return Message(content_of(answer), reply_to=message)


app.query()(_pass_on)
app.train()(_pass_on)
app.evaluate()(_pass_on)
