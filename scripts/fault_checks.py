"""What must hold after a fault: the run is that of one process in which the same is missing."""

import contextlib
import functools
import json
import tempfile
from pathlib import Path

from tapfl.engine.files import read_state
from tapfl.engine.messages import NoAnswer
from tapfl.engine.results import read_results
from tapfl.engine.run import run
from tapfl.engine.site import Here
from tapfl.errors import TapflError

_REFERENCES = {}


class Without(Here):
    """All clients in this process; some are missing in some rounds."""

    missing: frozenset = frozenset()

    @contextlib.contextmanager
    def open(self, plan, folder):
        with super().open(plan, folder) as (method, clients):
            yield method, _Without(clients, self.missing)


class _Without:
    def __init__(self, clients, missing):
        self._clients, self._missing = clients, missing

    def __getattr__(self, name):
        return getattr(self._clients, name)

    def ask(self, ask, whom):
        def there():
            for member, blocks in whom:
                if (ask.kind, member.id, ask.round) in self._missing:
                    lost.append(NoAnswer(member.id, "missing"))
                else:
                    yield member, blocks
        lost = []
        yield from self._clients.ask(ask, there())
        yield from lost


def reference(config, missing):
    """Return the results of a run in one process, without some clients in some rounds."""
    key = config.train.rounds, missing
    if key not in _REFERENCES:
        class Site(Without):
            pass
        Site.missing = frozenset(("train", client, round_) for client, round_ in missing)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run(config, out, device="cpu", site=Site)
            _REFERENCES[key] = [row for row in read_results(out / "results.csv")
                                    if not row["metric"].startswith("general_")]
    return _REFERENCES[key]


def check(machines, config, victim):
    """Return what does not hold, and a function that says what was lost in some rounds."""
    faults = []
    events = [json.loads(line)
              for line in (machines.out / "events.jsonl").read_text().splitlines()]
    missing = frozenset((e["client"], e["round"]) for e in events
                        if e["event"] in ("missing", "refused"))
    others = [client for client in machines.clients if client != victim]
    if any(client in others for client, _ in missing):
        faults.append(f"others are missing: {sorted(missing)}")
    try:
        found = read_results(machines.out / "results.csv")
    except (OSError, TapflError) as error:
        return [*faults, str(error)], lambda rounds: ""
    expected = reference(config, missing)
    # The shared model of everybody, and the personal models of those who were not touched.
    for what, chosen in (("shared models", lambda row: row["method"] == "fedavg"),
                         ("others' personal models", lambda row: row["client"] in others)):
        if list(filter(chosen, found)) != list(filter(chosen, expected)):
            faults.append(f"{what}: other results than in one process")
    if len(found) != len(expected):
        faults.append(f"{len(found)} results, expected {len(expected)}")
    for client in machines.clients:
        faults += _damaged(machines.home(client))
    faults += _damaged(machines.out)
    return faults, functools.partial(_lost, events, missing, config, machines.clients)


def _damaged(folder):
    """Return the states of a run's folder that cannot be read, or hold what is not finite."""
    found = []
    for path in [*(folder / "models").rglob("*.safetensors"),
                 *(folder / "state").rglob("*.safetensors")]:
        try:
            fault = read_state(path)[0].not_finite()
        except TapflError as error:
            fault = str(error)
        if fault is not None:
            found.append(f"{path.name}: {fault}")
    if not (folder / "results.csv").is_file() and (folder / "run.json").is_file():
        found.append(f"{folder}: no results")
    return found


def _lost(events, missing, config, clients, among):
    """Say whose updates and whose steps of X are not there, of some rounds."""
    rounds = [r for r in range(config.train.rounds) if r in among]
    personal = {(e["client"], e["round"]) for e in events if e["event"] == "personal"}
    steps = {(client, r) for client in clients for r in rounds} - personal
    updates = {(client, r) for client, r in missing if r in among}
    parts = [f"{what} of round{'s' if len(turns) > 1 else ''} "
             f"{', '.join(str(r + 1) for _, r in sorted(turns))}"
             for what, turns in (("the update", updates), ("the step of X", steps)) if turns]
    return " and ".join(parts) or "nothing"
