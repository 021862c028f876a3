"""What a run and a model depend on, and which runs experiments need."""

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest

from tapfl.config import Config
from tapfl.errors import TapflError
from tapfl.experiments import plan as module
from tapfl.experiments.catalogue import ALL, MODELS, Experiment, Part, find_experiments
from tapfl.experiments.plan import ASIDE, combined, data_listing, keys, make_plan
from tapfl.methods import PERSONAL_SECTIONS, method_specs
from tests.experiment import FEDERATION, tiny_experiment
from tests.experiments.tiny import FIRST, SECOND, tiny_model

# A change in every section that a federated run depends on.
CHANGES = [
    {"seed": 8}, {"precision": "bf16"}, {"foundation": {"weights": "other/model",
                                                        "architecture": None}},
    {"backbone": {"kind": "standard"}}, {"lora": {"encoder_rank": 3}},
    {"decoder": {"tie_embeddings": False}}, {"federation": {"groups": 2}},
    {"federation": {"holdout": 0.2}}, {"federation": {"dirichlet": 0.5}},
    {"data": {"train": 23}}, {"data": {"test": 5}}, {"data": {"seed": 1}},
    {"data": {"source": "hub"}}, {"train": {"rounds": 5}}, {"train": {"lr": 0.1}},
    {"train": {"cohort": 1}}, {"perfedavg": {"delta": 0.1}}, {"disentafl": {"weight": 0.1}},
    {"feddat": {"bottleneck": 5}}, {"fedprox": {"mu": 1.0}}, {"fedrep": {"head_share": 0.1}},
    {"fedala": {"steps": 1}}, {"evaluation": {"max_new_tokens": 5}},
    {"aggregation": {"rule": "median"}}, {"privacy": {"mode": "central"}}, {"start": "elsewhere"}]
# In the sections of personalizers: the federated run stays, a personal model changes.
PERSONAL = [{"tap": {"temperature": 2.0}}, {"post": {"steps": 3}}, {"post": {"lr": 0.1}},
            {"ditto": {"pull": 1.0}}, {"apfl": {"alpha": 0.1}}]
NOTHING = [{"threads": 2}, {"speed": {"kernels": False}}, {"checkpoint": {"every": 1}},
           {"data": {"folder": "elsewhere"}}]


def keys_of(folder, method="tap", **changes):
    (spec,) = method_specs(tiny_experiment(folder, methods=[method], **changes))
    return keys(spec)


def test_every_section_has_its_place():
    """A new section of the configuration must be thought of here."""
    changed = {key for change in CHANGES for key in change}
    assert changed | {*PERSONAL_SECTIONS} | set(ASIDE) == set(Config.model_fields)
    assert {key for change in PERSONAL for key in change} == {*PERSONAL_SECTIONS}


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_a_federated_run_depends_on(tmp_path, change):
    for method in ("fedavg", "tap"):
        before, after = keys_of(tmp_path, method), keys_of(tmp_path, method, **change)
        assert before[0] != after[0]
        assert before[1] != after[1]


@pytest.mark.parametrize("change", PERSONAL, ids=str)
def test_what_a_personal_model_alone_depends_on(tmp_path, change):
    assert keys_of(tmp_path, "fedavg") == keys_of(tmp_path, "fedavg", **change)
    before, after = keys_of(tmp_path), keys_of(tmp_path, **change)
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("change", NOTHING, ids=str)
def test_what_nothing_depends_on(tmp_path, change):
    assert keys_of(tmp_path) == keys_of(tmp_path, **change)


def test_methods_differ_and_equal_ones_are_equal(tmp_path):
    found = [keys_of(tmp_path, m) for m in ("fedavg", "fedavg+post", "fedavg+post2", "tap")]
    assert len({base for base, _ in found}) == 1
    assert len({key for _, key in found}) == 4
    assert keys_of(tmp_path, "fedprox")[0] != found[0][0]
    assert keys_of(tmp_path, "fedavg+tap") == found[3]
    soft = {"criterion": "always", "share": 0.5, "final_share": 0.5, "end": "plain2"}
    assert keys_of(tmp_path, "tap", tap=soft) == keys_of(tmp_path, "tap-soft")


def test_a_setting_that_a_later_version_adds_does_not_count(tmp_path):
    class Later(Config):
        more: int = 3

    (spec,) = method_specs(tiny_experiment(tmp_path, methods=["tap"]))
    found = [keys(dataclasses.replace(spec, config=Later.model_validate(
        spec.config.model_dump() | added))) for added in ({}, {"more": 3}, {"more": 4})]
    assert found[0] == found[1] == keys(spec)
    assert found[2][0] != found[0][0]


def test_settings_of_ones_own_count_where_they_are_used(tmp_path):
    def both(method):
        return [keys_of(tmp_path, method, own={"Mine": {"mu": mu}}) for mu in (1.0, 2.0)]

    (base, key), (other, other_key) = both("some:Mine")
    assert (base != other, key != other_key) == (True, True)
    (base, key), (other, other_key) = both("fedavg+some:Mine")
    assert (base != other, key != other_key) == (False, True)


def test_what_files_hold_counts_not_where_they_lie(tmp_path, monkeypatch):
    here, there, other = (tmp_path / name for name in ("here", "there", "other"))
    for folder in (here, there, other):
        folder.mkdir()
    assert keys_of(here) == keys_of(there)
    monkeypatch.setattr("tests.experiment.FEDERATION", FEDERATION.replace("vqa: 1,", "vqa: 1/2,"))
    assert keys_of(here) == keys_of(there)  # read once a command
    assert keys_of(other)[0] != keys_of(here)[0]


