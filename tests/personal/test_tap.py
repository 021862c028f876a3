import math

import pytest
import torch

from tapfl.blocks import BlockState
from tapfl.engine.run import run
from tapfl.federated.distill import divergence
from tapfl.personal.criteria import Case, Rule
from tapfl.tasks import Batch
from tests.experiment import FederatedRun, read_events, rows_of, tiny_experiment


def _margins(value):
    kinds = ("image_classification", "image_generation", "text_classification", "text_generation")
    return {"margins": dict.fromkeys(kinds, value)}


@pytest.fixture(scope="module")
def w_alone(tmp_path_factory):
    """The federated model after five rounds with nobody watching."""
    folder = tmp_path_factory.mktemp("alone")
    alone = FederatedRun(tiny_experiment(folder, train={"rounds": 5}, methods=["fedavg"]), folder)
    for t in range(5):
        alone.round(t)
    return alone.server.blocks


@pytest.mark.parametrize(("margin", "always"), [(1e6, False), (-1e6, True)])
def test_extreme_margins(tmp_path, margin, always, w_alone):
    """Huge: only the first participation replaces. Very negative: every seen task, every time."""
    config = tiny_experiment(tmp_path, train={"rounds": 5}, tap=_margins(margin))
    watched = FederatedRun(config, tmp_path)
    for t in range(5):
        watched.round(t)
    events = read_events(tmp_path, "replacement")
    first = {}
    for event in events:
        assert event["initial"] == ((event["client"], event["task"]) not in first)
        first.setdefault((event["client"], event["task"]), event["round"])
        assert event["blocks"] == sorted(watched.method.blocks_of_task(event["task"]))
        assert event["margin"] == margin
        assert (event["personal_loss"] is None) == event["initial"]
    assert all(e["initial"] for e in events) != always
    trained = {(e["round"], e["client"]) for e in read_events(tmp_path, "personal")}
    assert trained == {(e["round"], c) for e in read_events(tmp_path, "round") for c in e["cohort"]}
    if always:
        seen = sum(len(r["losses"]) for r in read_events(tmp_path, "round"))
        assert len(events) >= seen
    # Nobody who watches changes W, not by a bit.
    for name in w_alone:
        assert torch.equal(w_alone[name], watched.server.blocks[name])


def test_first_participation_is_once_even_where_x_sees_less_than_w(tmp_path):
    """One sample a step: X often misses a task that W saw. It has still been replaced."""
    config = tiny_experiment(tmp_path, tap=_margins(1e6), train={
        "rounds": 8, "cohort": 4, "batch_size": 1, "local_steps": 1})
    watched = FederatedRun(config, tmp_path)
    for t in range(8):
        watched.round(t)
    replaced = [(e["client"], e["task"]) for e in read_events(tmp_path, "replacement")]
    assert len(replaced) == len(set(replaced))


def test_replacement_changes_exactly_the_tasks_blocks(tmp_path):
    """Trap 3: all of the task's blocks, experts and stage-2 stacks too, and no others."""
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    tap = run.personalizers[0]
    client = run.federation.find("shapes")
    before = run.method.initial.subset(run.method.owned(client)).clone()
    w = BlockState({k: v + 1 for k, v in before.items()}, before.shapes)
    losses = dict.fromkeys(client.tasks, 1.0)
    case = Case(client, 0, w, before, losses, losses)
    mine, taken = tap._replace(case, {"agnews": 1.0}, new=[])
    assert taken == {"agnews": 1.0}
    changed = {n for n in mine if not torch.equal(mine[n], before[n])}
    assert changed == set(run.method.blocks_of_task("agnews"))
    assert "mome/text_classification/expert/text" in changed
    assert "mote/text/expert/text_classification" in changed
    assert all(torch.equal(mine[n], w[n]) for n in changed)


