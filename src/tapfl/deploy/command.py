"""`tapfl deploy`: a federation on real machines, over Flower."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

from tapfl.deploy.operate import add_status, add_stop
from tapfl.errors import TapflError
from tapfl.verbs import Verbs, add_verb

PATIENCE = ("join", "round", "finish", "minimum")


@contextlib.contextmanager
def _for_the_owner() -> Any:
    """Have all that is written, by processes below as well, be this user's alone.

    It tells of data: messages on their way, labels, samples, logs.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def add_deploy(verbs: Verbs) -> None:
    """Add ``tapfl deploy`` and what belongs below it."""
    verb = verbs.add_parser(
        "deploy", help="run a federation on real machines, over Flower",
        description="Run a federation on real machines, over Flower: a server, and a node for each "
                    "machine\nthat holds clients' data. Needs: pip install 'tapfl[flower]'",
        epilog="examples:\n  tapfl deploy local quickstart --clients 3 --out runs/deployed\n"
               "  tapfl deploy keys keys --host fl.example.org --nodes clinic-a,clinic-b",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    verb.set_defaults(run=lambda options: verb.print_help())
    below = verb.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_keys, _add_server, _add_client, _add_local, add_status, add_stop):
        add(below)


def _add_config(verb: argparse.ArgumentParser, reads_data: bool = True) -> None:
    verb.add_argument("preset", metavar="PRESET|FILE.yaml",
                      help="a shipped preset or a configuration file, the same everywhere")
    verb.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
                      help="change any key of the configuration, by its dotted name")
    if reads_data:
        verb.add_argument("--data", metavar="DIR", help="a folder that mirrors the hub's data sets")
    verb.add_argument("--threads", type=int, metavar="N", help="CPU threads to compute with")
    verb.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where to compute")
    verb.add_argument("--modules", type=Path, metavar="DIR",
                      help="where methods of your own are imported from")


def _add_patience(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--join", type=float, metavar="S",
                      help="how long to wait for nodes before giving up (300)")
    verb.add_argument("--round", type=float, metavar="S",
                      help="how long a client may take for a round (600)")
    verb.add_argument("--finish", type=float, metavar="S",
                      help="how long a client may take for its final models (3600)")
    verb.add_argument("--minimum", type=int, metavar="N",
                      help="how many clients must be connected for a round to begin (1)")
    verb.add_argument("--compression", choices=("none", "zlib"), default="none",
                      help="compress blocks on their way (none)")


def _add_keys(verbs: Verbs) -> None:
    verb = add_verb(
        verbs, "keys", _keys, "make certificates and node keys",
        "Make what is missing in a folder: a certificate authority (ca.pem, ca.key), the\n"
        "server's certificate, and a key for each node. The server needs the folder without\n"
        "ca.key; a node needs ca.pem and its own nodes/NAME.key. Nothing is replaced.",
        ["tapfl deploy keys keys --host fl.example.org --nodes clinic-a,clinic-b",
        "tapfl deploy keys keys --nodes clinic-c"])
    verb.add_argument("folder", type=Path, metavar="DIR", help="where the keys are")
    verb.add_argument("--host", action="append", default=[], metavar="NAME",
                      help="a name or an address that nodes reach the server by; may be repeated")
    verb.add_argument("--nodes", default="", metavar="A,B", help="names of nodes")


def _keys(options: argparse.Namespace) -> None:
    with _flower():
        from tapfl.deploy.keys import make_keys

    made = make_keys(options.folder, options.host, _listed(options.nodes))
    print("\n".join(f"made: {path}" for path in made) or f"{options.folder}: nothing was missing")


