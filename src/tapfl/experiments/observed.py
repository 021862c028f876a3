"""A run whose messages and models can be looked at: what attacks are measured with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.federation import Client, Member
from tapfl.engine.files import read_state
from tapfl.engine.inprocess import InProcess
from tapfl.engine.messages import Answer, Ask, Row, Update
from tapfl.engine.registry import Plan
from tapfl.engine.run import run
from tapfl.engine.site import Here
from tapfl.events import Subscriber
from tapfl.federated.method import FederatedMethod
from tapfl.methods import folder_name


class Message(NamedTuple):
    """What a client received in a round, and what it sent."""

    received: BlockState
    update: Update


Keep = Callable[[Member, int], bool]  # whether a client's message of a round is kept


@dataclass(frozen=True)
class _Overheard(InProcess):
    """Clients of this process whose messages somebody reads."""

    keep: Keep
    messages: dict[tuple[str, int], Message]

    def ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Let the clients have their turns; keep what an observer wants."""
        received: dict[str, BlockState] = {}

        def noted() -> Iterator[tuple[Member, BlockState]]:
            for member, state in whom:
                if ask.kind == "train" and self.keep(member, ask.round):
                    received[member.id] = state.clone()
                yield member, state

        for answer in super().ask(ask, noted()):
            if isinstance(answer, Update) and answer.client in received:
                self.messages[answer.client, ask.round] = Message(received[answer.client], answer)
            yield answer


class _Site(Here):
    """This process, with an observer in it."""

    def __init__(self, config: Config, device: str, out: Path, notify: Subscriber,
                 keep: Keep) -> None:
        super().__init__(config, device, out, notify)
        self.keep, self.messages = keep, dict[tuple[str, int], Message]()
        self.methods: dict[str, FederatedMethod] = {}

    @contextlib.contextmanager
    def open(self, plan: Plan, folder: Path) -> Iterator[tuple[FederatedMethod, InProcess]]:
        """Return a federated run's method, and clients that can be overheard."""
        with super().open(plan, folder) as (method, clients):
            assert isinstance(clients, InProcess)
            self.methods[plan.name] = method
            yield method, _Overheard(clients.worker, clients.federation, self.keep, self.messages)


class Observed:
    """A finished run: its results, the messages that were kept, and its models.

    It is made for one federated run; ``keep`` says which messages to keep.
    """

    def __init__(self, config: Config, out: Path, keep: Keep = lambda member, round_: False,
                 device: str = "cpu") -> None:
        made: list[_Site] = []

        def site(config: Config, device: str, out: Path, notify: Subscriber) -> _Site:
            made.append(_Site(config, device, out, notify, keep))
            return made[0]

        self.out = out
        self.rows: list[Row] = run(config, out, device=device, site=site)
        (self._site,) = made
        (self.method,) = self._site.methods.values()
        self.evaluator = self._site.evaluator

    @property
    def clients(self) -> Iterator[Client]:
        """The clients with their data, one after the other."""
        return iter(self._site.experiment.federation)

    @property
    def messages(self) -> dict[tuple[str, int], Message]:
        """What was overheard, by client and round."""
        return self._site.messages

    def model(self, method: str, client: Member) -> BlockState:
        """Return a client's final model: its own, or its blocks of the server's."""
        folder = self.out / "models" / folder_name(method)
        own = folder / f"{client.id}.safetensors"
        if own.is_file():
            return read_state(own)[0]
        return read_state(folder / "server.safetensors")[0].subset(self.method.owned(client))
