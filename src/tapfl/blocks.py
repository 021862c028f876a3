"""Blocks: the disjoint, named parts of the trainable server model (the paper's B_0..B_R).

A block is the unit that a client owns, a task uses, the server averages, a message carries, TAP
replaces and a checkpoint stores. Nothing else decides which parameters are meant. In a network a
block is a module, ``network.blocks[name]``; outside of it, it is one flat tensor in a BlockState.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tapfl.errors import TapflError, nearest
from tapfl.tasks import MODALITIES, NAME, Task

SHARED = "shared"
STANDARD_BACKBONE = "backbone"

_WORD = NAME.pattern
_BLOCK = re.compile(
    rf"encoder/{_WORD}|decoder/{_WORD}|{STANDARD_BACKBONE}|(adapter|ala)(/{_WORD})+"
    rf"|(mote|mome)/{_WORD}/(attention|expert/{_WORD})"
)


def check_block(name: str) -> str:
    """Return ``name`` if it is a well-formed block name."""
    if not isinstance(name, str) or not _BLOCK.fullmatch(name):
        raise TapflError(f"{name!r} is not a block name: expected for example 'encoder/image', "
                         "'mote/image/expert/shared' or 'decoder/agnews'")
    return name


class Route(NamedTuple):
    """One of the four paths through the two stages: the stack and the expert taken in each."""

    mote_stack: str
    mote_expert: str
    mome_stack: str
    mome_expert: str


def paths(modality: str, kind: str) -> tuple[Route, Route, Route, Route]:
    """Return the four paths of a modality and a task kind, the private ones first.

    Stage 1 (MoTE) routes by modality and holds experts per task kind, stage 2 (MoME)
    vice versa. Each path is private or shared in the modality and in the task.
    """
    return (
        Route(modality, kind, kind, modality),
        Route(modality, SHARED, SHARED, modality),
        Route(SHARED, kind, kind, SHARED),
        Route(SHARED, SHARED, SHARED, SHARED),
    )


def attention_block(stage: str, stack: str) -> str:
    """Return the name of a stack's attention; ``stage`` is ``mote`` or ``mome``."""
    return f"{stage}/{stack}/attention"


def expert_block(stage: str, route: Route) -> str:
    """Return the name of the expert that a path takes in a stage."""
    if stage == "mote":
        return f"mote/{route.mote_stack}/expert/{route.mote_expert}"
    return f"mome/{route.mome_stack}/expert/{route.mome_expert}"


def decoder_block(task: Task) -> str:
    """Return the name of a task's decoder.

    A label set belongs to its task; a generator is shared by the tasks of its kind.
    """
    return f"decoder/{task.name if task.is_classification else task.kind}"


@dataclass(frozen=True)
class Ownership:
    """Which blocks a task uses and a client owns, for one server model.

    ``trained_encoders`` are the modalities whose encoder has trainable parameters at all (ViLT's
    word embeddings have none).
    """

    tasks: Mapping[str, Task]
    backbone: str = "routed"
    trained_encoders: tuple[str, ...] = MODALITIES

    def task(self, name: str) -> Task:
        """Return the task called ``name``."""
        if name not in self.tasks:
            raise TapflError(f"unknown task '{name}'" + nearest(name, self.tasks))
        return self.tasks[name]

    def blocks_of_task(self, name: str) -> tuple[str, ...]:
        """Return B_{i,o}: the blocks that the task runs through, in a fixed order."""
        task = self.task(name)
        names = [f"encoder/{m}" for m in task.modalities if m in self.trained_encoders]
        if self.backbone == "standard":
            names.append(STANDARD_BACKBONE)
        else:
            for modality in task.modalities:
                for route in paths(modality, task.kind):
                    names += [attention_block("mote", route.mote_stack),
                              expert_block("mote", route),
                              attention_block("mome", route.mome_stack),
                              expert_block("mome", route)]
        names.append(decoder_block(task))
        return tuple(dict.fromkeys(names))

    def blocks_of(self, modalities: Iterable[str] | None, tasks: Iterable[str]) -> tuple[str, ...]:
        """Return B_i: the blocks of a client with these modalities and tasks, sorted.

        ``modalities=None`` means the modalities of the tasks.
        """
        chosen = [self.task(name) for name in tasks]
        if not chosen:
            raise TapflError("a client needs at least one task")
        needed = {m for task in chosen for m in task.modalities}
        if modalities is not None:
            given = set(modalities)
            for modality in sorted(given - set(MODALITIES)):
                raise TapflError(f"unknown modality '{modality}'" + nearest(modality, MODALITIES))
            for task in chosen:
                for modality in task.modalities:
                    if modality not in given:
                        raise TapflError(f"task '{task.name}' needs modality '{modality}', "
                                         f"the client has {sorted(given)}")
            for modality in sorted(given - needed):
                raise TapflError(f"modality '{modality}' is used by none of the client's tasks "
                                 f"({', '.join(t.name for t in chosen)})")
        return tuple(sorted({b for task in chosen for b in self.blocks_of_task(task.name)}))

    def all_blocks(self) -> tuple[str, ...]:
        """Return every block of the server model, sorted."""
        return self.blocks_of(None, self.tasks)


