"""The documents' examples run as printed."""

import re
import shlex
from pathlib import Path

import pytest

from tapfl.cli import build_parser, main

DOCS = Path(__file__).parent.parent / "docs"


def test_own_method(tmp_path, capsys):
    text = (DOCS / "own-method.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) <= 35
    (tmp_path / "prox.py").write_text(code)
    (tmp_path / "prox.yaml").write_text(settings)
    assert main(["run", str(tmp_path / "prox.yaml"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "prox:FedProx+tap" in out
    methods = {line.split(",")[1] for line in
               (tmp_path / "out" / "results.csv").read_text().splitlines()[1:]}
    assert methods == {"fedavg", "prox:FedProx", "prox:FedProx+prox:Halfway", "prox:FedProx+tap",
                       "constant"}


def test_documents_name_only_commands_that_exist(capsys):
    main([])
    known = set(re.findall(r"^    ([\w-]+)", capsys.readouterr().out, re.M))
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        used = set(re.findall(r"(?:^    |`|\n)tapfl ([a-z][a-z-]+)", path.read_text()))
        assert used <= known, (path.name, used - known)


def _commands(text):
    """Return the tapfl commands of a document's code blocks; two spaces begin a remark."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"```\n(.*?)```", text, re.S) + re.findall(r"(?:^    .*\n)+", text, re.M)
    for line in (line.strip() for block in blocks for line in block.splitlines()):
        if line.startswith("tapfl "):
            yield re.split(r"\s{2,}|\s#", line.removeprefix("tapfl ").strip())[0]


def test_every_command_of_the_documents_can_be_parsed(capsys):
    """Its verb and options exist, as printed."""
    seen = 0
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for command in _commands(path.read_text()):
            for one in command.split(" | ")[:1]:
                words = shlex.split(one.replace("RUN...", "RUN").partition(" > ")[0])
                try:
                    build_parser().parse_args(words)
                except SystemExit as ended:
                    if ended.code:
                        pytest.fail(f"{path.name}: {command}: {capsys.readouterr().err}")
                seen += 1
    assert seen > 30


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
