"""Faults of the public TAP code, to be switched on one by one: what did they do to its tables?

Nobody should use these methods for anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tapfl.blocks import STANDARD_BACKBONE
from tapfl.data.federation import Member
from tapfl.federated.method import FedAvg
from tapfl.model.decoders import Cache, TextHead
from tapfl.model.network import Network
from tapfl.personal.tap import Distillation, Tap
from tapfl.tasks import Batch, at_least_fp32, mean_of_real

BACKBONE = ("mote/", "mome/", STANDARD_BACKBONE)
TEXT_HEAD = "decoder/text_generation"
NEVER = -1  # no token has this id
MICRO = 4  # minibatches of 128 came in micro-batches of 32, and P counted these


class UnsentBackbone(FedAvg):
    """The averaged backbone never reaches the clients: each goes on with its own."""

    name: ClassVar[str] = "fedavg-unsent-backbone"
    shares_final_model: ClassVar[bool] = False

    def exchanged(self, client: Member) -> tuple[str, ...]:
        """Return encoders and decoders."""
        return tuple(b for b in self.owned(client) if not b.startswith(BACKBONE))

    def private(self, client: Member) -> tuple[str, ...]:
        """Return the backbone's blocks."""
        return tuple(b for b in self.owned(client) if b.startswith(BACKBONE))


class _Unheard(TextHead):
    def start(self, condition: Tensor, mask: Tensor | None) -> Cache:
        """Prepare to write without a condition: attention to zeros adds nothing but a constant."""
        return super().start(torch.zeros_like(condition), mask)


class _Endless(TextHead):
    def generate(self, condition: Tensor, mask: Tensor | None, *, start: int, end: int, pad: int,
                 max_new_tokens: int) -> Tensor:
        """Write on after the end token, up to the longest text."""
        return super().generate(condition, mask, start=start, end=NEVER, pad=pad,
                                max_new_tokens=max_new_tokens)


class _UnheardEndless(_Unheard, _Endless):
    pass


class _OtherTextHead(FedAvg):
    """FedAvg with another text head, whose blocks begin with the same values."""

    head: ClassVar[type[TextHead]]

    def new_network(self) -> Network:
        """Return a network with this text head, where it has one."""
        network = super().new_network()
        if TEXT_HEAD in network.blocks:
            foundation = network.foundation
            network.add_block(TEXT_HEAD, lambda: self.head(
                foundation.width, foundation.vocabulary, foundation.max_text,
                tied=self.context.config.decoder.tie_embeddings), self.context.seed)
        return network


class UnheardInput(_OtherTextHead):
    """The text head ignores what it is given: every input has the same answer."""

    name: ClassVar[str] = "fedavg-unheard-input"
    head: ClassVar[type[TextHead]] = _Unheard


class PastTheEnd(_OtherTextHead):
    """What a model writes after the end token is scored, too."""

    name: ClassVar[str] = "fedavg-past-the-end"
    head: ClassVar[type[TextHead]] = _Endless


class AllOfFedAvg(UnsentBackbone, _OtherTextHead):
    """An unsent backbone, an unheard input and texts without an end."""

    name: ClassVar[str] = "fedavg-all-faults"
    head: ClassVar[type[TextHead]] = _UnheardEndless


class SummedDivergence(Tap):
    """Stage 2 sums the KL over the tokens of a text and the rows of an image, padding included."""

    @functools.cached_property
    def _distillation(self) -> Distillation:
        return _Summed(self.method.teacher, self.context)


class _Summed(Distillation):
    counted: ClassVar[bool] = False

    def divergence(self, teacher: Tensor, student: Tensor, batch: Batch) -> Tensor:
        """Return the KL of a sample, summed over all its distributions; the mean over samples."""
        p, q = (F.log_softmax(at_least_fp32(x), dim=-1) for x in (teacher, student))
        kl = F.kl_div(q, p, log_target=True, reduction="none")
        return mean_of_real(kl.flatten(1).sum(dim=1), batch.real, batch.whole)


_UNSENT, _UNHEARD, _ENDLESS, _ALL, _SUMMED = (f"{__name__}:{found.__name__}" for found in (
    UnsentBackbone, UnheardInput, PastTheEnd, AllOfFedAvg, SummedDivergence))

Variants = Mapping[str, Mapping[str, Any]]


def fault_variants(post_steps: int) -> dict[str, Variants]:
    """Return each fault's variants by its title: of FedAvg, of post-training and of TAP.

    A fault that leaves a method as it is has no variant of it. ``post_steps`` is P.
    """
    few = {"post": {"steps": max(1, post_steps // MICRO)}}
    return {
        "The averaged backbone is never sent": _family("unsent", _UNSENT),
        "P counts micro-batches": {"micro-post": {"of": "fedavg+post", **few},
                                   "micro-tap": {"of": "tap", **few}},
        "The KL is summed, not averaged": {"summed-tap": {"of": f"fedavg+{_SUMMED}"}},
        "These three": _family("three", _UNSENT, _SUMMED, few),
        "The text head ignores its input": _family("unheard", _UNHEARD),
        "The head ignores its input, and P counts micro-batches":
            _family("few-unheard", _UNHEARD, post=few),
        "Texts are scored past their end": _family("endless", _ENDLESS),
        "All five": _family("five", _ALL, _SUMMED, few)}


def _family(name: str, federated: str, tap: str = "tap", post: Variants | None = None) -> Variants:
    """Return variants of FedAvg, of post-training and of TAP on a faulty federated method."""
    return {f"{name}-fedavg": {"of": federated},
            f"{name}-post": {"of": f"{federated}+post", **(post or {})},
            f"{name}-tap": {"of": f"{federated}+{tap}", **(post or {})}}
