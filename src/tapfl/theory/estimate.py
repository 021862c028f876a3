"""The bound's constants, estimated from gradients at the server model that a run has stored.

All are estimates at one or two points, while the theorem asks for bounds that hold everywhere: L in
particular can only be larger than what a few directions show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.data.batches import TaskBatch
from tapfl.data.federation import Client
from tapfl.engine.build import Experiment, build
from tapfl.engine.files import Label, read_state
from tapfl.engine.record import read_record
from tapfl.errors import TapflError
from tapfl.federated.context import randomness
from tapfl.federated.method import FedAvg
from tapfl.federated.stepper import parameters_of
from tapfl.federated.training import task_objective
from tapfl.methods import federated_runs, folder_name, method_specs

STEP = 1e-2  # of a finite difference
ITERATIONS = 4  # of the power method, from each direction
ROLE = "bound"


@dataclass(frozen=True)
class Stored:
    """A run's FedAvg: its configuration and where its server model is."""

    config: Config
    name: str
    path: Path

    def blocks(self) -> BlockState:
        """Read the server model."""
        return read_state(self.path, Label(self.name, "", self.config.train.rounds))[0]


def stored(folder: Path) -> Stored:
    """Find the server model of a run's FedAvg."""
    record = read_record(folder)
    if not record.finished:
        raise TapflError(f"{folder}: this run is not complete; expected one with a final model")
    for run in federated_runs(method_specs(record.config)):
        if run.federated == FedAvg.name:
            path = folder / "models" / folder_name(run.name) / "server.safetensors"
            if not path.is_file():
                raise TapflError(f"{path}: missing; the run kept no models (checkpoint.models)")
            return Stored(run.config, run.name, path)
    raise TapflError(f"{folder}: expected a run with {FedAvg.name}, or a method that stands on it "
                     f"such as tap; it has {', '.join(record.config.methods)}")


@dataclass
class Estimates:
    """What was found; ``noise`` is the largest client's, ``gradient`` is ||F||^2 where it ends."""

    smoothness: float = 0.0
    noise: float = 0.0
    mean_noise: float = 0.0
    heterogeneity: dict[str, float] = field(default_factory=dict)
    gap: float = 0.0
    gradient: float = 0.0
    clients: int = 0
    batches: int = 0


def estimate(run: Stored, device: str, batches: int, most: int) -> Estimates:
    """Estimate the constants with some minibatches of at most so many clients."""
    if batches < 2:
        raise TapflError(f"--batches {batches}: expected at least 2, to tell noise from signal")
    experiment = build(run.config, device)
    federation, kinds = experiment.federation, len(experiment.kinds)
    if most < min(kinds, len(federation)):
        raise TapflError(f"--clients {most}: expected at least {kinds}, one of every kind")
    clients = federation[:most]  # every kind comes before a second group does
    return _Estimation(experiment, run.blocks(), clients, batches).run()


