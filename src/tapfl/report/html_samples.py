"""Samples in a report: what every method's final model makes of a few test samples.

The pictures are part of the page, small and lossy; the run's folder has them as they were.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tapfl.engine.samples import (
    TaskInputs,
    TaskPredictions,
    picture_path,
    read_inputs,
    read_picture,
    read_predictions,
    sampled_clients,
    samples_path,
)
from tapfl.errors import TapflError, as_tapfl_error, one_line
from tapfl.evaluation.constant import CONSTANT
from tapfl.evaluation.metrics import PERCENT, exact_match, metric_kind, metric_place
from tapfl.report.gather import Gathered, methods_of
from tapfl.report.markup import Html, counted, folded, join, picture, tag
from tapfl.tasks import IMAGE_GENERATION

SIDE = 64  # pixels of a picture
QUALITY = 85  # of WebP: a few hundred bytes to two kilobytes a picture
LONGEST = 800  # characters of a text
FILTER = "sample-filter"


@dataclass(frozen=True)
class Shown:
    """One client's samples of a task, with the predictions of the methods that have any."""

    run: Path
    client: str
    task: str
    inputs: TaskInputs
    found: Mapping[str, TaskPredictions]

    def picture(self, number: int, method: str = "") -> Html:
        """Return a sample's picture, or what a method made of it, as the address of itself."""
        kept = self.found[method].pictures if method else self.inputs.pictures
        listing = samples_path(self.run, self.client, method)
        where = picture_path(listing, self.task, number)
        return _address(read_picture(listing, self.task, number, kept[number]), where)

    def right(self, method: str, number: int) -> bool | None:
        """Return whether a prediction is right; a picture is neither right nor wrong."""
        found = self.found[method]
        if found.labels and self.inputs.labels:
            return found.labels[number][:1] == [self.inputs.labels[number]]
        if found.texts and self.inputs.answers:
            return bool(exact_match([found.texts[number]], [self.inputs.answers[number]])[0])
        return None


def samples(gathered: Gathered) -> Html:
    """Return the samples of the first seed, task by task."""
    shown = _read(gathered) if gathered.finished else []
    if not shown:
        return tag("p", "The run kept no samples of what its models predict "
                        "(evaluation.samples)." if gathered.finished else
                   "They are there when the run is finished.", class_="empty")
    methods = [method for method in methods_of(gathered) if method != CONSTANT]
    by_task: dict[str, list[Shown]] = {}
    for each in shown:
        by_task.setdefault(each.task, []).append(each)
    ordered = [task for task in gathered.record.federation.tasks if task in by_task]
    return join([
        tag("p", "What each method's final model makes of a few test samples of some clients "
                 f"(seed {gathered.record.seed}). The samples were chosen by chance, the same for "
                 "all methods. Texts are shown as the model reads them; an answer counts as right "
                 "if all of its words are."),
        _filter(methods), *(_task(task, by_task[task], methods) for task in ordered)])


def _read(gathered: Gathered) -> list[Shown]:
    """Read the samples of the first run: clients in the roster's order."""
    run, methods = gathered.paths[0], methods_of(gathered)
    roster = {row["client"]: place for place, row in enumerate(gathered.runs[0].rows)}
    found = []
    for client in sorted(sampled_clients(run), key=lambda c: roster.get(c, len(roster))):
        inputs = read_inputs(run, client)
        by_method = {method: each.tasks for method in methods
                     if (each := read_predictions(run, client, method)) is not None}
        for task, samples_ in inputs.tasks.items():
            if task not in gathered.record.federation.tasks:
                raise TapflError(f"{samples_path(run, client)}: unknown task '{task}'")
            predictions = {method: tasks[task] for method, tasks in by_method.items()
                           if task in tasks}
            if any(each.rows != samples_.rows for each in predictions.values()):
                raise TapflError(f"{samples_path(run, client)}: the predictions for '{task}' are "
                                 "of other samples")
            found.append(Shown(run, client, task, samples_, predictions))
    return found


def _address(content: bytes, where: Path) -> Html:
    """Return a picture's data as an address; it is encoded anew, whatever the file holds."""
    from PIL import Image

    out = io.BytesIO()
    with (as_tapfl_error(f"{where}: not a readable picture"),
          Image.open(io.BytesIO(content), formats=["PNG"]) as image):
        if image.size != (SIDE, SIDE):
            raise TapflError(f"{where}: {image.width} x {image.height} pixels, expected "
                             f"{SIDE} x {SIDE}")
        image.convert("RGB").save(out, "WEBP", quality=QUALITY, method=6)
    return Html("data:image/webp;base64," + base64.b64encode(out.getvalue()).decode())


