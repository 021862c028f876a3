"""A federated round of TAP with two clients, part by part."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl.bench.measure import Report, once
from tapfl.bench.step import chosen, prepare
from tapfl.config import Config
from tapfl.data.federation import Client
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.registry import plan
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tapfl.federated.server import Server

COLUMNS = ["clients", "total s", "train W s", "average ms", "personalize s", "aggregate ms"]


def run(config: Config, device: str, quick: bool = False, batch: int | None = None,
        kinds: list[str] | None = None, steps: int | None = None,
        compile: bool = False) -> Report:
    """Time rounds of neighbouring kinds of clients, two by two, after two to warm up."""
    if steps or quick or device == "cpu":
        train = config.train.model_copy(update={"local_steps": steps or (1 if quick else 5)})
        config = config.model_copy(update={"train": train})
    config = config.model_copy(update={"methods": ["tap"], "variants": {}})
    experiment = prepare(config, device, quick, batch, compile)
    clients = chosen(experiment, kinds)
    if kinds is None and quick:
        clients = clients[:2]
    if len(clients) % 2:
        clients.append(clients[-1])
    context = experiment.context
    rows = []
    with (tempfile.TemporaryDirectory() as folder,
          ClientStore(Path(folder), device=device) as store):
        (each,) = plan(context.config)
        worker = Worker(each, context, store, Evaluator(None, config.evaluation), Path(folder))
        for pair in zip(clients[::2], clients[1::2], strict=True):
            server = Server(worker.method.initial, len(clients), 2, config.seed)
            measured = {}
            for round_ in range(3):
                measured = _round(worker, server, pair, round_, device)
            rows.append({"clients": " ".join(c.id for c in pair), **measured})
    return Report(
        "round: two clients, W and X trained",
        {"batch size": context.config.train.batch_size,
         "local steps": context.config.train.local_steps, "graphs": context.uses_cuda_graphs},
        COLUMNS, rows, "Train W: blocks loaded, trained, taken out and checked. Personalize: X "
                       "loaded, replaced, trained and handed to the store, which writes it to disk "
                       "in the background.")


def _round(worker: Worker, server: Server, clients: Sequence[Client], round_: int,
           device: str) -> dict[str, Any]:
    """Run a round; return the seconds of its parts."""
    spent = dict.fromkeys(COLUMNS[1:], 0.0)
    for client in clients:
        turn = worker.turn(client)
        names = worker.method.exchanged(client)
        update, seconds = once(functools.partial(turn.train, round_, server.send(names)), device)
        spent["train W s"] += seconds
        fault, seconds = once(functools.partial(server.receive, client.id, names, update.blocks,
                                                update.samples), device)
        spent["average ms"] += 1e3 * seconds
        if fault or update.fault:
            raise TapflError(f"bench round: {fault or update.fault}")
        _, seconds = once(functools.partial(turn.personalize, round_), device)
        spent["personalize s"] += seconds
        worker.end_turn(client, round_, kept=())
    _, seconds = once(server.aggregate, device)
    spent["aggregate ms"] = 1e3 * seconds
    spent["total s"] = (spent["train W s"] + spent["personalize s"]
                        + (spent["average ms"] + spent["aggregate ms"]) / 1e3)
    return spent
