"""Write the reference pages from the code: python scripts/reference.py [--check]

docs/configuration.md comes from tapfl/config.py and tapfl/settings, docs/commands.md from the
command line's parser, docs/api.md from docstrings. Nothing here imports torch. A key, an option or
a name without a meaning is an error. ``--check`` writes nothing and fails if a page is out of date.
"""

import argparse
import ast
import inspect
import re
import sys
from pathlib import Path

import yaml

import tapfl
from tapfl.cli import build_parser
from tapfl.config import Config, preset_summaries

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
NOTE = ("<!-- Written by scripts/reference.py (make docs-reference): "
        "edit the code, not this page. -->\n")

# Names of the Python API in the order of the page: a title, a sentence, and module:name.
API = (
    ("Run", "Everything that `tapfl run` does, from Python.",
     ("tapfl.config:load_config", "tapfl.engine.run:run", "tapfl.errors:TapflError")),
    ("Use a model", "What a client's model answers, and how to take it away.",
     ("tapfl.use.load:load", "tapfl.use.load:ClientModel", "tapfl.use.export:export")),
    ("Come later, or go", "Newcomers to a stored run, and clients that leave "
     "([newcomers.md](newcomers.md)).",
     ("tapfl.use.join:join", "tapfl.use.join:Joined", "tapfl.engine.departures:leave")),
    ("Read results", "What a run's folder holds, as Python values.",
     ("tapfl.engine.results:read_results", "tapfl.engine.record:read_record",
      "tapfl.engine.scores:read_scores", "tapfl.report.tables:render",
      "tapfl.report.verdict:verdict")),
    ("Write a method", "What a class of your own derives from ([own-method.md](own-method.md)).",
     ("tapfl.federated.method:FederatedMethod", "tapfl.federated.method:FedAvg",
      "tapfl.personal.personalizer:Personalizer", "tapfl.federated.settings:Configurable",
      "tapfl.config:Section")),
    ("What a method works with", "Clients, blocks, and the shipped training loop.",
     ("tapfl.federated.context:Context", "tapfl.data.federation:Member",
      "tapfl.data.federation:Client", "tapfl.blocks:BlockState", "tapfl.blocks:average",
      "tapfl.federated.training:local_training", "tapfl.federated.training:minimise",
      "tapfl.federated.training:task_objective", "tapfl.federated.context:randomness",
      "tapfl.federated.stepper:graph_safe")),
    ("Events", "What happens in a run. A `Logged` event is a line of events.jsonl; `kind` is its "
     "name there.",
     tuple(f"tapfl.events:{name}" for name in (
         "Event", "Logged", "RoundEnded", "OfClient", "Refused", "Missing", "Left",
         "Replacement", "PersonalLosses", "Curve", "Diverged", "Note", "RunStarted",
         "ClientFinished", "DataPrepared", "RowsDropped", "Message"))),
)


def main() -> int:
    stale = [name for name, text in pages().items() if _on_disk(name) != text]
    if "--check" not in sys.argv:
        for name in stale:
            (ROOT / "docs" / name).write_text(pages()[name], encoding="utf-8")
            print(f"written: docs/{name}")
        return 0
    for name in stale:
        print(f"docs/{name} is out of date: make docs-reference", file=sys.stderr)
    return bool(stale)


def pages() -> dict[str, str]:
    return {"configuration.md": configuration(), "commands.md": commands(), "api.md": api()}


def _on_disk(name: str) -> str | None:
    path = ROOT / "docs" / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


# Configuration


def configuration() -> str:
    schema = Config.model_json_schema()
    files = [SOURCE / "tapfl" / "config.py", *sorted((SOURCE / "tapfl" / "settings").glob("*.py"))]
    meanings = {name: docs for file in files
                for name, docs in attribute_docs(file.read_text(encoding="utf-8")).items()}
    top, sections = [], []
    for key, entry in schema["properties"].items():
        part = _section(schema, entry)
        if part is None:
            top += _rows(schema, "Config", {key: entry}, meanings)
        else:
            default = entry.get("default", {})
            rows = _rows(schema, part, schema["$defs"][part]["properties"], meanings, default)
            sections.append(f"## {key}\n\n{_prose(schema['$defs'][part]['description'])}\n\n"
                            + _table(("key", "type", "default", "meaning"), rows))
    presets = _table(("preset", "what it is for"),
                     [(f"`{name}`", text) for name, text in preset_summaries().items()])
    return "\n".join([
        NOTE, "# Configuration", "",
        "Every key of an experiment, with its default. A configuration is a YAML file with some of "
        "these keys,\nor a shipped preset; `--set section.key=value` changes a key on the command "
        "line. Unknown keys and\nvalues out of bounds are errors. To get a whole file to edit:\n",
        "```", "tapfl show quickstart > mine.yaml", "tapfl validate mine.yaml", "```", "",
        "A federation file, which names clients, tasks and data of your own, is described in "
        "[own-data.md](own-data.md).\n",
        "## Presets", "", presets, "## Top level", "",
        _table(("key", "type", "default", "meaning"), top), *sections]).rstrip() + "\n"


