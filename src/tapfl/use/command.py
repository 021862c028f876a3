"""`tapfl predict` and `tapfl export`: one input, or a file of many."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfl.data.files import text_rows
from tapfl.engine.files import replacing
from tapfl.errors import TapflError, as_tapfl_error
from tapfl.use.export import export
from tapfl.use.load import ClientModel, load

SHOWN = 5  # classes whose probabilities are printed
Record = dict[str, Any]


def run_predict(options: argparse.Namespace) -> None:
    """Print the answer to one input, or write those to a file of inputs."""
    if options.file and (options.image or options.text is not None):
        raise TapflError("predict: expected --file, or --image and --text for a single input")
    if not options.file and not options.image and options.text is None:
        raise TapflError("predict: nothing to predict; expected --image, --text or --file")
    model = _loaded(options, options.device, options.weights)
    if options.file:
        _many(model, options.task, options.file, options.out)
        return
    if options.image and not options.image.is_file():
        raise TapflError(f"--image {options.image}: no such file")
    answer = model.predict(options.task, options.image, options.text)
    if "image" in answer:
        out = options.out or Path(f"{options.image.stem}-{model.card.client}.png")
        _write_image(out, answer["image"])
        print(f"written: {out}")
    elif options.json:
        print(json.dumps(answer))
    elif "text" in answer:
        print(answer["text"])
    else:
        for label, probability in list(answer["probabilities"].items())[:SHOWN]:
            print(f"{label:<24} {100 * probability:5.1f}%")


def run_export(options: argparse.Namespace) -> None:
    """Write a client's model as files that stand on their own."""
    model = _loaded(options, "cpu")
    export(model, options.out, options.run_folder, options.weights)
    print(f"written: {options.out} (method {model.card.method}, {model.state.size:,} parameters); "
          f"see {options.out / 'README.md'}")


def _loaded(options: argparse.Namespace, device: str,
            weights: str | None = None) -> ClientModel:
    return load(options.run_folder, options.client, options.model, options.method, device,
                options.modules, weights)


def _many(model: ClientModel, task: str, file: Path, out: Path | None) -> None:
    records = _read(file)
    spec = model.task(task)
    images: list[Any] | None = None
    if "image" in spec.modalities:
        column = model.image_column(spec, records[0])
        if any(not r.get(column) for r in records):
            raise TapflError(f"{file}: task '{task}' needs a column '{column}' with picture files")
        images = [file.parent / str(r[column]) for r in records]
    answers = model.predict_many(task, images,
                                 records if "text" in spec.modalities else None)
    if spec.kind == "image_generation":
        folder = out or Path(f"{file.stem}-{task}")
        for number, answer in enumerate(answers):
            _write_image(folder / f"{number:05d}.png", answer["image"])
        print(f"written: {len(answers)} pictures to {folder}")
        return
    rows = [{**record, **_flat(answer)} for record, answer in zip(records, answers, strict=True)]
    if out is None:
        _write(sys.stdout, rows, ".jsonl" if file.suffix == ".jsonl" else ".csv")
        return
    with replacing(out) as partial, partial.open("w", encoding="utf-8", newline="") as opened:
        _write(opened, rows, out.suffix)
    print(f"written: {len(rows)} answers to {out}")


def _flat(answer: Mapping[str, Any]) -> Record:
    if "text" in answer:
        return {"prediction": answer["text"]}
    return {"prediction": answer["label"],
            "probability": f"{answer['probabilities'][answer['label']]:.4f}"}


def _read(file: Path) -> list[Record]:
    if file.suffix not in (".csv", ".jsonl"):
        raise TapflError(f"--file {file}: expected a .csv or .jsonl file")
    content = text_rows(file)
    records: list[Record] = []
    for number, row in enumerate(content.rows(0, content.count)):
        if isinstance(row, str):
            raise TapflError(f"--file {file}: row {number}: {row}")
        records.append(row)
    if not records:
        raise TapflError(f"--file {file}: no rows")
    return records


def _write(opened: Any, rows: Sequence[Record], suffix: str) -> None:
    if suffix == ".jsonl":
        opened.writelines(json.dumps(row) + "\n" for row in rows)
        return
    writer = csv.DictWriter(opened, list(rows[0]), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)


def _write_image(path: Path, pixels: Any) -> None:
    from PIL import Image

    with as_tapfl_error(f"--out {path}: cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
