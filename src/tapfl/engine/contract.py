"""The contract between the engine and a method, ours or a user's own: checked, and named if broken.

Before the first round: the blocks that a client owns are exchanged or private, none is both, and
whether clients of a task end with the same model is declared. In every call: what a user's class
raises or returns ends in one line that names the class and the fault.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tapfl.blocks import BlockState
from tapfl.data.federation import Member
from tapfl.errors import TapflError
from tapfl.federated.context import Losses
from tapfl.federated.method import FederatedMethod

# Hooks that may give clients of a task models of their own.
PERSONALISING = ("private", "adapt", "predicting")


def _class_of(owner: object) -> type:
    return owner if isinstance(owner, type) else type(owner)


def is_shipped(owner: object) -> bool:
    """Return whether a class, or an object's class, comes with tapfl."""
    return _class_of(owner).__module__.startswith("tapfl.")


def name_of(owner: object) -> str:
    """Return a class as users write it: ``module:Class``."""
    return f"{_class_of(owner).__module__}:{_class_of(owner).__name__}"


@contextlib.contextmanager
def calling(owner: object, hook: str) -> Iterator[None]:
    """Turn what a user's class raises into one line; what ours raise is a fault of tapfl's."""
    try:
        yield
    except Exception as error:
        if is_shipped(owner):
            raise
        said = (str(error).strip().splitlines() or [""])[0][:300]
        kind = "" if isinstance(error, TapflError) else f"{type(error).__name__}: "
        raise TapflError(f"{name_of(owner)}.{hook}: {kind}{said}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Return where in the user's own files an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    home = str(Path(__file__).parent.parent)
    own = [f for f in frames if not f.filename.startswith(home)
           and "site-packages" not in f.filename and "/lib/python" not in f.filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def check_method(method: FederatedMethod, members: Iterable[Member]) -> None:
    """Refuse a method that breaks the contract for one of some clients."""
    _check_declaration(method)
    for member in members:
        blocks = {}
        for hook in ("owned", "exchanged", "private"):
            with calling(method, hook):
                blocks[hook] = _names(method, hook, getattr(method, hook)(member))
        where = f"{name_of(method)}, client '{member.id}'"
        both = sorted(blocks["exchanged"] & blocks["private"])
        if both:
            raise TapflError(f"{where}: block '{both[0]}' is exchanged and private; expected one "
                             "of the two")
        lost = sorted(blocks["owned"] - blocks["exchanged"] - blocks["private"])
        if lost:
            raise TapflError(f"{where}: block '{lost[0]}' is owned, but neither exchanged nor "
                             "private: nobody would keep what it learns")
        foreign = sorted(blocks["exchanged"] - blocks["owned"])
        if foreign:
            raise TapflError(f"{where}: block '{foreign[0]}' is exchanged, but not owned")
        if method.shares_final_model and blocks["private"]:
            raise TapflError(f"{where}: has private blocks, so its final model is its own; set "
                             "shares_final_model = False in the class")


def _names(method: FederatedMethod, hook: str, found: Any) -> set[str]:
    if not isinstance(found, tuple | list):  # a set has another order in every process
        raise TapflError(f"expected a tuple or list of blocks' names, got {found!r:.80}")
    names = set(found)
    for name in names:
        if name not in method.initial:
            raise TapflError(f"the network has no block {name!r}")
    return names


def _check_declaration(method: FederatedMethod) -> None:
    """Refuse a class that may give clients models of their own and does not say whether it does."""
    order = type(method).__mro__

    def definer(name: str) -> int:
        return next(i for i, cls in enumerate(order) if name in cls.__dict__)

    for hook in PERSONALISING:
        if definer(hook) < definer("shares_final_model"):
            raise TapflError(
                f"{name_of(method)}: overrides {hook} and does not say whether all clients of a "
                "task end with the same model; set shares_final_model = True or False in the class")
    if method.shares_final_model and type(method).adapt is not FederatedMethod.adapt:
        raise TapflError(f"{name_of(method)}: adapts the final model to each client, so it is not "
                         "the same for all; set shares_final_model = False in the class")


def check_losses(method: FederatedMethod, client: Member, losses: Any) -> Losses:
    """Return what ``train`` returned, if it is a loss for each of some of the client's tasks."""
    expected = "expected the mean loss of every task seen, by task"
    if not isinstance(losses, dict):
        raise TapflError(f"{name_of(method)}.train: {expected}, got {type(losses).__name__}")
    for task, loss in losses.items():
        if task not in client.tasks:
            raise TapflError(f"{name_of(method)}.train: a loss of {task!r}, which is no task of "
                             f"client '{client.id}'; {expected}")
        if isinstance(loss, bool) or not isinstance(loss, int | float):
            raise TapflError(f"{name_of(method)}.train: the loss of '{task}' is "
                             f"{type(loss).__name__}; expected a number")
    return {task: float(loss) for task, loss in losses.items()}


def check_blocks(owner: object, hook: str, state: Any, expected: BlockState) -> BlockState:
    """Return a state whose blocks have the shapes and types that they began with."""
    if not isinstance(state, BlockState) or not len(state):
        raise TapflError(f"{name_of(owner)}.{hook}: expected blocks (a BlockState), got "
                         f"{type(state).__name__}")
    fault = state.misfit(expected)
    if fault is not None:
        raise TapflError(f"{name_of(owner)}.{hook}: {fault}")
    return state
