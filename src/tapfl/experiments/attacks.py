"""Malicious clients, to measure what an aggregation rule withstands.

Nobody should use these methods for anything else. The first clients of the roster are malicious,
as many as ``malicious`` says; the others are plain FedAvg. A malicious client may train on other
data than its own, and may send another update than it trained: the same step times a factor.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from tapfl.blocks import BlockState
from tapfl.config import MANY, WEIGHT, Section
from tapfl.data.batches import ClientData, Rows, TaskData
from tapfl.data.federation import Client, Member
from tapfl.errors import TapflError, nearest
from tapfl.federated.context import Losses
from tapfl.federated.method import FedAvg
from tapfl.tasks import IMAGE_CLASSIFICATION

BRIGHT = 255  # a trigger's pixels


class Malicious(Section):
    """How many clients are malicious."""

    malicious: int = Field(1, ge=0, le=MANY)
    """So many clients, the first of the roster, are malicious."""


class Attack(FedAvg):
    """FedAvg in which some clients train on ``poisoned`` data and send ``factor`` times a step."""

    Settings: ClassVar[type[Section]] = Malicious

    @property
    def factor(self) -> float:
        """What a malicious client's step is multiplied with."""
        return 1.0

    def poisoned(self, client: Client) -> ClientData:
        """Return what a malicious client trains on: its own data by default."""
        return client.data

    def is_malicious(self, client: Member) -> bool:
        """Return whether a client is one of the malicious ones."""
        return client.index < int(self.settings.malicious)

    def train(self, client: Client, round_: int) -> Losses:
        """Train as FedAvg does; a malicious client leaves what it wants to send."""
        if not self.is_malicious(client):
            return super().train(client, round_)
        blocks, names = self.network.blocks, self.owned(client)
        received = BlockState.extract(blocks, names)
        losses = super().train(dataclasses.replace(client, data=self.poisoned(client)), round_)
        if self.factor != 1:
            multiplied(received, BlockState.extract(blocks, names), self.factor).load_into(blocks)
        return losses


@torch.no_grad()
def multiplied(received: BlockState, trained: BlockState, factor: float) -> BlockState:
    """Return received + factor (trained - received)."""
    return BlockState({name: received[name] + factor * (value - received[name])
                       for name, value in trained.items()}, trained.shapes)


class SignFlip(Attack):
    """Goes the other way: received - scale (trained - received)."""

    class Settings(Malicious):
        """How far the other way."""

        scale: float = Field(5.0, ge=0, le=WEIGHT)
        """What the step is multiplied with, once its sign is changed."""

    @property
    def factor(self) -> float:
        """The scale, with its sign changed."""
        return -float(self.settings.scale)


class Scaling(Attack):
    """Goes too far: received + scale (trained - received)."""

    class Settings(Malicious):
        """How much too far."""

        scale: float = Field(10.0, ge=0, le=WEIGHT)
        """What the step is multiplied with."""

    @property
    def factor(self) -> float:
        """The scale."""
        return float(self.settings.scale)


class LabelFlip(Attack):
    """Trains on the labels C - 1 - y of every classification task."""

    def poisoned(self, client: Client) -> ClientData:
        """Return the client's samples with flipped labels."""
        return dataclasses.replace(client.data, holdings=[
            (flipped(data), rows) for data, rows in client.data.holdings])


def flipped(data: TaskData) -> TaskData:
    """Return a classification's samples with labels C - 1 - y; other data as they are."""
    if data.labels is None:
        return data
    return dataclasses.replace(data, labels=data.task.classes - 1 - data.labels)


class Backdoor(Attack):
    """Teaches one task that a bright square in the corner means the ``target`` class."""

    class Settings(Malicious):
        """Which pictures get the trigger, and how loud the update is."""

        task: str | None = None
        """An image classification; by default the client's first."""
        target: int = Field(0, ge=0, le=MANY)
        """The class that pictures with the trigger shall get."""
        share: float = Field(0.5, gt=0, le=1)
        """The share of the task's training pictures that get the trigger."""
        side: int = Field(8, ge=1, le=2048)
        """The trigger's side in pixels."""
        scale: float = Field(1.0, ge=0, le=WEIGHT)
        """What the step is multiplied with."""

    @property
    def factor(self) -> float:
        """The scale."""
        return float(self.settings.scale)

    def task_of(self, client: Member) -> str:
        """Return the task that gets the backdoor."""
        known = [name for name in client.tasks
                 if self.context.tasks[name].kind == IMAGE_CLASSIFICATION]
        wanted = self.settings.task
        if not known or (wanted is not None and wanted not in known):
            raise TapflError(
                f"own.Backdoor.task: client '{client.id}' has no image classification"
                + (f" '{wanted}'" + nearest(wanted, known) if wanted and known else ""))
        task = known[0] if wanted is None else str(wanted)
        if self.settings.target >= self.context.tasks[task].classes:
            raise TapflError(f"own.Backdoor.target: {self.settings.target}: '{task}' has "
                             f"{self.context.tasks[task].classes} classes, counted from 0")
        return task

    def poisoned(self, client: Client) -> ClientData:
        """Return the client's samples, some of the task's pictures with trigger and target."""
        task, settings, holdings = self.task_of(client), self.settings, []
        for data, rows in client.data.holdings:
            if data.task.name == task:
                order = np.random.default_rng([self.context.seed, client.index]).permutation(
                    len(rows))
                chosen = np.sort(order[:max(1, int(settings.share * len(rows)))])
                data = _some_triggered(data.take(rows), chosen, settings.target, settings.side)
                rows = np.arange(len(rows))
            holdings.append((data, rows))
        return dataclasses.replace(client.data, holdings=holdings)


def _some_triggered(data: TaskData, chosen: Rows, target: int, side: int) -> TaskData:
    """Return samples of which the chosen ones have the trigger and the target label."""
    assert data.images is not None
    assert data.labels is not None
    images, labels = data.images.clone(), data.labels.clone()
    index = torch.from_numpy(chosen)
    images[index.to(images.device), :, -side:, -side:] = BRIGHT
    labels[index.to(labels.device)] = target
    return dataclasses.replace(data, images=images, labels=labels)


def backdoor_test(data: TaskData, rows: Rows, target: int, side: int) -> TaskData:
    """Return test pictures of other classes with the trigger, labelled as the target.

    A model's accuracy on them is the attack's success rate.
    """
    assert data.labels is not None
    others = rows[data.labels.cpu().numpy()[rows] != target]
    return _some_triggered(data.take(others), np.arange(len(others)), target, side)
