"""What each experiment compares: settings of the federation, and methods under each of them.

An experiment only names what it needs; which runs that takes, and which of them are there already,
is decided in ``plan``. So experiments that ask for the same models share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapfl.config import Config, load_config
from tapfl.errors import TapflError, nearest
from tapfl.methods import merge
from tapfl.reading import check

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Methods to compare under one setting: ``changes`` are laid over the model's configuration.

    ``paper`` ends the name of the paper's figures, where these are not the experiment's. ``at`` is
    the part's place on the experiment's axis; parts of the same ``chart`` are drawn together. Where
    methods have places of their own, ``places`` says which.
    """

    title: str
    methods: tuple[str, ...]
    changes: Values = field(default_factory=dict)
    variants: Values = field(default_factory=dict)
    leads: tuple[tuple[str, str], ...] = ()  # pairs: by how much is the first better?
    paper: str | None = None
    at: str = ""
    chart: str = ""
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A question, and the parts of its answer. ``paper`` ends the name of the paper's figures.

    ``layout`` says what is written: a ``table`` of each part, or something of its own. ``axis``
    names what the parts differ in, where that can be drawn; parts of the experiment ``beside``
    stand on the same axis.
    """

    name: str
    question: str
    parts: tuple[Part, ...]
    paper: str | None = None
    layout: str = "table"
    axis: str = ""
    beside: str = ""


@dataclass(frozen=True)
class Model:
    """A preset, and what it is changed to for each scale."""

    preset: str
    paper: str  # whose published figures stand beside it
    paper_scale: Values
    small_scale: Values
    sizes: tuple[int | None, ...]  # training samples of a data set, for the experiment ``data``
    few: Values  # clients100 at the small scale

    def config(self, small: bool, changes: Values | None = None) -> Config:
        """Return the model's configuration at a scale, with changes laid over it."""
        scaled = merge(load_config(self.preset).model_dump(),
                       dict(self.small_scale if small else self.paper_scale))
        return check(Config, merge(scaled, dict(changes or {})), self.preset)


_SHORT: Values = {"train": {"rounds": 40, "warmup_rounds": 8}, "data": {"train": 3000, "test": 200},
                  "federation": {"groups": 1}}
_SIZES = (300, 1000, 3000, 10000, None)
_FEW: Values = {"federation": {"groups": 3}, "train": {"cohort": 3}}
MODELS = {
    "flava": Model("flava", "flava", {}, _SHORT, _SIZES, _FEW),
    "vilt": Model("vilt", "vilt", {}, _SHORT, _SIZES, _FEW),
    "offline-pair": Model("offline-pair", "flava", {}, _SHORT, _SIZES, _FEW),
    # In the miniature world, too, a client shall read its data about once, as in the paper.
    "mini": Model("miniature", "flava", {"data": {"train": 2400}}, {
        "data": {"train": 400, "test": 20}, "federation": {"groups": 1},
        "train": {"rounds": 8, "local_steps": 3, "warmup_rounds": 2}, "post": {"steps": 4}},
        (150, 300, 600, 1200, 2400), _FEW)}
SCALES = ("small", "paper")

PAPER_ROWS = ("local", "fedavg", "fedavg+post", "perfedavg", "perfedavg+post", "disentafl",
              "disentafl+post", "feddat", "feddat+post", "tap")
MORE_ROWS = ("fedavg+post2", "disentafl+post2", "tap-nokd", "fedprox", "fedper", "fedrep", "fedala",
             "ditto", "apfl", "tap-soft", "tap-gap")
LEADS = (("tap", "fedavg+post"), ("tap", "fedavg+post2"), ("tap-soft", "fedavg+post2"),
         ("tap-gap", "fedavg+post2"), ("fedavg+post2", "local"))
FAMILY = ("fedavg", "fedavg+post", "fedavg+post2", "tap", "tap-soft", "tap-gap")


def _margins(low: float, high: float) -> Values:
    """Return a variant with the lower margin for image generation and text classification."""
    return {"of": "tap", "tap": {"margins": {
        "image_generation": low, "text_classification": low, "image_classification": high,
        "text_generation": high}}}


MARGINS = {f"tap-margins-{low}-{high}": _margins(low / 100, high / 100)
           for low, high in ((1, 4), (2, 5), (5, 10))}
