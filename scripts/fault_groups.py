"""The faults that try_faults.py has happen, and how each is brought about."""

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from machines import Machines
from safetensors.torch import load, save

from tapfl.engine.flower.frames import unpack

AWAY = 5.0  # seconds until somebody starts a killed command again


@dataclass
class Fault:
    """What happens: ``act`` when a client is asked or has answered, or its answer is changed."""

    title: str
    act: Callable[[Machines, str], None] = lambda machines, client: None
    after: bool = False
    delay: float = 0.3
    answer: Callable[[dict, bytes, bytes], tuple | bytes] | None = None


@dataclass
class Group:
    """Faults of one deployment, with the rounds in which they happen.

    ``begin`` starts the client that they happen to.
    """

    faults: dict[int, Fault]
    begin: Callable[[Machines, str], None] = Machines.start_client
    rounds: int = 9
    patience: int = 120  # for a round


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


GROUPS = {
    "client": Group({
        1: Fault("kill -9 of a resident process, W in training", kill("resident", True)),
        2: Fault("kill -9 of a resident process, X in training", kill("resident", True),
                 after=True, delay=0.1),
        3: Fault("kill -9 of a SuperNode", kill("supernode", True)),
        5: Fault("kill -9 of `deploy client`, started again 5 s later", kill_command("node"))},
        rounds=8),
    "server": Group({
        1: Fault("kill -9 of the proxy", kill("proxy")),
        3: Fault("kill -9 of the run (ServerApp)", kill("serverapp")),
        5: Fault("kill -9 of the SuperLink", kill("superlink")),
        7: Fault("kill -9 of `deploy server`, started again 5 s later", kill_command("server"))}),
    "answers": Group({
        1: Fault("an update of NaN", answer=blocks(
            lambda found: {n: torch.full_like(v, float("nan")) for n, v in found.items()})),
        2: Fault("an update with a foreign block", answer=blocks(
            lambda found: first(found, "decoder/foreign", one(found)))),
        3: Fault("an update of a wrong shape", answer=blocks(
            lambda found: first(found, None, one(found)[:-1]))),
        4: Fault("ten times the bytes", answer=lambda asked, reply, earlier: (
            unpack(reply)[0], unpack(reply)[1] * 10)),
        5: Fault("the answer of the round before, again",
                 answer=lambda asked, reply, earlier: earlier),
        6: Fault("garbage", answer=lambda asked, reply, earlier: bytes(reversed(reply)))},
        rounds=9),
    "hang": Group({
        1: Fault("a resident process stopped for 60 s, `--round 30`", stop_for(60))},
        rounds=6, patience=30),
    "disk": Group({
        1: Fault("a client's disk is full for 12 s", fill_disk, delay=0.0)},
        begin=small_disk, rounds=4),
}
