import json
import subprocess
import sys

import pytest

from tapfl.cli import main
from tapfl.config import preset_names


def test_help_imports_nothing_heavy():
    code = ("import sys, tapfl.cli as c\n"
            "try: c.main(['model', '--help'])\nexcept SystemExit: pass\n"
            "heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'numpy'} & set(sys.modules)\n"
            "assert not heavy, heavy")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


def test_no_command_prints_help(capsys):
    assert main([]) == 0
    assert "commands" in capsys.readouterr().out


@pytest.mark.parametrize("preset", preset_names())
def test_model_of_every_preset(preset, capsys):
    assert main(["model", preset, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {"total", "trainable", "frozen", "bytes", "blocks", "clients"} <= set(summary)
    assert summary["total"] == summary["trainable"] + summary["frozen"]
    assert summary["bytes"] == 4 * summary["total"]
    assert summary["trainable"] == sum(summary["blocks"].values())
    for client in summary["clients"]:
        assert client["with_tap"] == client["total"] + client["trainable"]
        assert client["trainable"] == sum(summary["blocks"][b] for b in client["blocks"])
        assert client["total"] <= summary["total"]


def test_flava_server_stays_below_270_million(capsys):
    main(["model", "flava", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert 200e6 < summary["total"] < 270e6


def test_model_table(capsys):
    assert main(["model", "flava"]) == 0
    out = capsys.readouterr().out
    assert "decoder/text_generation" in out
    assert "310,559,996" in out
    assert "random" not in out


def test_counting_full_size_models_takes_no_memory():
    code = ("import resource, sys, tapfl.cli as c; c.main(['model', 'flava', '--json']);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[-1]) < 900_000  # kilobytes; the model alone has a gigabyte


@pytest.mark.parametrize(("arguments", "message"), [
    (["model", "flavva"], "unknown preset 'flavva'; did you mean 'flava'?"),
    (["model", "nowhere.yaml"], "nowhere.yaml: no such file"),
    (["model", "mini", "--set", "lora.rank=3"], "mini: unknown key 'lora.rank'"),
    (["model", "mini", "--set", "lorra.x=3"],
     "mini: unknown key 'lorra'; did you mean 'lora'?"),
    (["model", "mini", "--set", "lora.expert_rank=zero"], "mini: lora.expert_rank: "),
    (["model", "mini", "--set", "oops"], "--set oops: expected key=value"),
    (["model", "mini", "--set", "lora.dropout=2020-13-45"], "not valid YAML"),
    (["model", "mini", "--set", "lora.encoder_rank=99999999999999999999"], "lora.encoder_rank"),
    (["model", "x" * 6000], "unknown preset"),
    (["model", "mini", "--set", "foundation.weights={imag: a, text: b}"], "foundation 'pair'"),
    (["model", "mini", "--set", "foundation.name=mimi"],
     "unknown foundation 'mimi'; did you mean 'mini'?"),
    (["model", "mini", "--set", "federation.layout=flaver"], "did you mean 'flava'?"),
    (["model", "flava", "--set", "backbone.layers_per_stage=9"], "needs 18 layers"),
    (["model", "flava", "--set", "foundation.weights=/no/such/folder"],
     "/no/such/folder: cannot read"),
])
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == preset_names()


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "tapfl", "--version"], capture_output=True,
                          text=True, check=True)
    assert done.stdout.startswith("tapfl ")
