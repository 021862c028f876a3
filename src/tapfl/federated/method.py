"""What a federated method is: how a client's copy of W trains, and which blocks it shares."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import ClassVar

from tapfl.blocks import BlockState
from tapfl.data.federation import Client, Member
from tapfl.federated.context import Context, Losses
from tapfl.federated.settings import Configurable
from tapfl.federated.stepper import Objective
from tapfl.federated.training import local_training, minimise, task_objective
from tapfl.model.network import Network


class FederatedMethod(Configurable):
    """FedAvg's client side; other methods change a part of it.

    The engine loads a client's blocks into ``network``, calls ``train`` and takes the blocks out
    again. ``exchanged`` blocks come from the server and go back to it; ``private`` ones are kept by
    the client between its rounds.
    """

    name: ClassVar[str] = "fedavg"
    # Whether all clients of a task end with the same model: it is then evaluated and stored once.
    shares_final_model: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self.settings = self.read_settings(context.config)
        self.network = self.new_network()
        self.initial = BlockState.extract(self.network.blocks)

    def new_network(self) -> Network:
        """Return a network with all the method's blocks, on the shared frozen base."""
        return self.context.network()

    @functools.cached_property
    def teacher(self) -> Network:
        """A second network, for models that are read while another one trains."""
        return self.new_network().eval()

    # Which blocks: what a server may know of a client decides

    def blocks_of_task(self, task: str) -> tuple[str, ...]:
        """Return B_{i,o}: the blocks that a task uses."""
        return self.network.ownership.blocks_of_task(task)

    def owned(self, client: Member) -> tuple[str, ...]:
        """Return B_i: the blocks of the client's tasks, sorted."""
        return tuple(sorted({b for task in client.tasks for b in self.blocks_of_task(task)}))

    def exchanged(self, client: Member) -> tuple[str, ...]:
        """Return the blocks that the client receives and sends."""
        return self.owned(client)

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the blocks of the method that never leave the client."""
        return ()

    # What happens in a round; the client's blocks are in the network

    @property
    def objective(self) -> Objective:
        """The loss that local training and post-training minimise."""
        return task_objective

    def train(self, client: Client, round_: int) -> Losses:
        """Train W's blocks in place; return the mean loss of every task seen."""
        train = self.context.config.train
        return local_training(self.context, self.network, client, self.owned(client),
                              steps=train.local_steps, lr=train.rate(round_), round_=round_,
                              role="federated", step=minimise(self.objective))

    # What happens after the last round

    def adapt(self, client: Client) -> None:
        """Change the final model, in place, before it is evaluated on a client's tasks."""

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Set the network up as the client's final federated model predicts."""
        yield

    def post_train(self, client: Client, final: BlockState, steps: int, lr: float) -> BlockState:
        """Return the client's final W after ``steps`` more steps on its own data."""
        def work() -> BlockState:
            final.load_into(self.network.blocks)
            self._post_training(client, steps, lr)
            return BlockState.extract(self.network.blocks, final)

        # Post-training and TAP's teacher are one and the same. Copies: a caller may change its own.
        key = ("post", client.id, client.data.samples, steps, lr)
        return self.context.memo.once(key, final.clone(), work).clone()

    def _post_training(self, client: Client, steps: int, lr: float) -> None:
        local_training(self.context, self.network, client, self.owned(client), steps=steps, lr=lr,
                       round_=self.context.config.train.rounds, role="post",
                       step=minimise(self.objective))


class FedAvg(FederatedMethod):
    """McMahan et al., 2017, block by block: what TAP stands on by default."""
