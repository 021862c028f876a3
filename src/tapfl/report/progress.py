"""Progress of a run: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tapfl.engine.watch import Watch


def progress(quiet: bool = False, tensorboard: Path | None = None) -> Watch:
    """Return the display that suits standard error."""
    shown: list[Watch] = []
    if not quiet:
        shown.append(_Bars() if sys.stderr.isatty() else _Lines())
    if tensorboard is not None:
        shown.append(_TensorBoard(tensorboard))
    return _Several(shown)


class _Several(Watch):
    def __init__(self, watches: Sequence[Watch]) -> None:
        self.watches = watches

    def data(self, name: str, done: int, total: int) -> None:
        for watch in self.watches:
            watch.data(name, done, total)

    def method(self, name: str, rounds: int, done: int, clients: int) -> None:
        for watch in self.watches:
            watch.method(name, rounds, done, clients)

    def round(self, round_: int, cohort: Sequence[str], losses: Mapping[str, float],
              replacements: int, refused: int) -> None:
        for watch in self.watches:
            watch.round(round_, cohort, losses, replacements, refused)

    def client(self, client: str, done: int, clients: int) -> None:
        for watch in self.watches:
            watch.client(client, done, clients)

    def say(self, message: str) -> None:
        for watch in self.watches:
            watch.say(message)

    def close(self) -> None:
        for watch in self.watches:
            watch.close()


def _told(cohort: Sequence[str], losses: Mapping[str, float], replacements: int,
          refused: int) -> str:
    words = [" ".join(cohort[:4]) + (" …" if len(cohort) > 4 else "")]
    words += [f"{task} {loss:.3f}" for task, loss in sorted(losses.items())[:4]]
    if replacements:
        words.append(f"{replacements} replaced")
    if refused:
        words.append(f"{refused} refused")
    return " · ".join(words)


class _Lines(Watch):
    """About twenty lines per method."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._name, self._rounds = "", 0
        self._replacements = self._refused = 0

    def _print(self, message: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {message}", file=sys.stderr, flush=True)

    def data(self, name: str, done: int, total: int) -> None:
        if done == total:
            self._print(f"data: {name}, {total} rows prepared")

    def method(self, name: str, rounds: int, done: int, clients: int) -> None:
        self._name, self._rounds = name, rounds
        self._print(f"{name}: {rounds} rounds, {clients} clients"
                    + (f", going on after round {done}" if done else ""))

    def round(self, round_: int, cohort: Sequence[str], losses: Mapping[str, float],
              replacements: int, refused: int) -> None:
        self._replacements += replacements
        self._refused += refused
        if (round_ + 1) % max(1, self._rounds // 10) == 0 or round_ + 1 == self._rounds:
            told = _told(cohort, losses, self._replacements, self._refused)
            self._print(f"{self._name}: round {round_ + 1}/{self._rounds} · {told}")
            self._replacements = self._refused = 0

    def client(self, client: str, done: int, clients: int) -> None:
        if done % max(1, clients // 5) == 0 or done == clients:
            self._print(f"{self._name}: final models of {done}/{clients} clients")

    def say(self, message: str) -> None:
        self._print(message)


class _Bars(Watch):
    """Two bars per method: rounds, then clients' final models."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            # The last column alone gives way on a narrow terminal.
            TextColumn("{task.fields[told]}", style="dim",
                       table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True), expand=True)

        self._tables: dict[str, Any] = {}

    def data(self, name: str, done: int, total: int) -> None:
        if name not in self._tables:
            self._progress.start()
            self._tables[name] = self._progress.add_task(f"data: {name}", total=total, told="")
        self._progress.update(self._tables[name], completed=done)

    def method(self, name: str, rounds: int, done: int, clients: int) -> None:
        self._progress.start()  # only now: an error before this leaves the terminal alone
        self._rounds = self._progress.add_task(f"{name}: rounds", total=rounds, completed=done,
                                               told="")
        self._final = self._progress.add_task(f"{name}: final models", total=clients, told="")

    def round(self, round_: int, cohort: Sequence[str], losses: Mapping[str, float],
              replacements: int, refused: int) -> None:
        self._progress.update(self._rounds, completed=round_ + 1,
                              told=_told(cohort, losses, replacements, refused))

    def client(self, client: str, done: int, clients: int) -> None:
        self._progress.update(self._final, completed=done, told=client)

    def say(self, message: str) -> None:
        self._progress.console.print(message, markup=False)

    def close(self) -> None:
        self._progress.stop()


class _TensorBoard(Watch):
    """Losses and replacements as TensorBoard scalars; needs the tensorboard package."""

    _writer: Any

    def __init__(self, folder: Path) -> None:
        from tapfl.errors import TapflError

        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TapflError("--tensorboard needs the tensorboard package: "
                             "pip install 'tapfl[tensorboard]'") from None
        # The folder is made when there is something to write.
        self._make: Any = SummaryWriter
        self._folder, self._writer, self._name = folder, None, ""

    def method(self, name: str, rounds: int, done: int, clients: int) -> None:
        self._name = name
        self._writer = self._writer or self._make(str(self._folder))

    def round(self, round_: int, cohort: Sequence[str], losses: Mapping[str, float],
              replacements: int, refused: int) -> None:
        for task, loss in losses.items():
            self._writer.add_scalar(f"{self._name}/loss/{task}", loss, round_)
        self._writer.add_scalar(f"{self._name}/replacements", replacements, round_)
        self._writer.add_scalar(f"{self._name}/refused", refused, round_)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
