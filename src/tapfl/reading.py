"""Read YAML and hold it to a model: every fault is one line that names file, key and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tapfl.errors import TapflError, nearest

T = TypeVar("T", bound=BaseModel)


def is_file(path: str | Path) -> bool:
    """Return whether there is such a file; a name that cannot be one is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def exists(path: str | Path) -> bool:
    """Return whether there is such a file or folder."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def read_text(path: str | Path) -> str:
    """Read a text file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TapflError(f"{path}: not a readable UTF-8 text file ({error})") from None


class _Loader(yaml.SafeLoader):
    """Plain values only, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def yaml_value(text: str, where: str) -> Any:
    """Parse any YAML value; ``where`` names the file in errors."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise TapflError(f"{where}{line}: not valid YAML "
                         f"({getattr(error, 'problem', None) or 'syntax error'})") from None
    except (ValueError, RecursionError) as error:
        raise TapflError(f"{where}: not valid YAML ({error})") from None


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parse a YAML mapping; ``where`` names the file in errors."""
    values = yaml_value(text, where)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise TapflError(f"{where}: expected a mapping of keys to values, "
                         f"got {type(values).__name__}")
    return values


def check(model: type[T], values: dict[str, Any], where: str) -> T:
    """Validate; the first fault becomes one line that names the file, the key and the remedy."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]).replace("\n", " ")
        if fault["type"] == "extra_forbidden":
            hint = nearest(str(fault["loc"][-1]), _keys_at(model, fault["loc"][:-1]))
            raise TapflError(f"{where}: unknown key '{key}'{hint}") from None
        message = fault["msg"].removeprefix("Value error, ")
        got = "" if isinstance(fault["input"], dict) else f", got {fault['input']!r}"
        raise TapflError(f"{where}: {key or 'configuration'}: {message}{got}") from None


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type):
            return []
        model = field.annotation
    return list(model.model_fields)
