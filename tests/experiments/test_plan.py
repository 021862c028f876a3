"""Which runs experiments need, which of them are there, and what is still to run."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tapfl.config import Config
from tapfl.engine.results import read_results
from tapfl.errors import TapflError
from tapfl.experiments import plan as module
from tapfl.experiments.catalogue import ALL, MODELS, Experiment, Part, find_experiments
from tapfl.experiments.plan import ASIDE, combined, data_listing, keys, make_plan
from tapfl.experiments.results import seeds_of
from tapfl.methods import PERSONAL_SECTIONS, method_specs
from tests.experiment import FEDERATION, tiny_experiment
from tests.experiments.tiny import contents, make_runs, tiny_model

FIRST = Experiment("first", "?", (Part("usual", ("fedavg", "fedavg+post", "tap")),))
# The same names with other settings of what comes after federation, and one model that is equal.
SECOND = Experiment("second", "?", (
    Part("shorter", ("fedavg", "tap", "mine"), {"post": {"steps": 1}},
         {"mine": {"of": "tap", "tap": {"criterion": "always"}}}),))
SEEDS = (41, 42)

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
    plan = make_plan(chosen, MODELS["mini"], True, SEEDS, tmp_path)
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


# With runs


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both experiments with one seed: the model, and the folder with the finished run."""
    folder = tmp_path_factory.mktemp("plan")
    model, out = tiny_model(folder), folder / "out"
    make_runs(make_plan([FIRST, SECOND], model, True, [41], out))
    return model, out


@pytest.fixture
def copied(done, tmp_path):
    model, out = done
    return model, shutil.copytree(out, tmp_path / "out")


def only_run(out):
    (folder,) = (out / "runs").iterdir()
    return folder


def change_record(folder, **values):
    path = folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_finished_runs_are_found_under_the_parts_names(done):
    model, out = done
    plan = make_plan([FIRST, SECOND], model, True, [41], out)
    assert not plan.missing
    assert (plan.complete_runs, plan.has(0), plan.has(1), len(plan.finished)) == (1, True, True, 1)
    (seed,) = seeds_of(plan, 1, 0)
    run = only_run(out)
    assert seed.sources == {"fedavg": (run, "fedavg"), "tap": (run, "tap-2"),
                            "mine": (run, "mine-2")}
    kept = read_results(run / "results.csv")
    for name, there in (("tap", "tap-2"), ("mine", "mine-2")):
        mine = [row for row in seed.rows if row["method"] == name]
        assert mine
        assert mine == [row | {"method": name} for row in kept if row["method"] == there]
    assert {row["method"] for row in seed.rows} == {"fedavg", "tap", "mine", "constant"}
    scores = seed.scores(["tap"])
    assert {key[0] for key in scores} == {"tap"}
    assert {e["method"] for e in seed.events("tap", "replacement")} == {"tap-2"}


def test_a_run_that_lacks_a_model_is_followed_by_one_that_has_it(done):
    model, out = done
    third = Experiment("third", "?", (Part("more", ("tap", "tap-nokd")),))
    plan = make_plan([third], model, True, [41, 42], out)
    assert (plan.federated_runs, plan.complete_runs, plan.has(0)) == (2, 0, False)
    assert not any(run.config.checkpoint.models for run in plan.missing)
    more, new = plan.missing
    assert more.config.methods == ["tap-nokd"]
    assert more.folder.name == f"{only_run(out).name}-2"
    assert new.config.methods == ["tap", "tap-nokd"]


def test_an_unfinished_run_is_resumed_and_what_it_lacks_is_added(copied):
    model, out = copied
    change_record(only_run(out), finished=False)
    third = Experiment("third", "?", (Part("more", ("tap", "tap-nokd")),))
    plan = make_plan([FIRST, third], model, True, [41], out, data=out)
    resumed, more = plan.missing
    assert (resumed.resumes, resumed.folder) == (True, only_run(out))
    assert len(resumed.keys) == 3
    assert resumed.config.data.folder == str(out)  # the mirror may have moved
    assert (more.resumes, more.config.methods) == (False, ["tap-nokd"])
    assert plan.complete_runs == 0


def test_an_unfinished_run_without_a_wanted_model_is_left_alone(copied):
    model, out = copied
    change_record(only_run(out), finished=False)
    third = Experiment("third", "?", (Part("more", ("tap-nokd",)),))
    (run,) = make_plan([third], model, True, [41], out).missing
    assert (run.resumes, run.config.methods) == (False, ["tap-nokd"])


def test_a_resumed_run_reads_the_data_of_this_command_alone(copied):
    model, out = copied
    config = json.loads((only_run(out) / "run.json").read_text())["config"]
    config["data"]["folder"] = "gone"
    change_record(only_run(out), finished=False, config=config)
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    assert (run.resumes, run.config.data.folder) == (True, None)


def lines_kept(share, more=""):
    """Return what leaves the first lines of a file alone, and adds something."""
    def spoil(path):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:int(share * len(lines))]) + more)
    return spoil


