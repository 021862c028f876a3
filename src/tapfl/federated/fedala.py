"""FedALA (Zhang et al., 2023): a client learns, element by element, how much of W it takes in.

Only the last blocks, the decoders, are taken in by learned weights; all others are W's. What the
client keeps for this are blocks of its own: ``ala/model/...`` (its decoder as last trained),
``ala/weight/...`` (the weights) and ``ala/trainings`` (how often it has trained).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tapfl.blocks import BlockState
from tapfl.data.federation import Client, Member
from tapfl.federated.context import Losses
from tapfl.federated.fedper import is_decoder
from tapfl.federated.method import FederatedMethod
from tapfl.federated.stepper import Stepper, parameters_of
from tapfl.federated.still import Still
from tapfl.federated.training import Minibatch, local_training, task_gradients
from tapfl.model.network import Network

TRAININGS = "ala/trainings"


class FedALA(FederatedMethod):
    """FedAvg whose clients begin a local training with a mixture of their decoders and W's."""

    name: ClassVar[str] = "fedala"
    shares_final_model: ClassVar[bool] = False  # each client takes the final W in, in its own way

    def new_network(self) -> Network:
        """Return a network with the blocks that a client keeps for itself."""
        network = super().new_network()
        for name in [block for block in network.blocks if is_decoder(block)]:
            decoder = network.blocks[name]
            network.add_block(_kept("model", name), functools.partial(_filled, decoder, 0.0))
            network.add_block(_kept("weight", name), functools.partial(_filled, decoder, 1.0))
        network.add_block(TRAININGS, Count)
        for name in network.blocks:
            if name.startswith("ala/"):
                network.blocks[name].requires_grad_(False)
        return network

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the client's last decoders, its weights, and how often it has trained."""
        decoders = self._decoders(client)
        return (*(_kept(part, name) for part in ("model", "weight") for name in decoders),
                TRAININGS)

    def _decoders(self, client: Member) -> tuple[str, ...]:
        return tuple(block for block in self.owned(client) if is_decoder(block))

    # Taking W in: how every training begins, and how the final model is made

    def train(self, client: Client, round_: int) -> Losses:
        """Take W in, train, and keep the decoders for the next time."""
        self._take_in(client, round_)
        losses = super().train(client, round_)
        mixture = self._mixture(self._decoders(client))
        with torch.no_grad():
            torch._foreach_copy_(mixture.own, mixture.values)
            self.network.blocks[TRAININGS].count.add_(1)
        return losses

    def adapt(self, client: Client) -> None:
        """Take the final W in."""
        self._take_in(client, self.context.config.train.rounds)

    def _post_training(self, client: Client, steps: int, lr: float) -> None:
        self._take_in(client, self.context.config.train.rounds)
        super()._post_training(client, steps, lr)

    def _take_in(self, client: Client, round_: int) -> None:
        """Learn the weights, and leave the mixture where W's decoders are in the network."""
        times = int(self.network.blocks[TRAININGS].count)
        if not times:  # the client has no decoders of its own yet: it takes W as it is
            return
        settings, decoders = self.context.config.fedala, self._decoders(client)
        self._received.copy(BlockState.extract(self.network.blocks, decoders))
        mixture = self._mixture(decoders)
        mixture.mix()

        def step(stepper: Stepper,
                 stream: Iterator[Minibatch]) -> tuple[Minibatch, dict[str, Tensor]]:
            def body(parts: Minibatch) -> dict[str, Tensor]:
                losses, slope = task_gradients(self.network, stepper, parts)
                mixture.learn(slope, settings.lr)
                mixture.mix()
                return losses

            minibatch = next(stream)
            return minibatch, stepper.run("ala", body, minibatch)

        # The optimizer, and so its rate, has no part in this.
        local_training(self.context, self.network, client, decoders, lr=settings.lr,
                       steps=settings.first_steps if times == 1 else settings.steps,
                       round_=round_, role="ala", step=step)

    @functools.cached_property
    def _received(self) -> Still:
        return Still(self.network, [name for name in self.network.blocks if is_decoder(name)])

    def _mixture(self, decoders: Sequence[str]) -> Mixture:
        def kept(part: str) -> list[Tensor]:
            return [*parameters_of(self.network, [_kept(part, name) for name in decoders])]

        return Mixture([*parameters_of(self.network, decoders)], kept("model"),
                       self._received.parameters(decoders), kept("weight"))


@dataclass(frozen=True)
class Mixture:
    """values = own + (received - own) * weights, element by element; all change in place."""

    values: list[Tensor]
    own: list[Tensor]
    received: list[Tensor]
    weights: list[Tensor]

    @torch.no_grad()
    def mix(self) -> None:
        """Write the mixture; where a weight is one it is W, bit for bit."""
        torch._foreach_copy_(self.values, self.own)
        torch._foreach_lerp_(self.values, self.received, self.weights)

    @torch.no_grad()
    def learn(self, gradients: list[Tensor], rate: float) -> None:
        """Move the weights against their gradient, which is that of the values times the span."""
        span = torch._foreach_sub(self.received, self.own)
        torch._foreach_add_(self.weights, torch._foreach_mul(gradients, span), alpha=-rate)
        torch._foreach_clamp_min_(self.weights, 0.0)
        torch._foreach_clamp_max_(self.weights, 1.0)


class Count(nn.Module):
    """A number that is kept as blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1))


def _kept(part: str, decoder: str) -> str:
    """Return the block that a client keeps for one of its decoders."""
    return f"ala/{part}/{decoder.removeprefix('decoder/')}"


def _filled(block: nn.Module, value: float) -> nn.Module:
    """Return a block of the same shapes that holds one value everywhere."""
    filled = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in filled.parameters():
            parameter.fill_(value)
    return filled
