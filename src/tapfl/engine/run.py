"""Run an experiment from its configuration: what `tapfl run` and `tapfl.run` do."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from tapfl.config import Config
from tapfl.data.federation import load_federation
from tapfl.engine.build import WORTH_COMPILING, build, own_data
from tapfl.engine.inprocess import Trajectory
from tapfl.engine.record import EventLog, Row, environment, memory, read_results, write_results
from tapfl.engine.registry import plan
from tapfl.engine.store import Store, slug, write_json
from tapfl.engine.watch import Watch
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tapfl.federated.context import Context
from tapfl.model.summary import parameters
from tapfl.reading import check
from tapfl.tasks import TEXT_GENERATION


def run(config: Config, out: Path | str | None = None, *, resume: bool = False,
        device: str = "auto", watch: Watch | None = None, modules: Path | None = None) -> list[Row]:
    """Run an experiment into the folder ``out`` (a new one below ``runs``); return its results.

    ``resume`` goes on from the newest checkpoint there, if there is one. ``modules`` is where a
    user's own methods are looked for (the current folder by default).
    """
    out = fresh_folder(Path("runs") / "run") if out is None else Path(out)
    watch = watch or Watch()
    device = pick_device(device)
    if resume and modules is None:
        modules = _stored_modules(out)
    plans = plan(config.methods, modules)
    record = _prepare(out, config, resume, modules)
    if record["finished"] and (out / "results.csv").is_file():
        watch.say(f"{out}: this run is complete")
        return read_results(out / "results.csv")
    started, record["began"] = time.perf_counter(), time.time()
    rows: list[Row] = []
    try:
        context, evaluator = _start(config, device, watch, out, record)
        for each in plans:
            folder = out / "state" / slug(each.federated)
            with (Store(folder, config.checkpoint.cache_mb << 20, device) as store,
                  contextlib.closing(EventLog(out / "events.jsonl",
                                              folder / "events.jsonl")) as events):
                context.states, context.emit = store, events.emit
                rows += Trajectory(each, context, store, events, evaluator, out / "models",
                                   watch).run(resume)
            _free(device)
    finally:
        watch.close()
        del record["began"]
        record["seconds"] = record.get("seconds", 0.0) + time.perf_counter() - started
        record["memory"] = memory(device)
        # Whatever ended the run matters more than a disk that does not take its record.
        with contextlib.suppress(TapflError):
            write_json(out / "run.json", record)
    order = {name: i for i, name in enumerate(config.methods)}
    rows.sort(key=lambda row: order[row["method"]])
    write_results(out / "results.csv", rows)
    write_json(out / "run.json", record | {"finished": True})
    return rows


def _start(config: Config, device: str, watch: Watch, out: Path,
           record: dict[str, Any]) -> tuple[Context, Evaluator]:
    """Put the experiment together and write down what it is, before the first round."""
    context, tokenizer = build(config, device, watch)
    evaluator = Evaluator(tokenizer, config.evaluation, device)
    if config.speed.compile and not context.foundation.execution_modes["compiled"]:
        watch.say("compile: not used; it is for layers without kernels, on a GPU, in runs of "
                  f"{WORTH_COMPILING} steps or more")
    facts = _facts(context, device) | {"metrics": _metrics(context, evaluator)}
    for key, what in (("data_sha256", "data"), ("metrics", "metrics of text")):
        if record.get(key, facts[key]) != facts[key]:
            raise TapflError(f"{out}: this run was started with other {what}; what it has so far "
                             "and what would come do not go together")
    record |= facts
    write_json(out / "run.json", record)
    (out / "events.jsonl").write_text("")  # put together again from what each method has kept
    return context, evaluator


def _free(device: str) -> None:
    """Give back a finished method's network and recorded steps, which refer to each other."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def pick_device(device: str) -> str:
    """Return the device to run on; ``auto`` takes a GPU where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise TapflError("--device cuda: no GPU can be used here; expected auto or cpu")
    if device not in ("cpu", "cuda"):
        raise TapflError(f"--device {device}: expected auto, cpu or cuda")
    return device


def stored_config(out: Path) -> Config:
    """Return the configuration of a run that was started in a folder."""
    path = out / "run.json"
    if not path.is_file():
        raise TapflError(f"{out}: no run to resume here (run.json is missing)")
    try:
        return check(Config, json.loads(path.read_text())["config"], str(path))
    except (ValueError, KeyError) as error:
        if isinstance(error, TapflError):
            raise
        raise TapflError(f"{path}: not the record of a run ({error})") from None


def fresh_folder(folder: Path) -> Path:
    """Return the folder, or the next free one after it."""
    taken, number = folder, 1
    while taken.exists():
        number += 1
        taken = folder.with_name(f"{folder.name}-{number}")
    return taken


def _stored_modules(out: Path) -> Path | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return Path(json.loads((out / "run.json").read_text())["modules"])
    return None


def _prepare(out: Path, config: Config, resume: bool, modules: Path | None) -> dict[str, Any]:
    """Make or check the run's folder; return its record."""
    digest = _federation_digest(config)
    if (out / "run.json").is_file():
        if not resume:
            raise TapflError(f"{out} already holds a run: continue it with --resume, "
                             "or choose another --out")
        before, now = stored_config(out).model_dump(), config.model_dump()
        for section, value in now.items():
            if section == "data":  # a mirror may have moved; what it holds is what counts
                value = value | {"folder": before[section]["folder"]}
            if section not in ("speed", "checkpoint") and before[section] != value:
                raise TapflError(f"{out}: this run was started with another '{section}' "
                                 f"({before[section]}); resume it without changing it")
        record: dict[str, Any] = json.loads((out / "run.json").read_text())
        if record.get("federation_sha256") != digest:
            raise TapflError(f"{out}: the federation file has changed since this run was started")
        if "began" in record:
            record["seconds"] = record.get("seconds", 0.0) + _killed(out, record.pop("began"))
        return record | {"config": config.model_dump(mode="json")}
    empty = out.is_dir() and all(p.name.endswith(".partial") for p in out.iterdir())
    if resume and not empty:
        raise TapflError(f"{out}: no run to resume here (run.json is missing)")
    if out.exists() and not empty:
        raise TapflError(f"{out} is in the way: it is no run and not empty")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TapflError(f"--out {out}: cannot make this folder ({error.strerror})") from None
    record = {"config": config.model_dump(mode="json"), "finished": False,
              "federation_sha256": digest, "modules": str((modules or Path.cwd()).resolve())}
    write_json(out / "run.json", record)
    return record