def without(*words):
    """Return what takes one line away that has all these words."""
    def spoil(path):
        lines = path.read_text().splitlines(keepends=True)
        lines.remove(next(line for line in lines if all(word in line for word in words)))
        path.write_text("".join(lines))
    return spoil


@pytest.mark.parametrize(("name", "spoil", "fault"), [
    ("results.csv", Path.unlink, "missing"),
    ("results.csv", lambda path: path.write_bytes(b"\x00\xff\n"), "not the results of a run"),
    ("results.csv", lambda path: path.write_text("a,b\n"), "expected the columns seed, method"),
    ("results.csv", lambda path: path.write_text(path.read_text()[:-1]),
     "damaged: its last line is cut off"),
    ("results.csv", lines_kept(0.5), "damaged: it has no accuracy of tap"),
    ("results.csv", lines_kept(0.99), "of constant for client "),
    ("results.csv", without("tap", "accuracy"), "damaged: it has no accuracy of tap for client "),
    ("results.csv", lines_kept(0.5, "41,tap,"), "damaged: its last line is cut off"),
    ("results.csv", lines_kept(0.5, "41,tap,\n"), "not the results of a run"),
    ("events.jsonl", Path.unlink, "missing"),
    ("events.jsonl", lines_kept(1.0, '{"event": "rou'), "not the events of a run"),
    ("events.jsonl", lines_kept(1.0, "{}\n"), "not an event of a run"),
    ("events.jsonl", lines_kept(0.5), "damaged: it has 1 of the 2 rounds of fedavg"),
    ("run.json", Path.unlink, "not a readable record"),
    ("run.json", lambda path: path.write_text("{"), "not a readable record")])
def test_a_damaged_run_counts_as_not_there_and_stays(copied, name, spoil, fault):
    model, out = copied
    folder = only_run(out)
    spoil(folder / name)
    before = contents(folder)
    plan = make_plan([FIRST], model, True, [41], out)
    (run,) = plan.missing
    assert not run.resumes
    assert run.folder == folder.with_name(f"{folder.name}-2")
    (line,) = plan.unused
    assert line.startswith(str(folder / name))
    assert fault in line
    assert "\n" not in line
    assert not make_plan([FIRST], model, True, [42], out).unused  # another run: it is not asked for
    assert contents(folder) == before


def test_several_damaged_runs_all_stay(copied):
    model, out = copied
    folder = only_run(out)
    (folder / "results.csv").write_text("")
    shutil.copytree(folder, folder.with_name(f"{folder.name}-2"))
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    assert run.folder == folder.with_name(f"{folder.name}-3")


def test_a_damaged_run_of_another_version_is_not_spoken_of(copied, monkeypatch):
    model, out = copied
    (only_run(out) / "run.json").write_text("{")
    monkeypatch.setattr(module, "code_digest", lambda: "f" * 16)
    assert not make_plan([FIRST], model, True, [41], out).unused
    assert make_plan([FIRST], model, True, [41], out, any_version=True).unused


def test_a_damaged_run_is_not_spoken_of_once_there_is_another(copied, done):
    model, out = copied
    folder = only_run(out)
    (folder / "results.csv").write_text("")
    (run,) = make_plan([FIRST], model, True, [41], out).missing
    shutil.copytree(only_run(done[1]), run.folder)
    plan = make_plan([FIRST], model, True, [41], out)
    assert (plan.missing, plan.unused) == ([], [])
    assert {found for found, _ in plan.there.values()} == {run.folder}


def test_other_versions_count_only_if_asked_for(copied, monkeypatch):
    model, out = copied
    monkeypatch.setattr(module, "code_digest", lambda: "f" * 16)
    plan = make_plan([FIRST], model, True, [41], out)
    assert [run.folder.name[-6:] for run in plan.missing] == ["ffffff"]
    assert len(plan.finished) == 1  # how long it took is worth knowing
    old = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert not old.missing
    # A run of this version comes first, whatever the folders are called.
    new = shutil.copytree(only_run(out), plan.missing[0].folder)
    change_record(new, environment={"code": "f" * 16})
    both = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert {folder for folder, _ in both.there.values()} == {new}
    # An unfinished run of another version cannot be continued.
    shutil.rmtree(new)
    change_record(only_run(out), finished=False)
    again = make_plan([FIRST], model, True, [41], out, any_version=True)
    assert [run.resumes for run in again.missing] == [False]


def test_a_run_made_by_other_code_than_its_folder_says(copied):
    model, out = copied
    change_record(only_run(out), environment={"code": "f" * 16})
    assert make_plan([FIRST], model, True, [41], out).missing
    assert not make_plan([FIRST], model, True, [41], out, any_version=True).missing


def test_what_a_failed_start_left_is_no_run(done, tmp_path):
    model, _ = done
    (run,) = make_plan([FIRST], model, True, [41], tmp_path).missing
    run.folder.mkdir(parents=True)
    (run.folder / ".lock").touch()
    (again,) = make_plan([FIRST], model, True, [41], tmp_path).missing
    assert again.folder == run.folder
