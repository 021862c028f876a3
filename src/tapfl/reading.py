"""Read YAML and validate it: every fault is one line that names file, key and remedy."""

from __future__ import annotations

import datetime
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tapfl.errors import TapflError, nearest, one_line, shown

T = TypeVar("T", bound=BaseModel)
MAX_NODES = 1_000_000  # values of a YAML file, counting an aliased one wherever it is used
MAX_TEXT = 20_000_000  # bytes of a file that a person writes
MAX_DIGITS = 400  # characters of a number in YAML: more than any float needs
MAX_PATH, MAX_NAME = 4096, 255  # bytes of a path and of a name in it, the limits of Linux
SURROGATE = re.compile("[\ud800-\udfff]")
# What pydantic adds to the place of a fault: which of several types it tried.
_SHOULD = "Input should be "
_TRIED = re.compile(r"str|int|float|constrained-\w+|function-.*|[a-z]+\[.*\]")
MEGA = 1_000_000


def is_file(path: str | Path) -> bool:
    """Return whether there is such a file; a name that cannot be one is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_dir(path: str | Path) -> bool:
    """Return whether there is such a folder; a name that cannot be one is none."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def exists(path: str | Path) -> bool:
    """Return whether there is such a file or folder."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def open_regular(path: str | Path, limit: int | None = None) -> io.BufferedReader:
    """Open a regular file of at most ``limit`` bytes; a pipe or a device would never end."""
    def opener(name: str, flags: int) -> int:
        # Without this flag, opening a pipe waits until another process writes to it.
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    # Devices are not even opened: that alone can have an effect.
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError("not a regular file")
    file = open(path, "rb", opener=opener)  # noqa: SIM115 (pathlib has no opener)
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and (limit is None or found.st_size <= limit):
        return file
    file.close()
    raise OSError("not a regular file" if not stat.S_ISREG(found.st_mode) else
                  f"{found.st_size / MEGA:,.0f} MB, expected at most {(limit or 0) / MEGA:,.0f} MB")


def read_bytes(path: str | Path, limit: int) -> bytes:
    """Read a regular file; one that is longer than ``limit`` is refused."""
    with open_regular(path, limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"expected at most {limit / MEGA:,.0f} MB")
    return data


def read_text(path: str | Path) -> str:
    """Read a text file."""
    try:
        text = read_bytes(path, MAX_TEXT).decode("utf-8")
    except (OSError, ValueError) as error:
        raise TapflError(f"{path}: not a readable UTF-8 text file ({error})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def path_text(value: str) -> str:
    """Return a path if a file system can hold it: others fail wherever they are looked up."""
    size = len(value.encode("utf-8", "surrogatepass"))
    if size > MAX_PATH:
        raise ValueError(f"a path has at most {MAX_PATH} bytes, this one {size}")
    for name in value.split("/"):
        size = len(name.encode("utf-8", "surrogatepass"))
        if size > MAX_NAME:
            raise ValueError(f"a name in a path has at most {MAX_NAME} bytes, one here {size}")
    if "\0" in value:
        raise ValueError("a path has no NUL character")
    return value


class _Loader(yaml.SafeLoader):
    """Plain values only, no key twice, and no number that takes long to read."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown(key)} is there twice", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)

    def _short_number(self, node: yaml.ScalarNode) -> Any:
        if len(str(node.value)) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(str(node.value))} characters, expected at most "
                f"{MAX_DIGITS}", node.start_mark)
        made = self.construct_yaml_int if node.tag.endswith("int") else self.construct_yaml_float
        return made(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader._short_number)


def _count(node: yaml.Node | None) -> None:
    """Refuse a document whose aliases make it huge or circular, before anything follows them."""
    sizes: dict[int, int] = {}  # 0: a node that is being counted
    stack = [node] if node is not None else []
    while stack:
        top = stack[-1]
        inner = list(_children(top))
        if id(top) not in sizes:
            sizes[id(top)] = 0
            for child in inner:
                if sizes.get(id(child)) == 0:
                    raise yaml.constructor.ConstructorError(
                        None, None, "an alias is inside of what it names", child.start_mark)
            stack.extend(child for child in inner if id(child) not in sizes)
            continue
        stack.pop()
        if not sizes[id(top)]:
            sizes[id(top)] = 1 + sum(sizes[id(child)] for child in inner)
        if sizes[id(top)] > MAX_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_NODES:,} values, with its aliases followed",
                top.start_mark)


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def yaml_value(text: str, where: str) -> Any:
    """Parse any YAML value; ``where`` names the file in errors."""
    where = one_line(where, 500)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _count(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise TapflError(f"{where}{line}: not valid YAML ({problem or 'syntax error'})") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
            RecursionError) as error:  # what the library raises over `!!int ""` and its like
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