Shapes = dict[str, torch.Size]


class BlockState(Mapping[str, Tensor]):
    """Values of some blocks: one flat tensor per block, its parameters in alphabetical order.

    A flat tensor makes loading, replacing and averaging one operation per block, whatever the
    block is made of. ``shapes[block]`` holds its parameters' names and shapes.
    """

    def __init__(self, flat: Mapping[str, Tensor], shapes: Mapping[str, Shapes]) -> None:
        self._flat = {name: flat[name] for name in sorted(flat)}
        self.shapes = {name: shapes[name] for name in self._flat}

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._flat[name]
        except KeyError:
            raise TapflError(f"no block '{name}' here" + nearest(name, self._flat)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)

    def __contains__(self, name: object) -> bool:
        return name in self._flat

    __eq__ = object.__eq__  # comparing tensors element by element is not what a mapping means
    __hash__ = object.__hash__

    def _shapes_of(self, name: str) -> Shapes:
        self[name]  # an unknown name ends here, in one clear line
        return self.shapes[name]

    @classmethod
    @torch.no_grad()
    def extract(cls, blocks: nn.ModuleDict, names: Iterable[str] | None = None) -> BlockState:
        """Copy the named blocks (all by default) out of a network's ``blocks``."""
        laid = {name: _lay_flat(blocks, name) for name in (blocks if names is None else names)}
        return cls({name: flat.clone() for name, (flat, _) in laid.items()},
                   {name: shapes for name, (_, shapes) in laid.items()})

    @torch.no_grad()
    def load_into(self, blocks: nn.ModuleDict, names: Iterable[str] | None = None) -> None:
        """Copy the named blocks (all by default) into a network, in place."""
        targets, sources = [], []
        for name in self if names is None else names:
            flat, shapes = _lay_flat(blocks, name)
            if shapes != self._shapes_of(name):
                raise TapflError(_misfit(name, self.shapes[name], shapes))
            targets.append(flat)
            sources.append(self[name])
        if targets:
            torch._foreach_copy_(targets, sources)

    def subset(self, names: Iterable[str]) -> BlockState:
        """Return the named blocks, sharing memory."""
        return BlockState({name: self[name] for name in names}, self.shapes)

    def clone(self) -> BlockState:
        """Return an independent copy."""
        return BlockState({name: value.clone() for name, value in self.items()}, self.shapes)

    def equals(self, other: BlockState) -> bool:
        """Return whether all values are the same, bit for bit."""
        if self.shapes != other.shapes:
            return False
        same = [(value == other[name]).all() for name, value in self.items()
                if value is not other[name]]
        return bool(torch.stack(same).all()) if same else True

    def not_finite(self) -> str | None:
        """Say which block holds values that are not finite, if one does."""
        if not len(self):
            return None
        # One synchronisation with the device for the whole state.
        finite = torch.stack([value.isfinite().all() for value in self.values()])
        if bool(finite.all()):
            return None
        bad = next(name for name, ok in zip(self, finite.tolist(), strict=True) if not ok)
        return f"block '{bad}' holds values that are not finite"

    def misfit(self, expected: BlockState) -> str | None:
        """Say which block has other shapes or another type than expected, if one does."""
        for name, value in self.items():
            if name not in expected:
                return f"unknown block '{name}'"
            if self.shapes[name] != expected.shapes[name]:
                return f"block '{name}' has other shapes than the server's"
            if value.shape != expected[name].shape or value.dtype != expected[name].dtype:
                return (f"block '{name}' is {value.dtype} {tuple(value.shape)}, expected "
                        f"{expected[name].dtype} {tuple(expected[name].shape)}")
        return None

    def to(self, device: torch.device | str) -> BlockState:
        """Return the state on ``device``; tensors already there are shared."""
        return BlockState({name: value.to(device) for name, value in self.items()}, self.shapes)

    def replace(self, source: BlockState, names: Iterable[str]) -> None:
        """Overwrite the named blocks with ``source``'s values, in place."""
        for name in names:
            if self._shapes_of(name) != source._shapes_of(name):
                raise TapflError(_misfit(name, source.shapes[name], self.shapes[name]))
            self[name].copy_(source[name])

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Return views of a block's parameters, by name."""
        pieces = torch.split(self[name], [s.numel() for s in self._shapes_of(name).values()])
        return {key: piece.view(shape)
                for (key, shape), piece in zip(self.shapes[name].items(), pieces, strict=True)}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(value.numel() for value in self.values())

    @property
    def nbytes(self) -> int:
        """Number of bytes: what storing or sending the state costs."""
        return sum(value.numel() * value.element_size() for value in self.values())

    def save(self, path: Path | str, metadata: Mapping[str, str] | None = None) -> None:
        """Write a safetensors file whose tensors are called ``block:parameter``."""
        tensors = {f"{name}:{key}": value.contiguous()
                   for name in self for key, value in self.parameters(name).items()}
        save_file(tensors, str(path), dict(metadata or {}))

    @classmethod
    def load(cls, path: Path | str) -> BlockState:
        """Read what ``save`` wrote."""
        found: dict[str, dict[str, Tensor]] = {}
        try:
            with safe_open(str(path), framework="pt") as file:
                for full in file.keys():  # noqa: SIM118 (not a mapping)
                    name, separator, key = full.partition(":")
                    if not separator:
                        raise TapflError(f"tensor '{full}' is no 'block:parameter'")
                    found.setdefault(check_block(name), {})[key] = file.get_tensor(full)
        except (OSError, SafetensorError) as error:
            raise TapflError(f"{path}: not a readable safetensors file ({error})") from None
        except TapflError as error:
            raise TapflError(f"{path}: {error}") from None
        ordered = {name: dict(sorted(tensors.items())) for name, tensors in found.items()}
        return cls({name: torch.cat([t.reshape(-1) for t in tensors.values()])
                    for name, tensors in ordered.items()},
                   {name: {k: t.shape for k, t in tensors.items()}
                    for name, tensors in ordered.items()})


