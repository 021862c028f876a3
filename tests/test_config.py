import pytest

from tapfl.config import Config, load_config, preset_names, preset_text
from tapfl.errors import TapflError


@pytest.mark.parametrize("name", preset_names())
def test_presets_open_with_the_command_that_runs_them(name):
    load_config(name)
    assert preset_text(name).splitlines()[0].startswith("# tapfl ")
    assert name in preset_text(name).splitlines()[0]


def test_overrides():
    config = load_config("flava", ["lora.dropout=0.1", "foundation.weights=random"])
    assert config.lora.dropout == 0.1
    assert config.foundation.weights == "random"


def test_one_margin_by_its_dotted_name():
    """The others keep their defaults, also where a preset names none of them."""
    for preset in ("quickstart", "flava"):
        usual = load_config(preset).tap
        tap = load_config(preset, ["tap.margins.image_generation=0.05",
                                   "tap.distill_weights.text_generation=20"]).tap
        assert tap.margins == usual.margins.model_copy(update={"image_generation": 0.05})
        assert tap.distill_weights == usual.distill_weights.model_copy(
            update={"text_generation": 20})


@pytest.mark.parametrize(("setting", "message"), [
    ("tap.share=much",
     r"tap\.share: Input should be a valid number, or 'losses', 'gap' or 'holdout', got 'much'"),
    ("speed.micro_batch=0", r"micro_batch: expected a number of samples .* null, got 0$"),
    ("tap.criterion=paired", r"^mini: tap\.criterion: paired needs held-out data")])
def test_messages_of_settings(setting, message):
    with pytest.raises(TapflError, match=message):
        load_config("mini", [setting])


def test_the_papers_ranks():
    flava, vilt = load_config("flava").lora, load_config("vilt").lora
    assert (flava.encoder_rank, flava.attention_rank, flava.expert_rank) == (8, 16, 4)
    assert (vilt.encoder_rank, vilt.attention_rank, vilt.expert_rank) == (4, 8, 4)
    assert flava.dropout == vilt.dropout == 0.3


@pytest.mark.parametrize(("text", "message"), [
    ("a: [", "not valid YAML"),
    ("- a", "expected a mapping"),
    ("lora: {encoder_rank: 0}", "lora.encoder_rank: .*greater than or equal to 1, got 0"),
    ("lora: 3", "lora: .*got 3"),
    ("backbone: {kind: magic}", "backbone.kind: .*'routed' or 'standard', got 'magic'"),
    ("foundation: {name: flava, weights: {image: a, text: b}}", "is for the foundation 'pair'"),
    ("foundation: {name: pair, weights: {image: a}}", "expected the two keys image and text"),
    ("fundation: {}", "unknown key 'fundation'; did you mean 'foundation'"),
])
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(TapflError, match=message) as caught:
        load_config(path)
    assert "x.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("data", "message"), [
    (b"\xff\xfe\x00", "not a readable UTF-8 text file"),
    (b"lora: {dropout: 0.1, dropout: 0.2}", "the key 'dropout' is there twice"),
    (b"[" * 3000, "not valid YAML"),
    (b"lora: {dropout: 2020-13-45}", "not valid YAML"),
    (b'"a\\nb": 1', "unknown key 'a b'"),
])
def test_bad_bytes(tmp_path, data, message):
    (tmp_path / "x.yaml").write_bytes(data)
    with pytest.raises(TapflError, match=message) as caught:
        load_config(tmp_path / "x.yaml")
    assert "x.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_python_in_yaml(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("foundation: !!python/object/apply:os.system [echo]")
    with pytest.raises(TapflError, match="not valid YAML"):
        load_config(path)


def test_nothing_is_given_back_that_was_not_held_out():
    with pytest.raises(ValueError, match=r"post.use_holdout: nothing is held out"):
        Config.model_validate({"post": {"use_holdout": True}})
