"""What a run does with its folder, its threads, its record, damaged state and diverged models."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tapfl.cli import main
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import Message, RoundEnded
from tests.engine.test_resume import Stop, same_run
from tests.experiment import FEDERATION, FederatedRun, read_events, tiny_experiment


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    config = tiny_experiment(folder, methods=["tap", "local"],
                             train={"rounds": 6, "local_steps": 1}, post={"steps": 1})
    run(config, folder / "out")
    return config, folder / "out"


@pytest.fixture(scope="module")
def halted(calm, tmp_path_factory):
    """The same run, stopped after five rounds."""
    return stopped(calm[0], tmp_path_factory.mktemp("halted") / "out", at=4)


@pytest.fixture
def out(halted, tmp_path):
    """A copy of the run that was stopped."""
    return Path(shutil.copytree(halted, tmp_path / "out"))


def stopped(config, out, at):
    with pytest.raises(KeyboardInterrupt):
        run(config, out, notify=Stop(at_round=at))
    return out


# State

def _flip(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def _newest(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


def _swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("damage", [
    pytest.param(_flip, id="flip"),
    pytest.param(lambda path: path.unlink(), id="delete", marks=pytest.mark.long)])
def test_damaged_client_state_never_changes_results(out, calm, damage):
    """It falls back to the checkpoint before."""
    config, expected = calm
    damage(_newest(sorted((out / "state" / "fedavg" / "clients" / "tap").iterdir())[0]))
    said = []
    run(config, out, resume=True, notify=said.append)
    assert any("going back to round" in str(e) for e in said if isinstance(e, Message))
    same_run(out, expected)


@pytest.mark.parametrize(("damage", "fault"), [
    (lambda c: _swap(*(_newest(p) for p in sorted(c.iterdir())[:2])), "not the state it should be"),
    (lambda c: shutil.rmtree(sorted(c.iterdir())[0]), "missing"),
    (shutil.rmtree, "missing"),
], ids=["swapped clients", "a client's folder", "everybody's folder"])
def test_state_that_no_checkpoint_fits_is_refused(out, calm, damage, fault):
    damage(out / "state" / "fedavg" / "clients" / "tap")
    with pytest.raises(TapflError, match=rf"{fault}.*no sound checkpoint is left") as caught:
        run(calm[0], out, resume=True)
    assert "\n" not in str(caught.value)


def test_final_records_belong_to_a_client_and_its_models(tmp_path, calm):
    """One in another's place, or whose model is gone, is made again."""
    config, expected = calm
    out = tmp_path / "out"
    shutil.copytree(expected, out)
    final = out / "state" / "fedavg" / "final"
    shutil.copy(final / "shapes.json", final / "news.json")
    (out / "models" / "tap" / "words.safetensors").unlink()
    _swap(*(out / "models" / "tap" / f"{c}.safetensors" for c in ("looks", "shapes")))
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"finished": False}))
    run(config, out, resume=True)
    same_run(out, expected)


def test_settings_that_were_changed_in_the_record_are_refused(out):
    before = (out / "events.jsonl").read_bytes()
    record = json.loads((out / "run.json").read_text())
    record["config"]["train"]["lr"] = 0.123
    (out / "run.json").write_text(json.dumps(record))
    assert main(["run", "--resume", "--out", str(out), "--quiet"]) == 2
    assert (out / "events.jsonl").read_bytes() == before  # a refusal changes nothing


# The folder

def test_a_locked_folder(out, calm):
    with FileLock(str(out / ".lock")), pytest.raises(TapflError, match="another process is at"):
        run(calm[0], out, resume=True)
    run(calm[0], out, resume=True)
    assert not (out / ".lock").exists()