class BlockAverage:
    """The weighted mean of each block over the clients that have it, one contribution at a time.

    A running mean holds one accumulator however many clients contribute, and leaves a block that
    a single client owns, or that all agree on, bit for bit as it was.
    """

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}
        self._shapes: dict[str, Shapes] = {}
        self.weights: dict[str, float] = {}

    @torch.no_grad()
    def add(self, state: BlockState, weight: float) -> None:
        """Add ``state`` with ``weight``."""
        if not 0 < weight < float("inf"):
            raise TapflError(f"a weight must be positive and finite, got {weight}")
        known = [name for name in state if name in self._mean]
        for name in known:
            if self._shapes[name] != state.shapes[name]:
                raise TapflError(_misfit(name, state.shapes[name], self._shapes[name]))
        for name in state:
            self.weights[name] = self.weights.get(name, 0.0) + weight
            if name not in self._mean:
                self._mean[name] = state[name].clone()
                self._shapes[name] = state.shapes[name]
        if known:
            torch._foreach_lerp_([self._mean[name] for name in known],
                                 [state[name] for name in known],
                                 [weight / self.weights[name] for name in known])

    def result(self) -> BlockState:
        """Return the mean of every block that was contributed."""
        return BlockState(self._mean, self._shapes)


def average(states: Sequence[BlockState], weights: Sequence[float]) -> BlockState:
    """Return the weighted mean of each block over the states that have it."""
    mean = BlockAverage()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    return mean.result()


def _lay_flat(blocks: nn.ModuleDict, name: str) -> tuple[Tensor, Shapes]:
    """Return a block of a network as one flat tensor, which holds its parameters, and its layout.

    The parameters are moved into such a tensor once; a network that was moved or cast since has to
    be laid out again.
    """
    if name not in blocks:
        raise TapflError(f"the network has no block '{name}'" + nearest(name, blocks))
    block = blocks[name]
    parameters = dict(sorted(block.named_parameters()))
    laid: tuple[Tensor, Shapes] | None = block.__dict__.get("_laid_flat")
    if laid is None or not _lies_in(laid[0], parameters.values()):
        flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        pieces = torch.split(flat, [p.numel() for p in parameters.values()])
        for parameter, piece in zip(parameters.values(), pieces, strict=True):
            parameter.data = piece.view(parameter.shape)
        laid = flat, {key: p.shape for key, p in parameters.items()}
        block.__dict__["_laid_flat"] = laid
    return laid


def _lies_in(flat: Tensor, parameters: Iterable[nn.Parameter]) -> bool:
    at = flat.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != at or parameter.dtype != flat.dtype:
            return False
        at += parameter.numel() * flat.element_size()
    return True


def _misfit(name: str, given: Shapes, expected: Shapes) -> str:
    wanted = {key: tuple(shape) for key, shape in expected.items()}
    for key in sorted(set(given) | set(wanted)):
        have = tuple(given[key]) if key in given else None
        if have != wanted.get(key):
            return (f"block '{name}': parameter '{key}' has shape {have}, "
                    f"expected {wanted.get(key)}")
    raise AssertionError("the shapes agree")
