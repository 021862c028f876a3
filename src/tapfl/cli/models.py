"""Commands for models: use them, take them away, count them, pre-train one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_config, add_verb


def add_predict(verbs: Verbs) -> None:
    """Add ``tapfl predict``."""
    verb = add_verb(
        verbs, "predict", _predict, "let a client's model answer",
        "Let a client's model answer: a label with probabilities, a text, or a picture that is\n"
        "written to --out. One input by --image and --text, or a file of many.\n"
        "A CSV or JSON lines file has the columns 'image' and 'text', or those that the task's\n"
        "template names; the answers are put beside them.",
        ["tapfl predict runs/quickstart --client g0-1 --task agnews --text 'shares rise'",
         "tapfl predict runs/quickstart --client g0-4 --task vqa --image a.png --text 'how many?'",
         "tapfl predict runs/quickstart --client g0-1 --task agnews --file in.csv --out out.csv"])
    _add_client(verb)
    verb.add_argument("--task", required=True, metavar="TASK", help="one of the client's tasks")
    verb.add_argument("--image", type=Path, metavar="FILE", help="a picture")
    verb.add_argument("--text", metavar="TEXT", help="a text, a question, or concepts")
    verb.add_argument("--file", type=Path, metavar="FILE", help="a .csv or .jsonl of many inputs")
    verb.add_argument("--out", type=Path, metavar="FILE", help="where to write")
    verb.add_argument("--json", action="store_true", help="print one answer as JSON")
    verb.add_argument("--weights", metavar="PLACE",
                      help="where the frozen base is found now, if not where it was")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")


def _predict(options: argparse.Namespace) -> None:
    from tapfl.use.command import run_predict

    run_predict(options)


def add_export(verbs: Verbs) -> None:
    """Add ``tapfl export``."""
    verb = add_verb(
        verbs, "export", _export, "write a client's model as files to take away",
        "Write a client's model into a new folder: its blocks as safetensors, a model card with\n"
        "the client's own results, the encoders' LoRA in the format of the peft library.\n"
        "tapfl.load(DIR) and 'tapfl predict DIR' read it back.",
        ["tapfl export runs/quickstart --client g0-7 --out g0-7",
         "tapfl predict g0-7 --task agnews --text 'shares rise'"])
    _add_client(verb)
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    verb.add_argument("--weights", metavar="PLACE",
                      help="where the frozen base will be found, e.g. a hub id; by default weights "
                           "from a hub or a package are named and those in a folder are copied")


def _export(options: argparse.Namespace) -> None:
    from tapfl.use.command import run_export

    run_export(options)


def _add_client(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("run_folder", type=Path, metavar="RUN",
                      help="the folder of a complete run, or of an exported model")
    verb.add_argument("--client", metavar="ID", help="whose model, e.g. g0-1")
    verb.add_argument("--model", metavar="personal|federated",
                      help="the client's own model, which is the default (run.json says which "
                           "method's), or the federated one")
    verb.add_argument("--method", metavar="NAME", help="one of the run's methods, by its name")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where a federated method of your own (module:Class) is imported from")


def add_model(verbs: Verbs) -> None:
    """Add ``tapfl model``."""
    verb = add_verb(
        verbs, "model", _model, "count a model's parameters and bytes, block by block",
        "Count the parameters of a preset's server model and of every kind of client, without and\n"
        "with TAP's second copy. Loads no weights.",
        ["tapfl model flava", "tapfl model vilt --json",
         "tapfl model flava --set backbone.layers_per_stage=2"])
    add_config(verb)
    verb.add_argument("--json", action="store_true", help="print JSON")


def _model(options: argparse.Namespace) -> None:
    from tapfl.config import load_config
    from tapfl.model.summary import render, summarize

    summary = summarize(load_config(options.preset, options.overrides))
    print(json.dumps(summary, indent=2) if options.json else render(summary, options.preset))


def add_pretrain(verbs: Verbs) -> None:
    """Add ``tapfl pretrain``."""
    verb = add_verb(
        verbs, "pretrain", _pretrain, "pre-train the mini foundation",
        "Pre-train the mini foundation on the miniature world's unlabelled stream: masked text,\n"
        "masked images, image-text matching. The package ships what this command writes.",
        ["tapfl pretrain mini --out mini.safetensors --device cuda",
         "tapfl run quickstart --set foundation.weights=mini.safetensors"])
    verb.add_argument("foundation", choices=["mini"], help="the foundation to pre-train")
    verb.add_argument("--out", type=Path, default=Path("mini.safetensors"), metavar="FILE",
                      help="where to write (mini.safetensors)")
    verb.add_argument("--steps", type=int, default=3500, metavar="N", help="training steps (3500)")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="the seed (0)")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")


def _pretrain(options: argparse.Namespace) -> None:
    from tapfl.engine.run import pick_device
    from tapfl.pretrain import pretrain_mini

    if options.steps < 10:
        raise TapflError(f"--steps {options.steps}: expected at least 10")

    def show(step: int, losses: dict[str, float]) -> None:
        print(f"step {step + 1}/{options.steps}: "
              + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()), flush=True)

    pretrain_mini(options.out, steps=options.steps, seed=options.seed,
                  device=pick_device(options.device), progress=show)
    print(f"written: {options.out}")
