"""Progress of a run: bars with the time left on a terminal, plain lines elsewhere, TensorBoard.

Each display is a subscriber: it is called with every event and shows those that it knows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapfl.errors import TapflError
from tapfl.events import (
    ClientFinished,
    Curve,
    DataPrepared,
    Diverged,
    Event,
    Left,
    Message,
    Missing,
    PersonalLosses,
    Refused,
    Replacement,
    RoundEnded,
    RowsDropped,
    RunStarted,
)


class Display:
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        """Show an event."""

    def close(self) -> None:
        """Nothing more will come."""


def progress(quiet: bool = False, tensorboard: Path | None = None) -> Display:
    """Return the displays that suit standard error."""
    shown: list[Display] = []
    if not quiet:
        shown.append(_Bars() if sys.stderr.isatty() else _Lines())
    if tensorboard is not None:
        shown.append(_TensorBoard(tensorboard))
    return _Several(shown)


class _Several(Display):
    def __init__(self, displays: Sequence[Display]) -> None:
        self.displays = displays

    def __call__(self, event: Event) -> None:
        for display in self.displays:
            display(event)

    def close(self) -> None:
        for display in self.displays:
            display.close()


class _Counter:
    """What happened to clients since it was last asked."""

    WORDS = ((Replacement, "replaced"), (Refused, "refused"), (Missing, "missing"),
             (Diverged, "diverged"), (Left, "left"))

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, event: Event) -> None:
        for kind, word in self.WORDS:
            if isinstance(event, kind):
                self._counts[word] = self._counts.get(word, 0) + 1

    def line(self, event: RoundEnded) -> str:
        """Return a round in a line; counting begins anew."""
        words = [" ".join(event.cohort[:4]) + (" …" if len(event.cohort) > 4 else "")]
        words += [f"{task} {loss:.3f}" for task, loss in sorted(event.losses.items())[:4]]
        words += [f"{count} {word}" for word, count in self._counts.items()]
        self._counts = {}
        return " · ".join(words)


class _Lines(Display):
    """About twenty lines per federated run."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._name, self._rounds, self._counter = "", 0, _Counter()

    def _print(self, message: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {message}", file=sys.stderr, flush=True)

    def __call__(self, event: Event) -> None:
        self._counter.add(event)
        match event:
            case DataPrepared() if event.done == event.total:
                self._print(f"data: {event.name}, {event.total} rows prepared")
            case RunStarted():
                self._name, self._rounds = event.method, event.rounds
                self._print(f"{event.method}: {event.rounds} rounds, {event.clients} clients"
                            + (f", going on after round {event.done}" if event.done else ""))
            case RoundEnded():
                done = event.round + 1
                if done % max(1, self._rounds // 10) == 0 or done == self._rounds:
                    self._print(f"{self._name}: round {done}/{self._rounds} · "
                                f"{self._counter.line(event)}")
            case ClientFinished():
                if event.done % max(1, event.clients // 5) == 0 or event.done == event.clients:
                    self._print(f"{self._name}: final models of {event.done}/{event.clients} "
                                "clients")
            case Message() | RowsDropped():
                self._print(str(event))


class _Bars(Display):
    """Two bars per federated run: rounds, then clients' final models."""

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
            TextColumn("{task.fields[note]}", style="dim",
                       table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True), expand=True)
        self._tables: dict[str, Any] = {}
        self._counter = _Counter()

    def __call__(self, event: Event) -> None:
        self._counter.add(event)
        match event:
            case DataPrepared():
                if event.name not in self._tables:
                    self._progress.start()
                    self._tables[event.name] = self._progress.add_task(
                        f"data: {event.name}", total=event.total, note="")
                self._progress.update(self._tables[event.name], completed=event.done)
            case RunStarted():
                self._progress.start()  # only now: an error before this leaves the terminal alone
                self._rounds = self._progress.add_task(
                    f"{event.method}: rounds", total=event.rounds, completed=event.done, note="")
                self._final = self._progress.add_task(f"{event.method}: final models",
                                                      total=event.clients, note="")
            case RoundEnded():
                self._progress.update(self._rounds, completed=event.round + 1,
                                      note=self._counter.line(event))
            case ClientFinished():
                self._progress.update(self._final, completed=event.done, note=event.client)
            case Message() | RowsDropped():
                self._progress.console.print(str(event), markup=False)

    def close(self) -> None:
        self._progress.stop()


class _TensorBoard(Display):
    """Losses of W and of each personal model, and what happened, as TensorBoard scalars."""

    _writer: Any

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise TapflError("--tensorboard needs the tensorboard package: "
                             "pip install 'tapfl[tensorboard]'") from None
        # The folder is made when there is something to write.
        self._make: Any = SummaryWriter
        self._folder, self._writer = folder, None
        self._means: dict[str, list[float]] = {}  # of the round under way, by name
        self._counts = {"replacements": 0, "refused": 0}

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._writer = self._writer or self._make(str(self._folder))
            case PersonalLosses():
                for task, loss in event.losses.items():
                    self._count(f"{event.method}/personal_loss/{task}", loss)
            case Curve():
                for metric, value in event.values.items():
                    self._count(f"{event.method}/curve/{event.task}/{metric}", value)
            case Replacement():
                self._counts["replacements"] += 1
            case Refused():
                self._counts["refused"] += 1
            case RoundEnded():
                self._round(event)

    def _count(self, name: str, value: float) -> None:
        self._means.setdefault(name, []).append(value)

    def _round(self, event: RoundEnded) -> None:
        """Write a round: means over its clients."""
        for task, loss in event.losses.items():
            self._writer.add_scalar(f"{event.method}/loss/{task}", loss, event.round)
        for name, values in self._means.items():
            self._writer.add_scalar(name, sum(values) / len(values), event.round)
        for what, count in self._counts.items():
            self._writer.add_scalar(f"{event.method}/{what}", count, event.round)
        self._means, self._counts = {}, dict.fromkeys(self._counts, 0)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
