"""Real faults on a real deployment: python scripts/try_faults.py [--only NAME,..] [--out DIR]

Every fault has a federation of its own on loopback: SuperLink, proxy, three SuperNodes, TLS and
keys. It happens in the middle of a round. When the run is over, its results are compared with those
of a run in one process in which the same updates are missing. Prints a Markdown table.
Needs nginx; the clock that is off needs faketime, the full disk needs root.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from fault_checks import check
from machines import Machines
from refusals import refusals
from safetensors.torch import load, save

from tapfl.config import load_config
from tapfl.data.federation import client_ids, load_federation
from tapfl.engine.flower.frames import pack, unpack

ROUND = 1  # the round in which it happens: the second
AWAY = 5.0  # seconds until somebody starts a killed command again
SETTINGS = ("threads=1", "methods=[fedavg,tap]", "train.rounds=5", "train.cohort=3",
            "train.local_steps=8", "checkpoint.every=2")


@dataclass
class Fault:
    """What happens to a client: ``act`` once it is asked, or has answered; or its answer changes.

    ``begin`` starts the client in a way of its own.
    """

    title: str
    act: Callable[[Machines, str], None] = lambda machines, client: None
    after: bool = False
    delay: float = 0.3
    answer: Callable[[dict, bytes, bytes], tuple | bytes] | None = None
    begin: Callable[[Machines, str], None] = Machines.start_client
    patience: tuple = ("--round", "120", "--join", "150")


def kill(what: str, of_client: bool = False, number: int = signal.SIGKILL):
    return lambda machines, client: machines.signal(number, what, client if of_client else None)


def kill_command(what: str):
    """Kill one of our own commands, and start it again as an operator would."""
    def act(machines, client):
        name = client if what == "node" else what
        machines.signal(signal.SIGKILL, what, client if what == "node" else None)
        machines.collect(name)
        time.sleep(AWAY)
        machines.start_client(client) if what == "node" else machines.start_server()
    return act


def stop_for(seconds: float):
    def act(machines, client):
        kill("resident", True, signal.SIGSTOP)(machines, client)
        time.sleep(seconds)
        kill("resident", True, signal.SIGCONT)(machines, client)
    return act


def small_disk(machines, client):
    folder = machines.home(client).parent
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True)
    machines.start_client(client)


def fill_disk(machines, client):
    path = machines.home(client).with_name("filler")
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    time.sleep(12)
    path.unlink()


def with_clock(offset: str):
    before = ("env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", offset)
    return lambda machines, client: machines.start_client(client, before)


def clock_goes_wrong(machines, client):
    machines.signal(signal.SIGTERM, "node", client)
    machines.collect(client)
    with_clock("+1h")(machines, client)
    time.sleep(60)
    machines.signal(signal.SIGTERM, "node", client)
    machines.collect(client)
    machines.start_client(client)


def blocks(change):
    """Change the blocks of an answer."""
    def answer(asked, reply, earlier):
        header, body = unpack(reply)
        return header, save(change(load(body)))
    return answer


def first(values, name, value):
    return {**dict(list(values.items())[1:]), name or next(iter(values)): value}


def one(values):
    return next(iter(values.values()))


FAULTS = {
    "supernode": Fault("kill -9 of a SuperNode", kill("supernode", True)),
    "resident": Fault("kill -9 of a resident process, W in training", kill("resident", True)),
    "resident-x": Fault("kill -9 of a resident process, X in training", kill("resident", True),
                        after=True, delay=0.1),
    "node": Fault("kill -9 of `deploy client`, started again 5 s later", kill_command("node")),
    "serverapp": Fault("kill -9 of the run (ServerApp)", kill("serverapp")),
    "superlink": Fault("kill -9 of the SuperLink", kill("superlink")),
    "proxy": Fault("kill -9 of the proxy", kill("proxy")),
    "server": Fault("kill -9 of `deploy server`, started again 5 s later", kill_command("server")),
    "hang": Fault("a resident process stopped for 40 s, `--round 20`", stop_for(40),
                  patience=("--round", "20", "--join", "150")),
    "nan": Fault("an update of NaN", answer=blocks(
        lambda found: {n: torch.full_like(v, float("nan")) for n, v in found.items()})),
    "foreign": Fault("an update with a foreign block", answer=blocks(
        lambda found: first(found, "decoder/foreign", one(found)))),
    "shape": Fault("an update of a wrong shape", answer=blocks(
        lambda found: first(found, None, one(found)[:-1]))),
    "large": Fault("ten times the bytes", answer=lambda asked, reply, earlier: (
        unpack(reply)[0], unpack(reply)[1] * 10)),
    "garbage": Fault("garbage", answer=lambda asked, reply, earlier: bytes(reversed(reply))),
    "replay": Fault("the answer of the round before, again",
                    answer=lambda asked, reply, earlier: earlier),
    "disk": Fault("a client's disk is full for 12 s", fill_disk, begin=small_disk, delay=0.0),
    "clock-behind": Fault("a client's clock is 2 min behind", begin=with_clock("-120s")),
    "clock-ahead": Fault("a client's clock is 1 h ahead for 60 s", clock_goes_wrong),
}


class Happening:
    """Has a fault happen once, in ``ROUND``; ``at`` is when it did."""

    def __init__(self, machines: Machines, client: str, fault: Fault) -> None:
        self.at: float | None = None
        self._machines, self._client, self._fault, self._earlier = machines, client, fault, b""
        machines.tap(client, self._asked, self._answered)

    def _asked(self, asked: dict) -> None:
        if not self._fault.after:
            self._now(asked)

    def _answered(self, asked: dict, reply: bytes) -> bytes:
        fault = self._fault
        if fault.after:
            self._now(asked)
        earlier, self._earlier = self._earlier, reply
        if fault.answer is None or asked.get("round") != ROUND:
            return reply
        changed = fault.answer(asked, reply, earlier)
        return pack(*changed) if isinstance(changed, tuple) else changed

    def _now(self, asked: dict) -> None:
        if self.at is None and asked.get("round") == ROUND:
            self.at = time.monotonic() + self._fault.delay
            threading.Timer(self._fault.delay, self._fault.act,
                            [self._machines, self._client]).start()


def connected(said: dict, seen: set) -> bool:
    """Return whether all three have joined."""
    if " joined with " in said.get("says", ""):
        seen.add(said["says"].rpartition(" ")[2])
    return len(seen) == 3


def try_fault(name: str, folder: Path, config_path: Path, clients: list[str]) -> tuple[str, ...]:
    """Have a fault happen; return a row of the table."""
    fault, victim = FAULTS[name], clients[0]
    machines = Machines(folder, config_path, clients, fault.patience)
    try:
        machines.start_server()
        for client in clients:
            (fault.begin if client == victim else Machines.start_client)(machines, client)
        seen: set[str] = set()
        if machines.follow(lambda said: connected(said, seen), 120) is None:
            return fault.title, f"FAILED: only {sorted(seen)} joined", "", ""
        happening = Happening(machines, victim, fault)
        ended = machines.follow(lambda said: said.get("says", "").startswith(
            ("finished", "stopped")), 420)
        what = "FAILED: no end" if ended is None else machines.log[-1][1]["says"]
        recovered = recovery(machines.log, happening.at or 0.0, victim)
    finally:
        machines.stop()
        if name == "disk":
            shutil.copytree(machines.home(victim), folder / "kept")
            subprocess.run(["umount", str(machines.home(victim).parent)], check=False)
    left = machines.left_over()
    faults, lost = check(machines, load_config(str(config_path)), victim,
                         folder / "kept" if name == "disk" else None)
    faults += [f"processes left: {left}"] if left else []
    if what != "finished" or faults:
        return fault.title, f"FAILED: {what}; {'; '.join(faults)}", recovered, lost
    return fault.title, said_of(machines.log, happening.at or 0.0), recovered, lost


def recovery(log: list, since: float, victim: str) -> str:
    """Return the seconds until a round ended in which everybody's update counted."""
    lost = set()
    for when, said in log:
        if when < since:
            continue
        if said.get("event") in ("missing", "refused"):
            lost.add((said["method"], said["round"]))
        if "cohort" in said:
            pending = (said["method"], said["round"])
            # Events of a round come before its end.
            if pending not in lost:
                return f"{when - since:.0f}"
    return f"{log[-1][0] - since:.0f}, in the end"


