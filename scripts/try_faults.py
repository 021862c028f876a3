"""Real faults on a real deployment: python scripts/try_faults.py [--only NAME,..] [--out DIR]

Each group of faults has a federation of its own on loopback: SuperLink, proxy, three SuperNodes,
TLS and keys. Faults happen to one client, or to the server, in the middle of a round, one after the
other. When the run is over, its results are compared with those of a run in one process in which
the same updates are missing. Prints a Markdown table.
Needs nginx; the full disk needs root.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml
from fault_checks import check
from fault_groups import GROUPS, Fault, Group
from machines import Machines
from refusals import refusals

from tapfl.config import load_config
from tapfl.data.participants import client_ids, load_federation
from tapfl.engine.flower.frames import pack

SETTINGS = ("threads=1", "methods=[fedavg,tap]", "train.cohort=3",
            "train.local_steps=8", "checkpoint.every=2")


class Happening:
    """Has faults happen, each once in its round; ``at`` is when they did."""

    def __init__(self, machines: Machines, client: str, faults: dict[int, Fault]) -> None:
        self.at: dict[int, float] = {}
        self._machines, self._client, self._faults, self._earlier = machines, client, faults, b""
        machines.tap(client, self._asked, self._answered)

    def _asked(self, asked: dict) -> None:
        fault = self._faults.get(asked.get("round", -1))
        if fault is not None and not fault.after:
            self._now(asked["round"], fault)

    def _answered(self, asked: dict, reply: bytes) -> bytes:
        fault = self._faults.get(asked.get("round", -1))
        earlier, self._earlier = self._earlier, reply
        if fault is None:
            return reply
        if fault.after:
            self._now(asked["round"], fault)
        changed = reply if fault.answer is None else fault.answer(asked, reply, earlier)
        return pack(*changed) if isinstance(changed, tuple) else changed

    def _now(self, round_: int, fault: Fault) -> None:
        if round_ not in self.at:
            self.at[round_] = time.monotonic() + fault.delay
            threading.Timer(fault.delay, fault.act, [self._machines, self._client]).start()


def connected(said: dict, seen: set) -> bool:
    """Return whether all three have joined."""
    if " joined with " in said.get("says", ""):
        seen.add(said["says"].rpartition(" ")[2])
    return len(seen) == 3


def try_group(group: Group, folder: Path, config_path: Path,
              clients: list[str]) -> list[tuple[str, ...]]:
    """Have faults happen; return rows of the table."""
    victim = clients[0]
    machines = Machines(folder, config_path, clients, ("--round", str(group.patience),
                                                       "--join", "150"))
    seen: set[str] = set()
    try:
        machines.start_server()
        for client in clients:
            (group.begin if client == victim else Machines.start_client)(machines, client)
        if machines.follow(lambda said: connected(said, seen), 180) is None:
            return [("", f"FAILED: only {sorted(seen)} joined", "", "")]
        happening = Happening(machines, victim, group.faults)
        ended = machines.follow(lambda said: said.get("says", "").startswith(
            ("finished", "stopped")), 900)
    finally:
        machines.stop()
        keep_small_disk(machines.home(victim).parent)
    wrong = [f"processes left: {left}"] if (left := machines.left_over()) else []
    if ended is None or machines.log[-1][1]["says"] != "finished":
        return [("", f"FAILED: {machines.log[-1][1]}", "", "")]
    found, lost = check(machines, load_config(str(config_path)), victim)
    rows = []
    for round_, fault in group.faults.items():
        if round_ not in happening.at:
            wrong.append(f"{fault.title}: did not happen")
            continue
        later = [r for r in group.faults if r > round_]
        since = happening.at[round_]
        log = [(when, said) for when, said in machines.log
               if since <= when < (happening.at.get(later[0], 1e18) if later else 1e18)]
        rows.append((fault.title, said_of(log), recovery(log, since),
                     lost(range(round_, later[0] if later else 1000))))
    return [*rows, *(("", f"FAILED: {each}", "", "") for each in [*wrong, *found])]


def keep_small_disk(folder: Path) -> None:
    """Copy what is on a small disk, and take it away."""
    if folder.is_mount():
        kept = folder.with_name("kept")
        shutil.copytree(folder, kept)
        subprocess.run(["umount", str(folder)], check=True)
        shutil.copytree(kept, folder, dirs_exist_ok=True)


def recovery(log: list, since: float) -> str:
    """Return the seconds until a round ended in which everybody's update counted."""
    lost = set()
    for when, said in log:
        if said.get("event") in ("missing", "refused"):
            lost.add(said["round"])  # events of a round come before its end
        if "cohort" in said and said["round"] not in lost:
            return f"{when - since:.0f}"
    return f"{log[-1][0] - since:.0f}, in the end"


def said_of(log: list) -> str:
    """Return what the server said of it, without what it says of every round."""
    texts = []
    for _, said in log:
        text = said.get("says") or (f"round {said['round'] + 1}: {said['event']} "
                                    f"({said['reason']})" if "reason" in said else "")
        if text and text != "finished" and text not in texts:
            texts.append(text)
    return "; ".join(texts)[:600].replace("|", "/") or "the server noticed nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join([*GROUPS, "refusals"]), metavar="A,B",
                        help=f"some of {', '.join(GROUPS)}, refusals")
    parser.add_argument("--out", type=Path, help="a folder for logs and runs (a temporary one)")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="faults-"))
    out.mkdir(parents=True, exist_ok=True)
    config = load_config("quickstart", list(SETTINGS))
    clients = list(client_ids(load_federation(config.federation), config.federation))[:3]
    config = config.model_copy(update={"federation": config.federation.model_copy(
        update={"clients": tuple(clients)})})
    print("| fault | what happened | seconds to recover | lost |\n|---|---|---|---|", flush=True)
    failed = False
    for name in options.only.split(","):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir()
        rounds = GROUPS[name].rounds if name in GROUPS else 1
        train = config.train.model_copy(update={"rounds": rounds})
        path = out / name / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_copy(update={"train": train}).model_dump(
            mode="json"), sort_keys=False))
        rows = (refusals(out / name, path, clients) if name == "refusals"
                else try_group(GROUPS[name], out / name, path, clients))
        for row in rows:
            failed = failed or row[1].startswith("FAILED")
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