def attribute_docs(source: str) -> dict[str, dict[str, str]]:
    """Return the string that stands under each attribute, by class."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: inspect.cleandoc(text.value.value)
                for field, text in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)}
    return found


def _rows(schema, section, properties, meanings, defaults=None, prefix=""):
    """Return a table's rows: key, type, default, meaning; the keys of a mapping follow it."""
    rows = []
    for key, entry in properties.items():
        if key not in meanings.get(section, {}):
            raise SystemExit(f"settings: {section}.{key} has no meaning: write a string under it")
        default = (defaults or {}).get(key, entry.get("default"))
        below = _section(schema, entry)  # the defaults of its keys follow
        rows.append((f"`{prefix}{key}`", words(entry), "" if below else _value(default, entry),
                     " ".join(_prose(meanings[section][key]).split())))
        inner, step = below, ""
        if inner is None and _section(schema, entry.get("additionalProperties")):
            inner, step, default = _section(schema, entry["additionalProperties"]), "NAME.", None
        if inner is not None:
            rows += _rows(schema, inner, schema["$defs"][inner]["properties"], meanings, default,
                          f"{prefix}{key}.{step}")
    return rows


def _section(schema, entry) -> str | None:
    """Return the class that an entry refers to, if it does."""
    name = entry.get("$ref", "").rpartition("/")[2] if isinstance(entry, dict) else ""
    return name if name in schema.get("$defs", {}) else None


def words(entry) -> str:
    """Say in words what a value must be."""
    if "anyOf" in entry:
        parts = [words(part) for part in entry["anyOf"] if part.get("type") != "null"]
        return ", or ".join(parts)
    if "enum" in entry:
        *others, last = (f"`{value}`" for value in entry["enum"])
        return f"{', '.join(others)} or {last}"
    if "const" in entry:
        return f"`{entry['const']}`"
    kind = entry.get("type")
    if kind in ("integer", "number"):
        name = "whole number" if kind == "integer" else "number"
        return name + _bounds(entry)
    if kind == "array":
        return f"list of {words(entry['items'])}"
    if kind == "string":
        return "text such as `3x`" if "pattern" in entry else "text"
    return {"boolean": "`true` or `false`"}.get(kind, "mapping")


def _bounds(entry) -> str:
    low, high = entry.get("minimum"), entry.get("maximum")
    above, below = entry.get("exclusiveMinimum"), entry.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {_figure(low)} to {_figure(high)}"
    parts = [f"{word} {_figure(value)}" for word, value in (
        ("at least", low), ("above", above), ("at most", high), ("below", below))
        if value is not None]
    return ", " + ", ".join(parts) if parts else ""


def _figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _value(default, entry) -> str:
    if default is None:
        return "none" if "anyOf" in entry else "required"
    text = yaml.safe_dump(default, default_flow_style=True, width=10_000, sort_keys=False)
    return f"`{text.strip().removesuffix('...').strip()}`"


# Commands


def commands() -> str:
    parser = build_parser()
    parts = [NOTE, "# Commands", "",
             "Every command and option, as `tapfl COMMAND --help` prints them. Bad input is one "
             "line on stderr, and\nexit status 2.", ""]
    verbs = _verbs(parser)
    parts += [_table(("command", "what it does"),
                     [(f"[`tapfl {name}`](#{_anchor(f'tapfl {name}')})", short)
                      for name, short, _ in verbs])]
    for name, _, verb in verbs:
        parts += _command(f"tapfl {name}", verb)
    return "\n".join(parts).rstrip() + "\n"


