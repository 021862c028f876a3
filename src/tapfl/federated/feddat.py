"""FedDAT (Chen et al., 2024): a dual adapter teaches the shared one and learns from it.

Adapters stand after every feed-forward network of the encoders and of the backbone, beside the LoRA
blocks, which stay as they are. Three per place: ``shared`` is trained, sent and averaged; ``local``
is trained and private; ``frozen`` is the shared one as it was received.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client, Member
from tapfl.federated.context import Context, Losses
from tapfl.federated.distill import divergence
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import Stepper, backward, parameters_of
from tapfl.federated.training import Minibatch, local_training, weighted
from tapfl.model.network import Network, Outputs


class Bottleneck(nn.Module):
    """Down, ReLU, up; the residual is added where it is used."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, bottleneck), nn.Linear(bottleneck, width)
        for layer in (self.down, self.up):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, h: Tensor) -> Tensor:
        """Return what is added to ``h``."""
        with torch.autocast(h.device.type, h.dtype, enabled=h.dtype.itemsize < 4):
            added: Tensor = self.up(torch.relu(self.down(h)))
        return added


class FedDAT(FederatedMethod):
    """FedAvg's protocol with adapters; the personalised model is the dual-adapter one."""

    name: ClassVar[str] = "feddat"
    shares_final_model: ClassVar[bool] = False  # the local adapters are each client's own

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.places = self._places()

    def new_network(self) -> Network:
        """Return a network with three adapters after every feed-forward network."""
        network = super().new_network()
        for part in ("shared", "local", "frozen"):
            for place, (depth, width) in self._places().items():
                network.add_block(f"adapter/{part}/{place}", self._adapters(depth, width),
                                  self.context.seed)
                if part == "frozen":
                    network.blocks[f"adapter/frozen/{place}"].requires_grad_(False)
        network.adapter = functools.partial(_shared, network)
        return network

    def _places(self) -> dict[str, tuple[int, int]]:
        """Return how many adapters of which width every place has."""
        foundation, stage = self.context.foundation, len(self.context.foundation.layers) // 2
        places = {f"encoder/{m}": (len(e.layers), e.width)
                  for m, e in foundation.encoders.items() if e.layers}
        kind = self.context.config.backbone.kind
        stages = {"backbone": 2 * stage} if kind == "standard" else {"mote": stage, "mome": stage}
        return places | {name: (depth, foundation.width) for name, depth in stages.items()}

    def _adapters(self, depth: int, width: int) -> Callable[[], nn.Module]:
        bottleneck = self.context.config.feddat.bottleneck
        return lambda: nn.ModuleList(Bottleneck(width, bottleneck) for _ in range(depth))

    # Which blocks

    def _places_of(self, tasks: Sequence[str]) -> list[str]:
        modalities = {m for t in tasks for m in self.network.ownership.task(t).modalities}
        return [p for p in self.places
                if not p.startswith("encoder/") or p.removeprefix("encoder/") in modalities]

    def blocks_of_task(self, task: str) -> tuple[str, ...]:
        """Return the task's blocks and the shared adapters on its way."""
        return (*super().blocks_of_task(task),
                *(f"adapter/shared/{place}" for place in self._places_of([task])))

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the client's own adapters, and the shared ones as it received them."""
        return tuple(f"adapter/{part}/{place}" for part in ("frozen", "local")
                     for place in self._places_of(client.tasks))

    @contextlib.contextmanager
    def predicting(self) -> Iterator[None]:
        """Predict with the dual adapter."""
        self.network.adapter = functools.partial(_dual, self.network)
        try:
            yield
        finally:
            self.network.adapter = functools.partial(_shared, self.network)

    # Training

    def train(self, client: Client, round_: int) -> Losses:
        """Train the shared and the local adapters against each other."""
        train = self.context.config.train
        return self._dual_training(client, round_, "federated", train.local_steps,
                                   train.rate(round_))

    def _post_training(self, client: Client, steps: int, lr: float) -> None:
        self._dual_training(client, self.context.config.train.rounds, "post", steps, lr)

    def adapt(self, client: Client) -> None:
        """The final model's frozen adapters are the shared ones as last received."""
        self._freeze(self._places_of(client.tasks))

    def _freeze(self, places: Sequence[str]) -> None:
        with torch.no_grad():
            for place in places:
                source = self.network.blocks[f"adapter/shared/{place}"]
                self.network.blocks[f"adapter/frozen/{place}"].load_state_dict(source.state_dict())

    def _dual_training(self, client: Client, round_: int, role: str, steps: int,
                       lr: float) -> Losses:
        network, places = self.network, self._places_of(client.tasks)
        self._freeze(places)
        own = [f"adapter/local/{place}" for place in places]
        shared = parameters_of(network, self.owned(client))
        local = parameters_of(network, own)
        stepper = self.context.stepper(network)

        def body(parts: Sequence[TaskBatch]) -> dict[str, Tensor]:
            said: dict[str, list[Tensor]] = {}  # the student's predictions, piece by piece

            def teach_shared(piece: Sequence[TaskBatch]) -> dict[str, Tensor]:
                with self.predicting(), torch.no_grad():
                    teacher = [network(p.task, p.batch).prediction for p in piece]
                student = [network(p.task, p.batch).prediction for p in piece]
                for p, prediction in zip(piece, student, strict=True):
                    said.setdefault(p.task, []).append(prediction.detach())
                return backward(*self._mutual(piece, student, teacher))

            losses = stepper.gather(teach_shared, parts, begin=said.clear)
            stepper.move(shared)
            whole = {t: v[0] if len(v) == 1 else torch.cat(v) for t, v in said.items()}

            def teach_local(piece: Sequence[TaskBatch]) -> dict[str, Tensor]:
                with self.predicting():
                    dual = [network(p.task, p.batch).prediction for p in piece]
                return backward(*self._mutual(piece, dual, [whole[p.task][p.rows] for p in piece]))

            stepper.gather(teach_local, parts)
            stepper.move(local)
            return losses

        def step(stepper: Stepper,
                 stream: Iterator[Minibatch]) -> tuple[Minibatch, dict[str, Tensor]]:
            minibatch = next(stream)
            return minibatch, stepper.run("dual", body, minibatch)

        return local_training(self.context, network, client, (*self.owned(client), *own),
                              steps=steps, lr=lr, round_=round_, role=role, step=step)

    def _mutual(self, parts: Sequence[TaskBatch], student: Sequence[Tensor],
                teacher: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the tasks' losses plus the divergence from the (fixed) teacher."""
        losses = {p.task: self.network.loss(p.task, Outputs(s, {}), p.batch)
                  for p, s in zip(parts, student, strict=True)}
        apart = {p.task: divergence(t, s, p.batch)
                 for p, s, t in zip(parts, student, teacher, strict=True)}
        kl = self.context.config.feddat.kl_weight * weighted(apart, parts)
        return weighted(losses, parts) + kl, losses


def _shared(network: Network, place: str, index: int, h: Tensor) -> Tensor:
    added: Tensor = network.blocks[f"adapter/shared/{place}"][index](h)
    return h + added


def _dual(network: Network, place: str, index: int, h: Tensor) -> Tensor:
    local: Tensor = network.blocks[f"adapter/local/{place}"][index](h)
    frozen: Tensor = network.blocks[f"adapter/frozen/{place}"][index](h)
    return h + 0.5 * local + 0.5 * frozen
