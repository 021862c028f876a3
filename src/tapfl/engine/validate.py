"""Refuse what a run would refuse, without running: what `tapfl validate` does."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tapfl.config import Config
from tapfl.data.participants import client_count, load_federation, taking_part
from tapfl.engine.build import build
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.registry import plan
from tapfl.engine.start import Start
from tapfl.engine.worker import Worker
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import Subscriber, nobody


def validate(config: Config, modules: Path | None = None, *, config_only: bool = False,
             notify: Subscriber = nobody) -> str:
    """Check a configuration as far as a run's first round; return what it describes.

    With ``config_only``, neither data nor weights are read.
    """
    plans = plan(config, modules)
    file = load_federation(config.federation)
    if not config_only:
        experiment = build(config, "cpu", notify)
        evaluator = Evaluator(experiment.tokenizer, config.evaluation)
        experiment.metrics(evaluator)
        with tempfile.TemporaryDirectory() as folder:
            for each in plans:
                worker = Worker(each, experiment.context, ClientStore(Path(folder)), evaluator,
                                Path(folder))
                worker.check(experiment.kinds)
    if config.start is not None:
        start = Start(config, Path())
        start.origin.check(config, taking_part(file, config.federation), {})
        start.check(plans)
    clients = client_count(file, config.federation)
    tasks = len(taking_part(file, config.federation).tasks)
    return (f"{len(config.methods)} methods in {len(plans)} federated run(s), {clients} clients, "
            f"{tasks} tasks")
