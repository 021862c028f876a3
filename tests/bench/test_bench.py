import json
import math
import subprocess
import sys

import pytest
import torch

from tapfl.bench.command import configure
from tapfl.bench.measure import Report, changed, matmul_rate, peak_memory, show, timed
from tapfl.cli import main
from tapfl.config import load_config

COLUMNS = {
    "server": ["clients", "ms", "GB/s", "share of copy", "extra MB"],
    "scale": ["clients", "round s", "idle round ms", "start s", "peak MB", "disk MB"],
    "evaluate": ["task", "kind", "samples", "seconds", "samples/s"],
    "data": ["data set", "samples", "load s", "samples/s", "again s", "minibatch ms"],
}


def bench(tmp_path, *arguments):
    path = tmp_path / "report.json"
    assert main(["bench", *arguments, "--quick", "--device", "cpu", "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.long) if name in ("scale", "evaluate") else name
    for name in COLUMNS])
def test_every_benchmark(name, tmp_path, capsys):
    report = bench(tmp_path, name)
    assert report["columns"] == COLUMNS[name]
    assert {"preset", "precision", "device", "name", "torch", "threads",
            "date"} <= set(report["facts"])
    assert report["facts"]["preset"] == "mini"
    assert len(report["rows"]) > 1
    for row in report["rows"]:
        assert list(row) == report["columns"]
        assert all(isinstance(v, str) or (math.isfinite(v) and v > 0) for v in row.values())
    out = capsys.readouterr().out
    assert report["title"] in out
    assert report["facts"]["torch"] in out


def test_kernels_add_up(tmp_path, capsys):
    rows = bench(tmp_path, "kernels", "--kinds", "1")["rows"]
    assert {row["client"] for row in rows} == {"1"}
    *listed, whole = rows
    assert whole["kernel"] == "all kernels"
    assert sum(row["ms"] for row in listed) == pytest.approx(whole["ms"])
    assert sum(row["calls"] for row in listed) == whole["calls"]
    products = [row for row in listed if row["kernel"] in ("aten::addmm", "aten::mm")]
    assert products
    times = [row["ms"] for row in listed if row["kernel"] != "the others"]
    assert times == sorted(times, reverse=True)


def test_averaging_holds_one_update(tmp_path, capsys):
    rows = bench(tmp_path, "server", "--clients", "1,3,9")["rows"]
    assert [row["clients"] for row in rows] == [1, 3, 9]
    assert len({row["extra MB"] for row in rows}) == 1


def test_a_full_size_preset_on_synthetic_data(tmp_path, capsys):
    report = bench(tmp_path, "data", "vilt", "--set", "train.batch_size=4")
    assert report["facts"]["source"] == "synthetic"
    assert report["facts"]["batch size"] == 4
    assert "Random weights in place of dandelin/vilt-b32-mlm" in report["note"]
    assert [row["samples"] for row in report["rows"]] == [40] * 6


def test_what_the_user_sets_stays():
    config, notes = configure("flava", ["foundation.weights=folder", "data.source=miniature"])
    assert (config.foundation.weights, config.data.source) == ("folder", "miniature")
    assert notes == []
    config, notes = configure("mini", [])
    assert (config.foundation.weights, config.data.source) == ("shipped", "miniature")


@pytest.mark.parametrize(("arguments", "message"), [
    (["server", "flafa"], "unknown preset 'flafa'; did you mean 'flava'?"),
    (["data", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: no such folder"),
    (["step", "--memory-cap", "12", "--device", "cpu"], "--memory-cap: expected --device cuda"),
    (["data", "--device", "tpu"], "--device tpu: expected auto, cpu or cuda"),
    (["scale", "--clients", "30,100000"], "--clients 100000: expected at most 16847"),
])
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith(f"tapfl: {message}")
    assert len(lines) == 1


@pytest.mark.parametrize("arguments", [
    ["sever"], ["server", "--clients", "0"], ["evaluate", "--samples", "many"],
    ["step", "--batch", "-1"], ["step", "--micro-batch", "few"], ["step", "--memory-cap", "0"]])
def test_what_the_parser_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_name_it_tells_which_there_are(capsys):
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*COLUMNS, "step", "round", "examples:"))


