"""reproduction.json: which experiments a folder holds, and which runs their figures come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from tapfl.engine.files import write_json
from tapfl.engine.record import read_object, read_record
from tapfl.errors import TapflError
from tapfl.experiments.catalogue import CATALOGUE, CLIENTS, MODELS, Experiment, Part
from tapfl.experiments.plan import Plan
from tapfl.experiments.results import Source, sources_of
from tapfl.reading import check

FILE = "reproduction.json"
FORMAT = 1
_NAME = re.compile(r"\w[\w+.-]{0,200}")


def _checked(name: str) -> str:
    """Return a name that becomes part of a path."""
    if not _NAME.fullmatch(name):
        raise ValueError("expected the name of a file or folder, without a path")
    return name


Name = Annotated[str, AfterValidator(_checked)]


class IndexedPart(BaseModel):
    """A part of an experiment. ``runs``: seed -> method -> a run below runs/, its name in there."""

    model_config = ConfigDict(extra="forbid")

    title: str
    methods: list[str]
    at: str = ""
    chart: str = ""
    places: dict[str, str] = {}
    runs: dict[str, dict[str, tuple[Name, str]]]

    @property
    def missing(self) -> int:
        """How many of its models are not there."""
        return sum(len(set(self.methods) - set(found)) for found in self.runs.values())

    def sources(self, folder: Path) -> list[dict[str, Source]]:
        """Return, seed by seed, which run has which method."""
        return [{method: (folder / "runs" / run, name) for method, (run, name) in found.items()}
                for found in self.runs.values()]


class IndexedExperiment(BaseModel):
    """An experiment as it was asked for last."""

    model_config = ConfigDict(extra="forbid")

    question: str
    layout: str
    axis: str = ""
    beside: str = ""
    model: str
    scale: str
    parts: list[IndexedPart]

    @property
    def models(self) -> int:
        """How many models it compares."""
        return sum(len(part.methods) * len(part.runs) for part in self.parts)

    @property
    def missing(self) -> int:
        """How many of them are not there."""
        return sum(part.missing for part in self.parts)


class Index(BaseModel):
    """All experiments of a folder."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    experiments: dict[Name, IndexedExperiment] = {}


def write_index(out: Path, plan: Plan, chosen: Sequence[Experiment], model: str,
                scale: str) -> None:
    """Note the chosen experiments; those of other commands stay."""
    try:
        index = read_index(out) or Index()
    except TapflError:  # of another version, or damaged: what it said is lost, no figure is
        index = Index()
    for number, experiment in enumerate(chosen):
        index.experiments[experiment.name] = IndexedExperiment(
            question=experiment.question, layout=experiment.layout, axis=experiment.axis,
            beside=experiment.beside, model=model, scale=scale, parts=[
                _indexed(plan, number, place, part)
                for place, part in enumerate(experiment.parts)])
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FILE, index.model_dump(mode="json"))


def _indexed(plan: Plan, number: int, place: int, part: Part) -> IndexedPart:
    found = {seed: sources_of(plan, models) for (e, p, seed), models in plan.needed.items()
             if (e, p) == (number, place)}
    runs = {str(seed): {method: (folder.name, name)
                        for method, (folder, name) in sources.items()}
            for seed, sources in found.items()}
    at = part.at
    if at == CLIENTS:
        first = next((folder for sources in found.values() for folder, _ in sources.values()), None)
        at = str(read_record(first).clients) if first else ""
    return IndexedPart(title=part.title, methods=list(part.methods), at=at, chart=part.chart,
                       places=dict(part.places), runs=runs)


def read_index(folder: Path) -> Index | None:
    """Read the index of a folder, if there is one."""
    path = folder / FILE
    if not path.is_file():
        return None
    values = read_object(path)
    if values.get("format") != FORMAT:
        raise TapflError(f"{path}: made by another version of tapfl (format "
                         f"{values.get('format')}, expected {FORMAT}); the same tapfl reproduce "
                         "command writes it anew")
    return check(Index, values, str(path))


def tables_alone(folder: Path) -> Index:
    """Return what is known of a folder without an index: the questions of its tables."""
    found = {}
    for name, make in CATALOGUE.items():
        if (folder / f"{name}.csv").is_file():
            experiment = make(MODELS["mini"], True)
            found[name] = IndexedExperiment(question=experiment.question, layout=experiment.layout,
                                            model="", scale="", parts=[])
    return Index(experiments=found)


def is_reproduction(folder: Path) -> bool:
    """Return whether `tapfl reproduce` has written here."""
    return ((folder / FILE).is_file() or ((folder / "runs").is_dir() and any(
        (folder / f"{name}.csv").is_file() for name in CATALOGUE)))
