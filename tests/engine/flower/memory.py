"""A transport without a network: frames are handed to residents in this process."""

import functools
import itertools
import sys

from tapfl.engine.flower.allow import ALLOW
from tapfl.engine.flower.elsewhere import Elsewhere
from tapfl.engine.flower.nodes import Patience
from tapfl.engine.flower.resident import Resident
from tapfl.engine.rounds import Rounds
from tapfl.engine.run import run

EVERYTHING = frozenset(ALLOW)


class Killed(BaseException):
    """The end of a process, as kill -9 does it."""


def while_alive(rounds, commit=Rounds.commit):
    """Instead of Rounds.commit: a process that is killed writes nothing down."""
    if not isinstance(sys.exception(), Killed):
        commit(rounds)


class InMemory:
    """Nodes by id, each a resident or anything else that answers; answers come last one first."""

    def __init__(self, residents):
        self.residents = dict(enumerate(residents, 1))
        self.numbers, self.waiting, self.after = itertools.count(), {}, []
        self.bytes = 0

    def nodes(self):
        return list(self.residents)

    def push(self, node, data, patience):
        id_ = str(next(self.numbers))
        self.bytes += len(data)
        if node not in self.residents:
            self.waiting[id_] = "the node is gone"
            return id_
        while self.after:  # what the last reply left to do comes before the next message
            self.after.pop(0)()
        answer = self.residents[node].answer(data)
        self.waiting[id_], then = answer if isinstance(answer, tuple) else (answer, None)
        if then is not None:
            self.after.append(then)
        return id_

    def pull(self, ids):
        found = {id_: self.waiting.pop(id_) for id_ in sorted(ids, reverse=True)
                 if self.waiting.get(id_) is not None}
        self.bytes += sum(len(data) for data in found.values())
        return found


class Listening(InMemory):
    """Remembers every byte that comes from nodes."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.heard = []

    def pull(self, ids):
        found = super().pull(ids)
        self.heard += found.values()
        return found


class Deadly(InMemory):
    """After the n-th message to a client the server is no more; ``then`` still happens there."""

    def __init__(self, nodes, nth):
        super().__init__(nodes)
        self.nth, self.calls = nth, itertools.count(1)

    def push(self, node, data, patience):
        id_ = super().push(node, data, patience)
        if next(self.calls) == self.nth:
            raise Killed
        return id_


def residents(config, folder, groups, allow=EVERYTHING, **more):
    """One resident for each list of clients."""
    return [Resident(config, hosted, folder / f"node{i}", allow=allow, **more)
            for i, hosted in enumerate(groups)]


def served(config, out, transport, patience=None, notify=lambda event: None, resume=False, **more):
    """Run the server's side over a transport."""
    patience = patience or Patience(join=0.5, hello=0.5, round=5, finish=5, poll=0.001)
    site = functools.partial(Elsewhere, transport, patience, **more)
    return run(config, out, device="cpu", notify=notify, resume=resume, site=site)
