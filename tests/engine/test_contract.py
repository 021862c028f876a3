"""Methods of one's own that break their contract: one line that names the class and the fault."""

import pytest

from tapfl.cli import main
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tests.experiment import FEDERATION, read_events, rows_of, tiny_experiment

HEAD = """
import torch
from tapfl.blocks import BlockState
from tapfl.config import Section
from tapfl.events import Note
from tapfl.federated.method import FedAvg
from tapfl.personal.personalizer import Personalizer

"""


def attempt(folder, name, body, methods=None, **sections):
    (folder / f"{name}.py").write_text(HEAD + body)
    config = tiny_experiment(folder, methods=methods or [f"{name}:Mine"], train={"rounds": 1},
                             **sections)
    return run(config, folder / "out", modules=folder)


@pytest.mark.parametrize(("name", "body", "fault"), [
    ("half", "    def exchanged(self, client):\n        return [b for b in self.owned(client) "
             "if not b.startswith('decoder/')]",
     "block 'decoder/agnews' is owned, but neither exchanged nor private"),
    ("both", "    shares_final_model = False\n    def private(self, client):\n"
             "        return self.owned(client)", "is exchanged and private"),
    ("silent", "    def private(self, client):\n        return ()",
     "overrides private and does not say whether all clients of a task end with the same model"),
    ("adapts", "    def adapt(self, client):\n        pass", "overrides adapt and does not say"),
    ("liar", "    shares_final_model = True\n    def exchanged(self, client):\n        return "
             "self.owned(client)[1:]\n    def private(self, client):\n        return "
             "self.owned(client)[:1]", "has private blocks, so its final model is its own"),
    ("unknown", "    def exchanged(self, client):\n        return (*self.owned(client), 'x/y')",
     "the network has no block 'x/y'"),
    ("none", "    def exchanged(self, client):\n        return None",
     "exchanged: expected a tuple or list of blocks' names, got None"),
    ("raises", "    def train(self, client, round_):\n        return 1 / 0",
     r"raises:Mine.train: ZeroDivisionError: division by zero \(raises.py, line 11\)"),
    ("nothing", "    def train(self, client, round_):\n        super().train(client, round_)",
     "nothing:Mine.train: expected the mean loss of every task seen, by task, got NoneType"),
    ("foreign", "    def train(self, client, round_):\n        return {'vqaa': 1.0}",
     "a loss of 'vqaa', which is no task of client"),
    ("words", "    def train(self, client, round_):\n        return {client.tasks[0]: 'low'}",
     "expected a number"),
    ("double", "    def train(self, client, round_):\n"
               "        losses = super().train(client, round_)\n"
               "        self.network.double()\n        return losses",
     "double:Mine.train: block '.*' is torch.float64"),
    ("broken", "    def __init__(self, context):\n        raise RuntimeError('no luck')",
     "broken:Mine.__init__: RuntimeError: no luck"),
    ("more", "    def exchanged(self, client):\n        return sorted(self.initial)",
     "is exchanged, but not owned"),
    ("unordered", "    def exchanged(self, client):\n        return set(self.owned(client))",
     "expected a tuple or list of blocks' names"),
    ("never", "    shares_final_model = True\n    def adapt(self, client):\n        pass",
     "adapts the final model to each client"),
    ("predicts", "    shares_final_model = False\n    def predicting(self):\n"
                 "        raise RuntimeError('no idea')",
     "predicts:Mine.predicting: RuntimeError: no idea"),
    ("badset", "    class Settings:\n        mu = 1",
     "badset:Mine: Settings: expected a class derived from tapfl.config.Section"),
])
def test_federated_methods(tmp_path, name, body, fault):
    with pytest.raises(TapflError, match=fault) as caught:
        attempt(tmp_path, name, f"class Mine(FedAvg):\n{body}\n")
    assert "\n" not in str(caught.value)
    if name != "predicts":  # the others fail before the first round is over
        assert not (tmp_path / "out").exists()  # nothing in the way of the next try


@pytest.mark.parametrize(("name", "body", "fault"), [
    ("pnone", "    def after_federation(self, client, final):\n        pass",
     r"pnone:Mine.after_federation: expected blocks \(a BlockState\), got NoneType"),
    ("praise", "    def after_training(self, *_):\n        raise KeyError('x')\n"
               "    def after_federation(self, client, final):\n        return final",
     "praise:Mine.after_training: KeyError"),
    ("pold", "    def after_training(self, client, round_, trained, losses):\n        pass",
     "pold:Mine.after_training: TypeError"),
    ("phalf", "    def after_federation(self, client, final):\n        return BlockState("
              "{n: v.half() for n, v in final.items()}, final.shapes)",
     "phalf:Mine.after_federation: block '.*' is torch.float16"),
    ("ppart", "    def after_federation(self, client, final):\n        return final.subset("
              "sorted(final)[:1])", "block '.*' is missing; expected all blocks"),
    ("pnan", "    def after_training(self, client, round_, *_):\n        self.report(Note("
             "self.name, round_, client.id, {'x': float('nan')}))",
     "pnan:Mine.after_training: ValueError"),
    ("pword", "    def after_training(self, *_):\n        self.report('hello')",
     "report: expected an event such as tapfl.events.Note, got str"),
    ("pabstract", "    pass", "pabstract:Mine.after_federation: NotImplementedError"),
])
def test_personalizers(tmp_path, name, body, fault):
    with pytest.raises(TapflError, match=fault):
        attempt(tmp_path, name, f"class Mine(Personalizer):\n{body}\n",
                [f"fedavg+{name}:Mine"])


