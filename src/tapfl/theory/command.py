"""The command line of the bound. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tapfl.errors import TapflError, nearest
from tapfl.verbs import Verbs, add_verb

if TYPE_CHECKING:
    from tapfl.config import Config
    from tapfl.theory.analysis import Analysis

FOUNDATION = "mini"  # the preset that a federation file is read with
CONSTANTS = (
    ("smoothness", "L: how fast a client's gradient changes (1; estimated for a run)"),
    ("noise", "sigma^2: the variance of a client's minibatch gradient (1; estimated for a run)"),
    ("gap", "f(W_0) - E f(W_T): how far the objective falls (1; estimated for a run)"))


def add_bound(verbs: Verbs) -> None:
    """Add ``tapfl bound``."""
    verb = add_verb(
        verbs, "bound", _bound, "say what the paper's theorem bounds, block by block",
        "Compute the right side of the paper's convergence theorem for FedAvg's server model:\n"
        "term by term, block by block, and as modality-task pairs are added. A layout or a\n"
        "federation file says which blocks there are and who owns them; for a run, the other\n"
        "constants are estimated from gradients at its stored server model (docs/theory.md).",
        ["tapfl bound flava",
         "tapfl bound examples/clinics/federation.yaml --local-steps 5 --figure bound.svg",
         "tapfl bound runs/quickstart --batches 4 --json"])
    verb.add_argument("federation", metavar="LAYOUT|FILE|RUN",
                      help="a layout or preset, a federation or configuration file, or the folder "
                           "of a complete run")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name (not for runs)")
    for name, meaning in CONSTANTS:
        verb.add_argument(f"--{name}", type=float, metavar="NUMBER", help=meaning)
    verb.add_argument("--heterogeneity", metavar="[BLOCK=]NUMBER", action="append", default=[],
                      help="zeta_r^2 of all blocks, or of one: how much its owners' gradients "
                           "differ (1; estimated for a run); may be given again")
    verb.add_argument("--local-steps", type=int, metavar="N",
                      help="tau (as the configuration has it)")
    verb.add_argument("--rounds", type=int, metavar="N", help="T (as the configuration has it)")
    verb.add_argument("--step-size", default="max", metavar="SCHEDULE",
                      help="max (the largest allowed, in every round), diminishing (that over "
                           "t+1), a number, NUMBER/(t+1), or a list such as 0.1,0.05")
    verb.add_argument("--batches", type=int, default=4, metavar="N",
                      help="for a run: minibatches of each client to estimate with (4)")
    verb.add_argument("--clients", type=int, default=50, metavar="N",
                      help="for a run: estimate with at most so many clients (50)")
    verb.add_argument("--data", metavar="DIR",
                      help="for a run: a folder that mirrors the hub's data sets")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda",
                      help="for a run: where to compute")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--figure", type=Path, metavar="FILE",
                      help="draw it, as .svg, .pdf or .png (needs matplotlib: pip install "
                           "tapfl[figures])")


def _bound(options: argparse.Namespace) -> None:
    from tapfl.theory.analysis import as_json
    from tapfl.theory.figure import check_file, write_figure
    from tapfl.theory.text import text

    if options.figure:
        check_file(options.figure)
    found = _analysis(options)
    print(json.dumps(as_json(found), indent=1) if options.json else text(found))
    if options.figure:
        write_figure(found, options.figure)
        if not options.json:
            print(f"\nfigure: {options.figure}")


def _analysis(options: argparse.Namespace) -> Analysis:
    from tapfl.reading import is_dir
    from tapfl.theory.analysis import analyse, constants
    from tapfl.theory.federation import ownerships

    common, by_block = read_heterogeneity(options.heterogeneity)
    estimates = None
    if is_dir(options.federation):
        from tapfl.engine.run import pick_device
        from tapfl.theory.estimate import estimate, stored
        from tapfl.use.mirror import with_mirror

        if options.overrides:
            raise TapflError(f"--set {options.overrides[0]}: a run has its configuration; expected "
                             "--local-steps, --rounds or --step-size")
        run = stored(Path(options.federation))
        run = dataclasses.replace(run, config=with_mirror(run.config, options.data))
        estimates = estimate(run, pick_device(options.device), options.batches, options.clients)
        config = run.config
    else:
        if options.data is not None:
            raise TapflError(f"--data {options.data}: goes with the folder of a run")
        config = read_config(options.federation, options.overrides)
    who = ownerships(config)
    given = {name: getattr(options, name) for name, _ in CONSTANTS} | {"heterogeneity": common}
    found = constants(who.owned().owners, given, by_block, estimates)
    train = config.train
    return analyse(options.federation, config, who, found,
                   train.local_steps if options.local_steps is None else options.local_steps,
                   train.rounds if options.rounds is None else options.rounds,
                   options.step_size, estimates)


def read_config(name: str, overrides: list[str]) -> Config:
    """Read a layout, a preset, a configuration file, or a federation file on the mini model."""
    from tapfl.config import load_config, preset_names
    from tapfl.data.participants import layout_names
    from tapfl.reading import is_file, parse_yaml, read_text

    if is_file(name) and name not in preset_names():
        values = parse_yaml(read_text(name), name)
        if isinstance(values, dict) and "clients" in values:
            config = load_config(FOUNDATION, ["federation.groups=1", *overrides])
            federation = config.federation.model_copy(update={"file": name})
            return config.model_copy(update={"federation": federation})
        return load_config(name, overrides)
    known = [*layout_names(), *preset_names()]
    if name not in known and "/" not in name and not name.endswith((".yaml", ".yml")):
        raise TapflError(f"{name}: neither a layout or preset, nor a file, nor the folder of a run"
                         + nearest(name, known))
    return load_config(name, overrides)


def read_heterogeneity(values: list[str]) -> tuple[float | None, dict[str, float]]:
    """Return zeta^2 of all blocks and of single ones."""
    common, by_block = None, {}
    for value in values:
        block, _, number = value.rpartition("=")
        try:
            found = float(number)
        except ValueError:
            raise TapflError(f"--heterogeneity {value}: expected a number, or BLOCK=NUMBER"
                             ) from None
        if block:
            by_block[block] = found
        else:
            common = found
    return common, by_block