def test_a_start_that_fails_leaves_nothing(tmp_path, calm):
    config = tiny_experiment(tmp_path, data={"source": "hub", "folder": str(tmp_path / "none")})
    with pytest.raises(TapflError):
        run(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()  # an empty folder of the user's stays
    with pytest.raises(TapflError):
        run(config, tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "mine" / "movie.partial").write_text("mine")
    with pytest.raises(TapflError, match="in the way"):
        run(config, tmp_path / "mine")
    assert (tmp_path / "mine" / "movie.partial").read_text() == "mine"
    with pytest.raises(TapflError, match="cannot make or use"):
        run(config, tmp_path / ("x" * 300))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(TapflError, match="in the way"):
        run(config, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


@pytest.mark.long
def test_sigterm_ends_like_ctrl_c(tmp_path, calm):
    (tmp_path / "c.yaml").write_text(json.dumps(calm[0].model_dump(mode="json")))
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "tapfl", "run", str(tmp_path / "c.yaml"),
                                "--out", str(out)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "events.jsonl").is_file() and '"round"' in (out / "events.jsonl").read_text():
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the run was over before the signal came")
    assert process.returncode == 130
    assert f"go on with: tapfl run --resume --out {out}" in error
    run(calm[0], out, resume=True)
    same_run(out, calm[1])


def test_resume_imports_nothing_that_is_not_named(tmp_path, monkeypatch):
    (tmp_path / "evilmod.py").write_text(
        "from tapfl.federated.method import FedAvg\n"
        "class Mine(FedAvg):\n    pass\n")
    config = tiny_experiment(tmp_path, methods=["evilmod:Mine"], train={"rounds": 3})
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=1), modules=tmp_path)
    assert "modules" not in json.loads((tmp_path / "out" / "run.json").read_text())
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("evilmod")
    (tmp_path / "evilmod.py").write_text("raise SystemExit('it was run')")
    assert main(["run", "--resume", "--out", "out"]) == 2
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "evilmod.py").write_text(
        "from tapfl.federated.method import FedAvg\nclass Mine(FedAvg):\n    pass\n")
    assert main(["run", "--resume", "--out", "out", "--modules", "good", "--quiet"]) == 0


# Threads

def test_threads_are_part_of_a_run(tmp_path):
    config = tiny_experiment(tmp_path, threads=2, methods=["fedavg"],
                             federation={"clients": ["news"]},
                             train={"rounds": 2, "local_steps": 1})
    before = torch.get_num_threads()
    seen = []

    def watch(event):
        seen.append(torch.get_num_threads())
        if isinstance(event, RoundEnded) and event.round == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=watch)
    assert torch.get_num_threads() == before
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["threads"] == record["environment"]["threads"] == 2
    torch.set_num_threads(1)
    run(config, tmp_path / "out", resume=True, notify=lambda _: seen.append(
        torch.get_num_threads()))
    assert set(seen) == {2}
    with pytest.raises(TapflError, match="started with another 'threads'"):
        run(config.model_copy(update={"threads": 1}), tmp_path / "out", resume=True)


def test_the_usual_number_of_threads_does_not_depend_on_the_environment(monkeypatch, calm):
    config = calm[0].model_copy(update={"threads": None})
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert config.thread_count == min(8, len(os.sched_getaffinity(0)))


# The record

