"""The package's metadata: what it imports is declared, and what it reads is in the wheel."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tapfl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules whose distribution has another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "google": "protobuf"}


def _name(requirement):
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _imports(body):
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def _third_party(nodes):
    modules = {name.partition(".")[0] for name in _imports(nodes)}
    return {DISTRIBUTIONS.get(m, m).lower().replace("_", "-")
            for m in modules - set(sys.stdlib_module_names) - {"tapfl"}}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")),
                         ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_declared(path):
    tree = ast.parse(path.read_text())
    always = {_name(r) for r in PROJECT["dependencies"]}
    extras = {_name(r) for rs in PROJECT["optional-dependencies"].values() for r in rs}
    # Kernels are imported only where Triton is installed, which comes with torch on Linux.
    allowed = always | ({"triton"} if "kernels" in path.parts else set())
    # What speaks to Flower is imported where somebody asks for it.
    if {"flower", "deploy"} & set(path.parts):
        allowed |= {_name(r) for r in PROJECT["optional-dependencies"]["flower"]}
    assert _third_party(tree.body) <= allowed
    assert _third_party(ast.walk(tree)) <= allowed | extras


def test_files_that_are_no_code_are_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["tapfl"]
    files = [str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*")
             if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {"py.typed", "presets/flava-100.yaml", "assets/mini.safetensors"} <= set(files)
    assert [f for f in files if not any(fnmatch(f, p) for p in patterns)] == []


def test_the_pinned_versions_satisfy_the_declared_ranges():
    packaging = pytest.importorskip("packaging.requirements")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
                if "==" in line and not line.startswith("#"))
    pins = {_name(name): version for name, version in pins.items()}
    declared = [*PROJECT["dependencies"],
                *(r for rs in PROJECT["optional-dependencies"].values() for r in rs)]
    checked = 0
    for requirement in map(packaging.Requirement, declared):
        name = _name(requirement.name)
        if name in pins:
            assert requirement.specifier.contains(pins[name]), requirement
            checked += 1
    assert checked > 10
    # Libraries that are used beside it do not all allow protobuf 7.
    assert int(pins["protobuf"].partition(".")[0]) < 7


@pytest.mark.parametrize(("given", "expected"), [
    ({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")])
def test_threads_wait_for_a_short_time_unless_the_user_says_how(given, expected):
    """It has to be set before torch is loaded, which importing tapfl alone does not do."""
    kept = {key: value for key, value in os.environ.items()
            if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    program = ("import os, sys, tapfl; assert 'torch' not in sys.modules; "
               "print(os.environ.get('GOMP_SPINCOUNT'))")
    found = subprocess.run([sys.executable, "-c", program], env=kept | given, check=True,
                           capture_output=True, text=True).stdout
    assert found.strip() == expected
