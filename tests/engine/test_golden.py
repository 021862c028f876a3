"""The losses of a fixed experiment, so that no change of the numerics goes unnoticed."""

import pytest

from tests.experiment import FederatedRun, read_events, tiny_experiment

GOLDEN = [
    (["shapes", "news"], {"agnews": 1.375767, "tiny-imagenet": 2.086373}),
    (["shapes", "news"], {"agnews": 1.382679, "tiny-imagenet": 2.019096}),
    (["looks", "words"], {"fmnist": 2.609777, "vqa": 6.160567, "commongen": 6.287337}),
    (["looks", "words"], {"fmnist": 2.341282, "vqa": 5.93101, "commongen": 5.98773}),
    (["looks", "words"], {"fmnist": 1.664315, "vqa": 5.560819, "commongen": 5.770369}),
]
REPLACED = [
    (1, "shapes", "agnews"),
    (3, "looks", "fmnist"),
]


def test_golden_losses(tmp_path):
    config = tiny_experiment(tmp_path, methods=["tap"], train={"rounds": 5})
    run = FederatedRun(config, tmp_path)
    for t in range(5):
        run.round(t)
    found = [(e["cohort"], e["losses"]) for e in read_events(tmp_path, "round")]
    assert [cohort for cohort, _ in found] == [cohort for cohort, _ in GOLDEN]
    for (_, losses), (_, expected) in zip(found, GOLDEN, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)
    replaced = [(e["round"], e["client"], e["task"]) for e in read_events(tmp_path, "replacement")
                if not e["initial"]]
    assert replaced == REPLACED
