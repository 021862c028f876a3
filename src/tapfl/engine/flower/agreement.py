"""What a server and its nodes must have in common: the configuration and the federation."""

from __future__ import annotations

import hashlib

from tapfl.config import NEW, Config
from tapfl.engine.record import fixed_settings
from tapfl.engine.run import federation_digest


def agreement(config: Config) -> str:
    """Return a checksum of the settings that all must share.

    Where each one computes and where its files are is its own affair: the federation file counts
    by what it says, not by where it is. That a run goes on from another one counts, too; from which
    one is said in a hello.
    """
    fixed = fixed_settings(config)
    federation = fixed.federation.model_copy(update={"file": None})
    settings = fixed.model_copy(update={
        "federation": federation, "threads": None, "start": fixed.start and NEW})
    text = settings.model_dump_json(exclude_defaults=True) + federation_digest(config)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