def test_the_record_says_where_data_come_from_and_what_was_dropped(tmp_path, capsys):
    rows = "".join(f"text {n},{'AB'[n % 2]}\n" for n in range(20)) + "no label,C\n,A\n"
    (tmp_path / "texts.csv").write_text("text,label\n" + rows)
    (tmp_path / "f.yaml").write_text(
        "tasks:\n  code: {kind: text_classification, modalities: [text], classes: [A, B]}\n"
        "  agnews: {kind: text_classification, modalities: [text], classes: 4}\n"
        "clients:\n  - {name: x, tasks: {code: {path: texts.csv}, agnews: 1}}\n")
    config = tiny_experiment(tmp_path, federation={"file": str(tmp_path / "f.yaml")},
                             train={"rounds": 1}, methods=["feddat"])
    (tmp_path / "c.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert main(["run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert "2 of 22 rows were left out" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["format"] == 2
    assert record["data"] == {"code": "files of each client's own", "agnews": "miniature"}
    assert list(record["data_sha256"]) == ["code/x"]
    (dropped,) = record["dropped"]
    assert (dropped["dropped"], dropped["rows"]) == (2, 22)
    assert sorted(r["count"] for r in dropped["reasons"]) == [1, 1]
    adapters = record["parameters"]["methods"]["feddat"]["blocks"]
    assert adapters
    assert all(name.startswith("adapter/") for name in adapters)


def test_swapped_texts_are_noticed(tmp_path):
    texts = [f"text {n}" for n in range(10)]
    path = tmp_path / "texts.csv"

    def write(order):
        path.write_text("text,label\n" + "".join(f"{t},{'AB'[i % 2]}\n"
                                                 for i, t in enumerate(order)))

    write(texts)
    (tmp_path / "f.yaml").write_text(
        "tasks:\n  code: {kind: text_classification, modalities: [text], classes: [A, B]}\n"
        "clients:\n  - {name: x, tasks: {code: {path: texts.csv}}}\n")
    config = tiny_experiment(tmp_path, federation={"file": str(tmp_path / "f.yaml")},
                             train={"rounds": 3, "cohort": 1})
    stopped(config, tmp_path / "out", at=1)
    write([texts[2], texts[1], texts[0], *texts[3:]])
    with pytest.raises(TapflError, match="started with other data"):
        run(config, tmp_path / "out", resume=True)


# Models that diverge

def test_a_diverged_personal_model_is_replaced_again(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 4, "cohort": 4},
                             tap={"margins": dict.fromkeys(
                                 ("image_classification", "image_generation",
                                  "text_classification", "text_generation"), 1e6)})
    some = FederatedRun(config, tmp_path / "run")
    tap, client = some.personalizers[0], some.federation.find("news")
    some.round(0)
    real = tap._train

    def explode(who, round_, start):
        end, losses = real(who, round_, start)
        if who.id == "news" and round_ == 1:
            next(iter(end.values())).fill_(float("nan"))
            return end, dict.fromkeys(losses, float("nan"))
        return end, losses

    tap._train = explode
    before = tap._load(client, 1)[0].clone()
    some.round(1)
    (event,) = read_events(tmp_path / "run", "diverged")
    assert (event["client"], event["round"], event["method"]) == ("news", 1, "tap")
    assert event["tasks"] == ["agnews"]
    kept, _, history = tap._load(client, 2)
    assert kept.equals(before)  # the training was dropped
    assert history["agnews"] == float("inf")
    some.round(2)
    replaced = [e for e in read_events(tmp_path / "run", "replacement")
                if e["client"] == "news" and e["round"] == 2]
    assert [(e["task"], e["initial"], e["personal_loss"]) for e in replaced] == [
        ("agnews", False, None)]
    assert tap._load(client, 3)[2]["agnews"] < float("inf")
    assert not tap._load(client, 3)[0].not_finite()


def test_a_run_whose_models_all_diverge_still_ends_in_a_table(tmp_path, capsys):
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    config = tiny_experiment(tmp_path, methods=["fedavg", "fedavg+post", "tap"],
                             train={"rounds": 2, "lr_initial": 0.9, "lr": 0.9}, post={"lr": 0.9})
    (tmp_path / "c.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert main(["run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert main(["table", str(tmp_path / "out")]) == 0
    capsys.readouterr()


# Bounds on updates

def test_one_huge_update_does_not_destroy_the_average(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 8, "cohort": 4},
                             federation={"max_update_norm": "5x"})
    some = FederatedRun(config, tmp_path / "run")
    for t in range(4):
        some.round(t)
    real = some.method.train

    def poison(client, round_):
        losses = real(client, round_)
        if client.id == "news":
            some.method.network.blocks["decoder/agnews"][0].weight.data.fill_(1e30)
        return losses

    some.method.train = poison
    some.round(4)
    (event,) = read_events(tmp_path / "run", "refused")
    assert event["client"] == "news"
    assert "moved by" in event["reason"]
    assert max(v.abs().max() for v in some.server.blocks.values()) < 100
    some.method.train = real
    some.round(5)  # the honest are not refused afterwards
    assert len(read_events(tmp_path / "run", "refused")) == 1
