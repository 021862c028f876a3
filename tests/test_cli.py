import json
import subprocess
import sys

import pytest
import yaml

from tapfl.cli import main
from tapfl.config import preset_names
from tests.experiment import tiny_experiment


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
    assert preset != "flava" or 200e6 < summary["total"] < 270e6


def test_model_table(capsys):
    assert main(["model", "flava"]) == 0
    out = capsys.readouterr().out
    assert "decoder/text_generation" in out
    assert "310,559,996" in out
    assert "random" not in out


@pytest.mark.long
def test_counting_full_size_models_takes_no_memory():
    code = ("import resource, sys, tapfl.cli as c\n"
            "for preset in ('mini', 'flava'):\n"
            "    c.main(['model', preset, '--json'])\n"
            "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    small, large = (int(line) for line in done.stderr.split()[-2:])
    assert large - small < 100_000  # kilobytes; the model itself would take a gigabyte


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


@pytest.mark.parametrize(("words", "line"), [
    ("run quickstart --seed x", "tapfl run: --seed: expected a whole number, got 'x'"),
    ("run quickstart --seed", "tapfl run: --seed: expected one argument"),
    ("run quickstart --sede 4", "tapfl run: unknown option --sede"),
    ("run quickstart --engine ray", "tapfl run: --engine: invalid choice: 'ray' (choose from"),
    ("run quickstart flava vilt", "tapfl run: not expected: flava vilt"),
    ("reproduce main --jobs x", "tapfl reproduce: --jobs: expected a whole number, got 'x'"),
    ("reproduce", "tapfl reproduce: the following arguments are required: EXPERIMENT"),
    ("deploy local quickstart --out here --join soon",
     "tapfl deploy local: --join: expected a number, got 'soon'"),
    ("deploy local quickstart --out here --joint 3", "tapfl deploy local: unknown option --joint"),
    ("deploy server offline-pair --keys keys --out here --data .",  # it reads no data
     "tapfl deploy server: unknown option --data"),
    ("deploy lokal", "tapfl deploy: COMMAND: invalid choice: 'lokal' (choose from"),
    ("runn", "tapfl: COMMAND: invalid choice: 'runn' (choose from"),
    ("--verbose run quickstart", "tapfl: unknown option --verbose"),
])
def test_what_the_parser_refuses_is_one_line(words, line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(line)
    assert err.endswith(f"({line.partition(':')[0]} --help)\n")
    assert err.count("\n") == 1


def test_the_parser_quotes_what_was_typed_in_one_line(capsys):
    for words in (["--seed", "4\n5"], ["--a\nb"], ["--seed", "x" * 5000], ["\udcff", "\udcff"]):
        with pytest.raises(SystemExit):
            main(["run", "quickstart", *words])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert len(err) < 2100


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == preset_names()


def test_python_dash_m():
    done = subprocess.run([sys.executable, "-m", "tapfl", "--version"], capture_output=True,
                          text=True, check=True)
    assert done.stdout.startswith("tapfl ")


@pytest.fixture
def tiny_file(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg", "tap"], train={"rounds": 2})
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def _scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload().Tags()["scalars"]


def test_run_resume_and_table(tiny_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["run", str(tiny_file), "--out", str(out), "--tensorboard", "--seed", "9",
                 "--set", "evaluation.every=1"]) == 0
    captured = capsys.readouterr()
    assert "fedavg" in captured.out
    assert "made with random weights" in captured.out
    assert str(out / "results.csv") in captured.out
    assert "fedavg: round 2/2" in captured.err
    tags = _scalars(out / "tensorboard")
    for kind in ("fedavg/loss/", "tap/personal_loss/", "fedavg/curve/", "tap/curve/"):
        assert any(tag.startswith(kind) for tag in tags), kind
    assert (out / "results.csv").read_text().splitlines()[1].startswith("9,fedavg,shapes,")
    assert main(["run", str(tiny_file), "--out", str(out)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["run", "--resume", "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_default_folders_do_not_collide(tiny_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["run", str(tiny_file), "--quiet", "--set", "train.rounds=0",
                     "--set", "post.steps=0"]) == 0
    assert (tmp_path / "runs/tiny/results.csv").is_file()
    assert (tmp_path / "runs/tiny-2/results.csv").is_file()


def test_show_is_a_configuration(tmp_path, capsys):
    assert main(["show", "flava", "--set", "train.rounds=5"]) == 0
    path = tmp_path / "shown.yaml"
    path.write_text(capsys.readouterr().out)
    assert "rounds: 5" in path.read_text()
    assert main(["validate", str(path), "--config-only"]) == 0
    assert "10 methods in 5 federated run(s), 30 clients, 8 tasks" in capsys.readouterr().out


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_validates(preset, capsys):
    assert main(["validate", preset, "--config-only"]) == 0
    assert "valid" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["run"], "expected a preset or a file"),
    (["run", "--resume"], "expected a preset or a file"),
    (["run", "--resume", "--out", "nowhere"], "nowhere: no run to resume here"),
    (["run", "--resume", "--out", "nowhere", "--seed", "3"], "the run keeps its configuration"),
    (["run", "quickstart", "--device", "tpu"], "expected auto, cpu or cuda"),
    (["run", "quickstart", "--set", "train.rouns=3"],
     "unknown key 'train.rouns'; did you mean 'rounds'?"),
    (["run", "quickstart", "--set", "methods=[tapp]"], "did you mean 'tap'?"),
    (["run", "quickstart", "--set", "tap.criterion=validation"], "set federation.holdout"),
    (["run", "quickstart", "--set", "train.lr=-1"], "train.lr: "),
    (["run", "quickstart", "--set", "train.lr=.inf"], "train.lr: "),
    (["run", "quickstart", "--resume"], "--resume: no run in runs/quickstart"),
    (["run", "quickstart", "--resume", "--out", "typo"], "typo: no run to resume here"),
    (["run", "quickstart", "--set", "federation.groups=500", "--set",
      "data.train=60", "--set", "data.test=2", "--threads", "1"], "too many for the 60 samples"),
    (["run", "quickstart", "--set", "foundation.weights=/no/where.safetensors"],
     "/no/where.safetensors: not a readable safetensors file"),
    (["validate", "quickstart", "--set", "tap.margins.text_generation=wide"], "tap.margins"),
    (["pretrain", "mini", "--steps", "1"], "expected at least 10"),
])
def test_bad_runs(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert message in captured.err


def test_python_api(tiny_file, tmp_path):
    import tapfl

    rows = tapfl.run(tapfl.load_config(tiny_file), tmp_path / "api")
    assert {r["method"] for r in rows} == {"fedavg", "tap", "constant"}
    with pytest.raises(AttributeError):
        tapfl.nothing  # noqa: B018


def test_the_package_shows_its_names():
    import tapfl

    assert {"run", "load", "export", "load_config", "TapflError"} <= set(dir(tapfl))


def test_tables_of_runs(tmp_path, capsys):
    head = "seed,method,client,task,dataset,metric,value,samples\n"
    for seed, value in ((41, "nan"), (42, "3.0")):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "results.csv").write_text(
            head + f"{seed},mine:Own,a,t,mydata,accuracy,{value},5\n"
            f"{seed},wide,a,t,mydata,accuracy,2.0,5\n{seed},wide,a,u,other,mse,0.5,5\n")
    runs = [str(tmp_path / "41"), str(tmp_path / "42" / "results.csv")]
    assert main(["table", *runs]) == 0
    assert "nan" in capsys.readouterr().out
    assert main(["table", *runs, "--markdown", "--columns", "1"]) == 0
    out = capsys.readouterr().out
    assert "| wide | **2.0 ±0.0** |" in out
    assert "mine:Own | nan ±nan |" in out
    assert main(["table", *runs, "--format", "csv"]) == 0
    assert "\nwide,tapfl,image_generation,other,mse,0.5,0.0,2,1\n" in capsys.readouterr().out
    assert main(["table", *runs, "--format", "latex"]) == 0
    assert capsys.readouterr().out.startswith(r"\begin{tabular}")
    for options, message in ((["--format", "html"], "--format html: expected terminal"),
                             (["--format", "csv", "--markdown"], "expected one of them"),
                             (["--paper", "bert"], "--paper: the paper has no tables of 'bert'"),
                             (["--columns", "0"], "--columns 0: expected at least 1")):
        assert main(["table", *runs, *options]) == 2
        assert message in capsys.readouterr().err
    for bad, message in (("nowhere", "there is no such file or folder"), (".", "no results here"),
                         ("41/../x.csv", "there is no such file or folder")):
        assert main(["table", str(tmp_path / bad)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert main(["table", str(tmp_path / "bad.csv")]) == 2
    assert "expected the columns" in capsys.readouterr().err
    (tmp_path / "bad.csv").write_text(head + "x,m,c,t,d,accuracy,high,5\n")
    assert main(["table", str(tmp_path / "bad.csv")]) == 2
    assert "not the results of a run" in capsys.readouterr().err


def test_validate_refuses_what_a_run_would_refuse(tmp_path, capsys):
    tasks = "tasks:\n  code: {kind: text_classification, modalities: [text], classes: [A, B]}\n"
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t {n},{'AB'[n % 2]}\n"
                                                             for n in range(10)))
    (tmp_path / "c.yaml").write_text("federation: {file: f.yaml, groups: 1}\n"
                                     "foundation: {name: mini, weights: shipped}\n")
    for entry, message in (
            ("{path: a.csv}", None), ("{path: none.csv}", "none.csv"),
            ("{path: a.csv, text: words}", "column 'words' is missing"),
            ("{path: ., text: x}", "")):
        (tmp_path / "f.yaml").write_text(
            tasks + f"clients:\n  - {{name: x, tasks: {{code: {entry}}}}}\n")
        code = main(["validate", str(tmp_path / "c.yaml")])
        error = capsys.readouterr().err.strip().splitlines()
        assert code == (0 if message is None else 2)
        assert message is None or message in error[-1]
    (tmp_path / "f.yaml").write_text(
        tasks + "clients:\n  - {name: x, tasks: {code: {path: a.csv}}}\n")
    assert main(["validate", str(tmp_path / "c.yaml"), "--set",
                 "foundation.weights=/no/such/file.safetensors"]) == 2
    assert "file.safetensors" in capsys.readouterr().err


def test_a_run_ends_with_its_report(tmp_path, capsys, monkeypatch):
    """Whatever goes wrong with the report, the run is complete."""
    config = tiny_experiment(tmp_path, methods=["fedavg"], train={"rounds": 1, "local_steps": 1})
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def run(name, *more):
        assert main(["run", str(path), "--device", "cpu", "--out", str(tmp_path / name),
                     *more]) == 0
        return capsys.readouterr()

    out = run("one").out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'one' / 'report.html'}"
    assert "section-results" in (tmp_path / "one" / "report.html").read_text()
    assert "report" not in run("two", "--no-report").out
    assert not (tmp_path / "two" / "report.html").exists()

    def fail(*arguments):
        raise ZeroDivisionError("a\nfault")

    monkeypatch.setattr("tapfl.report.html.render", fail)
    captured = run("three")
    assert "results:" in captured.out
    assert captured.err.splitlines()[-1] == (
        "tapfl: no report was written (ZeroDivisionError: a fault)")


@pytest.mark.parametrize(("options", "line"), [
    (["--engine", "flower", "--workers", "0"], "--workers 0: expected 1 or more"),
    (["--workers", "2"], "--workers: is for --engine flower"),
    (["--ray-address", "auto"], "--ray-address: is for --engine flower"),
    (["--engine", "flower", "--seeds", "1,2"], "--seeds: runs side by side, each in one process"),
])
def test_options_of_the_engines(options, line, tmp_path, capsys):
    assert main(["run", "quickstart", "--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tapfl: {line}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_engine_flower_without_ray(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", "quickstart", "--engine", "flower", "--out", str(tmp_path / "run")]) == 2
    assert "Ray is not installed here: pip install 'tapfl[flower]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
