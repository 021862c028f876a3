"""Names of methods, variants with settings, and which of them share a federated run."""

import pytest

from tapfl.config import Config, load_config
from tapfl.engine.registry import plan
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.methods import federated_runs, find_method, folder_name, merge, method_specs
from tests.experiment import rows_of, tiny_experiment


def runs(methods, **sections):
    config = Config.model_validate({"methods": methods, **sections})
    return [(r.name, [s.name for s in r.personal]) for r in federated_runs(method_specs(config))]


WIDE = {"of": "tap", "tap": {"margins": {"image_generation": 0.05}}}


def test_settings_of_personalizers_share_the_federated_run():
    variants = {"wide": WIDE, "held": {"of": "tap", "tap": {"criterion": "validation"}},
                "long": {"of": "fedavg+post", "post": {"steps": 7}}}
    assert runs(["fedavg", "tap", *variants], variants=variants, federation={"holdout": 0.1}) == [
        ("fedavg", ["tap", "wide", "held", "long"])]


def test_settings_of_w_start_another_run():
    variants = {"slow": {"of": "tap", "train": {"lr": 1e-5}},
                "heavy": {"of": "disentafl", "disentafl": {"weight": 2.0}},
                "slow2": {"of": "fedavg+post", "train": {"lr": 1e-5}}}
    assert runs(["tap", "disentafl", *variants], variants=variants) == [
        ("fedavg", ["tap"]), ("disentafl", []), ("fedavg-of-slow", ["slow", "slow2"]),
        ("heavy", [])]


def test_a_variants_settings_are_merged_deep():
    config = Config.model_validate({"methods": ["wide"], "variants": {"wide": WIDE},
                                    "tap": {"temperature": 3.0}})
    (spec,) = method_specs(config)
    assert spec.config.tap.margins.image_generation == 0.05
    assert spec.config.tap.margins.text_generation == 0.01
    assert spec.config.tap.temperature == 3.0
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


def test_variants_on_the_command_line():
    config = load_config("quickstart", [
        "methods=[tap, wide]", "variants.wide.of=tap",
        "variants.wide.tap.margins.image_generation=0.05"])
    assert method_specs(config)[1].config.tap.margins.image_generation == 0.05


@pytest.mark.parametrize(("methods", "variants", "message"), [
    (["tap", "tap"], {}, "'tap' is there twice"),
    (["tap", "fedavg+tap"], {}, "'fedavg.tap' is there twice"),
    (["tap", "same"], {"same": {"of": "tap", "tap": {"temperature": 1.0}}},
     "'same' is there twice"),
    (["fedavg", "slow"], {"slow": {"of": "fedavg", "post": {"lr": 1e-3}}},
     "'slow' is there twice"),
    (["a:b_C", "a_b:C"], {}, "would share a folder"),
    (["tap"], {"wide": WIDE}, "'wide' is not in methods"),
    (["wide"], {"wide": {"of": "tap", "federation": {"groups": 2}}},
     "'federation' is no section that a variant can set"),
    (["wide"], {"wide": {"of": "tap", "tpa": {}}}, "did you mean 'tap'"),
    (["wide"], {"wide": {"of": "tap", "tap": {"margin": 1}}}, "unknown key 'tap.margin'"),
    (["w", "wide"], {"wide": WIDE, "w": {"of": "wide", "post": {"steps": 1}}}, "variant itself"),
    (["fedavg"], {"fedavg": WIDE}, "'fedavg' is a method already"),
])
def test_bad_variants(methods, variants, message):
    with pytest.raises(TapflError, match=message):
        plan(Config.model_validate({"methods": methods, "variants": variants}))


@pytest.mark.parametrize(("methods", "override", "message"), [
    (["tap-soft"], "tap.share=0.25",
     r"tap.share: 0.25 would change nothing, 'tap-soft' stands for 0.5; make a variant of it: "
     r"\{of: tap-soft, tap: \{share: 0.25\}\}$"),
    (["fedavg", "disentafl+tap-soft"], "tap.end=plain", "'disentafl.tap-soft' stands for plain2"),
    (["tap-nokd"], "tap.end=plain2", "'tap-nokd' stands for plain;"),
    (["mine"], "tap.share=0.25", "of: tap-soft, tap"),
])
def test_a_setting_that_a_name_stands_for_is_not_lost_silently(methods, override, message):
    variants = ["variants.mine={of: tap-soft, post: {steps: 3}}"] if methods == ["mine"] else []
    config = load_config("quickstart", [f"methods={methods}", override, *variants])
    with pytest.raises(TapflError, match=message):
        plan(config)