def _killed(out: Path, began: float) -> float:
    """Return how long a piece of the run took that could not say it itself: to its last event."""
    with contextlib.suppress(OSError):
        return max(0.0, (out / "events.jsonl").stat().st_mtime - began)
    return 0.0


def _federation_digest(config: Config) -> str:
    """Return a checksum of who holds what: a file can change between a crash and a resume."""
    file = load_federation(config.federation)
    return hashlib.sha256(file.model_dump_json().encode()).hexdigest()


def _digests(context: Context) -> dict[str, list[str]]:
    """Return checksums of real data; what is made from a seed follows from the configuration."""
    own = own_data(context.config, context.federation.file)
    return {task: [data.digest() for data in pair]
            for task, pair in context.federation.splits.items()
            if context.config.data.source == "hub" or task in {*own.tasks, *own.clients}}


def _metrics(context: Context, evaluator: Evaluator) -> dict[str, Any]:
    """Return what the metrics depend on; what is missing for one shows before the first round."""
    writes = any(task.kind == TEXT_GENERATION for task in context.federation.tasks.values())
    return evaluator.facts() if writes else {}


def _facts(context: Context, device: str) -> dict[str, Any]:
    """Return what belongs into run.json before the first round."""
    network = context.network()
    blocks = {name: parameters(block) for name, block in sorted(network.blocks.items())}
    frozen = parameters(context.foundation)
    return {
        "seed": context.seed, "clients": len(context.federation),
        "environment": environment(device),
        "weights": context.foundation.weights, "random_weights": context.foundation.is_random,
        "data": context.config.data.source,
        "data_sha256": _digests(context),
        "federation": context.federation.file.model_dump(mode="json"),
        "classes": {task: list(test.classes)
                    for task, (_, test) in context.federation.splits.items() if test.classes},
        "computing": {"dtype": str(context.foundation.dtype).removeprefix("torch."),
                      "layers": context.foundation.execution_modes,
                      "graphs": context.uses_cuda_graphs},
        "parameters": {"total": frozen + sum(blocks.values()), "frozen": frozen,
                       "trainable": sum(blocks.values()), "blocks": blocks},
    }
