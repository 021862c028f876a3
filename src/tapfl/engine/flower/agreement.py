"""What a server and its nodes must have in common: configuration, federation and frozen weights."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from tapfl.config import NEW, Config
from tapfl.engine.record import fixed_settings
from tapfl.engine.run import federation_digest
from tapfl.errors import as_tapfl_error
from tapfl.model.weights import RANDOM, SHIPPED

WEIGHTS = frozenset({".safetensors", ".json", ".txt", ".model"})  # what belongs to a base's folder


def agreement(config: Config) -> str:
    """Return a checksum of the settings that all must share.

    Where each one computes and where its files are is its own affair: the federation file counts
    by what it says, not by where it is. Weights have a mark of their own. That a run goes on from
    another one counts, too; from which one is said in a hello.
    """
    fixed = fixed_settings(config)
    settings = fixed.model_copy(update={
        "federation": fixed.federation.model_copy(update={"file": None}),
        "foundation": fixed.foundation.model_copy(update={"weights": RANDOM}),
        "threads": None, "start": fixed.start and NEW})
    text = settings.model_dump_json(exclude_defaults=True) + federation_digest(config)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_mark(config: Config) -> str:
    """Return what tells the frozen weights from others: their public name, or a checksum of files.

    The path of a folder is no such thing: it differs between machines, and is nobody's business.
    """
    weights = config.foundation.weights
    parts = [weights] if isinstance(weights, str) else [weights[key] for key in sorted(weights)]
    return " + ".join(map(_mark, parts))


@functools.cache
def _mark(place: str) -> str:
    source = Path(place)
    with as_tapfl_error(f"{place}: cannot be read"):
        if place in (RANDOM, SHIPPED) or not source.exists():
            return place  # of a hub or a package
        whole = hashlib.sha256()
        for path in [source] if source.is_file() else sorted(source.iterdir()):
            if path.is_file() and path.suffix in WEIGHTS:
                name = "" if source.is_file() else path.name
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                whole.update(f"{name} {content}\n".encode())
        return f"files {whole.hexdigest()[:32]}"
