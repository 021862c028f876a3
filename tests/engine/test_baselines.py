"""The personalization baselines beyond the paper, in whole runs."""

import math

import pytest
import torch

import tapfl
from tapfl.config import Config
from tapfl.engine.registry import plan
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.events import RoundEnded
from tapfl.reading import check
from tests.engine.test_resume import same_run
from tests.experiment import FederatedRun, tiny_experiment

METHODS = ["fedprox", "fedper", "fedrep", "fedala", "fedavg+ditto", "fedavg+apfl"]


class StopOnce:
    """Press Ctrl-C after the first round of some federated runs, once in each."""

    def __init__(self, *runs):
        self.runs = set(runs)

    def __call__(self, event):
        if isinstance(event, RoundEnded) and event.method in self.runs:
            self.runs.remove(event.method)
            raise KeyboardInterrupt


def whole(folder, methods):
    return tiny_experiment(folder, methods=methods, train={"rounds": 2}, post={"steps": 1},
                           fedala={"steps": 1, "first_steps": 2})


def test_whole_runs(tmp_path):
    methods = ["fedprox", "fedper", "fedrep", "fedper+post"]
    rows = run(whole(tmp_path, methods), tmp_path / "out")
    assert {r["method"] for r in rows if r["method"] != "constant"} == set(methods)
    assert all(math.isfinite(r["value"]) for r in rows)


@pytest.mark.long
def test_what_clients_keep_survives_a_break(tmp_path):
    """Two rounds of the same two clients, so that it matters."""
    methods = ["fedala", "fedavg+ditto", "fedavg+apfl"]
    rows = run(whole(tmp_path, methods), tmp_path / "calm")
    assert {r["method"] for r in rows if r["method"] != "constant"} == set(methods)
    assert all(math.isfinite(r["value"]) for r in rows)
    stop = StopOnce("fedala", "fedavg")
    for again in (False, True):
        with pytest.raises(KeyboardInterrupt):
            run(whole(tmp_path, methods), tmp_path / "out", resume=again, notify=stop)
    run(whole(tmp_path, methods), tmp_path / "out", resume=True, notify=stop)
    same_run(tmp_path / "out", tmp_path / "calm")
    for method in methods:  # and what came out can be loaded
        model = tapfl.load(tmp_path / "calm", client="news", method=method, device="cpu")
        assert len(model.predict("agnews", text="a late goal")["probabilities"]) == 4


def test_w_is_the_same_with_or_without_models_beside_it(tmp_path):
    found = []
    for methods in (["fedavg"], ["fedavg+ditto", "fedavg+apfl", "tap"]):
        watched = FederatedRun(tiny_experiment(tmp_path, methods=methods),
                               tmp_path / str(len(methods)))
        for t in range(3):
            watched.round(t)
        found.append(watched.server.blocks)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_settings_of_models_beside_w_share_its_run():
    variants = {"loose": {"of": "fedavg+ditto", "ditto": {"pull": 0.01}},
                "slow": {"of": "fedavg+apfl", "apfl": {"rate": 1e-4}},
                "far": {"of": "fedprox", "fedprox": {"mu": 1.0}}}
    plans = plan(Config.model_validate({"methods": [*METHODS, *variants], "variants": variants}))
    assert [(p.name, [spec.name for spec, _ in p.personalizers]) for p in plans] == [
        *((name, []) for name in ("fedprox", "fedper", "fedrep", "fedala")),
        ("fedavg", ["fedavg+ditto", "fedavg+apfl", "loose", "slow"]), ("far", [])]


@pytest.mark.parametrize(("section", "values", "key"), [
    ("fedprox", {"mu": -1}, "fedprox.mu"), ("fedprox", {"mu": "strong"}, "fedprox.mu"),
    ("fedrep", {"head_share": 0}, "fedrep.head_share"),
    ("fedrep", {"head_share": 1}, "fedrep.head_share"),
    ("fedala", {"lr": 0}, "fedala.lr"), ("fedala", {"steps": -1}, "fedala.steps"),
    ("fedala", {"first_steps": 1.5}, "fedala.first_steps"),
    ("ditto", {"pull": -0.1}, "ditto.pull"), ("ditto", {"lambda": 1}, "ditto.lambda"),
    ("ditto", {"finish": -1}, "ditto.finish"), ("apfl", {"alpha": 1.1}, "apfl.alpha"),
    ("apfl", {"rate": -1}, "apfl.rate"), ("apfl", {"finish": "long"}, "apfl.finish")])
def test_bad_settings(section, values, key):
    with pytest.raises(TapflError, match=key):
        check(Config, {section: values}, "x.yaml")