def _add_server(verbs: Verbs) -> None:
    verb = add_verb(
        verbs, "server", _server, "run the server of a federation",
        "Start a SuperLink on this machine's loopback interface, let the registered nodes in,\n"
        "and run the federation to its end. With --public, a proxy (nginx) listens there and\n"
        "passes to nodes what nodes need, and nothing else. Stopped or killed, the same\n"
        "command goes on from the last checkpoint. clients.yaml in the folder of keys says\n"
        "which key has which clients; other nodes are refused.",
        ["tapfl deploy server clinics.yaml --keys keys --out runs/clinics "
        "--public 0.0.0.0:8443",
        "tapfl deploy status runs/clinics"])
    _add_config(verb, reads_data=False)
    verb.add_argument("--seed", type=int, metavar="N", help="the seed")
    verb.add_argument("--keys", type=Path, required=True, metavar="DIR",
                      help="the folder of 'tapfl deploy keys'")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    verb.add_argument("--port", type=int, metavar="N",
                      help="the SuperLink's port on this machine (a free one)")
    verb.add_argument("--public", metavar="HOST:PORT", help="where nodes elsewhere reach the proxy")
    _add_patience(verb)


@_for_the_owner()
def _server(options: argparse.Namespace) -> None:
    with _flower():
        from tapfl.deploy.server import BELOW, Server
        from tapfl.engine.flower.job import Job
    from tapfl.data.participants import client_ids, load_federation
    from tapfl.deploy.hosts import read_hosts
    from tapfl.engine.run import pick_device

    config, folder = _config(options), options.out / BELOW
    hosts = read_hosts(options.keys, list(client_ids(load_federation(config.federation),
                                                     config.federation)))
    job = Job(config=config, out=options.out.resolve(), log=(folder / "log.jsonl").resolve(),
              device=pick_device(options.device), modules=_own(options),
              compression=options.compression, patience=_patience(options))
    with Server(options.out, options.keys, options.port, options.public, hosts) as server:
        print(f"nodes reach this server at {server.address}", flush=True)
        for said in server.begin(job):
            _say(said)
    print(f"results: {options.out / 'results.csv'}")


def _add_client(verbs: Verbs) -> None:
    verb = add_verb(
        verbs, "client", _client, "take part in a federation with this machine's clients",
        "Hold the data and the personal models of one or more clients, and answer the server\n"
        "until stopped. Besides updates of the shared model, nothing leaves this machine but\n"
        "what --allow names. DIR is a run's folder: predict, export and report work there.\n"
        "With --socket, the SuperNode that brings the messages is started by somebody else.",
        ["tapfl deploy client clinics.yaml --clients clinic-a --out state "
        "--superlink fl.example.org:8443 --ca ca.pem --key clinic-a.key --allow scores",
        "tapfl deploy client clinics.yaml --clients clinic-a --out state --socket resident"])
    _add_config(verb)
    verb.add_argument("--seed", type=int, metavar="N", help="the seed, the same everywhere")
    verb.add_argument("--clients", required=True, metavar="A,B", help="the clients that live here")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="their own folder")
    verb.add_argument("--superlink", metavar="HOST:PORT", help="the server")
    verb.add_argument("--ca", type=Path, metavar="FILE",
                      help="the certificate of the federation's authority (ca.pem)")
    verb.add_argument("--key", type=Path, metavar="FILE", help="this node's private key")
    verb.add_argument("--socket", type=Path, metavar="PATH",
                      help="start no SuperNode; listen here for one that you start yourself")
    verb.add_argument("--group", metavar="NAME",
                      help="with --socket: the group of the user that the SuperNode runs under")
    verb.add_argument("--allow", default="", metavar="A,B",
                      help="what else may be reported: scores, losses, replacements, notes "
                           "(nothing)")


@_for_the_owner()
def _client(options: argparse.Namespace) -> None:
    with _flower():
        from tapfl.deploy.node import Node
        from tapfl.engine.flower.allow import ALLOW

    allow = _listed(options.allow)
    for name in allow:
        if name not in ALLOW:
            raise TapflError(f"--allow {name}: expected some of {', '.join(ALLOW)}")
    _check_ways(options)
    if options.socket:
        from tapfl.deploy.resident import Home, live

        live(Home(config=_config(options), clients=tuple(_listed(options.clients)),
                  out=options.out, socket=options.socket.resolve(), group=options.group,
                  allow=tuple(allow), device=options.device, modules=_own(options)))
        return
    Node(_config(options), _listed(options.clients), options.out, options.superlink, options.ca,
         options.key, allow, options.device, _own(options)).run(
             lambda text: print(text, flush=True))


