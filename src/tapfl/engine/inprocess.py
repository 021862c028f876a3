"""Clients that live in this process: one frozen base, every client in turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.data.federation import Federation, Member
from tapfl.engine.files import header_digest
from tapfl.engine.messages import Answer, Ask, Final, Report
from tapfl.engine.samples import samples_digest
from tapfl.engine.worker import Worker
from tapfl.errors import TapflError


@dataclass(frozen=True)
class InProcess:
    """Calls turns here; one client's W is held at a time."""

    worker: Worker
    federation: Federation

    def ask(self, ask: Ask, whom: Iterable[tuple[Member, BlockState]]) -> Iterator[Answer]:
        """Let one client after the other have its turn."""
        for member, received in whom:
            turn = self.worker.turn(self.federation[member.index])
            if ask.kind == "train":
                yield turn.train(ask.round, received)  # it is averaged before X trains
                yield Report(member.id, ask.round, turn.personalize(ask.round))
            elif ask.kind == "evaluate":
                yield Final(member.id, turn.evaluate(received))
            else:
                yield turn.finish(received)
            self.worker.end_turn(member, ask.round, ask.kept)

    def settle(self, round_: int) -> list[Any]:
        """Have the clients' files written; return those that a round consists of."""
        self.worker.store.flush()
        return list(self.worker.store.listing(as_of=round_))

    def keeps(self, member: Member, models: Mapping[str, str], scores: Mapping[str, str],
              samples: Mapping[str, str]) -> bool:
        """Compare the checksums that the files carry."""
        return kept_files(self.worker, member, models, scores, samples)

    def check(self, listed: Sequence[Any]) -> str | None:
        """Compare the clients' files with what a checkpoint lists."""
        return self.worker.store.check(listed)

    def adopt(self, folder: Path, listed: Sequence[Any] | None,
              clients: Sequence[str]) -> list[Any]:
        """Copy what clients kept for the methods of this federated run."""
        return adopt_files(self.worker, folder, listed, clients)


def adopt_files(worker: Worker, folder: Path, listed: Sequence[Any] | None,
                clients: Sequence[str]) -> list[Any]:
    """Copy what clients kept in another run into a worker's store."""
    if listed is None and clients:
        raise TapflError(f"start: {folder}: what its clients keep is not there: it is on their "
                         "own machines, or was removed, or the run had no checkpoints "
                         "(checkpoint.every: null)")
    owners = {worker.plan.name, *(p.name for p in worker.personalizers)}
    known = set(clients)
    return list(worker.store.take(folder / "clients", [
        each for each in listed or () if each[0] in owners and each[1] in known]))


def kept_files(worker: Worker, member: Member, models: Mapping[str, str],
               scores: Mapping[str, str], samples: Mapping[str, str]) -> bool:
    """Return whether a client's files in a worker's folder have these checksums."""
    return all(found(path(method, member.id)) == digest
               for path, found, files in ((worker.model_path, header_digest, models),
                                          (worker.scores_path, header_digest, scores),
                                          (worker.samples_path, samples_digest, samples))
               for method, digest in files.items())
