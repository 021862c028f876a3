"""What a user takes away: a client's model as files that stand on their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl import __version__
from tapfl.engine.record import Row, read_results
from tapfl.engine.store import write_json, write_state
from tapfl.errors import TapflError
from tapfl.model.peft import export_encoder_lora
from tapfl.use.card import CARD, WEIGHTS
from tapfl.use.load import ClientModel


def export(model: ClientModel, folder: Path | str, run: Path | str | None = None) -> Path:
    """Write the model's blocks, its card, and the encoders' LoRA in the peft library's format.

    ``tapfl.load(folder)`` reads it back. ``run`` is where the client's own results are found.
    """
    out, card = Path(folder), model.card
    if ":" in card.method:
        raise TapflError(f"export: {card.method} is code of your own, which no file can carry")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TapflError(f"--out {out}: there is something already; expected a new folder")
    rows = _results(Path(run), card.client, card.method) if run is not None else []
    write_state(out / WEIGHTS, model.state, {"method": card.method, "client": card.client})
    write_json(out / CARD, {
        "tapfl": __version__, "client": card.client, "method": card.method,
        "classes": {task: list(names) for task, names in card.classes.items()},
        "config": card.config.model_dump(mode="json"),
        "federation": card.file.model_dump(mode="json")})
    for modality in model.network.foundation.trained_encoders:
        export_encoder_lora(model.network, modality, out / "lora" / modality)
    (out / "README.md").write_text(_readme(model, rows), encoding="utf-8")
    return out


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
    lines += ["", "## Use", "", "```python", "import tapfl",
              "model = tapfl.load(\"this folder\")", _example(model), "```", "", "## Files", "",
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
