"""Commands for what a run needs: configurations, and what metrics fetch."""

from __future__ import annotations

import argparse
from pathlib import Path

from tapfl.verbs import Verbs, add_config, add_verb, beside


def add_presets(verbs: Verbs) -> None:
    """Add ``tapfl presets``."""
    add_verb(verbs, "presets", _presets, "list the shipped presets", "List the shipped presets.",
             ["tapfl presets"])


def _presets(options: argparse.Namespace) -> None:
    from tapfl.config import preset_summaries

    for name, summary in preset_summaries().items():
        print(f"{name:<16} {summary}")


def add_show(verbs: Verbs) -> None:
    """Add ``tapfl show``."""
    verb = add_verb(
        verbs, "show", _show, "print a whole configuration",
        "Print a configuration as YAML with every key, also those left at their default.",
        ["tapfl show miniature > mine.yaml", "tapfl show quickstart --set train.rounds=5"])
    add_config(verb)


def _show(options: argparse.Namespace) -> None:
    import yaml

    from tapfl.config import load_config

    config = load_config(options.preset, options.overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")


def add_validate(verbs: Verbs) -> None:
    """Add ``tapfl validate``."""
    verb = add_verb(
        verbs, "validate", _validate, "check a configuration without running it",
        "Check a configuration as a run would: its keys and values, its federation and\n"
        "methods, the files and columns of its data, weights and packages. Data are\n"
        "prepared on the way: the run will find them so.",
        ["tapfl validate mine.yaml", "tapfl validate flava --config-only"])
    add_config(verb)
    verb.add_argument("--data", metavar="DIR", help="a folder that mirrors the hub's data sets")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where methods of your own (module:Class) are imported from")
    verb.add_argument("--config-only", action="store_true",
                      help="read neither data nor weights")


def _validate(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.engine.validate import validate
    from tapfl.report.progress import progress
    from tapfl.use.mirror import with_mirror

    config = with_mirror(load_config(options.preset, options.overrides), options.data)
    display = progress()
    try:
        found = validate(config, options.modules or beside(options.preset),
                         config_only=options.config_only, notify=display)
    finally:
        display.close()
    print(f"{options.preset}: valid. {found}")


def add_setup_metrics(verbs: Verbs) -> None:
    """Add ``tapfl setup-metrics``."""
    add_verb(verbs, "setup-metrics", _setup_metrics, "fetch what the metrics of text need",
             "Fetch WordNet for METEOR, and say which model BERTScore will use here.",
             ["tapfl setup-metrics"])


def _setup_metrics(options: argparse.Namespace) -> None:
    from tapfl.evaluation.bertscore import usual_model
    from tapfl.evaluation.meteor import fetch_wordnet

    print(f"meteor: WordNet in {fetch_wordnet()}")
    print(f"bertscore: {usual_model()}")
