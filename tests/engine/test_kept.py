"""What a complete run keeps: models and state, or neither."""

import shutil

import pytest

from tapfl.cli import main
from tapfl.engine.run import run
from tapfl.events import ClientFinished
from tests.engine.test_resume import Stop, same_files, same_run
from tests.engine.test_samples import files_of
from tests.experiment import tiny_experiment

KEPT = {"results.csv", "events.jsonl", "run.json", "scores", "samples", "labels.json"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    config = tiny_experiment(folder, train={"rounds": 1, "local_steps": 1}, post={"steps": 1})
    run(config, folder / "out")
    return config, folder / "out"


def _without(config):
    return config.model_copy(update={
        "checkpoint": config.checkpoint.model_copy(update={"models": False})})


def _kept(out):
    return {p.name for p in out.iterdir()}


def test_a_run_can_keep_no_models(tmp_path, calm, capsys):
    config, expected = calm
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(_without(config), out, notify=Stop(at_client=2))
    assert (out / "state").is_dir()  # until it is complete it can be resumed
    assert not (out / "models").exists()
    done = []
    run(_without(config), out, resume=True,
        notify=lambda e: done.append(e.client) if isinstance(e, ClientFinished) else None)
    assert len(done) == 2  # the first two were done
    assert _kept(out) == KEPT
    same_files(out, expected, "scores")
    assert files_of(out) == files_of(expected)
    assert (out / "results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    assert main(["predict", str(out), "--client", "news", "--task", "agnews", "--text", "x"]) == 2
    assert main(["export", str(out), "--client", "news", "--out", str(tmp_path / "e")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all("kept no models (checkpoint.models: false)" in line for line in errors)


def test_whether_models_are_kept_may_change_on_resume(tmp_path, calm):
    """Clients that had kept none make theirs again; models that are not wanted any more go."""
    config, expected = calm
    out = tmp_path / "none-then-all"
    with pytest.raises(KeyboardInterrupt):
        run(_without(config), out, notify=Stop(at_client=2))
    run(config, out, resume=True)
    same_run(out, expected)
    out = tmp_path / "all-then-none"
    with pytest.raises(KeyboardInterrupt):
        run(config, out, notify=Stop(at_client=2))
    assert (out / "models").is_dir()
    run(_without(config), out, resume=True)
    assert _kept(out) == KEPT
    assert (out / "results.csv").read_bytes() == (expected / "results.csv").read_bytes()
    # What a complete run has is not touched, whatever it is resumed with.
    out = tmp_path / "complete"
    shutil.copytree(expected, out)
    run(_without(config), out, resume=True)
    same_run(out, expected)


def test_a_complete_run_finishes_removing_its_state(tmp_path, calm):
    out = tmp_path / "out"
    run(_without(calm[0]), out)
    (out / "state" / "fedavg").mkdir(parents=True)  # as if it had been killed just then
    run(_without(calm[0]), out, resume=True)
    assert not (out / "state").exists()