# About what summing the KL over a text's tokens and an image's rows, in place of the mean, does.
STRONG_KD = {"tap-kd-strong": {"of": "tap", "tap": {"distill_weights": {
    "text_generation": 20.0, "image_generation": 0.4}}}}
RULES = {"tap-gradient": {"of": "tap", "tap": {"criterion": "gradient"}},
         "tap-losses": {"of": "tap-soft", "tap": {"share": "losses"}},
         "tap-merge": {"of": "tap", "tap": {"final_share": "losses", "sharpness": 8.0,
                                            "end": "plain2"}},
         "tap-soft-kd": {"of": "tap-soft", "tap": {"end": "distill"}}}
HELD_OUT_RULES = {"tap-validation": {"of": "tap", "tap": {"criterion": "validation"}},
                  "tap-blocks": {"of": "tap", "tap": {"criterion": "validation", "unit": "block"}},
                  "tap-paired": {"of": "tap", "tap": {"criterion": "paired", "confidence": 0.9}},
                  "tap-mix": {"of": "tap-soft", "tap": {"end": "mix"}}}
HOLDOUT: Values = {"federation": {"holdout": 0.1}}
GIVEN_BACK: Values = {"federation": {"holdout": 0.1}, "post": {"use_holdout": True}}
CLIENTS = "{clients}"  # the place of a part on an axis of clients: how many its runs have
SKEWS = {"no label skew": None, "Dirichlet 1.0": 1.0, "Dirichlet 0.3": 0.3}


def _skewed(alpha: float | None, more: Values | None = None) -> Values:
    return merge(dict(more or {}), {"federation": {"dirichlet": alpha}} if alpha else {})


def _main(model: Model, small: bool) -> Experiment:
    return Experiment("main", "Which method is best?",
                      (Part("All methods", PAPER_ROWS + MORE_ROWS, at=CLIENTS),), paper="")


def _kd(model: Model, small: bool) -> Experiment:
    return Experiment("kd", "Does distillation help TAP's second stage?", (
        Part("With, without and with stronger distillation", ("tap", "tap-nokd", *STRONG_KD),
             variants=STRONG_KD),), paper="")


def _margin(model: Model, small: bool) -> Experiment:
    return Experiment("margins", "How much do TAP's margins matter?", (
        Part("Margins in hundredths: of image generation and text classification, of the others",
             ("tap", *MARGINS), variants=MARGINS, places={"tap": "usual", **{
                 name: name.removeprefix("tap-margins-").replace("-", " / ")
                 for name in MARGINS}}),), paper="-margins", axis="margins in hundredths")


def _2p(model: Model, small: bool) -> Experiment:
    return Experiment("2p", "Is TAP better than post-training with as many steps?", (
        Part("As many steps after federation",
             ("fedavg+post2", "disentafl+post2", "tap", "tap-soft", "tap-gap")),), paper="")


def _standard(model: Model, small: bool) -> Experiment:
    rows = ("fedavg", "fedavg+post", "perfedavg", "perfedavg+post", "feddat", "feddat+post", "tap",
            "tap-soft")
    return Experiment("standard", "What does the routed backbone bring?", (
        Part("A standard transformer as backbone", rows, {"backbone": {"kind": "standard"}},
             at="standard"),
        Part("The routed backbone", rows, paper="", at="routed")), paper="-standard",
        axis="backbone")


def _deep(model: Model, small: bool) -> Experiment:
    return Experiment("deep", "Does a deeper backbone change the order?", (
        Part("Two layers in each stage", ("fedavg", "fedavg+post", "feddat", "feddat+post", "tap",
                                          "tap-soft"), {"backbone": {"layers_per_stage": 2}}),),
        paper="-deep")


def _clients100(model: Model, small: bool) -> Experiment:
    changes: Values = model.few if small else {"federation": {"groups": 10},
                                               "train": {"cohort": 5}}
    title = "More clients" if small else "100 clients, five in a round"
    return Experiment("clients100", "Do the results hold with many clients?",
                      (Part(title, FAMILY, changes, at=CLIENTS),), paper="-100", axis="clients",
                      beside="main")


