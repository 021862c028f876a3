"""What a personalizer is: it watches the federated model and never writes to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tapfl.blocks import BlockState
from tapfl.data.federation import Client
from tapfl.errors import TapflError
from tapfl.events import Diverged, Event, Logged
from tapfl.federated.context import Context, Kept, Losses
from tapfl.federated.method import FederatedMethod
from tapfl.federated.settings import Configurable


class Personalizer(Configurable):
    """Makes a client's own model; any number of them can watch one federated run.

    ``name`` is the method's name in the results, and ``context.config`` its configuration: that of
    the run, with a variant's settings merged in.
    """

    preferred: ClassVar[bool] = False  # whether ``predict`` takes this model before others

    @classmethod
    def keeps_model(cls) -> bool:
        """Return whether clients keep X beside W from round to round: if it watches the rounds."""
        return cls.after_training is not Personalizer.after_training

    def __init__(self, context: Context, method: FederatedMethod, name: str) -> None:
        self.context, self.method, self.name = context, method, name
        self.settings = self.read_settings(context.config)

    def after_training(self, client: Client, round_: int, received: BlockState,
                       trained: BlockState, losses: Losses) -> None:
        """See the client's W, as received and just trained, and the loss of every task seen."""

    def current(self, client: Client, round_: int) -> BlockState | None:
        """Return X as it is after a round, to be evaluated on the way; None if there is none."""
        return None

    def after_federation(self, client: Client, final: BlockState) -> BlockState:
        """Return the client's personal model, given its final W."""
        raise NotImplementedError

    # What a personalizer can use

    def after(self, client: Client) -> Client:
        """Return the client as it trains after federation: with its held-out data, if asked for."""
        return client.with_holdout() if self.context.config.post.use_holdout else client

    def post_train(self, client: Client, final: BlockState, steps: int,
                   lr: float | None = None) -> BlockState:
        """Return W after ``steps`` more steps, at the learning rate of post-training by default."""
        rate = self.context.config.post_lr if lr is None else lr
        return self.method.post_train(client, final, steps, rate)

    def first(self, client: Client, w: BlockState | None) -> BlockState:
        """Return what X begins as: W's start, in a run that goes on from another one ``w``."""
        start = self.method.initial if w is None or self.context.config.start is None else w
        return start.subset(self.method.owned(client))

    def load(self, client: Client, before: int) -> Kept | None:
        """Return blocks and notes that were saved for a client before a round, if any were."""
        return self.context.states.load(self.name, client.id, as_of=before - 1)

    def save(self, client: Client, round_: int, state: BlockState,
             notes: Mapping[str, Any]) -> None:
        """Keep blocks and notes (plain JSON) for a client, on its own machine."""
        self.context.states.save(self.name, client.id, round_, state, notes)

    def report(self, event: Event) -> None:
        """Have an event written to events.jsonl."""
        if not isinstance(event, Logged):
            raise TapflError("report: expected an event such as tapfl.events.Note, got "
                             f"{type(event).__name__}")
        json.dumps(event.record(), allow_nan=False)  # what is no JSON fails here, not in the log
        self.context.events.append(event)

    def diverged(self, client: Client, round_: int, state: BlockState, losses: Losses) -> bool:
        """Return whether a training went wrong; if so, report it. Drop what it made."""
        tasks = [task for task, loss in losses.items() if not math.isfinite(loss)]
        reason = state.not_finite() or (f"the loss of {tasks[0]} is not finite" if tasks else None)
        if reason is not None:
            self.report(Diverged(self.name, round_, client.id, tasks, reason))
        return reason is not None
