"""`tapfl reproduce` and `tapfl run --seeds`, as a user types them."""

import contextlib
import os
import re
import signal
import threading

import pytest

from tapfl.cli import main
from tapfl.config import CheckpointConfig
from tapfl.engine.record import read_record
from tapfl.engine.results import read_results
from tapfl.errors import TapflError
from tapfl.experiments import catalogue, execute
from tapfl.experiments.catalogue import Experiment, Part
from tapfl.experiments.command import _checkpointed, read_seeds
from tapfl.experiments.plan import Run
from tapfl.experiments.write import write_experiment
from tests.experiments.tiny import InProcess, contents, tiny_model, tiny_preset


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Let `--model mini` be the tiny one."""
    monkeypatch.setitem(catalogue.MODELS, "mini", tiny_model(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """Let some experiments ask for less, so that their runs take a second."""
    asked = {"kd": ("fedavg", "fedavg+post"), "2p": ("fedavg+post2", "disentafl"),
             "deep": ("perfedavg",)}
    for name, methods in asked.items():
        experiment = Experiment(name, "?", (Part("all", methods),))
        monkeypatch.setitem(catalogue.CATALOGUE, name, lambda model, small, e=experiment: e)


def in_process(monkeypatch, fails=()):
    found = InProcess(fails)
    monkeypatch.setattr(execute, "execute", found)
    return found


def reproduce(*words, out="out"):
    return main(["reproduce", *words, "--devices", "cpu", "--jobs", "1", "--out", out])


# What a user may get wrong


@pytest.mark.parametrize(("words", "message"), [
    ("mian", "unknown experiment 'mian'; did you mean 'main'?"),
    ("kd --model flawa", "--model flawa: no such model; did you mean 'flava'?"),
    ("kd --scale tiny", "--scale tiny: expected small or paper"),
    ("kd --seeds 41,41", "--seeds 41,41: expected different numbers"),
    ("kd --seeds 41,041", "--seeds 41,041: expected different numbers"),
    ("kd --seeds ,", "--seeds ,: expected different numbers"),
    ("kd --seeds -1", "--seeds -1: expected different numbers"),
    ("kd --seeds ²", "--seeds ²: expected different numbers"),
    ("kd --seeds 9223372036854775808", "--seeds 9223372036854775808: expected different numbers"),
    ("kd --devices gpu", "--devices gpu: expected cpu, cuda or cuda:N"),
    ("kd --jobs 0", "--jobs 0: expected at least 1"),
    ("kd --jobs x", "--jobs: expected a whole number, got 'x'"),
    ("kd --data nowhere", "--data nowhere: no such folder"),
    ("kd --data file", "--data file: expected a folder, not a file"),
    ("kd --model offline-pair --data .", "--data .: no .parquet files here"),
    ("kd --data .", "--data .: --model mini reads no data folder: its data are made"),
    ("kd --out file", "--out file: file is not a folder"),
    ("kd --out file/below", "--out file/below: file is not a folder"),
    ("--seeds 41", "the following arguments are required: EXPERIMENT")])
def test_wrong_input_is_one_line(tiny, capsys, words, message):
    (tiny / "file").touch()
    before = sorted(tiny.iterdir())
    try:
        status = main(["reproduce", *words.split()])
    except SystemExit as ended:
        status = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert message in line
    assert sorted(tiny.iterdir()) == before


def test_a_gpu_that_is_not_here_is_refused_before_anything_starts(tiny, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    words = ["reproduce", "kd", "--devices", "cuda:3"]
    assert main(words) == 2
    assert "--devices cuda:3: there is no such GPU" in capsys.readouterr().err
    assert not (tiny / "reproduction").exists()
    assert main([*words, "--dry-run"]) == 0  # a plan can be made elsewhere


def test_seeds():
    assert read_seeds("41, 42,7") == [41, 42, 7]
    assert read_seeds("0") == [0]


# The plan


def test_dry_run_prints_the_plan_and_writes_nothing(tiny, capsys):
    before = sorted(tiny.iterdir())
    assert reproduce("kd", "2p", "--seeds", "41,42", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "kd             1 part(s): Does distillation help TAP's second stage?" in out
    assert "models to compare: 16 (2 seed(s)); one run for each would be 16 runs" in out
    assert "federated runs needed: 4; there: 0; to run: 4" in out
    assert "expected time: not known before the first run is done" in out
    assert len(re.findall(r"^  (fedavg|disentafl)-s4[12]-[0-9a-f]{10}-[0-9a-f]{6}: ", out,
                          re.M)) == 4
    assert sorted(tiny.iterdir()) == before


def test_a_mirror_for_other_models_is_no_fault(tiny, monkeypatch):
    monkeypatch.setenv("TAPFL_DATA", str(tiny / "nowhere"))
    assert reproduce("kd", "--seeds", "41", "--dry-run") == 0


def test_without_checkpoints(tiny, small, capsys, monkeypatch):
    """The runs are the same ones: a plan with checkpoints finds them. A begun run keeps its own."""
    runs = in_process(monkeypatch)
    assert reproduce("kd", "--seeds", "41", "--no-checkpoints") == 0
    (name,) = runs.made
    record = read_record(tiny / "out" / "runs" / name)
    assert record.config.checkpoint.every is None
    capsys.readouterr()
    assert reproduce("kd", "--seeds", "41", "--dry-run") == 0
    assert "federated runs needed: 1; there: 1; to run: 0" in capsys.readouterr().out
    config = record.config.model_copy(update={"checkpoint": CheckpointConfig(every=3)})
    for begun, every in ((True, 3), (False, None)):
        planned = Run(tiny, config, [], resumes=begun)
        assert _checkpointed(planned, wanted=False).checkpoint.every == every
        assert _checkpointed(planned, wanted=True) is config


def test_a_later_experiment_finds_what_is_there(tiny, small, capsys, monkeypatch):
    runs = in_process(monkeypatch)
    assert reproduce("kd", "--seeds", "41") == 0
    assert len(runs.made) == 1
    capsys.readouterr()
    assert reproduce("kd", "2p", "--seeds", "41", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "federated runs needed: 2; there: 0; to run: 2" in out
    assert re.search(r"fedavg-s41-\w+-\w+-2: fedavg\+post2\n", out)
    assert "expected time: less than a minute, judged by 1 run(s)" in out
    before = contents(tiny / "out" / "runs")
    assert reproduce("kd", "--seeds", "41") == 0
    out = capsys.readouterr().out
    assert "there: 1; to run: 0" in out
    assert "expected time: none, all runs are there" in out
    assert len(runs.made) == 1
    assert contents(tiny / "out" / "runs") == before
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    words = ["reproduce", "kd", "--seeds", "41", "--out", "out", "--devices", "cuda"]
    assert main(words) == 0  # nothing is to run, so no GPU is needed


def test_a_damaged_run_is_made_again(tiny, small, capsys, monkeypatch):
    runs = in_process(monkeypatch)
    assert reproduce("kd", "--seeds", "41") == 0
    (name,) = runs.made
    damaged = tiny / "out" / "runs" / name
    (damaged / "results.csv").write_text((damaged / "results.csv").read_text()[:-20])
    table = (tiny / "out" / "kd.md").read_text()
    before, left = contents(tiny / "out"), contents(damaged)
    capsys.readouterr()
    assert reproduce("kd", "--seeds", "41", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "there: 0; to run: 1" in out
    assert (f"  {name}-2: fedavg, fedavg+post\n  cannot be used, counts as not there: out/runs/"
            f"{name}/results.csv: ") in out
    assert contents(tiny / "out") == before
    assert reproduce("kd", "--seeds", "41") == 0
    assert runs.made == [name, f"{name}-2"]
    assert contents(damaged) == left
    assert (tiny / "out" / "kd.md").read_text() == table
    capsys.readouterr()
    assert reproduce("kd", "--seeds", "41") == 0
    out = capsys.readouterr().out
    assert "there: 1; to run: 0" in out
    assert "cannot be used" not in out
    assert len(runs.made) == 2


def test_a_table_that_cannot_be_written_does_not_stop_the_others(tiny, small, capsys, monkeypatch):
    in_process(monkeypatch)
    write = write_experiment

    def spoiled(plan, number, experiment, *more):
        if experiment.name == "kd":
            raise TapflError("events.jsonl, line 3: not the events of a run")
        return write(plan, number, experiment, *more)

    monkeypatch.setattr("tapfl.experiments.write.write_experiment", spoiled)
    assert reproduce("kd", "2p", "--seeds", "41") == 2
    out, err = capsys.readouterr()
    assert re.search(r"^2p: out/2p\.md ", out, re.M)
    assert err.splitlines()[-2:] == [
        "kd: not written: events.jsonl, line 3: not the events of a run",
        "tapfl: 1 experiment(s) could not be written; the others are"]


def test_a_failed_run_stops_neither_the_others_nor_their_tables(tiny, small, capsys, monkeypatch):
    runs = in_process(monkeypatch, fails=["disentafl"])
    assert reproduce("2p", "deep", "--seeds", "41") == 2
    out, err = capsys.readouterr()
    assert "2p: not written, some of its runs are missing" in out
    assert (tiny / "out" / "deep.md").is_file()
    assert not (tiny / "out" / "2p.md").exists()
    assert [re.sub(r"-\w{10}-\w{6}", "", name) for name in runs.made] == [
        "fedavg-s41", "disentafl-s41", "perfedavg-s41"]
    lines = err.splitlines()
    assert re.fullmatch(r"1/3 fedavg-\S+: 1 s", lines[0])
    assert re.fullmatch(r"2/3 disentafl-\S+: failed, see out/runs/disentafl-\S+\.log", lines[1])
    assert re.fullmatch(r"3/3 perfedavg-\S+: 1 s", lines[2])
    assert re.fullmatch(r"disentafl-\S+: exit status 2; last line: disentafl "
                        r"\(out/runs/disentafl-\S+\.log\)", lines[3])
    assert lines[4] == ("tapfl: 1 run(s) failed; what is finished is kept, the same command tries "
                        "again")
    again = in_process(monkeypatch)
    assert reproduce("2p", "deep", "--seeds", "41") == 0
    assert [name.partition("-")[0] for name in again.made] == ["disentafl"]
    assert (tiny / "out" / "2p.md").is_file()


def test_code_that_changes_under_way_is_no_traceback(tiny, small, capsys, monkeypatch):
    """A run by other code than the plan's does not count as the plan's."""
    in_process(monkeypatch)
    monkeypatch.setattr("tapfl.experiments.plan.code_digest", lambda: "f" * 16)
    assert reproduce("kd", "--seeds", "41") == 2
    assert "1 run(s) are still missing: tapfl's code changed" in capsys.readouterr().err


# With processes


@contextlib.contextmanager
def stopped_in(runs, seed):
    """Send this process SIGTERM once the run of a seed has a round behind it."""
    over = threading.Event()

    def watch():
        while not over.wait(0.02):
            if any(b'"event": "round"' in path.read_bytes()
                   for path in runs.glob(f"*-s{seed}-*/events.jsonl")):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.long
def test_interrupted_and_started_again(tmp_path, small, monkeypatch, capsys):
    """Two experiments, two seeds: what is finished is not touched, the rest goes on."""
    methods = ("fedavg+post", "tap")
    monkeypatch.setitem(catalogue.CATALOGUE, "replacements", lambda model, small: Experiment(
        "replacements", "?", (Part("all", methods),), layout="replacements"))
    monkeypatch.setitem(catalogue.MODELS, "mini", tiny_model(
        tmp_path, train={"rounds": 5, "local_steps": 1}, post={"steps": 1},
        checkpoint={"every": 1}))
    runs, words = tmp_path / "out" / "runs", ("kd", "replacements", "--seeds", "41,42")
    with monkeypatch.context() as patch:  # the first seed, in this process: it takes less time
        in_process(patch)
        assert reproduce("kd", "replacements", "--seeds", "41", out=str(tmp_path / "out")) == 0
    (tmp_path / "out" / "kd.md").unlink()
    with stopped_in(runs, 42):
        assert reproduce(*words, out=str(tmp_path / "out")) == 130
    assert "tapfl: the same command goes on where this one stops" in capsys.readouterr().err
    first, second = sorted(path for path in runs.iterdir() if path.is_dir())
    assert read_record(first).finished
    assert not read_record(second).finished
    assert not (tmp_path / "out" / "kd.md").exists()
    before = contents(first)

    assert reproduce(*words, out=str(tmp_path / "out")) == 0
    out, err = capsys.readouterr()
    assert "federated runs needed: 2; there: 1; to run: 1 (1 to go on with)" in out
    assert re.fullmatch(r"1/1 fedavg-s42-\S+: \d+ s\n", err)
    assert contents(first) == before
    assert read_record(second).finished
    rounds = re.findall(r"round (\d+)/5", second.with_suffix(".log").read_text())
    assert set(map(int, rounds)) == set(range(1, 6))
    assert len(rounds) <= 6  # one at most was cut off and made again
    for name in ("kd", "replacements"):
        assert all((tmp_path / "out" / f"{name}.{end}").is_file() for end in ("md", "tex", "csv"))
    assert {row["seed"] for folder in (first, second)
            for row in read_results(folder / "results.csv")} == {41, 42}


# tapfl run --seeds


def test_run_for_several_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = in_process(monkeypatch)
    preset = str(tiny_preset(tmp_path, train={"local_steps": 1}, post={"steps": 1}))
    words = ["run", preset, "--seeds", "41,42", "--out", "three", "--set",
             "methods=[fedavg, fedavg+post]"]
    assert main(words) == 0
    assert runs.made == ["seed41", "seed42"]
    out, err = capsys.readouterr()
    assert re.search(r"^│ fedavg\+post +│", out, re.M)
    assert "runs: three/seed41   three/seed42" in out
    assert "report: three/report.html" in out
    assert len(err.splitlines()) == 2
    assert main(words) == 2
    assert "seed41 already holds a run: continue it with --resume" in capsys.readouterr().err
    report = tmp_path / "three" / "report.html"
    assert "seeds 41, 42<" in report.read_text()
    before = contents(tmp_path / "three")
    more = [word.replace("41,42", "41,42,43") for word in words]
    assert main([*more, "--resume"]) == 0
    assert runs.made == ["seed41", "seed42", "seed43"]
    del before[report]  # it is of all seeds
    assert all(contents(tmp_path / "three")[path] == found for path, found in before.items())
    assert "seeds 41, 42, 43<" in report.read_text()
    # The folder stands for its seeds.
    shown, folders = [], [f"three/seed{seed}" for seed in (41, 42, 43)]
    for verb in ("table", "verdict", "footprint"):
        for given in (["three"], folders):
            capsys.readouterr()
            assert main([verb, *given]) == 0
            shown.append(capsys.readouterr().out)
        assert shown[-1] == shown[-2]
    report.unlink()
    assert main(["report", "three"]) == 0
    named = tmp_path / "named.html"
    assert main(["report", *folders, "--out", str(named)]) == 0
    assert report.read_bytes() == named.read_bytes()
    capsys.readouterr()
    assert main([*words, "--set", "train.rounds=3", "--resume"]) == 2  # seeds of one configuration
    assert "seed41: this run was started with another 'train'" in capsys.readouterr().err
    assert len(runs.made) == 3


def test_one_seed_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch, fails=["seed42"])
    words = ["run", str(tiny_preset(tmp_path)), "--seeds", "42,41", "--out", "two", "--set",
             "methods=[fedavg]"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "│" not in out  # a table of some seeds would look like one of all
    assert err.splitlines()[-1] == ("tapfl: 1 run(s) failed; what is finished is kept, the same "
                                    "command with --resume tries again")
    assert main(["run", "--resume", "--out", "two"]) == 2
    assert "it holds runs of several seeds: give the preset or file and --seeds again" in (
        capsys.readouterr().err)
    again = in_process(monkeypatch)
    assert main([*words, "--resume"]) == 0
    assert again.made == ["seed42"]


@pytest.mark.parametrize(("words", "message"), [
    ("quickstart --seeds 41,x", "--seeds 41,x: expected different numbers"),
    ("quickstart --seeds 41 --seed 42", "--seeds: expected a preset or a file, no --seed"),
    ("--seeds 41 --resume --out three", "three: no run to resume here"),
    ("quickstart --seeds 41 --tensorboard", "no --tensorboard"),
    ("quickstart --seeds 41 --out file", "--out file: file is not a folder"),
    ("quickstart --seeds 41 --devices gpu", "--devices gpu: expected cpu"),
    ("quickstart --seeds 41 --device gpu", "--device gpu: expected auto, cpu or cuda"),
    ("quickstart --jobs 2", "--devices and --jobs are for several --seeds"),
    ("quickstart --devices cpu", "--devices and --jobs are for several --seeds")])
def test_wrong_input_for_several_seeds(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["run", *words.split()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
