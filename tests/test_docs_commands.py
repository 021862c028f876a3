"""Every command of the documents parses, and runs as printed unless it says what it needs.

A block of commands may follow a line ``<!-- needs: time -->`` (or gpu, hub, data, cluster,
servers): then it is only parsed. All others are run by the long tests, page by page and in their
order, in a folder where the runs that they name are there. Only size differs from what is printed:
``run`` gets ``SMALL`` too.
"""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from importlib import resources
from pathlib import Path

import pytest
from PIL import Image

from tapfl.cli import build_parser, main

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}

NEEDS = {"gpu", "hub", "data", "time", "cluster", "servers"}
# What no test runs, on whichever page it stands: the words of a command, and what it needs.
KINDS = {
    r"\bcuda\b|^tapfl run flava|^tapfl bench .*(flava|vilt)": "gpu",
    r"^tapfl setup-metrics|^tapfl (run|validate) pair": "hub",
    r"(--data|data\.folder=) ?DIR": "data",
    r"^tapfl deploy\b": "servers",
    r"^tapfl report reproduction": "time",
    r"^tapfl (bench|pretrain|watch)\b|^tapfl reproduce (?!.*--dry-run)": "time",
}
PLACEHOLDERS = {"RUN...": "runs/mine", "RUN": "runs/mine", "ID": "g0-4", "TASK": "vqa",
                "F": "a.png", "T": "how many?", "DIR": "somewhere", "CLIENT...": "g0-1",
                "FILE": "examples/clinics/newcomers.yaml", "NEW": "newcomers"}
SMALL = ["train.rounds=2", "train.local_steps=1", "train.batch_size=4", "post.steps=1",
         "evaluation.max_new_tokens=4"]
FEW = ["federation.groups=2", "data.train=60", "data.test=6"]  # for presets, which bring data


def _blocks(text):
    """Yield what a block of commands needs, and its lines; two spaces begin a remark."""
    fence = r"^```([^\n`]*)\n(.*?)^```"
    pattern = rf"(?:^<!-- needs: ([^\n]*) -->\n\s*)?(?:{fence}|((?:^    .*\n)+))"
    for match in re.finditer(pattern, re.sub(r"\s*\\\n\s*", " ", text), re.S | re.M):
        needs, language, fenced, indented = match.groups()
        if not language:
            lines = [line.strip() for line in (indented or fenced).splitlines()]
            yield needs, [re.split(r"\s{2,}|\s#", line)[0] for line in lines if line]


def _commands(page):
    """Yield the commands of a page, each with what it needs, if it is known to need something."""
    for needs, lines in _blocks(PAGES[page].read_text()):
        for line in lines:
            if line.startswith(("tapfl ", "python ")):
                kinds = [kind for words, kind in KINDS.items() if re.search(words, line)]
                yield line, needs or next(iter(kinds), None)


def _words(command):
    """Return a command's words as a shell would, and where its output goes."""
    command, _, file = command.partition(" > ")
    words = []
    for word in shlex.split(command):
        found = sorted(map(str, Path().glob(word))) if "*" in word else []
        words += found or [PLACEHOLDERS.get(word, word)]
    return words, file.strip()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_parses(page, capsys):
    """Its verb and options exist, as printed."""
    for command, _ in _commands(page):
        program, *words = _words(command)[0]
        if program == "python":
            continue
        try:
            build_parser().parse_args(words)
        except SystemExit as ended:
            if ended.code:
                pytest.fail(f"{page}: {command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_need_what_is_known(page):
    said = re.findall(r"<!-- needs:([^\n]*)-->", PAGES[page].read_text())
    assert {needs.strip() for needs in said} <= NEEDS
    read = [needs for needs, _ in _blocks(PAGES[page].read_text()) if needs]
    assert len(read) == len(said), "a mark stands directly before its block"


@pytest.mark.parametrize("page", PAGES)
def test_targets_and_scripts_exist(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in (line for _, lines in _blocks(PAGES[page].read_text()) for line in lines):
        tool, _, rest = line.partition(" ")
        if tool == "make":
            assert rest.split()[0] in targets, line
        if tool == "python" and (file := rest.split()[0]).startswith(("scripts/", "examples/")):
            assert (ROOT / file).is_file(), line


def test_blocks_are_found(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(
        "```python\nx\n```\n\n```\ntapfl run a \\\n  --quiet      a remark\n```\n"
        "<!-- needs: time -->\n```\ntapfl run b\n```\n\n    tapfl run c\n    tapfl watch c\n")
    monkeypatch.setitem(PAGES, "page", tmp_path / "page.md")
    assert list(_commands("page")) == [
        ("tapfl run a --quiet", None), ("tapfl run b", "time"), ("tapfl run c", None),
        ("tapfl watch c", "time")]


def _run(command):
    """Run a command as printed, ``run`` with less to do; return whether it succeeded."""
    (program, *words), file = _words(command)
    if program == "python":
        return subprocess.run([sys.executable, *words], check=False).returncode == 0
    if words[0] == "run" and words[1] != "--resume":
        if "--out" in words and "--resume" not in words:  # one that the workplace brought along
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        settings = SMALL if words[1].endswith(".yaml") else [*SMALL, *FEW]
        words += [word for setting in settings for word in ("--set", setting)]
        words += ["--quiet", "--threads", "1"]
    with contextlib.ExitStack() as stack:
        if file:
            opened = stack.enter_context(Path(file).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(opened))
        return main(words) == 0


def _write_files(text):
    """Write the files that a page shows: a block whose paragraph begins with the file's name."""
    for name, content in re.findall(
            r"^`([\w/.-]+\.\w+)`(?:[^\n]+\n)*?[^\n]*\n\n```(?:python|yaml)\n(.*?)^```", text,
            re.S | re.M):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the runs and files that the documents speak of."""
    folder = tmp_path_factory.mktemp("workplace")
    with contextlib.chdir(folder):
        (folder / "examples").symlink_to(ROOT / "examples")
        Image.new("RGB", (64, 64), "red").save("a.png")
        Path("in.csv").write_text("text\nshares rise\n")
        shutil.copy(str(resources.files("tapfl") / "assets" / "mini.safetensors"), ".")
        settings = " ".join(f"--set {setting}" for setting in FEW)
        assert _run(f"tapfl show quickstart {settings} > mine.yaml")
        for seed in (41, 42, 43):
            assert _run(f"tapfl run quickstart --seed {seed} --out runs/{seed}")
            shutil.copytree(f"runs/{seed}", f"runs/three/seed{seed}")
            shutil.copytree(f"runs/{seed}", f"runs/seed{seed}")
        assert _run("tapfl run examples/clinics/clinics.yaml --out runs/clinics")
        assert _run("tapfl run quickstart --set privacy.mode=central --set privacy.noise=8 "
                    "--out runs/private")
        for name in ("mine", "quickstart", "flava", "vilt"):
            shutil.copytree("runs/41", f"runs/{name}")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", [
    page for page in PAGES if any(needs is None for _, needs in _commands(page))])
def test_commands_run_as_printed(page, workplace, tmp_path, monkeypatch, capsys):
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(webbrowser, "open", lambda address: True)
    _write_files(PAGES[page].read_text())
    for command in [command for command, needs in _commands(page) if needs is None]:
        capsys.readouterr()
        assert _run(command), f"{command}: {capsys.readouterr().err}"
