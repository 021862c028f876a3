"""A task: what goes in, what comes out, and the loss in between."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapfl.errors import TapflError, nearest, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODALITIES = ("image", "text")
IMAGE_CLASSIFICATION = "image_classification"
IMAGE_GENERATION = "image_generation"
TEXT_CLASSIFICATION = "text_classification"
TEXT_GENERATION = "text_generation"
KINDS = (IMAGE_CLASSIFICATION, IMAGE_GENERATION, TEXT_CLASSIFICATION, TEXT_GENERATION)
# The modality that a kind requires; text can be generated from either, so it requires none.
NEEDS = {IMAGE_CLASSIFICATION: "image", IMAGE_GENERATION: "image", TEXT_CLASSIFICATION: "text"}
MAX_CLASSES = 1_000_000

# Names end up in block names, file names and reports, so they are plain words.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it can safely become part of a path."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or len(name) > 80:
        raise TapflError(
            f"{what} {shown(name)} is not a name: expected letters, digits, '_' or '-', "
            "starting with a letter or digit, at most 80 characters"
        )
    return name


@dataclass(frozen=True)
class Task:
    """One task of the paper's set O: a name of its own and one of four kinds.

    Experts and stage-2 stacks belong to the kind, losses and replacement to the task.
    """

    name: str
    kind: str
    modalities: tuple[str, ...]
    classes: int = 0

    def __post_init__(self) -> None:
        check_name(self.name, "task")
        if self.name in KINDS:
            raise TapflError(f"task '{self.name}': the name of a task kind cannot name a task")
        if self.kind not in KINDS:
            raise TapflError(f"task '{self.name}': unknown kind '{self.kind}'"
                             + nearest(self.kind, KINDS))
        for modality in self.modalities:
            if modality not in MODALITIES:
                raise TapflError(f"task '{self.name}': unknown modality '{modality}'"
                                 + nearest(modality, MODALITIES))
        if not self.modalities or len(set(self.modalities)) != len(self.modalities):
            raise TapflError(f"task '{self.name}': expected one or two different modalities, "
                             f"got {list(self.modalities)}")
        # One order everywhere, whatever order the federation file has.
        ordered = tuple(m for m in MODALITIES if m in self.modalities)
        object.__setattr__(self, "modalities", ordered)
        if self.is_classification and self.classes < 2:
            raise TapflError(f"task '{self.name}': classes must be at least 2, got {self.classes}")
        if self.classes > MAX_CLASSES:
            raise TapflError(f"task '{self.name}': classes must be at most {MAX_CLASSES}, got "
                             f"{shown(self.classes)}")
        if not self.is_classification and self.classes:
            raise TapflError(f"task '{self.name}': classes are for classification, "
                             f"this is {self.kind}")
        needed = NEEDS.get(self.kind)
        if needed and needed not in self.modalities:
            raise TapflError(f"task '{self.name}': {self.kind} needs the {needed} modality, got "
                             f"{list(self.modalities)}")

    @property
    def is_classification(self) -> bool:
        """Whether the output is one label of ``classes``."""
        return self.kind in (IMAGE_CLASSIFICATION, TEXT_CLASSIFICATION)


@dataclass
class Batch:
    """Samples of one task. Only the fields that the task uses are set.

    ``image`` is uint8 ``(B, 3, 64, 64)``; ``text`` and ``answer`` are token ids ``(B, T)`` with a
    boolean mask that is true on real tokens (no mask: nothing is padded); ``label`` is ``(B,)``.
    ``real (B,)`` is true on samples that count (None: all do); the others only round the shape up.
    ``whole (2,)`` is set on a piece of a batch: how many samples and answer tokens of the whole
    batch count. Means are then sums over the piece divided by these, and add up. ``places (N,)``
    says where in the answers, the first token left out and all rows laid end to end, a token may
    count: all that do are there, and some that only round the shape up. None means everywhere.
    """

    image: Tensor | None = None
    text: Tensor | None = None
    text_mask: Tensor | None = None
    label: Tensor | None = None
    answer: Tensor | None = None
    answer_mask: Tensor | None = None
    real: Tensor | None = None
    whole: Tensor | None = None
    places: Tensor | None = None

    def __len__(self) -> int:
        for value in (self.image, self.text):
            if value is not None:
                return len(value)
        return 0

    def real_targets(self) -> Tensor | None:
        """Return which tokens of the answers count as targets, ``(B, T - 1)``, if any do not."""
        if self.answer_mask is None:
            return None
        targets = self.answer_mask[:, 1:]
        return targets if self.real is None else targets & self.real[:, None]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on ``device``."""
        return Batch(*(v if v is None else v.to(device, non_blocking=True)
                       for v in (getattr(self, f.name) for f in dataclasses.fields(self))))


def at_least_fp32(values: Tensor) -> Tensor:
    """Return half-precision values in fp32, others as they are: losses need the precision."""
    return values.float() if values.element_size() < 4 else values


def mean_of_real(values: Tensor, real: Tensor | None, whole: Tensor | None = None) -> Tensor:
    """Return the mean over samples (the first axis) and whatever each has, of those that count.

    ``real`` and ``whole`` are as in a batch.
    """
    if real is None and whole is None:
        return values.mean()
    each = values.flatten(1).mean(dim=1) if values.dim() > 1 else values
    if whole is not None:
        return (each if real is None else each * real).sum() / whole[0]
    assert real is not None
    return (each * real).sum() / real.sum()


def task_loss(task: Task, prediction: Tensor, target: Tensor, mask: Tensor | None,
              real: Tensor | None = None, whole: Tensor | None = None,
              entropies: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Return the loss of the task's kind, the mean over samples (over real tokens for text).

    ``prediction`` and ``target`` are class logits and labels, next-token logits and token ids
    (``mask`` is true where the target counts), or two images. ``real`` and ``whole`` are as
    in a batch. ``entropies``, if given, is another way to the loss of every token.
    """
    import torch.nn.functional as F

    if entropies is None or task.kind != TEXT_GENERATION:
        prediction = at_least_fp32(prediction)
    if task.kind == IMAGE_GENERATION:
        error = F.mse_loss(prediction, target.to(prediction.dtype), reduction="none")
        return mean_of_real(error, real, whole)
    target = target.long()
    if real is not None:
        target = target.masked_fill(~real.view(-1, *(1,) * (target.dim() - 1)), -100)
    if not task.is_classification:
        if mask is not None:
            target = target.masked_fill(~mask, -100)
        prediction, target = prediction.flatten(0, -2), target.flatten()
        if entropies is not None:
            count = (target >= 0).sum() if whole is None else whole[1]
            return entropies(prediction, target).sum() / count
    if whole is None:
        return F.cross_entropy(prediction, target, ignore_index=-100)
    total = F.cross_entropy(prediction, target, ignore_index=-100, reduction="sum")
    return total / whole[0 if task.is_classification else 1]


def sample_losses(task: Task, prediction: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return the loss of every sample; a text's is the mean over its real tokens."""
    import torch.nn.functional as F

    prediction = at_least_fp32(prediction)
    if task.kind == IMAGE_GENERATION:
        return (prediction - target.to(prediction.dtype)).square().flatten(1).mean(dim=1)
    if task.is_classification:
        return F.cross_entropy(prediction, target.long(), reduction="none")
    each = F.cross_entropy(prediction.transpose(1, 2), target.long(), reduction="none")
    real = each.new_ones(each.shape) if mask is None else mask.to(each.dtype)
    return (each * real).sum(dim=1) / real.sum(dim=1)