def test_how_far_a_task_moved_is_the_mean_over_its_blocks(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    (tap,), client = run.personalizers, run.federation.find("shapes")
    w, losses = run.final(client), dict.fromkeys(client.tasks, 1.0)
    own = sorted(run.method.blocks_of_task("agnews"))
    by_block = dict.fromkeys(w, 0.0) | {own[0]: 1.0, own[1]: 0.5}
    monkeypatch.setattr(tap.rule, "by_block", lambda *_: by_block)
    _, taken = tap._replace(Case(client, 0, w, w, losses, losses), {"agnews": 1.0}, new=[])
    assert taken == {"agnews": pytest.approx(1.5 / len(own))}
    (event,) = run.worker.drain()
    assert event.blocks == own[:2]  # those that moved


def test_histories_after_a_partial_move_by_hand(tmp_path, monkeypatch):
    """X's training sees no task: what X knows of its losses is what it took from W."""
    run = FederatedRun(tiny_experiment(tmp_path, tap={"criterion": "always", "share": 0.25}),
                       tmp_path)
    (tap,), client = run.personalizers, run.federation.find("news")
    monkeypatch.setattr(tap, "_train", lambda client, round_, start: (start, {}))
    w = run.final(client)
    for round_, loss, expected in ((0, 2.0, 2.0), (1, 1.0, 0.75 * 2.0 + 0.25 * 1.0)):
        tap.after_training(client, round_, w, w, {"agnews": loss})
        _, federated, personal = tap._load(client, round_ + 1)
        assert (federated, personal) == ({"agnews": loss}, {"agnews": expected})


def test_a_training_of_x_that_diverged_forgets_the_tasks_it_saw(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    (tap,), client = run.personalizers, run.federation.find("shapes")
    w = run.final(client)
    monkeypatch.setattr(tap, "_train", lambda client, round_, start: (start, {"agnews": math.nan}))
    tap.after_training(client, 0, w, w, {"agnews": 1.0, "tiny-imagenet": 2.0})
    _, federated, personal = tap._load(client, 1)
    assert federated == {"agnews": 1.0, "tiny-imagenet": 2.0}
    assert personal == {"agnews": math.inf, "tiny-imagenet": 2.0}
    run.worker.drain()
    tap.after_training(client, 1, w, w, {"agnews": 1.0})
    event = run.worker.drain()[0]  # W is better whatever it is, but this is not the first time
    assert (event.task, event.personal_loss, event.initial) == ("agnews", None, False)


def test_post_train_is_taps_teacher_bit_for_bit(tmp_path, monkeypatch):
    config = tiny_experiment(tmp_path, methods=["fedavg+post", "tap"])
    both = FederatedRun(config, tmp_path)
    client = both.federation[0]
    final = both.server.blocks.subset(both.method.owned(client))
    post = both.personalizers[0].after_federation(client, final)
    both.worker.end_turn(client, -1, ())  # train the teacher afresh
    both.personalizers[1].after_federation(client, final)
    teacher = BlockState.extract(both.method.teacher.blocks, final)
    assert all(torch.equal(post[n], teacher[n]) for n in final)
    assert not both.method.teacher.training


def test_without_distillation_the_teacher_does_not_matter(tmp_path):
    config = tiny_experiment(tmp_path, methods=["tap", "tap-nokd"])
    both = FederatedRun(config, tmp_path)
    client = both.federation.find("words")
    final = both.server.blocks.subset(both.method.owned(client))
    taught, untaught = (p.after_federation(client, final) for p in both.personalizers)
    assert any(not torch.equal(taught[n], untaught[n]) for n in final)
    both.method.post_train = lambda *_: final  # another teacher
    both.worker.end_turn(client, -1, ())
    again = both.personalizers[1].after_federation(client, final)
    assert all(torch.equal(untaught[n], again[n]) for n in final)


@pytest.mark.parametrize("other", [
    {"tap": {"temperature": 5.0}}, {"tap": {"distill_weights": {"text_classification": 9.0}}},
    {"post": {"use_holdout": True}}], ids=str)
def test_variants_that_teach_otherwise_do_not_share_stage_2(tmp_path, other):
    config = tiny_experiment(tmp_path, methods=["tap", "other"], federation={"holdout": 0.25},
                             variants={"other": {"of": "tap", **other}})
    both = FederatedRun(config, tmp_path)
    client = both.federation.find("news")
    one, two = (p.after_federation(client, both.final(client)) for p in both.personalizers)
    assert not one.equals(two)


def test_a_mix_is_chosen_on_data_that_nobody_has_trained_on(tmp_path, monkeypatch):
    config = tiny_experiment(tmp_path, tap={"end": "mix"}, federation={"holdout": 0.25},
                             post={"use_holdout": True})
    run = FederatedRun(config, tmp_path)
    (tap,), client, trained = run.personalizers, run.federation.find("news"), []

    def watch(name):
        original = getattr(tap, name)
        monkeypatch.setattr(tap, name, lambda client, *a, **k: trained.append(
            (name, client.data.samples)) or original(client, *a, **k))

    watch("post_train")
    watch("_trained")
    tap.after_federation(client, run.final(client))
    held = len(client.data.holdout[0][1])
    assert trained == [("post_train", client.data.samples),
                       ("_trained", client.data.samples + held)]


def test_a_last_training_that_diverged_is_dropped(tmp_path, monkeypatch):
    run = FederatedRun(tiny_experiment(tmp_path, tap={"end": "plain"}), tmp_path)
    (tap,), client = run.personalizers, run.federation.find("news")
    final = run.final(client)
    broken = BlockState({n: v * math.nan for n, v in final.items()}, final.shapes)
    monkeypatch.setattr(tap, "_trained", lambda *_, **__: (broken, {"agnews": math.nan}))
    assert tap.after_federation(client, final).equals(final)
    assert [type(e).__name__ for e in run.worker.drain()][-1] == "Diverged"


def test_the_final_w_has_no_loss_yet(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path, tap={"final_share": 0.5}), tmp_path)
    (tap,), client = run.personalizers, run.federation.find("news")
    w = run.final(client)
    tap.after_training(client, 0, w, w, {"agnews": 1.0})
    run.worker.drain()
    tap.after_federation(client, w)
    (event,) = run.worker.drain()
    assert (event.round, event.share, event.federated_loss) == (4, 0.5, None)
    assert event.personal_loss is not None


def test_a_client_that_never_took_part_starts_from_w(tmp_path):
    config = tiny_experiment(tmp_path, train={"rounds": 1, "cohort": 1}, post={"steps": 0})
    only = FederatedRun(config, tmp_path)
    only.round(0)
    idle = next(c for c in only.federation if c.index not in only.server.cohort(0))
    final = only.server.blocks.subset(only.method.owned(idle))
    personal = only.personalizers[0].after_federation(idle, final)
    assert all(torch.equal(personal[n], final[n]) for n in final)
    assert all(e.initial for e in only.worker.drain())


def test_histories_survive_on_disk(tmp_path):
    some = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    some.round(0)
    tap = some.personalizers[0]
    client = some.federation[some.server.cohort(0)[0]]
    _, federated, personal = tap._load(client, 1)
    assert any(math.isfinite(v) for v in personal.values())
    assert set(federated) == set(personal) == set(client.tasks)


def test_a_task_that_a_client_has_got_since_begins_as_the_first_ones_did(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    (tap,), method = run.personalizers, run.method
    before, client = (run.federation.find(name) for name in ("news", "shapes"))
    few = BlockState({n: method.initial[n] + 1 for n in method.owned(before)},
                     method.initial.shapes)
    tap.save(client, 0, few, {"federated": {"agnews": 1.0}, "personal": {"agnews": 2.0}})
    state, federated, personal = tap._load(client, 1)
    assert set(few) < set(state) == set(method.owned(client))
    for name, value in state.items():
        assert torch.equal(value, few[name] if name in few else method.initial[name])
    assert federated == {"agnews": 1.0, "tiny-imagenet": math.inf}
    assert personal == {"agnews": 2.0, "tiny-imagenet": math.inf}


def test_validation_criterion(tmp_path):
    """Histories hold losses on held-out samples, which are never trained on."""
    config = tiny_experiment(tmp_path, tap={"criterion": "validation"},
                             federation={"holdout": 0.25})
    some = FederatedRun(config, tmp_path)
    client = some.federation.find("news")
    (data, held), (_, kept) = client.data.holdout[0], client.data.holdings[0]
    assert len(held) == 3
    assert not set(held) & set(kept)
    some.round(0)
    for index in some.server.cohort(0):
        client = some.federation[index]
        personal, _, history = some.personalizers[0]._load(client, 1)
        personal.load_into(some.method.network.blocks)
        network = some.method.network.eval()
        for data, rows in client.data.holdout:
            if math.isfinite(history[data.task.name]):
                batch = data.batch(rows)
                loss = network.loss(data.task.name, network(data.task.name, batch), batch).item()
                assert history[data.task.name] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("criterion", ["validation", "paired"])
def test_the_history_of_w_is_of_w_as_it_was_trained(tmp_path, criterion):
    some = FederatedRun(tiny_experiment(tmp_path, tap={"criterion": criterion},
                                        federation={"holdout": 0.25}), tmp_path)
    (tap,), client = some.personalizers, some.federation.find("news")
    received = some.final(client)
    trained = BlockState({n: v + 0.1 for n, v in received.items()}, received.shapes)
    tap.after_training(client, 0, received, trained, {"agnews": 1.0})
    _, federated, _ = tap._load(client, 1)
    before, after = (tap.rule.held_out(client, w, ["agnews"]) for w in (received, trained))
    assert federated == after != before


def test_an_infinite_loss_of_w_has_no_place_in_an_event(tmp_path, monkeypatch):
    monkeypatch.setattr(Rule, "held_out",
                        lambda self, client, state, tasks: dict.fromkeys(tasks, math.inf))
    some = FederatedRun(tiny_experiment(tmp_path, tap={"criterion": "validation"},
                                        federation={"holdout": 0.25}), tmp_path)
    some.round(0)
    replaced = read_events(tmp_path, "replacement")
    assert replaced
    assert {each["federated_loss"] for each in replaced} == {None}


def test_a_loss_that_is_no_number_counts_as_infinite(tmp_path):
    run = FederatedRun(tiny_experiment(tmp_path), tmp_path)
    (tap,), client = run.personalizers, run.federation.find("news")
    w = run.final(client)
    tap.after_training(client, 0, w, w, {"agnews": math.nan})
    assert tap._load(client, 1)[1] == {"agnews": math.inf}


def test_divergence_by_hand():
    teacher, student = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    batch = Batch(answer=torch.zeros(2, 4), answer_mask=mask)
    total, count = 0.0, 0
    for i in range(2):
        for j in range(3):
            if mask[i, j + 1]:
                p, q = (teacher[i, j] / 2).softmax(-1), (student[i, j] / 2).softmax(-1)
                total, count = total + float((p * (p / q).log()).sum()), count + 1
    assert divergence(teacher, student, batch, 2.0).item() == pytest.approx(4 * total / count)
    image = torch.randn(2, 3, 4, 6)
    p, q = image.softmax(-1), torch.zeros_like(image).softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(divergence(image, torch.zeros_like(image), Batch()), expected)


@pytest.mark.parametrize("method", ["disentafl+tap", "feddat+tap", "perfedavg+tap", "local+tap"])
def test_tap_composes_with_every_federated_method(tmp_path, method):
    config = tiny_experiment(tmp_path, methods=[method], train={"rounds": 2, "local_steps": 1},
                             post={"steps": 1})
    rows = run(config, tmp_path / "out")
    assert {r["method"] for r in rows} == {method, "constant"}
    assert all(math.isfinite(r["value"]) for r in rows)


@pytest.mark.long
def test_variants_of_tap_train_the_same_x_once(tmp_path, monkeypatch):
    """TAP with and without distillation share stage 1, and get what each gets alone."""
    from tapfl.personal import tap as module

    def rows(methods, name):
        config = tiny_experiment(tmp_path, methods=methods, train={"rounds": 3},
                                 federation={"clients": ["shapes", "looks"]})
        return FederatedRun(config, tmp_path / name).run()

    alone = [rows([method], method) for method in ("tap", "tap-nokd")]
    counted = []
    original = module.local_training
    monkeypatch.setattr(module, "local_training",
                        lambda *a, **k: counted.append(k["role"]) or original(*a, **k))
    both = rows(["tap", "tap-nokd"], "both")
    for method, expected in zip(("tap", "tap-nokd"), alone, strict=True):
        assert rows_of(both, method) == rows_of(expected, method)
    assert counted.count("personal") == 3 * 2  # rounds times cohort
