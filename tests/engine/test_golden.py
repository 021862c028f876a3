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


# The mean of all losses in each of three rounds, for every federated method and both backbones.
METHODS = {
    ("local", "routed"): [3.817350, 3.643730, 3.494741, 2.995413, 2.842983, 2.654506],
    ("fedavg", "routed"): [3.817350, 3.670991, 3.552776, 2.995413, 2.881268, 2.680186],
    ("perfedavg", "routed"): [3.750425, 3.715916, 3.500092, 2.991770, 2.851362, 2.591715],
    ("disentafl", "routed"): [3.817585, 3.670889, 3.555998, 2.995705, 2.881310, 2.681572],
    ("feddat", "routed"): [3.838816, 3.667158, 3.574299, 2.996209, 2.883358, 2.661158],
    ("fedprox", "routed"): [3.817350, 3.671761, 3.558102, 2.996073, 2.887157, 2.705622],
    ("fedper", "routed"): [3.817350, 3.643817, 3.496718, 2.995413, 2.841997, 2.655342],
    ("fedrep", "routed"): [3.737993, 3.589781, 3.466915, 3.020198, 2.895618, 2.784611],
    ("fedala", "routed"): [3.817350, 3.670918, 3.552520, 2.995413, 2.881261, 2.679880],
    ("local", "standard"): [3.822017, 3.648307, 3.474849, 2.994733, 2.813227, 2.638747],
    ("fedavg", "standard"): [3.822017, 3.676123, 3.533657, 2.994733, 2.852720, 2.667029],
    ("perfedavg", "standard"): [3.762142, 3.701988, 3.492852, 2.992624, 2.839177, 2.624512],
    ("disentafl", "standard"): [3.822117, 3.676084, 3.536402, 2.994765, 2.853399, 2.677023],
    ("feddat", "standard"): [3.818144, 3.673330, 3.591382, 2.995998, 2.859310, 2.678019],
    ("fedprox", "standard"): [3.822017, 3.676907, 3.539174, 2.995397, 2.855829, 2.691782],
    ("fedper", "standard"): [3.822017, 3.648686, 3.479433, 2.994733, 2.813455, 2.636732],
    ("fedrep", "standard"): [3.746142, 3.576551, 3.467690, 3.020830, 2.882369, 2.774298],
    ("fedala", "standard"): [3.822017, 3.676046, 3.533505, 2.994733, 2.852720, 2.666884],
}


@pytest.mark.parametrize("backbone", [
    "routed", pytest.param("standard", marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["local", "fedavg", "perfedavg", "disentafl", "feddat",
                                    "fedprox", "fedper", "fedrep", "fedala"])
def test_golden_losses_of_every_method(tmp_path, method, backbone):
    config = tiny_experiment(tmp_path, methods=[f"{method}+tap"], train={"rounds": 3, "cohort": 4},
                             backbone={"kind": backbone})
    run = FederatedRun(config, tmp_path / "run")
    for t in range(3):
        run.round(t)

    def means(event):
        return [sum(e["losses"].values()) / len(e["losses"])
                for e in read_events(tmp_path / "run", event)]

    personal = means("personal")
    found = [*means("round"), *(sum(personal[i:i + 4]) / 4 for i in range(0, 12, 4))]
    assert found == pytest.approx(METHODS[method, backbone], rel=1e-4)
