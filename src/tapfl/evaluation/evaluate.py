"""Evaluate the model in a network on a task's test data, in large batches."""

from __future__ import annotations

from typing import Any

import torch

from tapfl.config import EvaluationConfig
from tapfl.data.batches import TaskData
from tapfl.evaluation.metrics import exact_match, token_f1
from tapfl.model.network import Network
from tapfl.tasks import Batch


@torch.no_grad()
def evaluate(network: Network, data: TaskData, tokenizer: Any,
             config: EvaluationConfig) -> dict[str, float]:
    """Return the task's metrics over the whole split."""
    network.eval()
    if data.task.kind == "text_generation":
        return _generation(network, data, tokenizer, config)
    sums = []
    for rows, batch in data.in_order(config.batch_size):
        sums.append(_sum(network, data.task.name, batch, len(rows)))
    total = float(torch.stack(sums).sum()) / len(data)
    return {"accuracy": 100 * total} if data.task.is_classification else {"mse": total}


def _sum(network: Network, task: str, batch: Batch, samples: int) -> torch.Tensor:
    """Return the right answers of a batch, or its squared error times its samples."""
    outputs = network(task, batch)
    if network.ownership.task(task).is_classification:
        right: torch.Tensor = outputs.prediction.argmax(dim=-1) == batch.label
        return right.sum().double()
    return network.loss(task, outputs, batch).double() * samples


def _generation(network: Network, data: TaskData, tokenizer: Any,
                config: EvaluationConfig) -> dict[str, float]:
    written: list[str] = []
    for _, batch in data.in_order(config.batch_size):
        ids = network.generate(
            data.task.name, batch, start=tokenizer.cls_token_id, end=tokenizer.sep_token_id,
            pad=tokenizer.pad_token_id, max_new_tokens=config.max_new_tokens)
        written += tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True)
    references = data.references or []
    return {"token_f1": token_f1(written, references),
            "exact_match": exact_match(written, references)}
