"""The reference pages are those of the code as it is."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import tapfl
from tapfl.config import Config

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "reference.py"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "commands.md", "api.md"])
def test_the_pages_are_up_to_date(reference, name):
    assert (ROOT / "docs" / name).read_text() == reference.pages()[name], "make docs-reference"


def test_pages_need_no_torch():
    code = ("import runpy, sys; module = runpy.run_path(sys.argv[1]); module['pages'](); "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code, str(SCRIPT)]).returncode == 0


def test_every_key_has_a_row(reference):
    text = reference.configuration()
    defaults = Config().model_dump()
    for section, values in defaults.items():
        keys = [section]
        if isinstance(values, dict) and values:
            _, _, rest = text.partition(f"\n## {section}\n")
            text_of, keys = rest.partition("\n## ")[0], list(values)
        else:
            text_of = text.partition("## Top level")[2].partition("\n## ")[0]
        for key in keys:
            assert f"| `{key}` |" in text_of, (section, key)


def test_every_public_name_is_in_the_api(reference):
    names = {name.partition(":")[2] for _, _, names in reference.API for name in names}
    assert set(tapfl.__all__) - {"__version__"} <= names


def test_types_in_words(reference):
    for entry, words in (
            ({"type": "integer", "minimum": 1, "maximum": 2000}, "whole number, 1 to 2,000"),
            ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number, above 0, at most 1"),
            ({"enum": ["a", "b", "c"], "type": "string"}, "`a`, `b` or `c`"),
            ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
            ({"type": "array", "items": {"type": "boolean"}}, "list of `true` or `false`")):
        assert reference.words(entry) == words


def test_a_key_without_a_meaning_is_an_error(reference):
    meanings = reference.attribute_docs(
        "class A:\n    told: int = 1\n    \"\"\"What it is.\"\"\"\n    untold: int = 2\n")
    assert meanings == {"A": {"told": "What it is."}}
    key = {"untold": {"type": "integer", "default": 2}}
    with pytest.raises(SystemExit, match=r"A\.untold has no meaning"):
        reference._rows({}, "A", key, meanings)
