"""APFL (Deng et al., 2020): a mixture of a model of one's own and W, in a share that is learned."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tapfl.blocks import BlockState
from tapfl.data.batches import TaskBatch
from tapfl.federated.stepper import Stepper, backward
from tapfl.federated.still import Still
from tapfl.federated.training import Minibatch, Step, task_objective
from tapfl.personal.beside import Beside, Notes


class Apfl(Beside):
    """The model is alpha v + (1 - alpha) w: v and alpha learn, w is W as it was just trained.

    In a step the network holds v, then the mixture for forward and backward, then v again, which
    the optimizer moves. w, v and alpha stay where they are, so steps can be captured.
    """

    @property
    def finish(self) -> int:
        """As the configuration says."""
        return self.context.config.apfl.finish

    def step(self, received: BlockState, trained: BlockState, notes: Notes) -> Step:
        """Mix with W as trained; alpha goes on from where it was."""
        self._w.copy(trained)
        self._alpha.fill_(self._share(notes))
        return functools.partial(self._step, tuple(trained))

    def notes(self) -> Notes:
        """Keep alpha."""
        return {"alpha": self._alpha.item()}

    def model(self, own: BlockState, notes: Notes, w: BlockState) -> BlockState:
        """Return the mixture."""
        alpha = self._share(notes)
        return BlockState({name: alpha * own[name] + (1 - alpha) * w[name] for name in own},
                          own.shapes)

    def _share(self, notes: Notes) -> float:
        return float(notes.get("alpha", self.context.config.apfl.alpha))

    # Values at fixed addresses, for captured steps

    @functools.cached_property
    def _w(self) -> Still:
        return Still(self.method.network)

    @functools.cached_property
    def _v(self) -> Still:
        return Still(self.method.network)

    @functools.cached_property
    def _alpha(self) -> Tensor:
        like: Tensor = next(self.method.network.blocks.parameters())
        return torch.zeros((), dtype=like.dtype, device=like.device)

    # A step

    def _step(self, blocks: tuple[str, ...], stepper: Stepper,
              stream: Iterator[Minibatch]) -> tuple[Minibatch, dict[str, Tensor]]:
        minibatch = next(stream)
        return minibatch, stepper.run(self, functools.partial(self._body, blocks, stepper),
                                      minibatch)

    def _body(self, blocks: tuple[str, ...], stepper: Stepper,
              parts: Sequence[TaskBatch]) -> dict[str, Tensor]:
        parameters = stepper.parameters
        v, w = self._v.parameters(blocks), self._w.parameters(blocks)
        with torch.no_grad():
            torch._foreach_copy_(v, [*parameters])
            _mix(parameters, w, self._alpha)
        try:
            losses = stepper.gather(
                lambda piece: backward(*task_objective(stepper.network, piece)), parts)
        except torch.cuda.OutOfMemoryError:
            with contextlib.suppress(RuntimeError), torch.no_grad():  # the step may be tried again
                torch._foreach_copy_([*parameters], v)
            raise
        slope = self._gradients(parameters, v, w)
        with torch.no_grad():
            torch._foreach_copy_([*parameters], v)
        stepper.move(parameters)
        self._alpha.sub_(self.context.config.apfl.rate * slope).clamp_(0, 1)
        return losses

    def _gradients(self, parameters: Sequence[nn.Parameter], v: Sequence[Tensor],
                   w: Sequence[Tensor]) -> Tensor:
        """Turn the mixture's gradients into those of v, alpha times as large; return alpha's."""
        # Parameters of tasks that are not in the minibatch have no gradient, and stay.
        seen = [(p.grad, own, other) for p, own, other in zip(parameters, v, w, strict=True)
                if p.grad is not None]
        found, own, other = (list(column) for column in zip(*seen, strict=True))
        along = torch._foreach_mul(torch._foreach_sub(own, other), found)
        slope = torch.cat([each.flatten() for each in along]).sum()
        torch._foreach_mul_(found, self._alpha)
        return slope


def _mix(values: Sequence[nn.Parameter], w: Sequence[Tensor], alpha: Tensor) -> None:
    """Turn values v into alpha v + (1 - alpha) w: v or w, bit for bit, where alpha is 1 or 0."""
    torch._foreach_mul_([*values], alpha)
    torch._foreach_add_([*values], torch._foreach_mul([*w], 1 - alpha))