def _validation(model: Model, small: bool) -> Experiment:
    tap = {"tap-validation": HELD_OUT_RULES["tap-validation"]}
    return Experiment("validation", "Should TAP compare losses on held-out data?", (
        Part("10% of each client's data held out", (*PAPER_ROWS[1:], *tap), HOLDOUT, tap),),
        paper="-validation")


def _footprint(model: Model, small: bool) -> Experiment:
    return Experiment("footprint", "What does TAP cost?", (Part("FedAvg and TAP", FAMILY),),
                      layout="footprint")


def _replacements(model: Model, small: bool) -> Experiment:
    return Experiment("replacements", "When is X replaced?", (
        Part("Cumulative replacements", ("tap", *MARGINS), variants=MARGINS),),
        layout="replacements")


def _significance(model: Model, small: bool) -> Experiment:
    return Experiment("significance", "Which differences are more than chance?", (
        Part("All methods", PAPER_ROWS + MORE_ROWS),), paper="", layout="significance")


def _criteria(model: Model, small: bool) -> Experiment:
    parts = []
    for title, alpha in SKEWS.items():
        parts += [Part(f"Nothing held out, {title}",
                       (*FAMILY, "tap-nokd", "ditto", "apfl", *RULES),
                       _skewed(alpha), RULES, at=title, chart="Nothing held out"),
                  Part(f"10% held out and given back in the end, {title}",
                       (*FAMILY, "tap-chosen", *HELD_OUT_RULES), _skewed(alpha, GIVEN_BACK),
                       HELD_OUT_RULES, at=title,
                       chart="10% held out and given back in the end")]
    return Experiment("criteria", "When should X take W in, and how much of it?", tuple(parts),
                      layout="verdicts", axis="label skew")


def _skew(model: Model, small: bool) -> Experiment:
    return Experiment("skew", "What if clients' labels differ?", tuple(
        Part(title, ("local", "local+post2", *FAMILY, "ditto", "apfl"), _skewed(alpha), at=title)
        for title, alpha in SKEWS.items()), axis="label skew")


def _data(model: Model, small: bool) -> Experiment:
    sizes = model.sizes[1:4] if small else model.sizes
    return Experiment("data", "How much data makes which method best?", tuple(
        Part(f"{'All' if size is None else format(size, ',')} training samples a data set",
             ("local", *FAMILY), {"data": {"train": size}}, leads=LEADS,
             at="all" if size is None else format(size, ","))
        for size in sizes), layout="leads", axis="training samples of a data set")


def _faults(model: Model, small: bool) -> Experiment:
    from tapfl.experiments.faults import fault_variants

    parts = [Part("No fault", ("fedavg", "fedavg+post", "tap"), leads=(("tap", "fedavg+post"),))]
    for title, variants in fault_variants(model.config(small).post.steps).items():
        names = dict.fromkeys(("fedavg", "fedavg+post", "tap"))
        found = {kind: next((n for n in variants if n.endswith(kind.rpartition("+")[2])), kind)
                 for kind in names}
        parts.append(Part(title, tuple(found.values()), variants=variants,
                          leads=((found["tap"], found["fedavg+post"]),)))
    return Experiment("faults", "What made the published gap between TAP and post-training?",
                      tuple(parts), layout="leads")


CATALOGUE: dict[str, Callable[[Model, bool], Experiment]] = {
    "main": _main, "kd": _kd, "margins": _margin, "2p": _2p, "standard": _standard, "deep": _deep,
    "clients100": _clients100, "validation": _validation, "footprint": _footprint,
    "replacements": _replacements, "significance": _significance, "criteria": _criteria,
    "skew": _skew, "data": _data, "faults": _faults}
ALL = "all"


def find_experiments(names: list[str], model: str, scale: str) -> list[Experiment]:
    """Return experiments by name, each once; ``all`` stands for every one of them."""
    known = [*CATALOGUE, ALL]
    for name in names:
        if name not in known:
            raise TapflError(f"unknown experiment '{name}'" + nearest(name, known))
    if model not in MODELS:
        raise TapflError(f"--model {model}: no such model" + nearest(model, MODELS))
    if scale not in SCALES:
        raise TapflError(f"--scale {scale}: expected small or paper")
    wanted = CATALOGUE if ALL in names else dict.fromkeys(names)
    return [CATALOGUE[name](MODELS[model], scale == "small") for name in wanted]
