"""The scores of single test samples, as files: what statistics resample.

``scores/METHOD/CLIENT.safetensors`` holds a float32 tensor for every task and metric, called
``task|metric``: one value per sample of the client's own test data, in the order of its rows. They
are the client's own files; no server asks for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tapfl.engine.files import CHECKSUM, HEADER, Label, header, replacing
from tapfl.errors import TapflError
from tapfl.methods import folder_name

FOLDER = "scores"
Values = Mapping[str, NDArray[np.float32]]
Key = tuple[str, str, str, str]  # method, client, task, metric
SampleScores = dict[Key, NDArray[np.float32]]


def write_scores(path: Path, label: Label, scores: Mapping[str, NDArray[np.float64]]) -> str:
    """Write the scores that a client's model has; return the file's checksum."""
    values = {name: np.ascontiguousarray(found, dtype=np.float32)
              for name, found in scores.items()}
    facts = asdict(label)
    digest = _digest(facts, values)
    with replacing(path) as temporary:
        save_file(dict(values), str(temporary), {HEADER: json.dumps(facts | {CHECKSUM: digest})})
    return digest


def score_file(run: Path, method: str, client: str) -> Path:
    """Return where the scores of a client's model are."""
    return _folder(run, method) / f"{client}.safetensors"


def _folder(run: Path, method: str) -> Path:
    return run / FOLDER / folder_name(method)


def read_scores(run: Path, methods: Iterable[str]) -> SampleScores | None:
    """Return the scores of some methods of a run; None where a run has kept no scores."""
    if not (run / FOLDER).is_dir():
        return None
    return {(method, path.stem, task, metric): values for method in methods
            for path in sorted(_folder(run, method).glob("*.safetensors"))
            for (task, metric), values in read_file(path).items()}


def read_file(path: Path) -> dict[tuple[str, str], NDArray[np.float32]]:
    """Return the scores of every sample by task and metric; a damaged file is refused."""
    try:
        facts, values = header(path), load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise TapflError(f"{path}: not a readable safetensors file ({error})") from None
    if facts is None or facts.pop(CHECKSUM, None) != _digest(facts, values):
        raise TapflError(f"{path}: damaged, or not the scores of a run (its checksum does not "
                         "match)")
    found = {}
    for name in sorted(values):
        task, _, metric = name.partition("|")
        found[task, metric] = values[name]
    return found


def _digest(facts: Mapping[str, object], values: Values) -> str:
    whole = hashlib.sha256(json.dumps([facts, {n: len(v) for n, v in sorted(values.items())}])
                           .encode())
    for _, found in sorted(values.items()):
        whole.update(found.tobytes())
    return whole.hexdigest()
