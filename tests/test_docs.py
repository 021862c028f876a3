"""The documents' examples run as printed."""

import re
from pathlib import Path

from tapfl.cli import main

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
    assert methods == {"fedavg", "prox:FedProx", "prox:FedProx+prox:Halfway", "prox:FedProx+tap"}


def test_documents_name_only_commands_that_exist(capsys):
    main([])
    known = set(re.findall(r"^    ([\w-]+)", capsys.readouterr().out, re.M))
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        used = set(re.findall(r"(?:^    |`|\n)tapfl ([a-z][a-z-]+)", path.read_text()))
        assert used <= known, (path.name, used - known)
