"""Rules of replacement, each against a computation by hand; test_moves.py has whole runs."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.config import Config
from tapfl.engine.run import run
from tapfl.errors import TapflError
from tapfl.methods import method_specs
from tapfl.personal.criteria import Case, Rule, _from_gap, _from_losses, _statistic, moved
from tests.experiment import FederatedRun, read_events, tiny_experiment


def _case(run, name="shapes", distance=0.05):
    """A client whose W lies a random step away from its X."""
    client = run.federation.find(name)
    personal = run.method.initial.subset(run.method.owned(client)).clone()
    rng = torch.Generator().manual_seed(3)
    federated = BlockState({k: v + distance * torch.randn(v.shape, generator=rng)
                            for k, v in personal.items()}, personal.shapes)
    history = dict.fromkeys(client.tasks, 1.0)
    return Case(client, 1, federated, personal, history, dict(history))


def _rule(run, **settings):
    tap = run.context.config.tap.model_copy(update=settings)
    return Rule(tap, run.personalizers[0].context, run.method)


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    return FederatedRun(tiny_experiment(folder, federation={"holdout": 0.25},
                                        lora={"dropout": 0.0}), folder)


def _held_out_loss(run, state, data, rows):
    state.load_into(run.method.network.blocks)
    network, batch = run.method.network.eval(), data.batch(rows)
    with torch.no_grad():
        return network.loss(data.task.name, network(data.task.name, batch), batch).item()


def test_margins_of_losses(held):
    case = _case(held)
    rule = _rule(held)
    case.federated_history["agnews"] = 0.9
    assert rule.shares(case, case.client.tasks) == {"agnews": 1.0}
    case.federated_history["agnews"] = 0.9951  # the margin is 0.005
    assert rule.shares(case, case.client.tasks) == {}
    case.personal_history["agnews"] = math.inf
    assert rule.shares(case, case.client.tasks) == {"agnews": 1.0}
    assert _rule(held, criterion="always", share=0.5).shares(case, case.client.tasks) == {
        "agnews": 1.0, "tiny-imagenet": 0.5}
    assert _rule(held, criterion="always").margin("agnews") == 0.0


@pytest.mark.parametrize(("criterion", "margin"), [
    ("training", 0.005), ("validation", 0.005), ("paired", 0.0), ("gradient", 0.0)])
def test_losses_alone_have_a_margin(held, criterion, margin):
    assert _rule(held, criterion=criterion).margin("agnews") == margin


def test_an_equal_loss_moves_nothing(held):
    case = _case(held)
    margins = held.context.config.tap.margins.model_copy(update={"text_classification": 0.0})
    rule = _rule(held, margins=margins)
    assert rule.shares(case, ["agnews"]) == {}
    case.federated_history["agnews"] = 1 - 1e-12
    assert rule.shares(case, ["agnews"]) == {"agnews": 1.0}


def test_sample_losses_have_the_tasks_loss_as_mean(held):
    for name in ("shapes", "looks", "words"):
        case = _case(held, name)
        found = _rule(held)._on_samples(case.client, case.personal, case.client.tasks)
        for data, rows in case.client.data.holdout:
            each = [_held_out_loss(held, case.personal, data, rows[i:i + 1])
                    for i in range(len(rows))]
            assert found[data.task.name] == pytest.approx(each, abs=1e-5)


def test_paired_by_hand(held):
    case = _case(held)
    rule = _rule(held, criterion="paired", confidence=0.7)
    expected = []
    for data, rows in case.client.data.holdout:
        x, w = (np.array([_held_out_loss(held, state, data, rows[i:i + 1])
                          for i in range(len(rows))]) for state in (case.personal, case.federated))
        t = (x - w).mean() / ((x - w).std(ddof=1) / math.sqrt(len(x)))
        if t > 0.5244:  # the normal quantile of 0.7
            expected.append(data.task.name)
    assert sorted(rule.shares(case, case.client.tasks)) == sorted(expected)
    swapped = Case(case.client, 1, case.personal, case.federated, case.federated_history,
                   case.personal_history)
    assert not set(rule.shares(swapped, case.client.tasks)) & set(expected)
    same = Case(case.client, 1, case.personal, case.personal, {}, case.personal_history)
    assert rule.shares(same, case.client.tasks) == {}
    assert _statistic(np.full(3, 0.5)) == math.inf
    assert _statistic(np.full(3, -0.5)) == -math.inf
    assert _statistic(np.array([1.0])) == 0.0
    assert _statistic(np.array([1.0, math.nan, 2.0])) == 0.0


@pytest.mark.parametrize(("confidence", "moves"), [(0.7, True), (0.8, False)])
def test_the_confidence_is_one_sided(held, monkeypatch, confidence, moves):
    """The normal quantiles of 0.7 and 0.8 are 0.52 and 0.84; t is between them."""
    case = _case(held)
    x = 0.7 / math.sqrt(2) + np.array([-1.0, 1.0]) / math.sqrt(2)  # mean 0.7 / sqrt(2), spread 1
    monkeypatch.setattr(Rule, "_on_samples", lambda self, client, state, tasks: {
        "agnews": x if state is case.personal else np.zeros(2)})
    rule = _rule(held, criterion="paired", confidence=confidence)
    assert _statistic(x) == pytest.approx(0.7)
    assert (rule.shares(case, ["agnews"]) == {"agnews": 1.0}) == moves


def test_what_is_remembered_belongs_to_both_models_and_all_tasks(held):
    case = _case(held)
    turned = dataclasses.replace(case, federated=BlockState(
        {k: 2 * v - case.federated[k] for k, v in case.personal.items()}, case.personal.shapes))
    rule = _rule(held, criterion="gradient")
    ahead, back = (rule._agreement(each, ["agnews"]) for each in (case, turned))
    assert any(ahead.values())
    assert list(back.values()) == pytest.approx([-each for each in ahead.values()], abs=1e-6)
    for tasks in (["agnews"], ["agnews", "tiny-imagenet"]):
        assert set(rule.held_out(case.client, case.personal, tasks)) == set(tasks)


def test_gradient_agreement_is_the_slope_towards_w(held):
    """<W - X, -grad> is minus the derivative of the loss along the way, by finite differences."""
    run, case = held, _case(held)
    run.method.network.double()
    case = Case(case.client, 1, *(BlockState({k: v.double() for k, v in s.items()}, s.shapes)
                                  for s in (case.federated, case.personal)),
                case.federated_history, case.personal_history)
    rule = _rule(run, criterion="gradient")
    from tapfl.federated.context import randomness

    def loss(state, task):
        state.load_into(run.method.network.blocks)
        network, total = run.method.network.eval(), 0.0
        with torch.no_grad(), randomness(run.context, case.client, 1, "agreement") as rng:
            for parts in case.client.data.minibatches(4, 5, rng):
                for part in parts:
                    if part.task == task:
                        outputs = network(task, part.batch)
                        total += part.weight * network.loss(task, outputs, part.batch).item()
        return total

    step = 1e-5
    for task in case.client.tasks:
        ahead = moved(case.personal, case.federated, dict.fromkeys(case.personal, step))
        back = moved(case.personal, BlockState(
            {k: 2 * v - case.federated[k] for k, v in case.personal.items()},
            case.personal.shapes), dict.fromkeys(case.personal, step))
        slope = (loss(ahead, task) - loss(back, task)) / (2 * step)
        found = sum(rule._agreement(case, [task]).values())
        assert found == pytest.approx(-slope, rel=1e-3)
        assert (task in rule.shares(case, [task])) == (slope < 0)
    by_block = _rule(run, criterion="gradient", unit="block", share=0.5).by_block(
        case, dict.fromkeys(case.client.tasks, 0.5))
    agrees = rule._agreement(case, case.client.tasks)
    assert by_block == {name: 0.5 if agrees[name] > 0 else 0.0 for name in case.personal}
    assert 0 < sum(by_block.values()) < 0.5 * len(by_block)
    whole = _rule(run, criterion="gradient", unit="block")
    assert whole.by_block(case, dict.fromkeys(case.client.tasks, 1.0)) == {
        name: 1.0 if agrees[name] > 0 else 0.0 for name in case.personal}
    case.personal_history["agnews"] = math.inf  # a task without a history moves whole
    forced = whole.by_block(case, dict.fromkeys(case.client.tasks, 1.0))
    assert all(forced[name] == 1.0 for name in run.method.blocks_of_task("agnews"))
    case.personal_history["agnews"] = 1.0
    assert all(p.grad is None for p in run.method.network.blocks.parameters())
    run.method.network.float()


def test_shares_from_losses():
    assert _from_losses(1.0, 1.0, 1) == 0.5
    assert _from_losses(1.0, 3.0, 1) == 0.75
    assert _from_losses(0.0, 0.0, 1) == 0.5
    assert _from_losses(math.inf, 1.0, 1) == 0.0
    # x^k / (x^k + w^k)
    assert _from_losses(3.0, 1.0, 4) == pytest.approx(1 / (81 + 1))
    assert _from_losses(2.0, 2.0, 100) == 0.5
    # Neither of the powers fits into a float.
    assert _from_losses(1e200, 1e190, 100) == 0.0
    assert _from_losses(1e-200, 1e-190, 100) == 1.0


def test_shares_from_the_gap():
    assert _from_gap(2.0, 2.0, 8) == 0.5
    # 1 / (1 + e^(k (w - x)))
    assert _from_gap(1.5, 1.0, 8) == pytest.approx(1 / (1 + math.exp(4)))
    assert _from_gap(1.0, 1.5, 8) == pytest.approx(1 / (1 + math.exp(-4)))
    assert _from_gap(math.inf, 1.0, 8) == _from_gap(1e300, 0.0, 100) == 0.0
    assert _from_gap(0.0, 1e300, 100) == 1.0
    # Small losses differ by little, though one is half of the other.
    assert _from_gap(0.16, 0.08, 8) > 0.3 > 0.01 > _from_losses(0.16, 0.08, 8)


def test_a_sharper_share_takes_less_of_a_worse_w(held):
    case = _case(held)
    task = case.client.tasks[0]
    worse = dataclasses.replace(case, federated_history={**case.federated_history, task: 1.2},
                                personal_history={**case.personal_history, task: 1.0})
    for share, odds in (("losses", lambda k: 1.2 ** k), ("gap", lambda k: math.exp(0.2 * k))):
        rules = [_rule(held, criterion="always", share=share, sharpness=k) for k in (1, 4, 16)]
        found = [rule.shares(worse, [task])[task] for rule in rules]
        assert found == pytest.approx([1 / (1 + odds(k)) for k in (1, 4, 16)])


def test_share_chosen_on_held_out_data(held):
    case = _case(held)
    chosen = _rule(held, criterion="always", share="holdout").shares(case, case.client.tasks)
    for data, rows in case.client.data.holdout:
        losses = {}
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            state = BlockState({k: v + share * (case.federated[k] - v)
                                for k, v in case.personal.items()}, case.personal.shapes)
            losses[share] = _held_out_loss(held, state, data, rows)
        best = min(losses, key=losses.get)
        assert chosen.get(data.task.name, 0.0) == best


def test_a_loss_that_is_not_finite_is_never_chosen(held, monkeypatch):
    case, losses = _case(held), iter([math.nan, math.inf, 2.0, 1.0, math.nan])
    monkeypatch.setattr(Rule, "held_out",
                        lambda self, client, state, tasks: {"agnews": next(losses)})
    chosen = _rule(held).chosen(case.client, case.personal, case.federated, ["agnews"])
    assert chosen == {"agnews": 0.75}


def test_a_block_of_two_tasks_moves_once(held):
    case = _case(held)
    shares = {"agnews": 0.5, "tiny-imagenet": 0.25}
    both = set(held.method.blocks_of_task("agnews")) & set(
        held.method.blocks_of_task("tiny-imagenet"))
    assert both
    by_task = _rule(held).by_block(case, shares)
    by_block = _rule(held, unit="block").by_block(case, shares)
    for name in case.personal:
        own = [s for t, s in shares.items() if name in held.method.blocks_of_task(t)]
        assert by_task[name] == max(own)
        assert by_block[name] == pytest.approx(sum(own) / len(own))
    end = moved(case.personal, case.federated, by_task)
    for name, value in end.items():
        expected = case.personal[name] + by_task[name] * (case.federated[name]
                                                          - case.personal[name])
        torch.testing.assert_close(value, expected)


def test_a_whole_move_copies_and_none_keeps_bit_for_bit(held):
    case = _case(held)
    shares = dict.fromkeys(case.personal, 0.0) | {"decoder/agnews": 1.0}
    end = moved(case.personal, case.federated, shares)
    for name in end:
        source = case.federated if name == "decoder/agnews" else case.personal
        assert torch.equal(end[name], source[name])
        assert end[name].data_ptr() != source[name].data_ptr()


RULES = {
    "paired": {"criterion": "paired"}, "gradient": {"criterion": "gradient"},
    "blocks": {"criterion": "gradient", "unit": "block", "share": 0.5},
    "losses": {"criterion": "always", "share": "losses", "sharpness": 4, "final_share": "losses"},
    "gap": {"share": "gap", "sharpness": 8, "final_share": "gap"},
    "chosen": {"criterion": "always", "share": "holdout", "final_share": "holdout",
               "end": "plain2"},
    "mix": {"criterion": "validation", "share": 0.25, "unit": "block", "end": "mix"}}


def test_every_rule_runs_on_one_federated_run(tmp_path):
    config = tiny_experiment(
        tmp_path, methods=["fedavg", "fedavg+post2", "tap-soft", *RULES],
        variants={name: {"of": "tap", "tap": rule} for name, rule in RULES.items()},
        federation={"holdout": 0.25, "clients": ["shapes", "looks"]},
        train={"rounds": 2, "local_steps": 1}, post={"steps": 1, "use_holdout": True})
    rows = run(config, tmp_path / "out")
    assert {r["method"] for r in rows if r["method"] != "constant"} == set(config.methods)
    assert all(math.isfinite(r["value"]) for r in rows)
    rounds = read_events(tmp_path / "out", "round")
    assert [(e["method"], e["cohort"]) for e in rounds] == 2 * [("fedavg", ["shapes", "looks"])]


def test_held_out_samples_are_given_back(tmp_path):
    config = tiny_experiment(tmp_path, methods=["fedavg+post"], federation={"holdout": 0.25})
    some = FederatedRun(config, tmp_path)
    client = some.federation.find("shapes")
    whole = client.with_holdout()
    assert whole.data.samples == client.data.samples + sum(len(r) for _, r in client.data.holdout)
    for (_, all_), (_, kept), (_, held) in zip(whole.data.holdings, client.data.holdings,
                                               client.data.holdout, strict=True):
        assert sorted(all_) == sorted([*kept, *held])
    (post,) = some.personalizers
    assert post.after(client) is client
    final = some.server.blocks.subset(some.method.owned(client))
    without = post.after_federation(client, final)
    post.context.config = config.model_copy(
        update={"post": config.post.model_copy(update={"use_holdout": True})})
    assert not without.equals(post.after_federation(client, final))  # and not from the memo


@pytest.mark.parametrize(("settings", "message"), [
    ({"criterion": "paired"}, "tap.criterion: paired needs held-out data"),
    ({"share": "holdout"}, "tap.share: holdout needs held-out data"),
    ({"final_share": "holdout"}, "tap.final_share: holdout needs"),
    ({"end": "mix"}, "tap.end: mix needs"), ({"share": 0.0}, "greater than 0"),
    ({"share": 1.5}, "less than or equal to 1"), ({"final_share": -0.1}, "greater than or equal"),
    ({"sharpness": 0}, "greater than 0"), ({"final_share": "loss"}, "final_share"),
    ({"confidence": 1.0}, "less than 1"), ({"criterion": "never"}, "criterion"),
    ({"unit": "client"}, "unit"), ({"end": "2p"}, "end")])
def test_bad_rules(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.model_validate({"tap": settings})


def test_a_share_chosen_on_held_out_data_has_a_name():
    config = Config.model_validate({
        "methods": ["tap-chosen", "mine"], "federation": {"holdout": 0.1},
        "variants": {"mine": {"of": "tap-soft", "post": {"steps": 3}, "tap": {
            "share": "holdout", "final_share": "holdout"}}}})
    chosen, mine = method_specs(config)
    assert chosen.config.tap == mine.config.tap
    with pytest.raises(TapflError, match=r"tap-chosen: .* needs held-out data"):
        method_specs(Config.model_validate({"methods": ["tap-chosen"]}))


def test_a_named_rule_can_be_varied():
    config = Config.model_validate({
        "methods": ["tap", "tap-soft", "quarter", "disentafl+tap-soft"],
        "variants": {"quarter": {"of": "tap-soft", "tap": {"share": 0.25}}}})
    tap, soft, quarter, other = method_specs(config)
    assert (tap.config.tap.share, tap.config.tap.end) == (1.0, "distill")
    assert (soft.config.tap.share, soft.config.tap.final_share) == (0.5, 0.5)
    assert (quarter.config.tap.share, quarter.config.tap.end) == (0.25, "plain2")
    assert (other.federated, other.personalizer, other.config.tap.share) == (
        "disentafl", "tap", 0.5)
    with pytest.raises(TapflError, match="'again' is there twice"):
        method_specs(Config.model_validate({
            "methods": ["tap-soft", "again"], "variants": {"again": {"of": "tap-soft"}}}))
