"""What an operator may allow to leave a node beside updates, and the events that belong to it."""

from __future__ import annotations

from tapfl.events import Curve, Diverged, Note, OfClient, PersonalLosses, Replacement

ALLOW: dict[str, tuple[type[OfClient], ...]] = {
    "scores": (Curve,), "losses": (PersonalLosses, Diverged), "replacements": (Replacement,),
    "notes": (Note,)}
