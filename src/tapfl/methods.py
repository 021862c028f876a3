"""Methods by name: ``federated[+personalizer]``, short names, and variants with settings.

This is the one place that reads a method's name. A variant is a method with settings of its own,
declared under ``variants:`` in the configuration; its sections are merged over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tapfl.config import GAP, HOLDOUT, Config
from tapfl.errors import TapflError, nearest
from tapfl.reading import check

LOCAL = "local"

_SOFT = {"criterion": "always", "unit": "task", "end": "plain2"}
# Personalizers that are another one with settings of its own: the personalizer, and the sections.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "tap-nokd": ("tap", {"tap": {"end": "plain"}}),
    "tap-soft": ("tap", {"tap": {**_SOFT, "share": 0.5, "final_share": 0.5}}),
    "tap-gap": ("tap", {"tap": {**_SOFT, "share": GAP, "final_share": GAP, "sharpness": 8.0}}),
    "tap-chosen": ("tap", {"tap": {**_SOFT, "share": HOLDOUT, "final_share": HOLDOUT}})}
SHORT = {name: f"fedavg+{name}" for name in ("tap", *NAMED, "ditto", "apfl")}

# What a variant may set. The sections of personalizers, and the settings of one's own personalizer,
# leave W alone: methods that differ in these share a federated run.
PERSONAL_SECTIONS = ("tap", "post", "ditto", "apfl")
METHOD_SECTIONS = (*PERSONAL_SECTIONS, "own", "train", "aggregation", "privacy", "perfedavg",
                   "disentafl", "feddat", "fedprox", "fedrep", "fedala")


@dataclass(frozen=True)
class MethodSpec:
    """A method of a run: its name in the results, its two halves, and its whole configuration."""

    name: str
    federated: str
    personalizer: str
    config: Config

    @property
    def federated_settings(self) -> str:
        """Everything that W depends on: methods for which it is equal share a federated run."""
        own = self.config.own.get(class_name(self.federated), {})
        return f"{self.federated} {sorted(own.items())} " + self.config.model_dump_json(
            exclude={"methods", "variants", "own", *PERSONAL_SECTIONS})


@dataclass(frozen=True)
class RunSpec:
    """One federated run and the methods that come out of it.

    ``plain`` is the method whose model is W itself, if it is asked for.
    """

    name: str
    federated: str
    config: Config
    plain: MethodSpec | None
    personal: tuple[MethodSpec, ...]


def folder_name(method: str) -> str:
    """Return a method's name as a folder's name: ``module:Class+post`` has characters to lose."""
    return "".join(c if c.isalnum() or c in "+-_" else "_" for c in method)


def class_name(half: str) -> str:
    """Return the class of a user's own ``module:Class``; a shipped half has none."""
    return half.partition(":")[2]


def names_own_code(config: Config) -> bool:
    """Return whether a configuration names classes that are not tapfl's own."""
    names = [*config.methods, *(variant.of for variant in config.variants.values())]
    return any(":" in half and not is_ours(half.partition(":")[0])
               for name in names for half in _halves(name))


def is_ours(module: str) -> bool:
    """Return whether a module is part of tapfl: nobody has to vouch for it."""
    return module.startswith("tapfl.") and not module.endswith("__main__")


def method_specs(config: Config) -> list[MethodSpec]:
    """Return the methods of a configuration, in its order; variants carry their own settings."""
    for name in config.variants:
        if name not in config.methods:
            raise TapflError(f"variants: '{name}' is not in methods, so nothing would run it"
                             + nearest(name, config.methods))
    specs = [_spec(config, name) for name in config.methods]
    folders: dict[str, str] = {}
    meanings: dict[tuple[str, str], str] = {}
    for spec in specs:
        folder = folder_name(spec.name).lower()
        # W itself depends on no setting of a personalizer.
        personal = spec.config.model_dump_json(include={*PERSONAL_SECTIONS, "own"})
        meaning = (spec.federated_settings, spec.personalizer and spec.personalizer + personal)
        if folder in folders and folders[folder] != spec.name:
            raise TapflError(f"methods: '{folders[folder]}' and '{spec.name}' would share a folder")
        if folder in folders or meaning in meanings:
            other = folders.get(folder) or meanings[meaning]
            raise TapflError(f"methods: '{spec.name}' is there twice" + (
                "" if other == spec.name else f", as '{other}' as well"))
        folders[folder], meanings[meaning] = spec.name, spec.name
    return specs


