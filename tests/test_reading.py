"""Configuration that is hostile, broken or mistyped is refused in one short line."""

import os
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapfl.config import Config, FederationConfig, load_config, preset_text
from tapfl.data.participants import load_federation
from tapfl.errors import LONGEST, TapflError, nearest, shown
from tapfl.reading import check, parse_yaml, read_text, yaml_value


@pytest.fixture
def little_memory():
    """A message that explodes fails here, before it takes the machine down."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(text, overrides=(), tmp_path=None):
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(TapflError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= LONGEST
    message.encode()  # it can be printed
    return message


def bomb(inner, levels=12, width=9):
    lines = [f"a0: &a0 {inner}"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]")
    return "\n".join(lines)


@pytest.mark.parametrize("use", [
    "foundation: *a11", "seed: *a11", "? *a11\n: 1", "methods: *a11",
    "foundation: {architecture: {x: *a11}}"])
def test_a_bomb_of_aliases_is_refused(use, tmp_path, little_memory):
    message = refused(f"{bomb('[lol, lol]')}\n{use}", tmp_path=tmp_path)
    assert "x.yaml, line" in message
    assert "aliases" in message


def test_few_aliases_are_fine():
    assert parse_yaml(bomb("[x]", levels=3), "x")["a2"] == [[["x"]] * 9] * 9


@pytest.mark.parametrize("text", [
    "foundation: {name: pair, architecture: &a {image: *a}}", "methods: &a [*a]",
    "seed: &a {? [*a] : 1}", "a: &a [&b [*a, *b]]"])
def test_a_circular_alias_is_refused(text, tmp_path):
    assert "an alias is inside of what it names" in refused(text, tmp_path=tmp_path)


@pytest.mark.parametrize("number", [
    "-0x" + "f" * 5000, "0x" + "f" * 50_000, "1" * 5000, "1:" * 5000 + "1", "0b" + "1" * 50_000,
    "1:" * 5000 + "1.5"])
def test_huge_numbers(number, tmp_path):
    assert "number of" in refused("", [f"train.rounds={number}"], tmp_path)
    assert "x.yaml, line 1" in refused(f"seed: {number}", tmp_path=tmp_path)


def test_a_number_that_python_does_not_write():
    with pytest.raises(TapflError, match=r"seed: .* got a number of 20001 bits"):
        check(Config, {"seed": 2**20_000}, "x")


@pytest.mark.parametrize("text", [
    "!!int ''", "!!float ''", "!!bool maybe", "!!timestamp soon", "!!binary é", "!!omap 3",
    "!!int abc", "!!set {a, b}", "!!binary /w==", "2020-01-01", "2020-01-01 10:00:00", "1e999999",
    "{<<: 3}", "\\x00", "&a", "*a", "? ", "!!str {a: b}", "!!map [1]", "!!seq {a: b}", "\x85: [",
    "{2020-01-01: 3}"])
def test_odd_values_are_one_line(text, tmp_path):
    assert "x.yaml" in refused(f"foundation: {text}", tmp_path=tmp_path)
    assert "x.yaml" in refused(f"lora: {{dropout: {text}}}", tmp_path=tmp_path)


@pytest.mark.parametrize(("key", "value"), [
    *((f"{section}.{name}", value) for section, names in {
        "data": ["train", "test", "seed"],
        "train": ["rounds", "cohort", "local_steps", "batch_size", "warmup_rounds", "lr",
                  "lr_initial", "weight_decay", "clip"],
        "post": ["steps", "lr"], "tap": ["temperature", "margins.text_generation",
                                         "distill_weights.image_generation"],
        "perfedavg": ["inner_lr", "inner_lr_initial", "delta", "adapt_steps"],
        "disentafl": ["weight"], "feddat": ["kl_weight", "bottleneck"], "fedprox": ["mu"],
        "fedala": ["lr", "steps", "first_steps"], "ditto": ["pull", "finish"],
        "apfl": ["alpha", "rate", "finish"],
        "evaluation": ["batch_size", "max_new_tokens", "bertscore_layer"],
        "checkpoint": ["every", "cache_mb"], "speed": ["resident_gb"],
        "federation": ["dirichlet", "groups"], "lora": ["encoder_rank"]}.items()
      for name in names for value in ("99999999999999999999", "1.0e+300")),
    ("seed", str(2**63)), ("tap.temperature", "1.0e-300"), ("federation.dirichlet", "1.0e-300")])
def test_numbers_have_bounds(key, value, tmp_path):
    message = refused(preset_text("flava"), [f"{key}={value}"], tmp_path)
    assert key in message
    assert "than or equal to" in message or "integer" in message


def test_the_largest_seed():
    import numpy as np
    import torch

    seed = load_config("mini", [f"seed={2**63 - 1}"]).seed
    np.random.default_rng(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("key", ["federation.file", "foundation.weights", "data.folder"])
@pytest.mark.parametrize("value", ["a" * 10_000, "a" * 300, "é" * 200, "a/" * 3000, '"a\\0b"'])
def test_paths_that_no_file_system_holds(key, value, tmp_path):
    message = refused("", [f"{key}={value}"], tmp_path)
    assert f"{key}: a path has" in message or f"{key}: a name in a path has" in message


@pytest.mark.parametrize("text", [
    '"\\ud800": 1', 'foundation: {name: "\\ud800"}', 'foundation: {"a\\udfff": 1}',
    'methods: [tap, "\\ud800"]', 'foundation: {architecture: {x: ["\\ud800"]}}'])
def test_half_a_character(text, tmp_path):
    assert "half a character" in refused(text, tmp_path=tmp_path)


def test_half_a_character_on_the_command_line(tmp_path):
    for override in ("a\udcff=1", "foundation.name=\udcff", "\n\udcff"):
        refused("", [override], tmp_path)


def test_files_that_never_end_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", "/dev/zero", "/dev/stdin", tmp_path):
        with pytest.raises(TapflError, match="not a readable UTF-8 text file"):
            read_text(path)
        with pytest.raises(TapflError):
            load_config(path)
        with pytest.raises(TapflError):
            load_federation(FederationConfig(file=str(path)))


def test_a_huge_text_file_is_refused(tmp_path):
    with (tmp_path / "x.yaml").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(TapflError, match="expected at most 20 MB"):
        read_text(tmp_path / "x.yaml")


@pytest.mark.parametrize(("override", "message"), [
    ("foundation.weights={image:a,text:b}", "{image: a, text: b}, with a space after each colon"),
    ("foundation.weights=3", "expected a hub id, a folder or 'random'"),
    ("foundation.weights=[a, b]", "expected a hub id, a folder or 'random'"),
    ("foundation.weights={image: 1, text: b}", "expected a hub id, a folder or 'random'"),
    ("foundation={name:pair}", "a colon is followed by a space"),
])
def test_weights_say_what_to_write(override, message, tmp_path):
    found = refused("foundation: {name: pair}", [override], tmp_path)
    assert message in found
    assert "foundation" in found


@pytest.mark.parametrize(("classes", "message"), [
    ("[a, 3]", r"tasks\.t\.classes\.1: Input should be a valid string, got 3"),
    ("[a, [b]]", r"tasks\.t\.classes\.1: Input should be a valid string, got \['b'\]"),
    ("[a, null]", r"tasks\.t\.classes\.1: "), ("[a, true]", r"tasks\.t\.classes\.1: "),
    ('[a, "\\ud800"]', r"tasks\.t\.classes\.1: .*half a character"),
    ("[a, 2020-01-01]", r"tasks\.t\.classes\.1: 2020-01-01 is a date; put it in quotes"),
    ("{a: b}", r"tasks\.t\.classes"), ("99999999", r"tasks\.t\.classes"),
])
def test_bad_lists_of_classes(classes, message, tmp_path):
    (tmp_path / "f.yaml").write_text(
        f"tasks: {{t: {{kind: text_classification, modalities: [text], classes: {classes}}}}}\n"
        "clients: [{name: x, tasks: {t: 1}}]")
    with pytest.raises(TapflError, match=message) as caught:
        load_federation(FederationConfig(file=str(tmp_path / "f.yaml")))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_messages_are_one_printable_line():
    error = str(TapflError("a\nb\x1b[2J\udcff\u202e" + "x" * 10**6))
    assert error.startswith("a b\\x1b[2J\\udcff\\u202e")
    assert len(error) <= LONGEST
    assert "and 99950 more" in nearest("#" * 10**6, map(str, range(100_000)))
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert len(shown(deep)) < 100


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters(exclude_categories=()), max_size=40))
def test_any_text_is_a_value_or_one_line(text):
    for attempt in (lambda: yaml_value(text, text), lambda: load_config("mini", [text]),
                    lambda: load_config("mini", [f"foundation.weights={text}"]),
                    lambda: check(Config, {text: text}, "x")):
        message = ""
        try:
            attempt()
        except TapflError as error:
            message = str(error)
        assert "\n" not in message
        message.encode()
