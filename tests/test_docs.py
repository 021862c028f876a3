"""The documents' examples run as printed, and what they refer to is there."""

import ast
import functools
import json
import re
import shlex
from pathlib import Path

import pytest

import tapfl
from tapfl.cli import main
from tapfl.reading import parse_yaml
from tapfl.report import paper

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def test_own_method(tmp_path, capsys):
    text = (DOCS / "own-method.md").read_text()
    code, more = re.findall(r"```python\n(.*?)```", text, re.S)
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 35
    names = ["fedavg", "prox:FedProx", "prox:FedProx+prox:Halfway", "prox:FedProx+tap"]
    assert parse_yaml(settings, "prox.yaml")["methods"] == names
    names += ["fedavg+follow:Follower", "fedavg+follow:Cautious"]
    (tmp_path / "prox.py").write_text(code)
    (tmp_path / "follow.py").write_text(more)
    (tmp_path / "prox.yaml").write_text(settings)
    assert main(["run", str(tmp_path / "prox.yaml"), "--out", str(tmp_path / "out"),
                 "--threads", "1", "--set", "data.test=12", "--set", "train.rounds=2",
                 "--set", "federation.clients=['1', '4']", "--set", f"methods={names}",
                 "--no-report"]) == 0
    out = capsys.readouterr().out
    assert "prox:FedProx+tap" in out
    methods = {line.split(",")[1] for line in
               (tmp_path / "out" / "results.csv").read_text().splitlines()[1:]}
    assert methods == {*names, "constant"}
    replaced = [json.loads(line) for line in
                (tmp_path / "out" / "events.jsonl").read_text().splitlines()
                if '"replacement"' in line]
    later = [each["share"] for each in replaced if each["personal_loss"] is not None
             and each["method"] == "fedavg+follow:Cautious"]
    assert later
    assert set(later) <= {0.5}


def test_documents_name_only_commands_that_exist(capsys):
    main([])
    known = set(re.findall(r"^    ([\w-]+)", capsys.readouterr().out, re.M))
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        used = set(re.findall(r"(?:^    |`|\n)tapfl ([a-z][a-z-]+)", path.read_text()))
        assert used <= known, (path.name, used - known)


@functools.cache
def _anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    found = set()
    for title in re.findall(r"^#+ (.+)$", text, re.M):
        anchor = re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-")
        number = 0
        while (name := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(name)
    return found


def _broken(path):
    """Return a page's links to files and headings that are not there."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", path.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert list(_broken(path)) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "there.md").write_text("# One two\n\n```\n# no heading\n```\n\n# One two\n")
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n[1](there.md) [2](gone.md) [3](there.md#one-two) [4](#a-b-c) "
                    "[5](there.md#no-heading) [6](https://example.org) [7](there.md#one-two-1)\n"
                    "`[8](code.md)`\n")
    assert list(_broken(page)) == ["gone.md", "there.md#no-heading"]


def test_every_page_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page.resolve())
        links = re.findall(r"\]\(([^)\s#:]+\.md)", page.read_text())
        todo += [target for link in links
                 if (target := (page.parent / link).resolve()).is_file() and target not in seen]
    index = DOCS / "index.md"  # the site's own front page
    assert {page for page in PAGES if page.is_relative_to(DOCS)} - seen - {index} == set()


def test_the_site_has_every_page():
    listed = re.findall(r"^[\w/*-]+$", (DOCS / "index.md").read_text(), re.M)
    pages = {str(page) for entry in listed for page in DOCS.glob(f"{entry}.md")}
    assert {str(page) for page in DOCS.rglob("*.md")} - pages == {str(DOCS / "index.md")}


def test_the_notebook_holds_what_it_printed():
    text = (DOCS / "notebooks" / "first-steps.ipynb").read_text()
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert len(outputs) > 8
    assert {output["output_type"] for output in outputs} <= {"execute_result", "stream"}
    assert re.search(r"/(home|root|tmp|work|usr)/", text) is None  # a path of one machine
    for link in re.findall(r"\]\(([^)\s:]+)\)", text):
        assert (DOCS / "notebooks" / link).exists(), link


@functools.cache
def _names(path):
    """Return what a Python file defines: functions, classes and their methods."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
    return found


def test_what_the_paper_is_mapped_to_exists():
    text = (DOCS / "paper-to-code.md").read_text()
    references = re.findall(r"`([\w/-]+\.py)::([\w.]+)`", text)
    assert len(references) > 80
    for file, name in references:
        path = ROOT / file if file.startswith("tests/") else ROOT / "src" / "tapfl" / file
        assert path.is_file(), file
        assert name in _names(path), (file, name)
        assert not file.startswith("tests/") or name.startswith("test_"), name
    for file in re.findall(r"`((?:presets|report)/[\w/-]+\.\w+)`", text):
        assert (ROOT / "src" / "tapfl" / file).is_file(), file
    for key in re.findall(r"`((?:train|tap|post)\.\w+)`", text):
        assert f"| `{key.partition('.')[2]}` |" in (DOCS / "configuration.md").read_text(), key


def test_every_table_of_the_published_figures_is_mapped():
    text = (DOCS / "paper-to-code.md").read_text()
    tables = {line.partition(",")[0] for line in
              Path(paper.__file__).with_suffix(".csv").read_text().splitlines()[1:]}
    assert {table for table in tables if table not in text} == set()


def test_the_citation():
    citation = parse_yaml((ROOT / "CITATION.cff").read_text(), "CITATION.cff")
    assert citation["version"] == tapfl.__version__
    about = " ".join(paper.__doc__.split())
    assert citation["preferred-citation"]["title"] in about
    names = [f"{a['given-names']} {a['family-names']}"
             for a in citation["preferred-citation"]["authors"]]
    assert f"by {', '.join(names[:-1])} and {names[-1]}" in about


@pytest.mark.long
def test_the_quickstart_and_what_the_readme_does_with_it(tmp_path, monkeypatch, capsys):
    """From the first command to a model that is taken away."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", "quickstart", "--quiet", "--threads", "1"]) == 0
    for command in ("table runs/quickstart --markdown",
                    "predict runs/quickstart --client g0-1 --task agnews --text 'shares rise'",
                    "export runs/quickstart --client g0-7 --out g0-7",
                    "predict g0-7 --task agnews --text 'shares rise'",
                    "run --resume --out runs/quickstart"):
        assert main(shlex.split(command)) == 0, (command, capsys.readouterr().err)
    assert (tmp_path / "g0-7" / "README.md").is_file()
