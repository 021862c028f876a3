"""What a personalizer is: it watches the federated model and never writes to it."""

from __future__ import annotations

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.federated.context import Context, Losses
from tapfl.federated.method import FederatedMethod


class Personalizer:
    """Makes a client's own model; any number of them can watch one federated run."""

    def __init__(self, context: Context, method: FederatedMethod, name: str) -> None:
        self.context, self.method, self.name = context, method, name

    def after_training(self, client: Client, round_: int, trained: BlockState,
                       losses: Losses) -> None:
        """See the client's W, just trained, and the loss of every task seen in it."""

    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Return the client's personal model, given its final W."""
        raise NotImplementedError
