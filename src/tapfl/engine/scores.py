"""The score of every test sample: RUN/scores/METHOD/CLIENT.safetensors.

Each file holds float32 tensors named ``task|metric``, in the order of the client's test data. They
let two methods be compared sample by sample, without evaluating anything again.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tapfl.errors import TapflError, as_tapfl_error
from tapfl.methods import folder_name

FOLDER = "scores"
Key = tuple[str, str, str, str]  # method, client, task, metric
SampleScores = dict[Key, NDArray[np.float32]]


def read_scores(run: Path, methods: Iterable[str]) -> SampleScores | None:
    """Return the scores of some methods of a run; None where a run has kept no scores."""
    from safetensors.numpy import load_file

    if not (run / FOLDER).is_dir():
        return None
    found: SampleScores = {}
    for method in methods:
        for path in sorted((run / FOLDER / folder_name(method)).glob("*.safetensors")):
            with as_tapfl_error(f"{path}: not readable as scores of test samples"):
                tensors = load_file(path)
            for name, values in tensors.items():
                task, bar, metric = name.partition("|")
                if not bar or values.ndim != 1 or values.dtype != np.float32:
                    raise TapflError(f"{path}: '{name}' is no list of scores; expected float32 "
                                     "values named task|metric")
                found[method, path.stem, task, metric] = values
    return found
