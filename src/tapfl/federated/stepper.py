"""Training steps: ordinary ones, and on a GPU steps captured as CUDA graphs and replayed.

A step of a large model is some thousand kernels, each launched from Python; for texts and small
models the launching takes longer than the computing. A CUDA graph captures a step once and launches
it whole. A step can be captured because its tensors stay at fixed addresses: the network's
parameters (a client's blocks are copied in), the optimizer's state, and the minibatch, which is
copied into the captured one's place.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tapfl.config import TrainConfig
from tapfl.data.batches import TaskBatch
from tapfl.federated.micro import MicroBatches, add_up
from tapfl.model.network import Network
from tapfl.tasks import Batch

# From a minibatch to the loss that is minimised and the unweighted loss of every task in it.
Objective = Callable[[Network, Sequence[TaskBatch]], tuple[Tensor, dict[str, Tensor]]]
Losses = dict[str, Tensor]
Body = Callable[[Sequence[TaskBatch]], Losses]
F = TypeVar("F", bound=Callable[..., Any])
MAX_GRAPHS = 512  # nine methods on the paper's federation meet 250 to 310 kinds of steps


def graph_safe(function: F) -> F:
    """Mark an objective whose steps may be captured.

    It has to be a function of the network and the minibatch: a captured step goes on reading the
    very tensors it was captured with.
    """
    function.graph_safe = True  # type: ignore[attr-defined]
    return function


class Stepper:
    """Takes optimizer steps on a network's blocks, for one client after the other.

    One AdamW serves all clients; it starts afresh with each (``restart``), so that no client sees
    another's moments. With ``graphs``, steps are captured when their kind comes a second time.
    ``micro`` says how minibatches are split where memory is short.
    """

    def __init__(self, network: Network, config: TrainConfig, graphs: bool = False,
                 micro: MicroBatches | None = None) -> None:
        self.network, self.config, self.graphs = network, config, graphs
        self.micro = micro or MicroBatches()
        self._captured: OrderedDict[Any, _Captured | None] = OrderedDict()
        self._pool: Any = None
        self._capturing = True  # until memory runs out
        self._under_capture = False
        self._moved = False  # since the step began
        self._optimizer: torch.optim.Optimizer | None = None
        self._lr = torch.zeros(())
        self._blocks: tuple[str, ...] = ()
        self.parameters: list[nn.Parameter] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a network has no captured steps yet; it gets a stepper of its own."""

    def restart(self, blocks: Iterable[str], lr: float) -> None:
        """Begin a local training of some blocks."""
        self._blocks = tuple(blocks)
        self.parameters = parameters_of(self.network, self._blocks)
        everything = list(self.network.blocks.parameters())
        for parameter in everything:
            parameter.grad = None
        if not self.graphs:
            self._optimizer = new_optimizer(self.parameters, lr, self.config)
            return
        if self._optimizer is None:
            self._lr = torch.zeros((), device=everything[0].device)
            self._optimizer = torch.optim.AdamW(
                [p for p in everything if p.requires_grad], lr=self._lr,
                weight_decay=self.config.weight_decay, fused=True,
                capturable=self._lr.is_cuda)
        self._lr.fill_(lr)
        state = self._optimizer.state
        moments = [v for p in self.parameters if p in state for v in state[p].values()]
        if moments:
            torch._foreach_zero_(moments)

    def step(self, objective: Objective, parts: Sequence[TaskBatch]) -> Losses:
        """Minimise the objective on a minibatch by one step; return the tasks' losses."""
        body = functools.partial(self._minimise, objective)
        if not getattr(objective, "graph_safe", False):
            return body(parts)
        return self.run(objective, body, parts)

    def run(self, kind: Hashable, body: Body, parts: Sequence[TaskBatch]) -> Losses:
        """Do whatever ``body`` does with a minibatch; ``kind`` names the body.

        The losses are good until the next step.
        """
        if not self.graphs:
            return body(parts)
        self._moved = False
        try:
            return self._replay(kind, body, parts)
        except torch.cuda.OutOfMemoryError:
            # A body that has moved something would move it twice; ``gather`` has tried everything.
            if self._moved or not self._may_fit(parts):
                raise
        self.forget_captured()
        return body(parts)

    def _may_fit(self, parts: Sequence[TaskBatch]) -> bool:
        """Return whether to try again, once the captured steps are forgotten.

        They keep their memory. Where it does not suffice for both, smaller steps are captured, or
        none.
        """
        if self.micro.shrink(parts):
            return True
        self._capturing = False
        return bool(self._captured)

    def forget_captured(self) -> None:
        """Give back what the captured steps hold."""
        self._captured.clear()
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def _replay(self, kind: Hashable, body: Body, parts: Sequence[TaskBatch]) -> Losses:
        key = (kind, self._blocks, _signature(parts))
        if key not in self._captured or not self._capturing:
            # The first of its kind is an ordinary step: it also warms up whatever needs it.
            self._captured[key] = None
            return body(parts)
        self._captured.move_to_end(key)
        captured = self._captured[key]
        if captured is None:
            captured = self._captured[key] = self._capture(body, parts)
            while len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
        captured.feed(parts)
        captured.graph.replay()
        return captured.losses

    def gather(self, work: Body, parts: Sequence[TaskBatch],
               begin: Callable[[], object] = lambda: None) -> Losses:
        """Do some work on a minibatch, which may go in pieces; return the tasks' losses.

        The work adds up gradients. It must change nothing else: where it does not fit into memory,
        it begins again, after ``begin``, with smaller pieces or without captured steps.
        """
        while True:
            for parameter in self.parameters:
                parameter.grad = None
            begin()
            try:
                return add_up(work(piece) for piece in self.micro.pieces(parts))
            except torch.cuda.OutOfMemoryError:
                if self._under_capture or not self._may_fit(parts):
                    raise
            self.forget_captured()

    def move(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let the optimizer follow the gradients of these parameters alone, clipped."""
        assert self._optimizer is not None
        self._moved = self._moved or not self._under_capture  # capturing moves nothing
        wanted = set(parameters)
        for parameter in self.network.blocks.parameters():
            if parameter not in wanted:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                # The fused optimizer goes over memory, not over elements.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        nn.utils.clip_grad_norm_(parameters, self.config.clip)
        self._optimizer.step()

    def _minimise(self, objective: Objective, parts: Sequence[TaskBatch]) -> Losses:
        def work(piece: Sequence[TaskBatch]) -> Losses:
            return backward(*objective(self.network, piece))

        losses = self.gather(work, parts)
        self.move(self.parameters)
        return losses

    def _capture(self, body: Body, parts: Sequence[TaskBatch]) -> _Captured:
        """Capture a step; capturing computes nothing, the caller replays it."""
        still = [dataclasses.replace(p, batch=_copy(p.batch), weight=_own(p.weight))
                 for p in parts]
        graph = torch.cuda.CUDAGraph()
        # All captured steps share one pool of memory: they never run at the same time, and nothing
        # in it is needed once a step is over. Other threads (the writer) may use the GPU meanwhile.
        self._under_capture = True
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                losses = body(still)
        finally:
            self._under_capture = False
        self._pool = self._pool or graph.pool()
        return _Captured(graph, still, losses)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    parts: list[TaskBatch]
    losses: Losses

    def feed(self, parts: Sequence[TaskBatch]) -> None:
        """Copy a minibatch to where the captured step reads it."""
        for still, part in zip(self.parts, parts, strict=True):
            for target, source in zip(_tensors(still), _tensors(part), strict=True):
                if target is not None and source is not None:
                    target.copy_(source, non_blocking=True)


def backward(loss: Tensor, losses: Losses) -> Losses:
    """Add a loss's gradients to the parameters'; return the tasks' losses as values."""
    loss.backward()  # type: ignore[no-untyped-call]
    return {task: value.detach() for task, value in losses.items()}


def _tensors(part: TaskBatch) -> list[Tensor | None]:
    found = [getattr(part.batch, f.name) for f in dataclasses.fields(part.batch)]
    return [*found, part.weight if isinstance(part.weight, Tensor) else None]


def _signature(parts: Sequence[TaskBatch]) -> tuple[Any, ...]:
    """Return what has to be equal for a captured step to be replayed: tasks and shapes."""
    return tuple((part.task, *(None if t is None else t.shape for t in _tensors(part)),
                  part.weight if isinstance(part.weight, float) else None) for part in parts)


def _copy(batch: Batch) -> Batch:
    return Batch(*(None if v is None else v.clone()
                   for v in (getattr(batch, f.name) for f in dataclasses.fields(batch))))


def _own(weight: float | Tensor) -> float | Tensor:
    return weight.clone() if isinstance(weight, Tensor) else weight


def parameters_of(network: Network, blocks: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters of some blocks, in the blocks' order."""
    return [p for name in blocks for p in network.blocks[name].parameters()]


def new_optimizer(parameters: list[nn.Parameter], lr: float,
                  config: TrainConfig) -> torch.optim.Optimizer:
    """Return a fresh AdamW: every local training starts without a memory of the last."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=config.weight_decay, fused=True)
