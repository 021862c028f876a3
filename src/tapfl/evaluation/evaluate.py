"""Evaluate the model in a network on a task's test data, in large batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tapfl.config import EvaluationConfig
from tapfl.data.batches import Rows, TaskData
from tapfl.evaluation.metrics import TextMetric, text_metrics
from tapfl.evaluation.predictions import Watch
from tapfl.model.network import Network
from tapfl.tasks import TEXT_GENERATION, Batch

Scores = dict[str, NDArray[np.float64]]  # metric -> a value per sample


@dataclass(frozen=True)
class Evaluator:
    """What turns predictions into scores: the tokenizer, and the metrics of the configuration."""

    tokenizer: Any
    config: EvaluationConfig
    device: str = "cpu"

    @functools.cached_property
    def text_metrics(self) -> list[TextMetric]:
        """The metrics of text, loaded when the first text is scored."""
        return text_metrics(self.config, self.device)

    def facts(self) -> dict[str, Any]:
        """Return what each metric of text depends on."""
        return {metric.name: metric.facts for metric in self.text_metrics}

    @torch.no_grad()
    def __call__(self, network: Network, data: TaskData, watch: Watch | None = None) -> Scores:
        """Return the task's metrics for every sample of a split; ``watch`` sees predictions."""
        network.eval()
        if data.task.kind == TEXT_GENERATION:
            written = self.write(network, data)
            if watch is not None:
                watch.read(written)
            return self.score_texts(written, data.references or [])
        found = data.in_batches(self.config.batch_size, lambda rows, batch: _values(
            network, data.task.name, batch, rows, watch))
        values = torch.cat(found).double().cpu().numpy()
        return {"accuracy": 100 * values} if data.task.is_classification else {"mse": values}

    def score_texts(self, written: Sequence[str], references: Sequence[str]) -> Scores:
        """Return the metrics of every text that was written."""
        return {metric.name: np.array(metric(written, references))
                for metric in self.text_metrics}

    @torch.no_grad()
    def write(self, network: Network, data: TaskData) -> list[str]:
        """Return the answer that a model writes to every sample."""
        network.eval()
        found = data.in_batches(self.config.batch_size, lambda _, batch: network.generate(
            data.task.name, batch, start=self.tokenizer.cls_token_id,
            end=self.tokenizer.sep_token_id, pad=self.tokenizer.pad_token_id,
            max_new_tokens=self.config.max_new_tokens).tolist())
        return [text for ids in found
                for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]


def _values(network: Network, task: str, batch: Batch, rows: Rows,
            watch: Watch | None) -> Tensor:
    """Return which answers of a batch are right, or every image's squared error."""
    prediction: Tensor = network(task, batch).prediction
    is_label = network.ownership.task(task).is_classification
    if is_label:
        assert batch.label is not None
        values = prediction.argmax(dim=-1) == batch.label
    else:
        assert batch.image is not None
        error: Tensor = prediction.float() - network.normalize(batch.image)
        values = error.square().flatten(1).mean(dim=1)
    if watch is not None:  # last: a batch that did not fit into memory comes again
        watch.see(rows, prediction, network, is_label)
    return values
