"""What an attacker computes of samples it suspects: their losses, and their gradients.

Scores of membership are made from these (``tapfl.privacy.membership``).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tapfl.blocks import BlockState, decoder_block
from tapfl.data.batches import Rows, TaskData
from tapfl.errors import TapflError
from tapfl.model.network import Network

Floats = NDArray[np.float64]
SIZE = 100  # samples of a batch


@torch.no_grad()
def losses_of(network: Network, model: BlockState, data: TaskData, rows: Rows) -> Floats:
    """Return a model's loss of each sample."""
    model.load_into(network.blocks)
    network.eval()
    task, found = data.task.name, []
    for start in range(0, len(rows), SIZE):
        batch = data.batch(rows[start:start + SIZE])
        found.append(network.sample_losses(task, network(task, batch), batch))
    return torch.cat(found).double().cpu().numpy()


def decoder_gradients(network: Network, model: BlockState, data: TaskData, rows: Rows) -> Floats:
    """Return the gradient of each sample's loss in the decoder's block, as flat as the block is.

    Only classification: its decoder is the client's own head, and it is small.
    """
    if not data.task.is_classification:
        raise TapflError(f"task '{data.task.name}': gradients are compared for classification, "
                         f"this is {data.task.kind}")
    model.load_into(network.blocks)
    network.eval()
    head = network.blocks[decoder_block(data.task)]
    parameters = [parameter for _, parameter in sorted(head.named_parameters())]
    found = []
    for start in range(0, len(rows), SIZE):
        batch = data.batch(rows[start:start + SIZE])
        with torch.no_grad():
            tokens, _ = network.encode(data.task, batch)
            pooled = tokens.pool(tokens.values).float()
        assert batch.label is not None
        losses = torch.nn.functional.cross_entropy(head(pooled), batch.label.long(),
                                                   reduction="none")
        for loss in losses:
            slopes = torch.autograd.grad(loss, parameters, retain_graph=True)
            found.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    return torch.stack(found).double().cpu().numpy()
