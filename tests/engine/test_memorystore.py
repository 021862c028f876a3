"""Runs without checkpoints: what clients keep stays in memory, and the results are the same."""

import json

import pytest
import torch

from tapfl.cli import main
from tapfl.engine.clientstore import ClientStore
from tapfl.engine.memorystore import MemoryStore
from tapfl.engine.rounds import Rounds
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import ClientFinished, RoundEnded
from tapfl.use.join import join
from tests.engine.stores import state, value
from tests.engine.test_resume import Stop, newest_checkpoint, same_run
from tests.experiment import tiny_experiment

METHODS = ["fedper", "tap", "apfl"]  # private blocks, and an X each


@pytest.fixture
def store(tmp_path):
    return MemoryStore(tmp_path / "clients")


def test_it_gives_back_what_files_would(store, tmp_path):
    notes = {"h": {"t": None, "u": 0.1 + 0.2}, "list": (1, 2), "word": "é"}
    files = ClientStore(tmp_path / "files")
    for each in (store, files):
        each.save("tap", "a", 3, state(5), notes)
        each.save("ditto", "a", 4, state(6), {})
    for owner, client, as_of in (("tap", "a", 3), ("tap", "a", 9), ("tap", "a", 2),
                                 ("ditto", "a", 4), ("tap", "b", 9), ("apfl", "a", 9)):
        mine, theirs = (each.load(owner, client, as_of) for each in (store, files))
        assert (mine is None) == (theirs is None), (owner, client, as_of)
        if mine is not None:
            assert (value(mine), mine[1]) == (value(theirs), theirs[1])


def test_copies_are_independent(store):
    mine, notes = state(1), {"h": [1.0]}
    store.save("tap", "a", 0, mine, notes)
    mine["backbone"].fill_(9)
    notes["h"].append(9.0)
    found = store.load("tap", "a", as_of=0)
    found[0]["backbone"].fill_(8)
    found[1]["h"].append(8.0)
    again = store.load("tap", "a", as_of=0)
    assert (value(again), again[1]) == (1, {"h": [1.0]})


def test_methods_that_save_one_state_share_a_copy(store):
    mine = state(1)
    store.save("tap", "a", 0, mine, {"h": 1})
    store.save("tap-nokd", "a", 0, mine, {"h": 2})
    first, second = (store._states[owner, "a"][0] for owner in ("tap", "tap-nokd"))
    assert first[0] is second[0]
    assert [json.loads(notes) for _, notes in (first, second)] == [{"h": 1}, {"h": 2}]
    store.prune("tap", "a", 0, kept=())
    assert not store._saved  # the turn is over


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_method_that_changes_and_saves_its_state_again_keeps_both(store, mode):
    with mode():
        mine = state(1)
        store.save("own", "a", 0, mine, {})
        mine["backbone"].data.fill_(9)  # no counter of changes sees this
        store.save("own", "a", 1, mine, {})
    assert [value(store.load("own", "a", as_of=r)) for r in (0, 1)] == [1, 9]


def test_variants_of_tap_keep_one_x(tmp_path):
    seen = []

    class Watched(MemoryStore):
        def prune(self, *more, **kept):
            seen.append({owner: versions[max(versions)][0]
                         for (owner, client), versions in self._states.items()
                         if client == "shapes"})
            super().prune(*more, **kept)

    config = tiny_experiment(tmp_path, methods=["tap", "tap-nokd", "tap-soft"],
                             train={"rounds": 2, "local_steps": 1}, post={"steps": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapfl.engine.site.MemoryStore", Watched)
        run(_without(config), tmp_path / "out")
    last = next(states for states in reversed(seen) if states)
    assert last["tap"] is last["tap-nokd"]
    assert last["tap-soft"] is not last["tap"]


def test_a_turn_sees_the_state_before_it_until_it_is_over(store):
    """A curve asks for the private blocks of the round before; after the turn nobody does."""
    store.save("fedper", "a", 2, state(2), {})
    store.save("fedper", "a", 5, state(5), {})
    assert [value(store.load("fedper", "a", as_of=r)) for r in (4, 5)] == [2, 5]
    store.prune("fedper", "a", 5, kept=())
    assert store.load("fedper", "a", as_of=4) is None
    assert value(store.load("fedper", "a", as_of=5)) == 5
    store.prune("fedper", "b", 5, kept=())  # of a client that keeps nothing


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    config = tiny_experiment(folder, methods=METHODS, train={"rounds": 3, "local_steps": 1},
                             post={"steps": 1}, evaluation={"every": 2, "sample": 4})
    run(config, folder / "out")
    return config, folder / "out"


def _without(config):
    return config.model_copy(update={
        "checkpoint": config.checkpoint.model_copy(update={"every": None})})


def test_results_and_models_are_those_of_a_run_with_checkpoints(calm, tmp_path):
    config, expected = calm
    seen = []

    def look(event):
        if isinstance(event, RoundEnded):
            seen.extend(p for p in (tmp_path / "out" / "state").rglob("*.safetensors"))

    run(_without(config), tmp_path / "out", notify=look)
    same_run(tmp_path / "out", expected)
    assert not seen  # nothing of a client was on disk, nor a checkpoint


@pytest.mark.parametrize("stop", [
    pytest.param(Stop(at_round=1), marks=pytest.mark.long), Stop(at_client=2)])
def test_an_interrupted_run_starts_again(calm, tmp_path, stop):
    config, expected = calm
    with pytest.raises(KeyboardInterrupt):
        run(_without(config), tmp_path / "out", notify=stop)
    assert newest_checkpoint(tmp_path / "out", "fedper") == -1
    rounds = []
    run(_without(config), tmp_path / "out", resume=True, notify=lambda event: rounds.append(
        event.round) if isinstance(event, RoundEnded) else None)
    assert rounds == [*range(3), *range(3)]  # of fedper and of fedavg
    same_run(tmp_path / "out", expected)


@pytest.mark.long
def test_a_run_with_checkpoints_does_not_go_on_without(calm, tmp_path):
    config, _ = calm
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_round=1))
    with pytest.raises(TapflError, match=r"checkpoints: the run has checkpoints to go on from; "
                                         r"checkpoint.every: expected a number, got null$"):
        run(_without(config), tmp_path / "out", resume=True)
    run(config, tmp_path / "out", resume=True)  # nothing is lost
    same_run(tmp_path / "out", calm[1])


