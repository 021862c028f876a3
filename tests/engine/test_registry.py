import sys

import pytest

from tapfl.config import Config
from tapfl.engine.record import read_record
from tapfl.engine.registry import plan
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.federated.method import FedAvg
from tapfl.personal.tap import Tap
from tapfl.report.gather import gather
from tests.engine.test_resume import Stop
from tests.experiment import tiny_experiment

OWN = """
from tapfl.federated.method import FedAvg
from tapfl.personal.posttrain import PostTrain

class Mine(FedAvg):
    def train(self, client, round_):
        losses = super().train(client, round_)
        return losses

class Thrice(PostTrain):
    times = 3

class Other:
    pass
"""


def config(methods, **sections):
    return Config.model_validate({"methods": methods, **sections})


def test_one_federated_run_feeds_all_its_personalizers():
    plans = plan(config(["local", "fedavg", "fedavg+post", "tap", "tap-nokd", "disentafl+tap"]))
    assert [(p.name, p.plain, [s.name for s, _ in p.personalizers]) for p in plans] == [
        ("local", True, []),
        ("fedavg", True, ["fedavg+post", "tap", "tap-nokd"]),
        ("disentafl", False, ["disentafl+tap"]),
    ]
    assert plans[1].method is FedAvg
    assert plans[1].personalizers[1][1] is Tap


def test_a_users_own_classes(tmp_path):
    (tmp_path / "ownmethods.py").write_text(OWN)
    names = ["ownmethods:Mine", "ownmethods:Mine+ownmethods:Thrice", "fedavg+ownmethods:Thrice"]
    rows = run(tiny_experiment(tmp_path, methods=names, train={"rounds": 1}), tmp_path / "out",
               modules=tmp_path)
    assert {r["method"] for r in rows} == {*names, "constant"}


def test_own_code_that_changes_while_a_run_is_interrupted(tmp_path):
    """A mistake may be corrected on the way; the record then says that the run has two versions."""
    (tmp_path / "changing.py").write_text(OWN)
    mine = tiny_experiment(tmp_path, methods=["fedavg+changing:Thrice", "fedavg"],
                           train={"rounds": 2, "local_steps": 1})
    out, calm = tmp_path / "out", Stop(at_client=1)
    with pytest.raises(KeyboardInterrupt):
        run(mine, out, modules=tmp_path, notify=Stop(at_round=1))
    before = read_record(out)
    assert list(before.code) == ["tapfl", "changing"]
    with pytest.raises(KeyboardInterrupt):
        run(mine, out, modules=tmp_path, notify=calm, resume=True)
    assert not read_record(out).mixed
    assert not any("has changed" in line for line in calm.said)
    (tmp_path / "changing.py").write_text(OWN.replace("times = 3", "times = 4"))
    sys.modules.pop("changing")  # as in a new process
    last = Stop()
    run(mine, out, modules=tmp_path, notify=last, resume=True)
    now = read_record(out)
    assert now.code["changing"] != before.code["changing"]
    assert now.mixed == ["changing"]
    assert any("the code of changing has changed since" in line for line in last.said)
    assert any("the code of changing changed while the run was interrupted" in warning
               for warning in gather([out]).warnings)


@pytest.mark.parametrize(("names", "message"), [
    (["fedavgg"], "unknown federated method 'fedavgg'; did you mean 'fedavg'"),
    (["fedavg+"], r"expected a method before and behind the plus, as in fedavg\+post"),
    (["fedavg+pst"], "unknown personalizer 'pst'; did you mean 'post'"),
    (["fedavg+tap", "tap"], r"'tap' is there twice, as '(fedavg\+tap|mine)' as well"),
    (["nowhere:Thing"], "cannot import nowhere"),
    (["../evil:Thing"], "is not the name of a module"),
    (["mymethods2:Nope"], "expected a class Nope"),
    (["mymethods2:Other"], "derived from tapfl.federated.method.FederatedMethod$"),
    (["mymethods2:Thrice"], r"FederatedMethod; .* behind a federated method: "
                            r"fedavg\+mymethods2:Thrice"),
    (["broken:Thing"], r"cannot import broken .*ZeroDivisionError"),
])
def test_bad_methods(tmp_path, names, message):
    (tmp_path / "mymethods2.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(TapflError, match="^methods: .*" + message):
        plan(config(names), tmp_path)
    spelling = "twice" in message or "plus" in message  # of a name, wherever it stands
    with pytest.raises(TapflError, match=message if spelling else
                       rf"^variants\.mine\.of: .*{message}"):  # also after a try that failed
        plan(config(["mine", *names[1:]], variants={"mine": {"of": names[0]}}), tmp_path)