def test_steps_in_pieces(tmp_path, capsys):
    report = bench(tmp_path, "step", "--kinds", "1", "--micro-batch", "2")
    assert report["facts"]["micro batch"] == 2
    report = bench(tmp_path, "step", "--kinds", "1", "--set", "speed.micro_batch=auto")
    assert report["facts"]["micro batch"] == "auto {}"  # a CPU's memory does not run out


def test_help_imports_nothing_heavy():
    code = ("import sys, tapfl.cli as c\n"
            "try: c.main(['bench', 'step', '--help'])\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'numpy', 'rich'}\n"
            "assert not heavy & set(sys.modules), heavy & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


def test_timed_returns_the_median():
    calls = []
    assert timed(lambda: calls.append(1), "cpu", repeats=5, warmup=2) >= 0
    assert len(calls) == 7


def test_the_machines_rates_are_positive():
    assert matmul_rate("cpu", torch.float32, 64) > 0
    assert peak_memory("cpu") > 1e7


def test_changed_values_are_checked():
    config = changed(load_config("mini"), {"train.rounds": 3, "seed": 5})
    assert (config.train.rounds, config.seed) == (3, 5)
    with pytest.raises(ValueError, match=r"train\.rounds"):
        changed(config, {"train.rounds": -1})


def test_a_report_is_shown_as_it_is(capsys):
    show(Report("title", {"share [%]": 0.5}, ["what", "n"],
                [{"what": "[red]", "n": 12345}, {"what": "b", "n": 0.01234}], "note [x]"))
    out = capsys.readouterr().out
    assert all(text in out for text in ("title", "share [%] 0.500", "[red]", "12,345", "0.012",
                                        "note [x]"))


def test_steps_are_counted_and_compared(tmp_path, capsys):
    report = bench(tmp_path, "step", "--kinds", "1,7", "--tokens", "12")
    assert [row["step"] for row in report["rows"]] == ["W or X", "X, taught"] * 2
    for row in report["rows"]:
        assert list(row) == report["columns"]
        assert row["ms"] > 0
        assert row["of matmul"] == pytest.approx(
            row["TFLOP/s"] / report["facts"]["matmul TFLOP/s"])
    plain, taught = report["rows"][:2]
    assert plain["TFLOP"] < taught["TFLOP"] < 2 * plain["TFLOP"]
    assert main(["bench", "step", "--quick", "--device", "cpu", "--kinds", "nobody"]) == 2
    assert "--kinds: unknown client 'nobody'" in capsys.readouterr().err


def test_a_round_is_split_into_its_parts(tmp_path, capsys):
    (row,) = bench(tmp_path, "round", "--kinds", "1,8")["rows"]
    assert row["clients"] == "1 8"
    parts = row["train W s"] + row["personalize s"] + sum(
        row[f"{part} ms"] for part in ("average", "aggregate")) / 1e3
    assert parts == pytest.approx(row["total s"])
    assert min(row["train W s"], row["personalize s"], row["average ms"]) > 0


def test_operations_are_those_of_the_layers():
    """One text through one encoder layer and the backbone, counted by hand."""
    from tapfl.bench.flops import StepFlops
    from tapfl.data.batches import TaskBatch
    from tapfl.tasks import Batch
    from tests.conftest import TASKS, tiny_config

    config = tiny_config(backbone={"kind": "standard"}, lora={"dropout": 0.0})
    flops = StepFlops(config, {"news": TASKS["news"]})
    batch = Batch(text=torch.ones(3, 8, dtype=torch.long), label=torch.zeros(3, dtype=torch.long))
    width, hidden, tokens, rows = 32, 64, 8, 24
    layer = 2 * rows * (4 * width * width + 2 * width * hidden) + 4 * rows * tokens * width
    forward, both = flops._part(TaskBatch("news", batch, 1.0, 3))
    # Four such layers; LoRA, the projection and the head are the rest.
    assert 4 * layer < forward < 4 * layer * 1.4
    assert 2 * forward < both < 3.2 * forward
