import pytest

from tapfl.config import load_config
from tapfl.model.summary import PAPER, render, summarize


def _cells(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return line.split()


@pytest.fixture(scope="module")
def flava():
    return summarize(load_config("flava"))


def test_percentages_are_means_of_ratios_as_in_the_paper(flava):
    clients, mean = flava["clients"], flava["mean"]
    ratios = [c["trainable"] / c["total"] for c in clients]
    assert mean["trainable_percent"] == pytest.approx(100 * sum(ratios) / len(ratios))
    ratios = [2 * c["trainable"] / c["with_tap"] for c in clients]
    assert mean["tap_trainable_percent"] == pytest.approx(100 * sum(ratios) / len(ratios))
    # A ratio of means would be another figure, so these can tell the two apart.
    of_means = sum(c["trainable"] for c in clients) / sum(c["total"] for c in clients)
    assert abs(mean["trainable_percent"] - 100 * of_means) > 1
    text = render(flava, "flava")
    assert _cells(text, "mean")[3] == f"{mean['trainable_percent']:.2f}"
    assert text.count("(%: mean of ratios)") == 2


@pytest.mark.parametrize(("name", "row"), [
    ("flava", "310,559,996 36,862,998 10.33 347,422,994 18.11 1.1569 1.2943"),
    ("vilt", "186,171,919 38,124,175 18.18 224,296,094 29.78 0.6935 0.8357"),
])
def test_the_papers_row_is_as_published(flava, name, row):
    text = render(flava if name == "flava" else summarize(load_config(name)), name)
    assert _cells(text, "paper")[1:8] == row.split()


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_papers_gigabytes_are_gib_of_fp32(name):
    paper = PAPER[name]
    # ViLT with TAP is published as 0.8357 where its total gives 0.8356; 10^9 bytes are 7% away.
    for kind in ("", "tap_"):
        assert paper[f"{kind}gib"] == pytest.approx(4 * paper[f"{kind}total"] / 2**30, rel=2e-4)


def test_memory_is_in_the_units_of_the_paper(flava):
    text = render(flava, "flava")
    assert float(_cells(text, "mean")[6]) == pytest.approx(
        4 * flava["mean"]["total"] / 2**30, abs=6e-5)
    assert " MB" not in text


def test_other_shapes_have_no_row_of_the_paper():
    small = load_config("flava", ["foundation.weights=random",
                                  "foundation.architecture={multimodal_config: {}}"])
    assert summarize(small)["paper"] is None
    summary = summarize(load_config("flava-deep"))
    assert summary["paper"] is None
    assert "paper" not in render(summary, "flava-deep")
