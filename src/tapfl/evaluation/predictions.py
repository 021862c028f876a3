"""What a model predicts for a few samples, taken from the pass that scores all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfl.data.batches import Rows
from tapfl.model.network import Network

TOP = 3  # labels that are kept of a classification


@dataclass(frozen=True)
class Predictions:
    """Predictions for some rows of a data set, in the order of ``rows``, which are sorted.

    A classification has its likeliest labels, best first, with their probabilities; other tasks
    have a picture (n, 3, 64, 64) or a text for every row.
    """

    rows: Rows
    labels: NDArray[np.int64] | None = None
    probabilities: NDArray[np.float32] | None = None
    pictures: NDArray[np.uint8] | None = None
    texts: Sequence[str] | None = None

    def of(self, rows: Rows) -> Predictions:
        """Return the predictions for some of the rows."""
        at = np.searchsorted(self.rows, rows)
        return Predictions(
            rows, None if self.labels is None else self.labels[at],
            None if self.probabilities is None else self.probabilities[at],
            None if self.pictures is None else self.pictures[at],
            None if self.texts is None else [self.texts[i] for i in at])


class Watch:
    """Collects the predictions for some rows while a data set is evaluated, in order.

    Nothing is copied to the host before the end, and no random number is drawn.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = np.unique(rows)
        self._labels: list[Tensor] = []
        self._probabilities: list[Tensor] = []
        self._pictures: list[Tensor] = []
        self._texts: list[str] | None = None

    def see(self, rows: Rows, prediction: Tensor, network: Network, is_label: bool) -> None:
        """Take what is wanted of a batch's predictions: class logits or normalised images."""
        wanted = np.flatnonzero(np.isin(rows, self.rows))
        if not len(wanted):
            return
        some = prediction[torch.from_numpy(wanted).to(prediction.device)]
        if not is_label:
            pixels = some.float() * network.normalize.std + network.normalize.mean
            self._pictures.append(pixels.nan_to_num(0, 255, 0).round().clamp(0, 255)
                                  .to(torch.uint8))
            return
        # A stable order: among equals the first label leads, as it does in argmax.
        best = some.sort(dim=-1, descending=True, stable=True).indices[:, :TOP]
        self._probabilities.append(some.float().softmax(dim=-1).gather(1, best))
        self._labels.append(best)

    def read(self, written: Sequence[str]) -> None:
        """Take what is wanted of all the texts that were written."""
        self._texts = [written[i] for i in self.rows]

    def predictions(self) -> Predictions:
        """Return what was collected."""
        labels, probabilities, pictures = (
            torch.cat(found).cpu().numpy() if found else None
            for found in (self._labels, self._probabilities, self._pictures))
        return Predictions(self.rows, labels, probabilities, pictures, self._texts)
