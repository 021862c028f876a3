"""A tiny experiment: four clients, five tasks, a random model; seconds, not minutes."""

import json
from pathlib import Path

from tapfl.config import Config
from tapfl.engine.build import build
from tapfl.engine.checkpoints import Checkpoints
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.departures import Departures
from tapfl.engine.eventlog import EventLog
from tapfl.engine.inprocess import InProcess
from tapfl.engine.registry import plan
from tapfl.engine.rounds import Rounds
from tapfl.engine.worker import Worker
from tapfl.evaluation.evaluate import Evaluator
from tapfl.events import nobody
from tapfl.federated.server import Server
from tests.conftest import FLAVA

FEDERATION = """
tasks:
  tiny-imagenet: {kind: image_classification, modalities: [image], classes: 8}
  fmnist: {kind: image_generation, modalities: [image]}
  agnews: {kind: text_classification, modalities: [text], classes: 4}
  vqa: {kind: text_generation, modalities: [image, text]}
  commongen: {kind: text_generation, modalities: [text]}
clients:
  - {name: shapes, tasks: {tiny-imagenet: 1, agnews: 1/2}}
  - {name: news, tasks: {agnews: 1/2}}
  - {name: looks, tasks: {vqa: 1, fmnist: 1/2}}
  - {name: words, tasks: {commongen: 1, fmnist: 1/2}}
"""


def tiny_experiment(folder: Path, **sections) -> Config:
    path = folder / "federation.yaml"
    path.write_text(FEDERATION)
    values = {
        "seed": 7,
        "threads": 1,
        "methods": ["tap"],
        "foundation": {"name": "flava", "weights": "random",
                       "architecture": {**FLAVA, "vocab_size": 600}},
        "lora": {"encoder_rank": 2, "attention_rank": 2, "expert_rank": 2, "dropout": 0.1},
        "federation": {"file": str(path), "groups": 1},
        "data": {"train": 24, "test": 6},
        "train": {"rounds": 4, "cohort": 2, "local_steps": 2, "batch_size": 5,
                  "lr_initial": 1e-3, "lr": 5e-3, "warmup_rounds": 2},
        "post": {"steps": 2},
        "evaluation": {"batch_size": 6, "max_new_tokens": 4, "samples": 2},
        "checkpoint": {"every": 2},
    }
    for key, value in sections.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return Config.model_validate(values)


class FederatedRun:
    """One federated run of a configuration, put together as `tapfl.run` does, round by round."""

    def __init__(self, config, folder):
        folder.mkdir(parents=True, exist_ok=True)
        experiment = build(config, "cpu")
        self.folder, self.context = folder, experiment.context
        self.federation = experiment.federation
        (each,) = plan(config)
        self.store = ClientStore(folder / "state" / "clients")
        self.worker = Worker(each, self.context, self.store,
                             Evaluator(experiment.tokenizer, config.evaluation),
                             folder, self.federation.others)
        self.method, self.personalizers = self.worker.method, self.worker.personalizers
        self.server = Server(self.method.initial, len(self.federation), config.train.cohort,
                             config.seed, max_update_norm=config.federation.max_update_norm)
        self.log = EventLog(folder / "events.jsonl", folder / "state" / "events.jsonl")
        self.rounds = Rounds(
            each.name, each.config, self.federation.members, self.server, self.method.exchanged,
            InProcess(self.worker, self.federation),
            Checkpoints(folder / "state" / "checkpoints", each.name), self.log,
            folder / "state" / "final", nobody, Departures(folder, folder / "state"))

    def round(self, round_):
        self.rounds.round(round_)

    def run(self):
        return self.rounds.run()

    def final(self, client):
        """Return the client's final W, as the server has it now."""
        return self.server.blocks.subset(self.method.owned(client))


def rows_of(rows, method):
    """Return the results of one method; others, and the constant answer, have theirs beside it."""
    return [row for row in rows if row["method"] == method]


def read_events(folder, event=None):
    records = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [r for r in records if event is None or r["event"] == event]