@pytest.mark.parametrize("change", ["noise", "leave"])
def test_models_of_a_w_that_is_trained_anew_are_made_anew(tmp_path, change):
    """Interrupted in the final stage; the second W is another one, for each client the same."""
    config = _without(tiny_experiment(
        tmp_path, methods=["fedavg"], train={"rounds": 1, "local_steps": 1}, post={"steps": 1},
        privacy={"mode": "central", "clip": 1.0, "noise": 0.5} if change == "noise" else {}))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "out", notify=Stop(at_client=3))
    if change == "leave":
        assert main(["leave", str(tmp_path / "out"), "looks"]) == 0
    done = []
    rows = run(config, tmp_path / "out", resume=True, notify=lambda event: done.append(
        event.client) if isinstance(event, ClientFinished) else None)
    assert len(done) == (4 if change == "noise" else 3)
    shared = {row["value"] for row in rows if row["dataset"] == "agnews"
              and row["metric"] == "accuracy" and row["method"] == "fedavg"}
    assert len(shared) == 1  # of one W, on the same test data


def test_a_run_that_starts_from_another_one_needs_checkpoints(calm, tmp_path, capsys):
    config, before = calm
    values = _without(config).model_dump(mode="json") | {"start": str(before)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    for verb in ("validate", "run"):
        assert main([verb, str(path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all("checkpoint.every: a run that starts from another one" in line for line in errors)


def test_newcomers_join_a_run_without_checkpoints(calm, tmp_path):
    config, before = calm
    run(_without(config), tmp_path / "without")
    file = tmp_path / "new.yaml"
    file.write_text("""
tasks: {agnews: {kind: text_classification, modalities: [text], classes: 4}}
clients: [{name: late, tasks: {agnews: 1}}]
""")
    join(before, file, tmp_path / "with-late", device="cpu")
    join(tmp_path / "without", file, tmp_path / "without-late", device="cpu")
    same_run(tmp_path / "without-late", tmp_path / "with-late")
    with pytest.raises(TapflError, match=r"or the run had no checkpoints \(checkpoint.every: null"):
        run(config.model_copy(update={"start": str(tmp_path / "without"),
                                      "train": config.train.model_copy(update={"rounds": 4})}),
            tmp_path / "longer")


def test_ctrl_c_says_that_the_run_will_start_again(calm, tmp_path, capsys, monkeypatch):
    config, _ = calm
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_without(config).model_dump(mode="json")))
    real = Rounds.round

    def one(self, round_):
        if round_:
            raise KeyboardInterrupt
        real(self, round_)

    monkeypatch.setattr(Rounds, "round", one)
    assert main(["run", str(path), "--out", str(tmp_path / "out"), "--device", "cpu"]) == 130
    said = capsys.readouterr().err
    assert "--resume" in said
    assert "(from the first round: no checkpoints)" in said


def test_bad_numbers_of_rounds_are_refused(tmp_path, capsys):
    for bad in ("0", "-1", "often"):
        assert main(["run", "quickstart", "--set", f"checkpoint.every={bad}", "--out",
                     str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all("checkpoint.every" in line for line in errors)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_of_a_gpu_wait_in_the_hosts_memory(tmp_path):
    store = MemoryStore(tmp_path, device="cuda")
    store.save("tap", "a", 0, state(3).to("cuda"), {})
    kept = store._states["tap", "a"][0][0]
    assert kept["backbone"].device.type == "cpu"
    found = store.load("tap", "a", as_of=0)
    assert found[0]["backbone"].is_cuda
    assert float(found[0]["backbone"][0]) == 3
