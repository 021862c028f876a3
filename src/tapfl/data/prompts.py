"""From what a person types to the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tapfl.data import hub
from tapfl.data.custom import FIELD, DataEntry
from tapfl.errors import TapflError, as_tapfl_error
from tapfl.reading import SURROGATE

TEXT = "text"
LISTS = ("choices", "concepts")  # columns that JSON can hold and CSV cannot
NO_ANSWER = {"answer": 0, "multiple_choice_answer": "", "target": ""}  # what the model is to answer


def prompt(task: str, values: Mapping[str, Any], entry: DataEntry | None = None) -> str:
    """Return a task's text, from the columns that its template names or from ``text`` alone.

    A template with one field takes the text there; one with several takes it as the whole prompt.
    """
    made = _made(task, values, entry)
    if SURROGATE.search(made):  # no tokenizer accepts it
        raise TapflError(f"task '{task}': its text holds half a character (a lone surrogate)")
    return made


def _made(task: str, values: Mapping[str, Any], entry: DataEntry | None) -> str:
    if entry is not None:
        return _filled(task, values, entry.text)
    known = hub.SETS.get(task)
    if known is None or known.words is None:
        return _text(task, values)
    inputs = {**values, **NO_ANSWER}
    if known.typed and not _fits(known.typed, inputs.get(known.typed)):
        text = _text(task, values)
        inputs[known.typed] = ([word.strip() for word in text.split(",")]
                               if known.typed in LISTS else text)
    if not all(_fits(column, inputs.get(column)) for column in known.columns):
        return _text(task, values)
    with as_tapfl_error(f"task '{task}': a row with {', '.join(values)} makes no prompt"):
        return known.words(inputs)[0]


def _fits(column: str, value: Any) -> bool:
    return isinstance(value, list) if column in LISTS else value is not None


def _filled(task: str, values: Mapping[str, Any], template: str) -> str:
    fields = FIELD.findall(template)
    if not fields:
        return _text(task, values, template if template in values else TEXT)
    if all(values.get(field) is not None for field in fields):
        return FIELD.sub(lambda found: str(values[found[1]]), template)
    text = _text(task, values)
    return FIELD.sub(lambda _: text, template) if len(set(fields)) == 1 else text


def _text(task: str, values: Mapping[str, Any], column: str = TEXT) -> str:
    text = values.get(column)
    if text is None or not str(text).strip():
        raise TapflError(f"task '{task}' needs a text, and got none")
    return str(text)
