"""Flower's half of a node: it passes every message to the node's resident process, and back.

Flower starts a process for each message, so this module imports nothing heavy. Node-config:
``socket`` is where the resident listens, ``patience`` how many seconds it may take to answer.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tapfl.engine.flower.frames import FrameError, request
from tapfl.engine.flower.records import content_of, frame_of

PATIENCE = 24 * 3600.0  # the server decides how long it waits; this only ends what is forgotten

app = ClientApp()


def _pass_on(message: Message, context: Context) -> Message:
    socket = context.node_config.get("socket")
    if socket is None:
        raise RuntimeError("the node-config has no 'socket'")
    patience = float(context.node_config.get("patience", PATIENCE))
    try:
        answer = request(str(socket), frame_of(message.content), patience)
    except (OSError, FrameError) as error:  # Flower tells the server what is raised here
        raise RuntimeError("the node's resident process does not answer "
                           f"({type(error).__name__})") from error
    return Message(content_of(answer), reply_to=message)


app.query()(_pass_on)
app.train()(_pass_on)
app.evaluate()(_pass_on)
