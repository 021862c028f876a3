"""Files with the score of every test sample."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tapfl.engine.build import build
from tapfl.engine.files import Label
from tapfl.engine.run import run
from tapfl.engine.scores import read_file, write_scores
from tapfl.errors import TapflError
from tapfl.evaluation.evaluate import Evaluator
from tests.engine.test_resume import same_files
from tests.experiment import tiny_experiment


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Skewed labels: every client has test rows of its own."""
    folder = tmp_path_factory.mktemp("scored")
    config = tiny_experiment(folder, methods=["fedavg", "tap"], train={"rounds": 2},
                             data={"train": 40, "test": 12},
                             federation={"file": str(folder / "federation.yaml"), "groups": 1,
                                         "dirichlet": 0.5})
    return config, folder / "out", run(config, folder / "out")


def test_results_are_the_means_of_the_scores(scored):
    _, out, rows = scored
    own = [row for row in rows if not row["metric"].startswith("general_")]
    seen = set()
    for row in own:
        path = out / "scores" / row["method"] / f"{row['client']}.safetensors"
        values = read_file(path)[row["task"], row["metric"]]
        assert values.dtype == np.float32
        assert len(values) == row["samples"]
        assert values.mean(dtype=np.float64) == pytest.approx(row["value"], rel=1e-6)
        seen.add((path, f"{row['task']}|{row['metric']}"))
    files = sorted((out / "scores").rglob("*.safetensors"))
    assert {(path, name) for path in files for name in load_file(path)} == seen
    assert {path.parent.name for path in files} == {"fedavg", "tap", "constant"}


def test_scores_stand_in_the_order_of_the_clients_test_rows(scored):
    """Each sample evaluated on its own, by the model that the run kept."""
    import tapfl

    config, out, _ = scored
    experiment = build(config, "cpu")
    evaluate = Evaluator(experiment.tokenizer, config.evaluation)
    model = tapfl.load(out, client="shapes", method="tap", device="cpu")
    data, rows = experiment.federation.find("shapes").tests["agnews"]
    assert len(rows) < len(data)
    alone = [evaluate(model.network, data.take(rows[i:i + 1]))["accuracy"][0]
             for i in range(len(rows))]
    found = read_file(out / "scores" / "tap" / "shapes.safetensors")["agnews", "accuracy"]
    assert found.tolist() == alone


def test_scores_that_are_gone_or_damaged_are_made_again(tmp_path, scored):
    import shutil

    config, expected, _ = scored
    out = tmp_path / "out"
    shutil.copytree(expected, out)
    (out / "scores" / "tap" / "news.safetensors").unlink()
    (out / "scores" / "constant" / "words.safetensors").write_bytes(b"")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | {"finished": False}))
    run(config, out, resume=True)
    same_files(out, expected, "scores")


def test_no_scores_unless_asked_for(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 1}, evaluation={"scores": False})
    run(config, tmp_path / "out")
    assert not (tmp_path / "out" / "scores").exists()


def test_damaged_files(tmp_path):
    path = tmp_path / "scores.safetensors"
    write_scores(path, Label("tap", "x", 3), {"a|mse": np.array([0.5, 2.0])})
    assert read_file(path)["a", "mse"].tolist() == [0.5, 2.0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    with pytest.raises(TapflError, match="checksum does not match"):
        read_file(path)
    path.write_bytes(b"{")
    with pytest.raises(TapflError, match="damaged"):
        read_file(path)
    with pytest.raises(TapflError, match="not readable"):
        read_file(tmp_path / "none.safetensors")
