"""What a user takes away: a client's model as files that stand on their own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl import __version__
from tapfl.engine.files import Label, write_json, write_state
from tapfl.engine.messages import Row
from tapfl.engine.results import read_results
from tapfl.errors import TapflError, as_tapfl_error
from tapfl.model.peft import export_encoder_lora
from tapfl.model.weights import RANDOM, SHIPPED
from tapfl.reading import exists
from tapfl.use.card import BASE, CARD, INSIDE, WEIGHTS, Card
from tapfl.use.load import ClientModel

COPIED = frozenset({".safetensors", ".json", ".txt", ".model"})  # weights, settings, tokenizer


def export(model: ClientModel, folder: Path | str, run: Path | str | None = None,
           weights: str | None = None) -> Path:
    """Write the model's blocks, its card, and the encoders' LoRA in the peft library's format.

    ``tapfl.load(folder)`` reads it back. ``run`` is where the client's own results are found.
    Weights from a hub or a package are named; those in a local folder are copied, or named by
    ``weights`` as they will be found where the export goes.
    """
    out, card = Path(folder), model.card
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapflError(f"--out {out}: there is something already; expected a new folder")
    rows = _results(Path(run), card.client, card.method) if run is not None else []
    named = card.with_weights(weights) if weights else _with_copies(card, out)
    write_state(out / WEIGHTS, Label(card.method, card.client, card.config.train.rounds),
                model.state, {"method": card.method, "client": card.client})
    # A variant's settings are merged in: the model is that of a method of its own.
    config = named.config.model_dump(mode="json") | {"methods": [card.federated], "variants": {}}
    write_json(out / CARD, {
        "tapfl": __version__, "client": card.client, "method": card.method,
        "federated": card.federated,
        "classes": {task: list(names) for task, names in card.classes.items()},
        "config": config, "federation": card.file.model_dump(mode="json")})
    for modality in model.network.foundation.trained_encoders:
        export_encoder_lora(model.network, modality, out / "lora" / modality)
    (out / "README.md").write_text(_readme(model, rows), encoding="utf-8")
    return out


def _with_copies(card: Card, out: Path) -> Card:
    """Return a card that names copies of weights that lie in local folders; copy them."""
    weights = card.config.foundation.weights
    parts = weights if isinstance(weights, dict) else {"model": weights}
    found = {}
    for part, place in parts.items():
        source = Path(place)
        if place in (RANDOM, SHIPPED) or not exists(source):
            found[part] = place  # a hub's or a package's name
            continue
        name = "mini.safetensors" if source.is_file() else part
        target = out / BASE / name
        with as_tapfl_error(f"{target}: cannot copy {source}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            for file in [source] if source.is_file() else sorted(source.iterdir()):
                if file.is_file() and file.suffix in COPIED:
                    target.mkdir(exist_ok=True) if source.is_dir() else None
                    shutil.copyfile(file, target / file.name if source.is_dir() else target)
        found[part] = INSIDE + name
    new = found if isinstance(weights, dict) else found["model"]
    foundation = card.config.foundation.model_copy(update={"weights": new})
    return dataclasses.replace(
        card, config=card.config.model_copy(update={"foundation": foundation}))


def _results(run: Path, client: str, method: str) -> list[Row]:
    path = run / "results.csv"
    rows = read_results(path) if path.is_file() else []
    return [r for r in rows if r["client"] == client and r["method"] == method]


def _readme(model: ClientModel, rows: Sequence[Row]) -> str:
    card = model.card
    config = card.config
    lines = [
        f"# Model of client {card.client}", "",
        f"Made by tapfl {__version__} with the method `{card.method}`, seed {config.seed}, on the "
        f"foundation `{config.foundation.name}` ({model.network.foundation.weights}).", ""]
    if model.network.foundation.is_random:
        lines += ["The foundation has random weights: it was not pre-trained.", ""]
    lines += ["## Tasks", "", "| task | kind | takes | classes |", "|---|---|---|---|"]
    for task in model.tasks.values():
        lines.append(f"| {task.name} | {task.kind} | {' and '.join(task.modalities)} | "
                     f"{_classes(card.classes.get(task.name), task.classes)} |")
    lines += ["", "## Results", "", "On the client's own test data; `general_` is on those of the "
              "task's other clients.", ""]
    if rows:
        lines += ["| task | metric | value | samples |", "|---|---|---|---|"]
        lines += [f"| {r['task']} | {r['metric']} | {r['value']:.4g} | {r['samples']} |"
                  for r in rows]
    else:
        lines.append("None were recorded for this model.")
    load = "model = tapfl.load(\"this folder\""
    if ":" in card.federated:
        lines += ["", f"The method `{card.federated}` is code that this folder does not carry: "
                  "`modules` is the folder it is imported from."]
        load += ", modules=\"DIR\""
    lines += ["", "## Use", "", "```python", "import tapfl", load + ")", _example(model), "```",
              "", "## Files", "",
              f"- `{WEIGHTS}`: {model.state.size:,} trained parameters in "
              f"{len(model.state)} blocks; the frozen base is not in it.",
              f"- `{CARD}`: configuration, tasks and classes."]
    lines += [f"- `lora/{modality}/`: the LoRA of the {modality} encoder, for "
              "`peft.PeftModel.from_pretrained`."
              for modality in model.network.foundation.trained_encoders]
    return "\n".join(lines) + "\n"


def _classes(names: Sequence[str] | None, count: int) -> str:
    if not names:
        return str(count or "")
    return ", ".join(names) if len(names) <= 12 else f"{len(names)}, {names[0]} to {names[-1]}"


def _example(model: ClientModel) -> str:
    task = next(iter(model.tasks.values()))
    given: dict[str, Any] = {"image": "picture.png", "text": "some text"}
    words = ", ".join(f"{m}={json.dumps(given[m])}" for m in task.modalities)
    return f"print(model.predict(\"{task.name}\", {words}))"