def _refuse_odd(values: Any, where: str) -> None:
    """Refuse what neither a model nor a record can hold: half a character, a date, bytes."""
    stack: list[tuple[tuple[object, ...], Any]] = [((), values)]
    while stack:
        place, value = stack.pop()
        if isinstance(value, dict):
            stack.extend(((*place, key), key) for key in value if not isinstance(key, str)
                         or SURROGATE.search(key))
            stack.extend(((*place, key), inner) for key, inner in value.items())
        elif isinstance(value, list | tuple):
            stack.extend(((*place, number), inner) for number, inner in enumerate(value))
        elif isinstance(value, str):
            if SURROGATE.search(value):
                raise TapflError(f"{where}: {_key(place)}: {shown(value)} is not a text: it holds "
                                 "half a character (a lone surrogate)")
        elif isinstance(value, datetime.date):
            raise TapflError(f"{where}: {_key(place)}: {value} is a date; put it in quotes if it "
                             "is meant as a text")
        elif isinstance(value, bytes | set):
            raise TapflError(f"{where}: {_key(place)}: expected a plain value, got {shown(value)}")


def _key(place: tuple[object, ...]) -> str:
    return ".".join(one_line(str(part), 100) for part in place) or "configuration"


def check(model: type[T], values: dict[str, Any], where: str) -> T:
    """Validate; the first fault becomes one line that names the file, the key and the remedy."""
    _refuse_odd(values, where)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = _telling(error)
        key = _key(_place(fault["loc"], values))
        if fault["type"] == "extra_forbidden":
            raise TapflError(f"{where}: unknown key '{key}'{_hint(model, fault)}") from None
        message = fault["msg"].removeprefix("Value error, ")
        got = "" if isinstance(fault["input"], dict) else f", got {shown(fault['input'])}"
        if not fault["loc"] and fault["type"] == "value_error":  # it names its keys itself
            raise TapflError(f"{where}: {message}") from None
        raise TapflError(f"{where}: {key}: {message}{got}") from None
    except RecursionError:
        raise TapflError(f"{where}: nested too deeply") from None


def _telling(error: ValidationError) -> Any:
    """Return the first fault; where several types were tried, that of the one that came furthest.

    A list of names of which one is a number is no integer either, but that is not what is wrong.
    """
    faults = error.errors(include_url=False)
    first = faults[0]
    if not first["loc"] or not _TRIED.fullmatch(str(first["loc"][-1])):
        return first
    same = [fault for fault in faults
            if fault["loc"][:len(first["loc"]) - 1] == first["loc"][:-1]]
    furthest = max(len(fault["loc"]) for fault in same)
    told = [fault for fault in same if len(fault["loc"]) == furthest]
    if furthest > len(first["loc"]):
        return told[0]
    messages = dict.fromkeys(fault["msg"] for fault in told)  # any of these types would do
    if len(messages) > 1 and all(message.startswith(_SHOULD) for message in messages):
        wanted = (m.removeprefix(_SHOULD).partition(", unable")[0] for m in messages)
        return told[0] | {"msg": _SHOULD + ", or ".join(wanted)}
    return told[0] | {"msg": ", or: ".join(messages)}


def _place(location: tuple[int | str, ...], values: Any) -> tuple[int | str, ...]:
    """Return a fault's place in what was read, without the names of types that were tried."""
    kept: list[int | str] = []
    for part in location:
        inside = (isinstance(values, dict) and part in values) or (
            isinstance(values, list) and isinstance(part, int) and part < len(values))
        if inside:
            values = values[part]
        elif _TRIED.fullmatch(str(part)):
            continue
        kept.append(part)
    return tuple(kept)


def _hint(model: type[BaseModel], fault: Any) -> str:
    key = str(fault["loc"][-1])
    if fault["input"] is None and ":" in key:
        return "; a colon is followed by a space: {key: value}"
    return nearest(key, _keys_at(model, fault["loc"][:-1]))


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not isinstance(field.annotation, type):
            return []
        model = field.annotation
    return list(model.model_fields)
