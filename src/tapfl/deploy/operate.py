"""`tapfl deploy status` and `tapfl deploy stop`: what operators do with what is under way."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tapfl.verbs import Verbs, add_verb


def add_status(verbs: Verbs) -> None:
    """Add ``tapfl deploy status``."""
    verb = add_verb(
        verbs, "status", _status, "show nodes, rounds, traffic and refusals of a server",
        "Show where the run of a server's folder stands.", ["tapfl deploy status runs/clinics"])
    verb.add_argument("folder", type=Path, metavar="DIR", help="the server's --out")
    verb.add_argument("--json", action="store_true", help="print JSON")


def _status(options: argparse.Namespace) -> None:
    from tapfl.deploy.status import status

    found = status(options.folder)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    place = f"{found['method']}, round {found['round'] + 1}" if found["method"] else "no round yet"
    print(f"{found['state']}: {place}; the last news is {found['seconds_since']:g} s old")
    print(f"traffic: {found['bytes_up'] / 1e6:.1f} MB up, {found['bytes_down'] / 1e6:.1f} MB down; "
          f"processes: {', '.join(found['processes']) or 'none'}")
    for line in (*found["nodes"], *found["refused"], *found["restarts"][-10:], *found["left"],
                 *found["missing"][-10:]):
        print(f"  {line}")


def add_stop(verbs: Verbs) -> None:
    """Add ``tapfl deploy stop``."""
    verb = add_verb(
        verbs, "stop", _stop, "stop what a server or a node has started",
        "Stop a server, a node or a local deployment by its folder, and whatever an earlier\n"
        "one has left running. What is complete stays; the command that started it goes on.",
        ["tapfl deploy stop runs/clinics"])
    verb.add_argument("folder", type=Path, metavar="DIR", help="the --out of a server or of a node")


def _stop(options: argparse.Namespace) -> None:
    from tapfl.deploy.app import stop_app
    from tapfl.deploy.processes import stop_owner, stop_recorded

    places = [options.folder / "deploy", options.folder.with_name(f"{options.folder.name}.flower")]
    stopped = [name for place in places for name in stop_owner(place)]
    stop_app(places[0])
    stopped += [name for place in places for name in stop_recorded(place)]
    print(f"stopped: {', '.join(stopped)}" if stopped else f"{options.folder}: nothing is running")
