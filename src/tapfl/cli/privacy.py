"""The command that says what noise promises."""

from __future__ import annotations

import argparse
from pathlib import Path

from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_verb


def add_privacy(verbs: Verbs) -> None:
    """Add ``tapfl privacy``."""
    verb = add_verb(
        verbs, "privacy", _privacy, "say what a run's noise promises, before or after it",
        "Say which epsilon the noise of a configuration promises every client, before anything is\n"
        "run (with the blocks that FedAvg exchanges), or what the noise of a run has promised.\n"
        "With --epsilon, say how much noise that takes.",
        ["tapfl privacy quickstart --set privacy.mode=central --set privacy.noise=8",
         "tapfl privacy quickstart --set privacy.mode=local --epsilon 20",
         "tapfl privacy runs/private"])
    verb.add_argument("preset", metavar="PRESET|FILE.yaml|RUN",
                      help="a shipped preset, a configuration file, or the folder of a run")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name")
    verb.add_argument("--epsilon", type=float, metavar="E", help="the promise that is wanted")


def _privacy(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.engine.promise import in_words, noise_for, planned

    if Path(options.preset).is_dir():
        for option, given in (("--set", options.overrides), ("--epsilon", options.epsilon)):
            if given:
                raise TapflError(f"{option}: {options.preset} is a run; its noise is what it was")
        _promised(Path(options.preset))
        return
    config = load_config(options.preset, options.overrides)
    if config.privacy.mode == "none":
        raise TapflError("privacy.mode: none adds no noise; expected local or central "
                         "(--set privacy.mode=central)")
    if options.epsilon is not None and not 0 < options.epsilon < float("inf"):
        raise TapflError(f"--epsilon {options.epsilon:g}: expected a number above 0")
    found = planned(config)
    print(in_words("fedavg", found))
    if options.epsilon is not None:
        noise = noise_for(found, options.epsilon)
        print(f"epsilon {options.epsilon:g} takes privacy.noise={noise:.3g}")


def _promised(folder: Path) -> None:
    """Print what a run has promised."""
    from tapfl.engine.promise import in_words, together
    from tapfl.engine.record import read_record

    record = read_record(folder)
    if not record.privacy:
        raise TapflError(f"{folder}: this run promises nothing; it has no noise, or is not "
                         "complete")
    for name, found in record.privacy.items():
        print(in_words(name, found))
    if len(record.privacy) > 1:
        print(together(record.privacy, record.config.privacy.delta))