def _check_ways(options: argparse.Namespace) -> None:
    """A node reaches its server by a SuperNode of its own, or by somebody else's."""
    given = [name for name in ("superlink", "ca", "key") if getattr(options, name)]
    if options.socket and given:
        raise TapflError(f"--{given[0]}: belongs to the SuperNode, which --socket leaves to you")
    if not options.socket and len(given) < 3:
        raise TapflError("deploy client: expected --superlink, --ca and --key, or --socket")
    if options.group and not options.socket:
        raise TapflError("--group: goes with --socket")


def _add_local(verbs: Verbs) -> None:
    verb = add_verb(
        verbs, "local", _local, "try a whole deployment on this machine",
        "Run a federation over Flower's servers on the loopback interface: a SuperLink, and a\n"
        "node with a process of its own for each client, with TLS and keys. Ends with\n"
        "DIR/results.csv, as 'tapfl run' writes it.",
        ["tapfl deploy local quickstart --clients 3 --out runs/deployed",
        "tapfl deploy local quickstart --clients g0-0,g0-7 --proxy --out runs/two"])
    _add_config(verb)
    verb.add_argument("--seed", type=int, metavar="N", help="the seed")
    verb.add_argument("--clients", default="3", metavar="N|A,B",
                      help="the first N clients of the federation, or these (3)")
    verb.add_argument("--nodes", type=int, metavar="N",
                      help="spread them over so many nodes (one for each)")
    verb.add_argument("--out", type=Path, required=True, metavar="DIR", help="the run's folder")
    verb.add_argument("--proxy", action="store_true", help="with the proxy of a public server")
    _add_patience(verb)


@_for_the_owner()
def _local(options: argparse.Namespace) -> None:
    with _flower():
        from tapfl.deploy.local import run_local
    from tapfl.data.participants import client_ids, load_federation
    from tapfl.engine.results import read_results
    from tapfl.engine.run import pick_device
    from tapfl.report.tables import show

    config = _config(options)
    ids = list(client_ids(load_federation(config.federation), config.federation))
    chosen = (ids[:int(options.clients)] if options.clients.isdigit()
              else _listed(options.clients))
    federation = config.federation.model_copy(update={"clients": tuple(chosen)})
    train = config.train.model_copy(update={"cohort": min(config.train.cohort, len(chosen))})
    config = config.model_copy(update={"federation": federation, "train": train})
    nodes = options.nodes or len(chosen)
    groups = [chosen[i::nodes] for i in range(min(nodes, len(chosen)))]
    run_local(config, groups, options.out, device=pick_device(options.device), proxy=options.proxy,
              patience=_patience(options), compression=options.compression, modules=_own(options),
              say=_say)
    show(read_results(options.out / "results.csv"), config.methods)
    print(f"results: {options.out / 'results.csv'}")


def _config(options: argparse.Namespace) -> Any:
    from tapfl.config import load_config
    from tapfl.use.mirror import with_mirror

    more = [f"{key}={value}" for key, value in (
        ("seed", options.seed), ("threads", options.threads)) if value is not None]
    return with_mirror(load_config(options.preset, [*options.overrides, *more]),
                       getattr(options, "data", None))


def _patience(options: argparse.Namespace) -> Any:
    from tapfl.engine.flower.nodes import Patience

    given = {name: getattr(options, name) for name in PATIENCE}
    return Patience(**{name: value for name, value in given.items() if value is not None})


def _own(options: argparse.Namespace) -> Path | None:
    beside = Path(options.preset).parent if Path(options.preset).is_file() else None
    modules: Path | None = options.modules or beside
    return modules.resolve() if modules else None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _say(said: dict[str, Any]) -> None:
    """Print a line of a job's log for people."""
    from tapfl.engine.flower.job import in_words

    print(in_words(said), flush=True)


@contextlib.contextmanager
def _flower() -> Any:
    """Turn a missing library into a line that says what to install."""
    try:
        yield
    except ImportError as error:
        raise TapflError(f"deploy: {error.name} is not installed; "
                         "pip install 'tapfl[flower]'") from None
