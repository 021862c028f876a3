"""A federated round of TAP with two clients, part by part."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tapfl.bench.measure import Report, once
from tapfl.bench.step import chosen, prepare
from tapfl.blocks import BlockAverage, BlockState
from tapfl.config import Config
from tapfl.data.federation import Client
from tapfl.engine.inprocess import Trajectory
from tapfl.engine.record import EventLog
from tapfl.engine.registry import plan
from tapfl.engine.store import Store
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tapfl.federated import method as federated
from tapfl.personal import tap

COLUMNS = ["clients", "total s", "train W s", "train X s", "load ms", "replace ms", "extract ms",
           "average ms", "state ms", "other ms"]


def run(config: Config, device: str, quick: bool = False, batch: int | None = None,
        kinds: list[str] | None = None, steps: int | None = None,
        compile: bool = False) -> Report:
    """Time rounds of neighbouring kinds of clients, two by two, after one to warm up."""
    if steps or quick or device == "cpu":
        train = config.train.model_copy(update={"local_steps": steps or (1 if quick else 5)})
        config = config.model_copy(update={"train": train})
    config = config.model_copy(update={"methods": ["tap"]})
    context = prepare(config, device, quick, batch, compile)
    clients = chosen(context, kinds)
    if kinds is None and quick:
        clients = clients[:2]
    if len(clients) % 2:
        clients.append(clients[-1])
    rows = []
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder), device=device) as store:
        events = EventLog(Path(folder) / "events.jsonl", Path(folder) / "own.jsonl")
        with contextlib.closing(events):
            context.states, context.emit = store, events.emit
            (each,) = plan(["tap"])
            run_ = Trajectory(each, context, store, events, Evaluator(None, config.evaluation),
                              Path(folder) / "models")
            for pair in zip(clients[::2], clients[1::2], strict=True):
                _round(run_, pair, 0)
                _round(run_, pair, 1)
                rows.append({"clients": " ".join(c.id for c in pair),
                             **_measured(run_, pair, device)})
    return Report(
        "round: two clients, W and X trained",
        {"batch size": context.config.train.batch_size,
         "local steps": context.config.train.local_steps, "graphs": context.uses_cuda_graphs},
        COLUMNS, rows, "State: X and its histories handed to the store, which writes them to disk "
                       "in the background.")


def _round(run_: Trajectory, clients: tuple[Client, ...], round_: int) -> None:
    for client in clients:
        _, fault = run_._client(client, round_)
        if fault:
            raise TapflError(f"bench round: {fault}")
    run_.server.aggregate()
    run_.store.round = round_


def _measured(run_: Trajectory, clients: tuple[Client, ...], device: str) -> dict[str, Any]:
    spent: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        for place, name, what in (
                (federated, "local_training", "train W"), (tap, "local_training", "train X"),
                (BlockState, "load_into", "load"), (BlockState, "replace", "replace"),
                (BlockState, "extract", "extract"), (BlockAverage, "add", "average"),
                (Store, "save", "state"), (Store, "load", "state")):
            stack.enter_context(_clocked(place, name, what, spent, device))
        _, total = once(functools.partial(_round, run_, clients, 2), device)
    found: dict[str, Any] = {"total s": total}
    for column in COLUMNS[2:-1]:
        what, unit = column.rsplit(" ", 1)
        found[column] = spent.get(what, 0.0) * (1e3 if unit == "ms" else 1)
    return found | {"other ms": (total - sum(spent.values())) * 1e3}


@contextlib.contextmanager
def _clocked(place: Any, name: str, what: str, spent: dict[str, float],
             device: str) -> Iterator[None]:
    """Add up the time that a function takes, while this lasts."""
    descriptor = place.__dict__[name]
    original: Callable[..., Any] = getattr(descriptor, "__func__", descriptor)

    def clocked(*arguments: Any, **named: Any) -> Any:
        result, seconds = once(functools.partial(original, *arguments, **named), device)
        spent[what] = spent.get(what, 0.0) + seconds
        return result

    setattr(place, name, classmethod(clocked) if isinstance(descriptor, classmethod) else clocked)
    try:
        yield
    finally:
        setattr(place, name, descriptor)