class _Estimation:
    """Gradients of a federation's clients at the run's first and last server model."""

    def __init__(self, experiment: Experiment, final: BlockState, clients: Sequence[Client],
                 batches: int) -> None:
        self.context, self.clients, self.batches = experiment.context, clients, batches
        self.kinds = {client.tasks: client for client in reversed(clients)}.values()
        self.method = FedAvg(self.context)
        self.first, self.last = self.method.initial, final.to(self.context.device)
        self.network = self.method.network
        fault = self.last.misfit(self.first) or self.last.not_finite()
        if fault or set(self.last) != set(self.first):
            raise TapflError(f"the run's server model: {fault or 'it has other blocks'}")

    def run(self) -> Estimates:
        found = self._first_moments()
        found.smoothness = max(self._curvature(client) for client in self.kinds)
        return found

    def _first_moments(self) -> Estimates:
        """Estimate noise, heterogeneity and the gap."""
        sums = {name: torch.zeros_like(value) for name, value in self.last.items()}
        squares, variances = dict.fromkeys(sums, 0.0), dict.fromkeys(sums, 0.0)
        owners, noises, falls = dict.fromkeys(sums, 0), [], []
        for client in self.clients:
            mean, variance, loss = self._client(client)
            falls.append(self._loss(client, self.first) - loss)
            noises.append(sum(variance.values()))
            for name, value in mean.items():
                sums[name] += value
                squares[name] += float(value.double().square().sum())
                variances[name] += variance[name]
                owners[name] += 1
        found = Estimates(noise=max(noises), mean_noise=sum(noises) / len(noises),
                          gap=sum(falls) / len(falls), clients=len(self.clients),
                          batches=self.batches)
        for name, count in owners.items():
            if count:
                squared_mean = float((sums[name].double() / count).square().sum())
                # Means of a few minibatches differ by noise alone, too: that part is taken off.
                luck = variances[name] / count / self.batches
                found.gradient += max(0.0, squared_mean - luck / count)
                found.heterogeneity[name] = max(
                    0.0, squares[name] / count - squared_mean - luck * (1 - 1 / count))
        return found

    def _client(self, client: Client) -> tuple[dict[str, Tensor], dict[str, float], float]:
        """Return a client's mean gradient and its variance, by block, and its mean loss."""
        self.last.load_into(self.network.blocks)
        names = self.method.owned(client)
        mean: dict[str, Tensor] = {}
        squares, total = dict.fromkeys(names, 0.0), 0.0
        with randomness(self.context, client, 0, ROLE):
            self.network.train()  # dropout is a part of the noise that training meets
            for parts in self._minibatches(client):
                loss, gradient = self._gradient(parts, names)
                total += loss / self.batches
                for name, value in gradient.items():
                    squares[name] += float(value.double().square().sum())
                    mean[name] = mean.get(name, 0) + value / self.batches
        variance = {name: max(0.0, squares[name] - self.batches * float(
            mean[name].double().square().sum())) / (self.batches - 1) for name in names}
        return mean, variance, total

    @torch.no_grad()
    def _loss(self, client: Client, state: BlockState) -> float:
        """Return a client's mean loss with other blocks, on the very minibatches of ``_client``."""
        state.load_into(self.network.blocks)
        with randomness(self.context, client, 0, ROLE):
            self.network.train()
            return sum(float(task_objective(self.network, parts)[0])
                       for parts in self._minibatches(client)) / self.batches

    def _minibatches(self, client: Client) -> list[list[TaskBatch]]:
        with randomness(self.context, client, 0, ROLE) as rng:
            return list(client.data.minibatches(self.batches, self.context.config.train.batch_size,
                                                rng))

    def _gradient(self, parts: Sequence[TaskBatch],
                  names: Sequence[str]) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of a minibatch and its gradient, one flat tensor for each block."""
        parameters = {name: parameters_of(self.network, [name]) for name in names}
        flat = [p for each in parameters.values() for p in each]
        loss = task_objective(self.network, parts)[0]
        found = iter(torch.autograd.grad(loss, flat, allow_unused=True))
        return float(loss.detach()), {
            name: torch.cat([torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                             for p, g in ((p, next(found)) for p in each)])
            for name, each in parameters.items()}

    def _curvature(self, client: Client) -> float:
        """Return the largest curvature that finite differences of one minibatch's gradient show."""
        names = self.method.owned(client)
        parts = self._minibatches(client)[0]
        with randomness(self.context, client, 0, ROLE):
            random = {name: torch.randn_like(self.last[name]) for name in names}
        update = {name: self.last[name] - self.first[name] for name in names}
        self.network.eval()  # the same function at both ends of a difference
        return max(self._power_method(parts, names, direction) for direction in (random, update))

    def _power_method(self, parts: Sequence[TaskBatch], names: Sequence[str],
                      direction: dict[str, Tensor]) -> float:
        """Follow a direction to where the gradient changes fastest."""
        most = 0.0
        for _ in range(ITERATIONS):
            length = _norm(direction)
            if length == 0:  # nothing moved this client's blocks
                break
            ends = []
            for sign in (1, -1):
                moved = {name: self.last[name] + sign * STEP / length * direction[name]
                         for name in names}
                BlockState(moved, self.last.shapes).load_into(self.network.blocks)
                ends.append(self._gradient(parts, names)[1])
            direction = {name: (ends[0][name] - ends[1][name]) / (2 * STEP) for name in names}
            most = max(most, _norm(direction))
        return most


def _norm(parts: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in parts.values()))