def test_the_code_of_faults_counts(tmp_path, monkeypatch):
    names = ("tapfl.experiments.faults:UnsentBackbone",
             "fedavg+tapfl.experiments.faults:SummedDivergence")
    before = [keys_of(tmp_path, name) for name in (*names, "tap")]
    monkeypatch.setattr(module, "_source", lambda half: "new" if ":" in half else "")
    after = [keys_of(tmp_path, name) for name in (*names, "tap")]
    assert before[0][0] != after[0][0]
    assert (before[1][0], before[2]) == (after[1][0], after[2])
    assert before[1][1] != after[1][1]


def test_a_faults_file_is_what_counts_and_no_other_methods(tmp_path):
    path = Path(module.__file__).with_name("faults.py")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert module._source("tapfl.experiments.faults:UnsentBackbone") == digest
    assert module._source("fedavg") == module._source("mine:Own") == ""


def test_the_shipped_weights_count_where_they_are_used(tmp_path, monkeypatch):
    shipped = {"foundation": {"name": "mini", "weights": "shipped", "architecture": None}}
    found = set()
    for changed in ("", "mini.safetensors", "tokenizer.json"):
        monkeypatch.setattr(module, "_asset", lambda name, changed=changed: str(name == changed))
        found.add(keys_of(tmp_path, **shipped)[0])
    assert len(found) == 3
    monkeypatch.setattr(module, "_asset", None)  # nobody reads them for random weights
    assert keys_of(tmp_path)


def test_data_are_known_by_their_listing(tmp_path):
    mirror = tmp_path / "mirror"
    (mirror / "owner" / "name").mkdir(parents=True)
    with pytest.raises(TapflError, match=r"no \.parquet files here"):
        data_listing(mirror)
    (mirror / "owner" / "name" / "train.parquet").write_bytes(b"12345")
    first = data_listing(mirror)
    assert first == data_listing(shutil.copytree(mirror, tmp_path / "moved"))
    (mirror / "owner" / "name" / "train.parquet").write_bytes(b"123456")
    larger = data_listing(mirror)
    (mirror / "owner" / "name" / "test.parquet").write_bytes(b"1")
    assert len({first, larger, data_listing(mirror), data_listing(None)}) == 4
    (spec,) = method_specs(tiny_experiment(tmp_path, methods=["tap"]))
    assert keys(spec, first) != keys(spec, larger)


def test_experiments_share_runs(tmp_path):
    """One FedAvg run a seed for six experiments, and DisentAFL's for one of them."""
    names = ["kd", "margins", "2p", "replacements", "footprint", "kd"]
    chosen = find_experiments(names, "mini", "small")
    plan = make_plan(chosen, MODELS["mini"], True, (41, 42), tmp_path)
    assert plan.models == 2 * (3 + 4 + 5 + 4 + 6)
    assert (plan.federated_runs, plan.complete_runs, len(plan.missing)) == (4, 0, 4)
    wanted = {model.key for models in plan.needed.values() for model in models}
    planned = [key for run in plan.missing for key in run.keys]
    assert sorted(planned) == sorted(wanted)  # each once
    assert not any(plan.has(number) for number in range(len(chosen)))


@pytest.mark.parametrize("model", ["mini", "flava"])
def test_a_common_run_has_the_very_models_that_were_asked_for(tmp_path, model):
    """Under whatever names: a model that would mean something else becomes a variant."""
    chosen = find_experiments([ALL], model, "small")
    plan = make_plan(chosen, MODELS[model], True, [41], tmp_path)
    files = data_listing(None) if model == "flava" else ""
    for run in plan.missing:
        found = [keys(spec, files) for spec in method_specs(run.config)]
        assert [key for _, key in found] == run.keys
        assert {base for base, _ in found} == {run.folder.name.split("-")[-2]}
    clashes = {name for run in plan.missing for name in run.config.variants
               if name.endswith("-2")}
    assert {"tap-2", "tap-soft-2", "fedavg-post-2"} <= clashes
    assert len({run.folder for run in plan.missing}) == len(plan.missing)


def test_a_clash_of_names_becomes_a_variant(tmp_path):
    plan = make_plan([FIRST, SECOND], tiny_model(tmp_path), True, [41], tmp_path)
    (run,) = plan.missing
    assert run.config.methods == ["fedavg", "fedavg+post", "tap", "tap-2", "mine-2"]
    steps = {s.name: s.config.post.steps for s in method_specs(run.config)}
    assert steps == {"fedavg": 2, "fedavg+post": 2, "tap": 2, "tap-2": 1, "mine-2": 1}
    models = [m for each in plan.needed.values() for m in each]
    assert combined(models[:3]).methods == ["fedavg", "fedavg+post", "tap"]
    assert not combined(models[:3]).variants


def test_names_of_clashes_are_never_taken(tmp_path):
    """The last part has a variant of its own under a name that another one has got."""
    parts = [Part(str(n), ("tap",), {"post": {"steps": n}}) for n in (1, 3, 4)]
    own = Part("own", ("tap-2",), {}, {"tap-2": {"of": "tap", "tap": {"criterion": "always"}}})
    some = Experiment("some", "?", (Part("usual", ("tap",)), *parts, own))
    (run,) = make_plan([some], tiny_model(tmp_path), True, [41], tmp_path).missing
    assert run.config.methods == ["tap", "tap-2", "tap-3", "tap-4", "tap-2-2"]
    assert [s.config.post.steps for s in method_specs(run.config)] == [2, 1, 3, 4, 2]
    assert method_specs(run.config)[-1].config.tap.criterion == "always"
