"""Values of blocks at fixed addresses: what a captured step may read beside the network."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from tapfl.blocks import BlockState
from tapfl.model.network import Network


class Still:
    """A copy of a network's blocks (all by default), allocated once and then only overwritten."""

    def __init__(self, network: Network, blocks: Iterable[str] | None = None) -> None:
        self.network = network
        self._state = BlockState.extract(network.blocks, blocks)

    def copy(self, source: BlockState) -> None:
        """Overwrite the blocks that ``source`` has, in place."""
        self._state.replace(source, source)

    def parameters(self, blocks: Iterable[str]) -> list[Tensor]:
        """Return the values of some blocks, in the order of ``stepper.parameters_of``."""
        views = {name: self._state.parameters(name) for name in blocks}
        return [values[key] for name, values in views.items()
                for key, _ in self.network.blocks[name].named_parameters()]
