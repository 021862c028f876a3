"""How many samples a second are evaluated, task by task."""

from __future__ import annotations

from functools import partial

from tapfl.bench.measure import Report, changed, timed
from tapfl.config import Config
from tapfl.engine.build import build
from tapfl.evaluation.evaluate import Evaluator

COLUMNS = ["task", "kind", "samples", "seconds", "samples/s"]
NO_MORE = {"federation.groups": 1, "federation.clients": None, "federation.holdout": 0,
           "federation.dirichlet": None, "tap.criterion": "training",
           "data.train": 1000}  # nothing trains here


def run(config: Config, device: str, quick: bool = False, samples: int | None = None) -> Report:
    """Evaluate the server's model, as it is before the first round, on every task's test data."""
    samples = samples or (4 if quick else 2000 if device.startswith("cuda") else 120)
    wanted = min(samples, config.data.test or samples)
    settings = {"evaluation.max_new_tokens": 4} if quick else {}
    config = changed(config, {**NO_MORE, "data.test": wanted, **settings})
    experiment = build(config, device)
    network = experiment.context.network()
    evaluate = Evaluator(experiment.tokenizer, config.evaluation, device)
    rows = []
    for name, (_, data) in experiment.federation.splits.items():
        seconds = timed(partial(evaluate, network, data), device,
                        repeats=1 if quick else 3, warmup=0 if quick else 1)
        rows.append({"task": name, "kind": data.task.kind, "samples": len(data),
                     "seconds": seconds, "samples/s": len(data) / seconds})
    return Report(
        "evaluate: a model on test data", {"batch size": config.evaluation.batch_size,
                                           "new tokens": config.evaluation.max_new_tokens},
        COLUMNS, rows,
        "The model has learned nothing yet: it writes until the limit of new tokens, the slowest "
        "case of text generation.")