def test_a_class_of_ones_own_cannot_change_w(tmp_path):
    """It gets copies: whoever scribbles on them spoils nobody's model."""
    body = """
class Mine(Personalizer):
    def after_training(self, client, round_, received, trained, losses):
        assert set(received) == set(trained)
        for state in (received, trained):
            for value in state.values():
                value.fill_(1e9)
        self.save(client, round_, trained, {"round": round_})
        self.report(Note(self.name, round_, client.id, {"seen": sorted(losses)}))

    def after_federation(self, client, final):
        kept = self.load(client, before=self.context.config.train.rounds)
        assert kept is None or kept[1] == {"round": 0}
        for value in final.values():
            value.fill_(1e9)
        model = self.post_train(client, final, 1)
        for value in model.values():
            value.zero_()
        return model
"""
    alone = run(tiny_experiment(tmp_path, methods=["fedavg", "fedavg+post"], train={"rounds": 1},
                                post={"steps": 1}), tmp_path / "alone")
    rows = attempt(tmp_path, "scribbles", body, ["fedavg", "fedavg+scribbles:Mine", "fedavg+post"],
                   post={"steps": 1})
    assert [r for r in rows if "scribbles" not in r["method"]] == alone
    assert {e["event"] for e in read_events(tmp_path / "out")} == {"round", "note"}


SETTINGS = """
class Mine(FedAvg):
    class Settings(Section):
        mu: float = 0.25
        word: str = "a"

    def train(self, client, round_):
        losses = super().train(client, round_)
        return {task: self.settings.mu for task in losses}
"""


def test_settings_of_ones_own(tmp_path):
    rows = attempt(tmp_path, "sett", SETTINGS, ["sett:Mine", "strong"], own={"Mine": {"mu": 0.5}},
                   variants={"strong": {"of": "sett:Mine", "own": {"Mine": {"mu": 2.0}}}})
    assert {r["method"] for r in rows} == {"sett:Mine", "strong", "constant"}
    losses = {e["method"]: set(e["losses"].values())
              for e in read_events(tmp_path / "out", "round")}
    assert losses == {"sett:Mine": {0.5}, "strong": {2.0}}


@pytest.mark.parametrize(("settings", "message"), [
    (["own.Mine.mu=high"], "own.Mine: mu: "),
    (["own.Mine.nu=1"], "own.Mine: unknown key 'nu'"),
    (["own.Yours.mu=1"], "own.Yours: no method of this run is a class of that name"),
])
def test_bad_settings_on_the_command_line(tmp_path, capsys, settings, message):
    (tmp_path / "setc.py").write_text(HEAD + SETTINGS)
    (tmp_path / "federation.yaml").write_text(FEDERATION)
    (tmp_path / "c.yaml").write_text('methods: ["setc:Mine"]\nfederation: {file: federation.yaml}')
    words = [w for s in settings for w in ("--set", s)]
    assert main(["validate", str(tmp_path / "c.yaml"), "--config-only", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_losses_that_are_not_finite_are_reported(tmp_path):
    body = """
class Mine(FedAvg):
    def train(self, client, round_):
        losses = super().train(client, round_)
        return dict.fromkeys(losses, float("nan"))
"""
    attempt(tmp_path, "nanloss", body)
    (event,) = read_events(tmp_path / "out", "round")
    assert event["losses"] == {}
    assert len(read_events(tmp_path / "out", "diverged")) == 2


def test_a_model_that_is_not_finite_is_reported_and_w_takes_its_place(tmp_path):
    body = """
class Mine(Personalizer):
    def after_federation(self, client, final):
        for value in final.values():
            value.fill_(float("inf"))
        return final
"""
    rows = attempt(tmp_path, "endless", body, ["fedavg", "fedavg+endless:Mine"])
    by = {m: [r["value"] for r in rows if r["method"] == m] for m in {r["method"] for r in rows}}
    assert by["fedavg"] == by["fedavg+endless:Mine"]
    assert len(read_events(tmp_path / "out", "diverged")) == 4


def test_the_memo_never_mixes_up_classes_variants_or_models(tmp_path):
    """What a user's class changes in place, or computes its own way, stays its own."""
    body = """
from tapfl.personal.tap import Tap

class Mine(Tap):
    class Settings(Section):
        alpha: float = 0.0

    def after_federation(self, client, final):
        once = self.post_train(client, final, 2)
        final.replace(once, list(once))
        twice = self.post_train(client, final, 2)
        assert not once.equals(twice)
        model = super().after_federation(client, final)
        for name in model:
            model[name].lerp_(final[name], self.settings.alpha)
        return model
"""
    variants = {f"s{i}": {"of": "fedavg+memos:Mine", "own": {"Mine": {"alpha": a}},
                          "post": {"lr": r}}
                for i, (a, r) in enumerate(((0.3, 1e-3), (0.6, 1e-3), (0.3, 5e-2)))}
    alone, two = {}, {"federation": {"clients": ["shapes", "looks"]}}
    for name, variant in variants.items():
        rows = attempt(tmp_path, "memos", body, [name], variants={name: variant}, **two)
        alone[name] = rows_of(rows, name)
        (tmp_path / "out").rename(tmp_path / name)
    rows = attempt(tmp_path, "memos", body, ["fedavg+post", *variants, "tap"], variants=variants,
                   **two)
    for name, expected in alone.items():
        assert rows_of(rows, name) == expected
        for path in (tmp_path / name / "models" / name).iterdir():
            assert path.read_bytes() == (tmp_path / "out" / "models" / name
                                         / path.name).read_bytes()
    assert alone["s0"] != alone["s2"]
