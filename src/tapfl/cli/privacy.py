"""The command that says what noise promises."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_verb

if TYPE_CHECKING:
    from tapfl.engine.promise import Promise


def add_privacy(verbs: Verbs) -> None:
    """Add ``tapfl privacy``."""
    verb = add_verb(
        verbs, "privacy", _privacy, "say what a run's noise promises, before or after it",
        "Say which epsilon the noise of a configuration promises every client, before anything is\n"
        "run (with the blocks that FedAvg exchanges), or what the noise of a run has promised.\n"
        "Federated runs of the same data add up. With --epsilon, say how much noise that takes\n"
        "for all of them together.",
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
    from tapfl.engine.promise import noise_for, planned, rounded_up
    from tapfl.methods import LOCAL, federated_runs, method_specs

    if Path(options.preset).is_dir():
        for option, given in (("--set", options.overrides), ("--epsilon", options.epsilon)):
            if given:
                raise TapflError(f"{option}: {options.preset} is a run; its noise is what it was")
        _promised(Path(options.preset))
        return
    config = load_config(options.preset, options.overrides)
    runs = {each.name: each.config for each in federated_runs(method_specs(config))
            if each.federated != LOCAL} or {"fedavg": config}
    bare = [name for name, each in runs.items() if each.privacy.mode == "none"]
    if len(bare) == len(runs):
        raise TapflError("privacy.mode: none adds no noise; expected local or central "
                         "(--set privacy.mode=central)")
    if options.epsilon is not None and not 0 < options.epsilon < float("inf"):
        raise TapflError(f"--epsilon {options.epsilon:g}: expected a number above 0")
    if options.epsilon is not None and bare:
        raise TapflError(f"--epsilon: '{bare[0]}' adds no noise (privacy.mode: none), so that of "
                         "the others reaches no epsilon; leave it out of methods")
    found = {name: planned(each) for name, each in runs.items()}
    _say(found, config.privacy.delta)
    if options.epsilon is not None:
        noise = noise_for(list(found.values()), options.epsilon)
        print(f"epsilon {options.epsilon:g} takes privacy.noise={rounded_up(noise)}")


def _say(found: Mapping[str, Promise], delta: float) -> None:
    from tapfl.engine.promise import in_words, together

    for name, each in found.items():
        print(in_words(name, each))
    if len(found) > 1:
        print(together(found, delta))


def _promised(folder: Path) -> None:
    """Print what a run has promised."""
    from tapfl.engine.record import read_record

    record = read_record(folder)
    if not record.privacy:
        raise TapflError(f"{folder}: this run promises nothing; it has no noise, or is not "
                         "complete")
    _say(record.privacy, record.config.privacy.delta)