def _filter(methods: Sequence[str]) -> Html:
    """Return the choice of samples; the page's script shows it, and does it."""
    choices = [tag("option", "all samples", value=""),
               *(tag("option", f"wrong by {method}", value=str(place))
                 for place, method in enumerate(methods))]
    return tag("div", tag("label", "Show", tag("select", *choices, id=FILTER)),
               tag("span", id=f"{FILTER}-count", role="status"), class_="tools", hidden=True)


def _task(task: str, shown: Sequence[Shown], methods: Sequence[str]) -> Html:
    kind = shown[0].inputs.kind.replace("_", " ")
    parts = [folded(_summary(each, methods),
                    tag("div", *(_card(each, number, methods)
                                 for number in range(len(each.inputs.rows))),
                        class_="cards wide" if each.inputs.kind == IMAGE_GENERATION else "cards"),
                    id_=f"samples-{task}-{each.client}", open_=place == 0)
             for place, each in enumerate(shown)]
    return tag("div", tag("h3", task, " ", tag("small", kind)), *parts, class_="samples")


def _summary(each: Shown, methods: Sequence[str]) -> str:
    """Return whose samples these are, and how many each method got right."""
    count = len(each.inputs.rows)
    right = {method: [each.right(method, i) for i in range(count)]
             for method in methods if method in each.found}
    told = [f"{method} {sum(map(bool, marks))}" for method, marks in right.items()
            if None not in marks]
    return (f"client {each.client}: {counted(count, 'sample')}"
            + (f"; right: {', '.join(told)}" if told else ""))


def _card(each: Shown, number: int, methods: Sequence[str]) -> Html:
    """Return one sample: what goes in, what is right, and what the methods say."""
    inputs = each.inputs
    answers = [method for method in methods if method in each.found]
    wrong = [str(place) for place, method in enumerate(methods)
             if method in each.found and each.right(method, number) is False]
    if inputs.kind == IMAGE_GENERATION:
        return tag("div", *_reconstructions(each, number, answers), class_="card row",
                   data_wrong="")
    parts: list[Html] = []
    if inputs.pictures:
        parts.append(picture(each.picture(number), f"test sample {number + 1} of {each.task}",
                             SIDE))
    if inputs.texts:
        parts.append(tag("p", one_line(inputs.texts[number], LONGEST), class_="text"))
    right = (inputs.name_of(inputs.labels[number]) if inputs.labels else
             one_line(inputs.answers[number], LONGEST) if inputs.answers else "")
    parts.append(tag("p", "label: " if inputs.labels else "right answer: ", tag("strong", right)))
    parts.append(tag("ul", *(_answer(each, number, method) for method in answers)))
    return tag("div", *parts, class_="card", data_wrong=" ".join(wrong))


def _reconstructions(each: Shown, number: int, methods: Sequence[str]) -> list[Html]:
    """Return the original and what every method made of it, side by side."""
    found = [tag("figure", picture(each.picture(number), f"original {number + 1}", SIDE),
                 tag("figcaption", tag("strong", "original")))]
    for method in methods:
        error = _score(each.found[method], number)
        found.append(tag(
            "figure", picture(each.picture(number, method),
                              f"reconstructed {number + 1} by {method}", SIDE),
            tag("figcaption", method, *([" ", tag("small", error)] if error else []))))
    return found


def _answer(each: Shown, number: int, method: str) -> Html:
    """Return what a method predicts, marked in form as well as in colour."""
    found, right = each.found[method], each.right(method, number)
    mark = {True: "✓", False: "✗", None: "·"}[right]
    word = {True: "right: ", False: "wrong: ", None: ""}[right]
    said: list[object] = []
    if found.labels:
        names = [each.inputs.name_of(label) for label in found.labels[number]]
        chances = [_percent(p) for p in
                   (found.probabilities[number] if found.probabilities else [])]
        pairs = [" ".join(filter(None, pair)) for pair in
                 zip(names, [*chances, *[""] * (len(names) - len(chances))], strict=False)]
        said = [" ".join(pairs[:1]), tag("small", " " + ", ".join(pairs[1:]))]
    elif found.texts:
        written = one_line(found.texts[number], LONGEST) or "(nothing)"
        said = [written, tag("small", " ", _score(found, number))]
    return tag("li", tag("span", mark, aria_hidden="true"), " ",
               tag("span", word, class_="hidden"), tag("strong", method), " ", *said,
               class_={True: "right", False: "wrong", None: None}[right])


def _percent(probability: float | None) -> str:
    """Return a probability; None was not finite."""
    return "not a number" if probability is None else f"{100 * probability:.0f}%"


def _score(found: TaskPredictions, number: int) -> str:
    """Return a sample's score in the metric that speaks for the task."""
    first = min(found.scores, key=metric_place, default=None)
    if first is None:
        return ""
    value, kind = found.scores[first][number], metric_kind(first)
    digits = 0 if kind in PERCENT else 3
    return f"{kind} {'not a number' if value is None else f'{value:.{digits}f}'}"