def said_of(log: list, since: float) -> str:
    """Return what the server said of it, without what it says of every round."""
    texts = []
    for when, said in log:
        text = said.get("says") or (f"round {said['round'] + 1}: {said['event']} "
                                    f"({said['reason']})" if "reason" in said else "")
        if when >= since and text and text != "finished" and text not in texts:
            texts.append(text)
    return "; ".join(texts)[:400].replace("|", "/") or "nothing was noticed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join([*FAULTS, "refusals"]), metavar="A,B",
                        help=f"some of {', '.join(FAULTS)}, refusals")
    parser.add_argument("--out", type=Path, help="a folder for logs and runs (a temporary one)")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="faults-"))
    out.mkdir(parents=True, exist_ok=True)
    config = load_config("quickstart", list(SETTINGS))
    clients = list(client_ids(load_federation(config.federation), config.federation))[:3]
    config = config.model_copy(update={"federation": config.federation.model_copy(
        update={"clients": tuple(clients)})})
    path = out / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    print("| fault | what happened | seconds to recover | lost |\n|---|---|---|---|", flush=True)
    failed = False
    for name in options.only.split(","):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir()
        rows = (refusals(out / name, path, clients) if name == "refusals"
                else [try_fault(name, out / name, path, clients)])
        for row in rows:
            failed = failed or row[1].startswith("FAILED")
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