@pytest.mark.parametrize(("methods", "overrides"), [
    (["tap", "tap-soft"], ["tap.share=0.25"]),  # it is TAP's
    (["tap-soft"], ["tap.share=0.5"]),
    (["tap-soft"], ["tap.temperature=2"]),
    (["fedavg"], ["tap.share=0.25"]),
    (["mine"], ["tap.share=0.1", "variants.mine={of: tap-soft, tap: {share: 0.25}}"]),
])
def test_settings_that_are_somebodys(methods, overrides):
    config = load_config("quickstart", [f"methods={methods}", *overrides])
    plan(config)
    shares = {"tap": 0.25, "tap-soft": 0.5, "mine": 0.25}
    assert all(spec.config.tap.share == shares[spec.name] for spec in method_specs(config)
               if spec.personalizer)


@pytest.mark.parametrize("name", ["../x", "a b", "", "x" * 81, "é", "a/b"])
def test_a_variant_has_a_name_that_can_be_a_folder(name):
    with pytest.raises(ValueError, match="is not a name"):
        Config.model_validate({"methods": [name], "variants": {name: WIDE}})


def test_methods_are_found_by_name():
    config = Config.model_validate({"methods": ["tap", "slow"], "variants": {
        "slow": {"of": "tap", "train": {"lr": 1e-5}}}})
    assert find_method(config, "tap")[0].name == "fedavg"
    assert find_method(config, "slow")[1].config.train.lr == 1e-5
    assert find_method(config, "fedavg-of-slow")[1] is None
    with pytest.raises(TapflError, match="the run has no 'slo'; did you mean 'slow'"):
        find_method(config, "slo")
    assert folder_name("pkg.mod:Own+post") == "pkg_mod_Own+post"


@pytest.mark.long
def test_variants_do_the_same_work_once_and_get_what_each_gets_alone(tmp_path, monkeypatch):
    """Four margins, of which three never matter: one training of X, one stage 2, one evaluation."""
    from tapfl.personal import tap as module

    def margin(value):
        kinds = ("image_classification", "image_generation", "text_classification",
                 "text_generation")
        return {"of": "tap", "tap": {"margins": dict.fromkeys(kinds, value)}}

    variants = {f"m{i}": margin(v) for i, v in enumerate((1e6, 2e6, 3e6, -1e6))}
    variants["longer"] = {"of": "fedavg+post", "post": {"steps": 3}}
    alone = {}
    for name, variant in variants.items():
        config = tiny_experiment(tmp_path, methods=[name], variants={name: variant})
        alone[name] = rows_of(run(config, tmp_path / name), name)
    counted, original = [], module.local_training
    monkeypatch.setattr(module, "local_training",
                        lambda *a, **k: counted.append(k["role"]) or original(*a, **k))
    rows = run(tiny_experiment(tmp_path, methods=list(variants), variants=variants),
               tmp_path / "all")
    for name, expected in alone.items():
        assert rows_of(rows, name) == expected
    rounds, clients = 4 * 2, 4
    assert rounds <= counted.count("personal") <= 2 * rounds  # the first X is everybody's
    assert clients <= counted.count("distill") <= 2 * clients
    assert alone["m0"] != alone["m3"]


def test_no_two_runs_share_a_folder():
    variants = {"a": {"of": "tap", "train": {"lr": 1e-3}},
                "fedavg-of-a": {"of": "fedavg", "train": {"lr": 2e-2}},
                "x_Y": {"of": "fedavg", "train": {"lr": 3e-2}}}
    config = Config.model_validate({"methods": ["fedavg", *variants, "x:Y+post"],
                                    "variants": variants})
    names = [folder_name(r.name).lower() for r in federated_runs(method_specs(config))]
    assert len(set(names)) == len(names) == 5
