"""The command line of the benchmarks. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_verb

if TYPE_CHECKING:
    from tapfl.config import Config



@dataclass(frozen=True)
class Benchmark:
    """A benchmark's help and options; its code is in the module of its name."""

    name: str
    short: str
    long: str
    examples: tuple[str, ...]
    options: tuple[str, ...] = ()
    bare: bool = False  # it needs neither weights nor data


BENCHMARKS = (
    Benchmark("step", "a training step of every kind of client",
              "Time one training step of every kind of client: forward, backward, optimizer.",
              ("tapfl bench step", "tapfl bench step flava --device cuda --batch 128 --compile",
               "tapfl bench step vilt --kinds 0,7 --steps 10",
               "tapfl bench step flava --device cuda --micro-batch auto --memory-cap 12"),
              ("batch", "kinds", "steps", "compile", "tokens", "micro_batch", "memory_cap")),
    Benchmark("kernels", "where the time of a step goes, kernel by kernel",
              "Take training steps under torch's profiler and list the kernels that take most\n"
              "time; on a CPU, the operators.",
              ("tapfl bench kernels --kinds 0", "tapfl bench kernels flava --device cuda --kinds 0",
               "tapfl bench kernels offline-pair --device cuda --kinds 0,1,4 --json kernels.json"),
              ("batch", "kinds", "steps", "compile")),
    Benchmark("round", "a whole round, part by part",
              "Time whole rounds: receiving blocks, training, averaging, and keeping state.",
              ("tapfl bench round", "tapfl bench round flava --device cuda --compile",
               "tapfl bench round mini --steps 5 --set train.cohort=4"),
              ("batch", "kinds", "steps", "compile")),
    Benchmark("server", "averaging updates, next to a plain copy",
              "Time the server's average of 2 to 1000 clients' updates, in bytes a second next to\n"
              "a plain copy of the same size, and report the memory it holds.",
              ("tapfl bench server", "tapfl bench server flava --device cuda",
               "tapfl bench server mini --clients 10,10000"), ("clients",), bare=True),
    Benchmark("scale", "a round as the number of clients grows",
              "Time rounds of TAP in federations of 30 to 10,000 clients of one kind, and report\n"
              "their memory. Every size runs in a process of its own, on synthetic data.",
              ("tapfl bench scale", "tapfl bench scale --clients 30,300 --rounds 30"),
              ("clients", "rounds")),
    Benchmark("evaluate", "evaluating a model, task by task",
              "Time the evaluation of a model on test data: samples a second for each task.",
              ("tapfl bench evaluate", "tapfl bench evaluate flava --samples 500",
               "tapfl bench evaluate mini --set evaluation.batch_size=32"), ("samples",)),
    Benchmark("data", "loading data sets and drawing minibatches",
              "Time making and tokenizing every data set, loading it again, and drawing\n"
              "minibatches from it.",
              ("tapfl bench data", "tapfl bench data --set data.train=500",
               "tapfl bench data flava --set data.source=hub --set data.folder=DIR")),
)