def check_named(config: Config, specs: Sequence[MethodSpec]) -> None:
    """Refuse a setting that no method would use, because their names stand for other values.

    A value at its default cannot be told from one that was not given; it is never refused.
    """
    for spec in specs:
        variant = config.variants.get(spec.name)
        method, own = (variant.of, variant.model_extra or {}) if variant else (spec.name, {})
        _, named = NAMED.get(_halves(method)[1], ("", {}))
        for section, key in ((s, k) for s, values in named.items() for k in values):
            given = getattr(config, section)
            value, default = getattr(given, key), type(given).model_fields[key].default
            used = [getattr(getattr(other.config, section), key) for other in specs
                    if other.personalizer == spec.personalizer]
            if key not in own.get(section, {}) and value != default and value not in used:
                raise TapflError(
                    f"{section}.{key}: {value} would change nothing, '{method}' stands for "
                    f"{named[section][key]}; make a variant of it: "
                    f"{{of: {method}, {section}: {{{key}: {value}}}}}")


def federated_runs(specs: Sequence[MethodSpec]) -> list[RunSpec]:
    """Group methods by what their W depends on: each group is one federated run."""
    groups: dict[str, list[MethodSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.federated_settings, []).append(spec)
    taken = {folder_name(spec.name).lower() for spec in specs}
    runs = []
    for group in groups.values():
        first = group[0]
        plain = next((s for s in group if not s.personalizer), None)
        name = plain.name if plain else first.federated
        number = 1
        while not plain and folder_name(name).lower() in taken:  # another run has this name
            name = f"{first.federated}-of-{first.name}" + (f"-{number}" if number > 1 else "")
            number += 1
        taken.add(folder_name(name).lower())
        runs.append(RunSpec(name, first.federated, first.config, plain,
                            tuple(s for s in group if s.personalizer)))
    return runs


def find_method(config: Config, name: str) -> tuple[RunSpec, MethodSpec | None]:
    """Return the federated run that a model comes from, and the method unless it is W itself."""
    for run in federated_runs(method_specs(config)):
        for spec in run.personal:
            if spec.name == name:
                return run, spec
        if name == run.name:
            return run, None
    raise TapflError(f"--method: the run has no '{name}'" + nearest(name, config.methods))


def federated_half(name: str) -> str:
    """Return the federated method that a method, which is no variant, stands on."""
    return _halves(name)[0]


def alone_among(config: Config, methods: Sequence[str]) -> str | None:
    """Return the method by which every client learns alone: ``local``, or one that stands on it."""
    def federated(name: str) -> str:
        variant = config.variants.get(name)
        return federated_half(variant.of if variant else name)

    return LOCAL if LOCAL in methods else next(
        (name for name in methods if federated(name) == LOCAL), None)


def _halves(name: str) -> tuple[str, str]:
    federated, plus, personalizer = SHORT.get(name, name).partition("+")
    if plus and not (federated and personalizer):
        raise TapflError(f"methods: '{name}': expected a method before and behind the plus, as in "
                         "fedavg+post")
    return federated, personalizer


def _spec(config: Config, name: str) -> MethodSpec:
    variant = config.variants.get(name)
    if variant is not None and variant.of in config.variants:
        raise TapflError(f"variants.{name}.of: '{variant.of}' is a variant itself; expected a "
                         "method")
    sections = dict(variant.model_extra or {}) if variant else {}
    for key in sections:
        if key not in METHOD_SECTIONS:
            raise TapflError(f"variants.{name}: '{key}' is no section that a variant can set"
                             + nearest(key, METHOD_SECTIONS))
    federated, personalizer = _halves(variant.of if variant else name)
    personalizer, named = NAMED.get(personalizer, (personalizer, {}))
    if not variant and not named:
        return MethodSpec(name, federated, personalizer, config)
    merged = merge(merge(config.model_dump(), named), sections)
    where = f"variants.{name}" if variant else name
    return MethodSpec(name, federated, personalizer, check(Config, merged, where))


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, mapping by mapping."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = (merge(old, value) if isinstance(old, dict) and isinstance(value, dict)
                       else value)
    return merged
