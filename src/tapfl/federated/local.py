"""Local: every client alone; the same data and steps, no server."""

from __future__ import annotations

from typing import ClassVar

from tapfl.data.federation import Member
from tapfl.federated.method import FederatedMethod


class Local(FederatedMethod):
    """All blocks are the client's own."""

    name: ClassVar[str] = "local"
    shares_final_model: ClassVar[bool] = False

    def exchanged(self, client: Member) -> tuple[str, ...]:
        """Return nothing: there is no server."""
        return ()

    def private(self, client: Member) -> tuple[str, ...]:
        """Return everything that the client trains."""
        return self.owned(client)