def _verbs(parser):
    """Return a parser's commands: name, help, parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            short = {choice.dest: choice.help for choice in action._choices_actions}
            return [(name, short[name], verb) for name, verb in action.choices.items()]
    return []


def _command(name, parser, level="##") -> list[str]:
    inner = _verbs(parser)
    places = [a for a in parser._actions if not a.option_strings and a.nargs != argparse.PARSER]
    options = [a for a in parser._actions if a.option_strings and a.dest != "help"]
    usage = " ".join([name, *([] if not inner else ["..."]), *map(_place, places),
                      *(f"{a.option_strings[-1]} {a.metavar}" for a in options if a.required),
                      *(["[options]"] if any(not a.required for a in options) else [])])
    parts = [f"{level} {name}", "", parser.description, "", "```text", usage, "```", ""]
    rows = [(f"`{a.metavar or a.dest}`".replace("|", r"\|"), _help(name, a)) for a in places]
    rows += [("`" + " ".join([*a.option_strings, *([a.metavar] if a.metavar else [])])
              .replace("|", r"\|") + "`", _help(name, a)) for a in options]
    if rows:
        parts += [_table(("option", "meaning"), rows)]
    if parser.epilog:
        examples = [line.strip() for line in parser.epilog.splitlines()[1:]]
        parts += ["```", *examples, "```", ""]
    for verb, _, below in inner:
        parts += _command(f"{name} {verb}", below, level + "#")
    return parts


def _place(action) -> str:
    name = action.metavar or action.dest
    return {"?": f"[{name}]", "+": f"{name}..."}.get(action.nargs, name)


def _help(name, action) -> str:
    if not action.help:
        raise SystemExit(f"{name}: {action.option_strings or action.metavar} has no help")
    return action.help.replace("%%", "%").replace("|", r"\|") + (
        " (required)" if action.option_strings and action.required else "")


# Python API


def api() -> str:
    parts = [NOTE, "# Python API", "",
             "What a program of your own may rely on, from the docstrings. "
             "[running.md](running.md#from-python)\nhas a first program.", ""]
    for title, sentence, names in API:
        parts += [f"## {title}", "", sentence, ""]
        for name in names:
            parts += _name(*name.split(":"))
    return "\n".join(parts).rstrip() + "\n"


def _defined(module: str, name: str) -> ast.stmt | None:
    """Return where a name is defined: in the module, or where that imports it from."""
    source = (SOURCE / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if getattr(node, "name", None) == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _defined(node.module, name)
    return None


def _name(module: str, name: str) -> list[str]:
    node = _defined(module, name)
    if node is None:
        raise SystemExit(f"scripts/reference.py: {module} has no {name}")
    home = "tapfl" if name in tapfl.__all__ else module
    parts = [f"### {name}", "", f"`from {home} import {name}`", "", "```python", _signature(node),
             "```", "", _docstring(node, f"{module}.{name}"), ""]
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)
                  and not ast.unparse(n.target).startswith(("_", "kind"))]
        if fields:
            parts += ["```python", *fields, "```", ""]
        rows = [(f"`{_call(n)}`".replace("|", r"\|"),
                 " ".join(_docstring(n, f"{name}.{n.name}").split()).replace("|", r"\|"))
                for n in node.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
        if rows:
            parts += [_table(("", "meaning"), rows)]
    return parts


def _signature(node) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    given = [ast.unparse(a) for a in node.args.args]
    for place, value in enumerate(reversed(node.args.defaults), 1):
        given[-place] += f" = {ast.unparse(value)}"
    if node.args.kwonlyargs:
        given.append("*")
        given += [ast.unparse(a) + (f" = {ast.unparse(d)}" if d else "")
                  for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    lines = ",\n    ".join(given)
    one = f"{node.name}({', '.join(given)}) -> {ast.unparse(node.returns)}"
    return one if len(one) <= 100 else (
        f"{node.name}(\n    {lines},\n) -> {ast.unparse(node.returns)}")


def _call(node) -> str:
    """Return a method as it is called: names without their types; a property has no brackets."""
    if any("property" in ast.unparse(d) for d in node.decorator_list):
        return node.name
    given = [a.arg for a in [*node.args.args, *node.args.kwonlyargs]
             if a.arg not in ("self", "cls")]
    return f"{node.name}({', '.join(given)})"


def _docstring(node, where: str) -> str:
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"{where} has no docstring")
    return _prose(text)


# Markdown


def _prose(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _table(heads, rows) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
