"""What may change when a run is continued: one list, and everything that reads it."""

import ast
from pathlib import Path

import pytest

import tapfl
from tapfl.config import Config
from tapfl.engine.record import RESULT_ROOMS, check_unchanged
from tapfl.errors import TapflError
from tests.engine.test_rounds import Fakes, rounds

ALLOWED = [{"speed": {"micro_batch": 2}}, {"checkpoint": {"every": 3}},
           {"data": {"folder": "elsewhere"}}]
REFUSED = [{"data": {"seed": 1}}, {"train": {"rounds": 3}}, {"seed": 1},
           {"federation": {"groups": 1}}, {"precision": "fp32"}]


@pytest.mark.parametrize("change", ALLOWED, ids=str)
def test_where_a_run_computes_may_change(tmp_path, change):
    check_unchanged(tmp_path, Config(), Config.model_validate(change), "stop")
    assert settings(tmp_path, change) == settings(tmp_path, {})


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_what_it_computes_may_not(tmp_path, change):
    (section,) = change
    with pytest.raises(TapflError, match=rf"another '{section}' \(.*\); choose another --out$"):
        check_unchanged(tmp_path, Config(), Config.model_validate(change), "choose another --out")
    assert settings(tmp_path, change) != settings(tmp_path, {})


def test_more_may_be_ignored(tmp_path):
    other = Config.model_validate({"threads": 3})
    check_unchanged(tmp_path, Config(), other, "stop", ["threads"])
    with pytest.raises(TapflError, match="another 'threads'"):
        check_unchanged(tmp_path, Config(), other, "stop")


def settings(folder, change):
    """What a checkpoint says of the configuration that it was made with."""
    made, _ = rounds(folder, Fakes())
    made.config = Config.model_validate(change)
    made.__post_init__()
    return made._settings


def test_the_codes_checksum_covers_every_room_that_results_depend_on():
    package = Path(tapfl.__file__).parent
    files = [*package.glob("*.py"), *(p for room in RESULT_ROOMS for p in (package / room).glob(
        "*.py"))]
    above = {"__init__.py", "__main__.py", "pretrain.py", "verbs.py"}  # these use other rooms
    for path in files:
        if path.parent == package and path.name in above:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tapfl."):
                room = node.module.split(".")[1]
                if (package / room).is_dir():
                    assert room in RESULT_ROOMS, f"{path} imports {node.module}"
