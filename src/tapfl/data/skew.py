"""Label skew: the samples of a label are dealt out by a Dirichlet draw around clients' shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapfl.data.batches import Rows

Labels = NDArray[np.int64]


def deal(order: Rows, labels: Labels, test_labels: Labels, shares: NDArray[np.float64],
         concentration: float, rng: np.random.Generator) -> tuple[list[Rows], list[Rows]]:
    """Return every client's training rows, and its test rows by the same draw.

    ``order`` are the training rows in the order in which they are dealt. What the shares leave
    over is not used. A client may have no test data of its own.
    """
    train: list[list[Rows]] = [[] for _ in shares]
    test: list[list[Rows]] = [[np.arange(0)] for _ in shares]
    label_of, held = labels[order], round(float(shares.sum()), 9)
    for label in np.unique(label_of):
        drawn = rng.dirichlet(concentration * len(shares) * shares / held)
        ends = np.cumsum(drawn) * held
        if held == 1:
            ends = ends[:-1]
        for dealt, rows in ((train, order[label_of == label]),
                            (test, np.flatnonzero(test_labels == label))):
            cuts = np.round(ends * len(rows)).astype(int)
            for pieces, piece in zip(dealt, np.split(rows, cuts), strict=False):
                pieces.append(piece)
    joined = [np.concatenate(pieces) for pieces in train]
    for i, rows in enumerate(joined):
        if not len(rows):  # a client left with nothing takes a sample from the one that has most
            rich = max(range(len(joined)), key=lambda j: len(joined[j]))
            joined[i], joined[rich] = joined[rich][:1], joined[rich][1:]
    return ([rng.permutation(rows) for rows in joined],
            [np.sort(np.concatenate(pieces)) for pieces in test])