def add_bench(verbs: Verbs) -> None:
    """Add ``tapfl bench`` and its benchmarks."""
    bench: argparse.ArgumentParser = verbs.add_parser(
        "bench", help="measure speed and memory on this machine",
        description="Measure speed and memory on this machine, now. Each benchmark prints a table "
                    "and the\nfacts it was measured under; --json FILE keeps them.",
        epilog="examples:\n  tapfl bench server\n  tapfl bench evaluate flava --device cuda\n"
               "  tapfl bench scale --help",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.set_defaults(run=lambda options: bench.print_help())
    names = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    for benchmark in BENCHMARKS:
        _add(names, benchmark)


def _add(names: Verbs, benchmark: Benchmark) -> None:
    parser = add_verb(
        names, benchmark.name, lambda options: _run(benchmark, options), benchmark.short,
        benchmark.long
        + "\n\nNothing is downloaded. A shipped preset is measured with random weights, as fast as "
          "others,\nand with synthetic data unless it is of the miniature world.",
        benchmark.examples)
    parser.add_argument("preset", metavar="PRESET|FILE.yaml", nargs="?",
                        help="what to measure (mini on a CPU, flava on a GPU)")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append",
                        default=[], help="change any key of the configuration, by its dotted name")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda",
                        help="where to compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON, too")
    parser.add_argument("--quick", action="store_true",
                        help="a moment, to see that it works; its figures mean little")
    for option in benchmark.options:
        OPTIONS[option](parser)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got '{text}'")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def _number_or_auto(text: str) -> int | str:
    return text if text == "auto" else _number(text)


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], object]] = {
    "batch": lambda p: p.add_argument("--batch", type=_number, metavar="N",
                                      help="the batch size (train.batch_size)"),
    "kinds": lambda p: p.add_argument("--kinds", type=_words, metavar="A,B",
                                      help="client kinds of the federation file (all)"),
    "steps": lambda p: p.add_argument("--steps", type=_number, metavar="N",
                                      help="steps to take"),
    "tokens": lambda p: p.add_argument("--tokens", type=_number, metavar="N",
                                       help="the length of every text (as in the data)"),
    "compile": lambda p: p.add_argument("--compile", action="store_true",
                                        help="with torch.compile"),
    "micro_batch": lambda p: p.add_argument("--micro-batch", type=_number_or_auto,
                                            metavar="N|auto", help="split minibatches into pieces "
                                                                   "(speed.micro_batch)"),
    "memory_cap": lambda p: p.add_argument("--memory-cap", type=_number, metavar="GB",
                                           help="use no more of the GPU's memory than this"),
    "clients": lambda p: p.add_argument("--clients", type=_numbers, metavar="N,N",
                                        help="numbers of clients"),
    "rounds": lambda p: p.add_argument("--rounds", type=_number, metavar="N",
                                       help="rounds to measure (12)"),
    "samples": lambda p: p.add_argument("--samples", type=_number, metavar="N",
                                        help="test samples of each task, at most "
                                             "(120, on a GPU 2000)"),
}


def _run(benchmark: Benchmark, options: argparse.Namespace) -> None:
    if options.json and not options.json.parent.is_dir():
        raise TapflError(f"--json {options.json}: no such folder")
    from tapfl.bench.measure import machine, show, write
    from tapfl.engine.run import pick_device

    device = pick_device(options.device)
    preset = options.preset or ("flava" if device == "cuda" else "mini")
    config, notes = configure(preset, options.overrides)
    module = importlib.import_module(f"tapfl.bench.{benchmark.name}")
    chosen = {name: getattr(options, name) for name in benchmark.options}
    report = module.run(config, device, options.quick, **chosen)
    report.facts = {"preset": preset, "precision": config.precision, **machine(device),
                    **report.facts, **({"quick": True} if options.quick else {})}
    report.note = "\n".join(filter(None, [report.note, *([] if benchmark.bare else notes)]))
    show(report)
    if options.json:
        write(report, options.json)
        print(f"written: {options.json}")


def configure(preset: str, overrides: list[str]) -> tuple[Config, list[str]]:
    """Return a configuration that can be measured here, and what was changed for it.

    A shipped preset gets random weights in place of downloaded ones, and synthetic data in place
    of the hub's; what the user sets stays.
    """
    from tapfl.config import load_config, preset_names

    config = load_config(preset, overrides)
    if preset not in preset_names():
        return config, []
    more, notes = [], []
    if not _sets(overrides, "foundation.weights") and config.foundation.weights not in (
            "random", "shipped"):
        more.append("foundation.weights=random")
        notes.append(f"Random weights in place of {config.foundation.weights}: "
                     "they are as fast or slow.")
    if not _sets(overrides, "evaluation.metrics"):
        more.append("evaluation.metrics=[token_f1]")  # the model is measured, not the metrics
    if not _sets(overrides, "data.source") and config.data.source == "hub":
        more.append("data.source=synthetic")
        notes.append("Synthetic data in the sizes of the paper's.")
    return load_config(preset, [*overrides, *more]), notes


def _sets(overrides: list[str], key: str) -> bool:
    """Return whether the user gives a key a value, or the section it is in."""
    section = key.partition(".")[0]
    return any(o.partition("=")[0] in (key, section) for o in overrides)
