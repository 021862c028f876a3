"""FedPer (Arivazhagan et al., 2019): the last layers are each client's own."""

from __future__ import annotations

from typing import ClassVar

from tapfl.data.federation import Member
from tapfl.federated.method import FederatedMethod


def is_decoder(block: str) -> bool:
    """Return whether a block is a task's last part, which personalization calls the head."""
    return block.startswith("decoder/")


class FedPer(FederatedMethod):
    """FedAvg of everything but the decoders, which train as usual and stay with the client."""

    name: ClassVar[str] = "fedper"
    shares_final_model: ClassVar[bool] = False  # the decoders are each client's own

    def exchanged(self, client: Member) -> tuple[str, ...]:
        """Return the body: all of the client's blocks but its decoders."""
        return tuple(block for block in self.owned(client) if not is_decoder(block))

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the head: the client's decoders."""
        return tuple(block for block in self.owned(client) if is_decoder(block))
