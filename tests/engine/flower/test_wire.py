"""What a message may say: each check alone, and a fuzz test of all of them."""

import contextlib
import json
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tapfl.engine.flower.frames import FrameError, pack, unpack
from tapfl.engine.flower.headers import Asked, ReportPart
from tapfl.engine.flower.reported import event_of
from tapfl.engine.flower.wire import (
    ask_frame,
    final_frame,
    read_ask,
    read_final,
    read_hello,
    read_refusal,
    read_update,
    update_frame,
)
from tapfl.engine.messages import Final
from tapfl.events import Curve, Diverged, Note, PersonalLosses, Replacement
from tests.engine.flower.fakes import BLOCKS, DUE, ZERO, event, hello, row, update
from tests.engine.flower.test_frames import values

EVENTS = [Replacement("tap", 1, "c1", "t", 0.5, None, 0.0, True, ["decoder/a"]),
          PersonalLosses("tap", 1, "c1", {"t": 0.5}), Note("tap", 1, "c1", {"x": [1, None, "y"]}),
          Curve("fedavg", 1, "c1", "u", {"accuracy": 50.0}, 6),
          Diverged("tap", 1, "c1", ["t"], "the loss of t is not finite")]


def update_header(**changes):
    reports = [ReportPart(round=1, events=[e.record() for e in EVENTS])]
    header, body = unpack(update_frame(update("c1", 2, ZERO), 2, reports, "none"))
    return header | changes, body


def final_header(**changes):
    header, body = unpack(final_frame(Final("c1", [row("c1")], EVENTS, seconds={"tap": 1.0}), []))
    return header | changes, body


def asked(**changes):
    values = {"kind": "train", "run": "fedavg", "client": "c1", "round": 2, "kept": [1],
              "awaited": [0]} | changes
    return unpack(ask_frame(Asked(**values), ZERO))


def test_updates_come_back_whole():
    for compression in ("none", "zlib"):
        made = update("c1", 2, ZERO)
        made.losses["u"] = float("inf")
        reports = [ReportPart(round=1, events=[e.record() for e in EVENTS])]
        frame = unpack(update_frame(made, 2, reports, compression))
        found, (report,) = read_update(frame, DUE, ZERO, BLOCKS)
        assert found.blocks.equals(made.blocks)
        assert found.samples == 11
        assert found.losses["t"] == 3.0
        assert found.losses["u"] != found.losses["u"]
        assert (report.client, report.round) == ("c1", 1)
        assert list(report.events) == EVENTS


def test_results_come_back_whole():
    rows = [row("c1"), row("c1", metric="mse", value=float("nan"))]
    frame = unpack(final_frame(Final("c1", rows, EVENTS, seconds={"": 2.0}), []))
    final, reports = read_final(frame, DUE)
    assert final.rows[0] == rows[0]
    assert final.rows[1]["value"] != final.rows[1]["value"]
    assert list(final.events) == EVENTS
    assert (final.seconds, reports, final.models, final.scores) == ({"": 2.0}, [], {}, {})


BAD_UPDATES = {
    "another kind": ({"kind": "final"}, "'kind'"),
    "no kind at all": ({"kind": ["update"]}, "'kind'"),
    "an unknown key": ({"models": {"../../x": "1"}}, "'models': Extra inputs"),
    "another client": ({"client": "c2"}, "client 'c2', expected 'c1'"),
    "an earlier round": ({"round": 1}, "round '1', expected 2"),
    "a round as a text": ({"round": "2"}, "'round'"),
    "a round that is true": ({"round": True}, "'round'"),
    "no samples": ({"samples": 0}, "'samples'"),
    "half a sample": ({"samples": 1.5}, "'samples'"),
    "a foreign task": ({"losses": {"v": 1.0}}, "losses of 'v'"),
    "losses as a list": ({"losses": [1.0]}, "'losses'"),
    "a fault that clears the screen": ({"fault": "\x1b[2J"}, "'fault'"),
    "a fault too long": ({"fault": "x" * 3000}, "'fault'"),
    "an unknown compression": ({"compression": "lzma"}, "'compression'"),
    "compressed, but it is not": ({"compression": "zlib"}, "decompressed"),
    "events that are no objects": ({"events": [1]}, "'events.0'"),
    "a report of this round": ({"reports": [{"round": 2, "events": []}]}, "round 2, which is not"),
    "a report not awaited": ({"reports": [{"round": 5, "events": []}]}, "round 5, which is not"),
    "a report twice": ({"reports": [{"round": 1, "events": []}] * 2}, "round 1, twice"),
    "an event of another round than its report's": (
        {"reports": [{"round": 0, "events": [event("c1", 1)]}]}, "round '1', expected 0"),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
def test_updates_that_are_refused(name):
    changes, reason = BAD_UPDATES[name]
    header, body = update_header(**changes)
    with pytest.raises(FrameError, match=reason.replace("[", r"\[")):
        read_update((header, body), DUE, ZERO, BLOCKS)


BAD_EVENTS = {
    "of a kind that only a server reports": ({"event": "round"}, "kind 'round'"),
    "of no kind": ({"event": None}, "kind 'None'"),
    "of a kind that is a list": ({"event": ["personal"]}, "is none of a client's"),
    "of another client": ({"client": "c2"}, "client 'c2'"),
    "of another method": ({"method": "local"}, "'local', which is no method"),
    "of a round to come": ({"round": 3}, "round '3', expected 2"),
    "of a round as a text": ({"round": "2"}, "'round'"),
    "of a foreign task": ({"losses": {"v": 1.0}}, "'v', which is no task"),
    "with an unknown key": ({"cohort": []}, "unknown 'cohort'"),
    "with a key too few": ({"losses": None}, "'losses'"),
    "of a foreign task's score": (
        Curve("tap", 2, "c1", "v", {"accuracy": 1.0}, 3).record(), "'v', which is no task"),
    "with an unknown metric": (
        Curve("tap", 2, "c1", "t", {"<b>": 1.0}, 3).record(), "metric '<b>'"),
    "of general scores": (
        Curve("tap", 2, "c1", "t", {"general_mse": 1.0}, 3).record(), "'general_mse'"),
    "of a reason that clears the screen": (
        Diverged("tap", 2, "c1", [], "\x1b[2J").record(), "cannot be shown"),
    "of blocks with long names": (
        Replacement("tap", 2, "c1", "t", None, None, 0.0, True, ["x" * 3000]).record(),
        "cannot be shown"),
    "of a foreign divergence": (Diverged("tap", 2, "c1", ["v"], "").record(), "no task"),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
def test_events_that_are_refused(name):
    changes, reason = BAD_EVENTS[name]
    whole = changes if len(changes) > 3 else event("c1", 2) | changes
    for place in ({"events": [whole]}, {"events": [event("c1", 2), whole]}):
        header, body = update_header(**place)
        with pytest.raises(FrameError, match=reason):
            read_update((header, body), DUE, ZERO, BLOCKS)


def test_a_notes_values_have_few_levels():
    """What is read may be deeper than what a log can write."""
    deep = 1
    for _ in range(200):
        deep = [deep]
    with pytest.raises(FrameError, match="more than 50 levels"):
        event_of(Note("tap", 1, "c1", {"x": deep}).record())


BAD_FINALS = {
    "paths of models": ({"models": {"../../etc": "1"}}, "'models'"),
    "paths of scores": ({"scores": {"/etc/passwd": "1"}}, "'scores'"),
    "seconds of a foreign method": ({"seconds": {"../x": 1.0}}, "seconds of '../x'"),
    "negative seconds": ({"seconds": {"tap": -1.0}}, "'seconds.tap'"),
    "an event of a round to come": ({"events": [event("c1", 3)]}, "round 3, expected 0 to 2"),
    "another client's results": ({"rows": [row("c2")]}, "client 'c2'"),
    "another seed": ({"rows": [row("c1", seed=43)]}, "seed '43'"),
    "an unknown method": ({"rows": [row("c1", method="best")]}, "'best', which is no method"),
    "a foreign task": ({"rows": [row("c1", task="v")]}, "'v', which is no task"),
    "another data set": ({"rows": [row("c1", dataset="u")]}, "data set 'u'"),
    "an unknown metric": ({"rows": [row("c1", metric="x,y\r")]}, "'metric'"),
    "general results": ({"rows": [row("c1", metric="general_accuracy")]}, "metric 'general_"),
    "a value that is a text": ({"rows": [row("c1", value="9")]}, "'value'"),
    "no samples": ({"rows": [row("c1", samples=0)]}, "'samples'"),
    "a row twice": ({"rows": [row("c1"), row("c1", value=99.0)]}, "twice"),
    "a column more": ({"rows": [row("c1", note="x")]}, "'note'"),
    "a report not awaited": ({"reports": [{"round": 2, "events": []}]}, "not due"),
}


@pytest.mark.parametrize("name", BAD_FINALS)
def test_results_that_are_refused(name):
    changes, reason = BAD_FINALS[name]
    with pytest.raises(FrameError, match=reason):
        read_final(final_header(**changes), DUE)


def _tensors(**changes):
    values = {name: value.clone() for name, value in ZERO.items()} | changes
    return save({name: value for name, value in values.items() if value is not None})


def _table(**entries):
    """A safetensors buffer with a table of our own."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


BAD_BODIES = {
    "nothing": (b"", "cannot be read"),
    "garbage": (b"garbage" * 100, "cannot be read"),
    "trailing bytes": (_tensors() + b"x", "cannot be read"),
    "a byte too few": (_tensors()[:-1], "cannot be read"),
    "a huge table": ((2**63).to_bytes(8, "little") + b"{}", "cannot be read"),
    "a tensor beyond the end": (
        _table(**{"decoder/a": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}),
        "cannot be read"),
    "an unknown type": (
        _table(**{"decoder/a": {"dtype": "\x1b[2J", "shape": [0], "data_offsets": [0, 0]}}),
        "cannot be read"),
    "a huge shape": (_table(**{"decoder/a": {
        "dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 0]}}), "cannot be read"),
    "a foreign block": (_tensors(**{"decoder/c": torch.zeros(4)}), "'decoder/c' is none"),
    "a path": (_tensors(**{"../x": torch.zeros(4)}), "'../x' is none"),
    "a missing block": (_tensors(**{"decoder/b": None}), "'decoder/b' is missing"),
    "another size": (_tensors(**{"decoder/a": torch.zeros(65)}), "expected torch.float32"),
    "another shape": (_tensors(**{"decoder/a": torch.zeros(8, 8)}), "expected torch.float32"),
    "another type": (_tensors(**{"decoder/a": torch.zeros(64).half()}), "is torch.float16"),
    "ten times its size": (_tensors(**{"decoder/a": torch.zeros(640)}), "expected torch.float32"),
    "more than could be": (_tensors(**{"decoder/a": torch.zeros(1 << 20)}), "at most"),
}


@pytest.mark.parametrize("compression", ["none", "zlib"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_refused(name, compression):
    body, reason = BAD_BODIES[name]
    header, _ = update_header(compression=compression)
    body = zlib.compress(body) if compression == "zlib" else body
    with pytest.raises(FrameError, match=f"{reason}|not in one piece") as error:
        read_update((header, body), DUE, ZERO, BLOCKS)
    assert str(error.value).isprintable()


def test_a_tensor_that_is_there_twice_counts_once_or_not_at_all():
    entry = '"decoder/%s": {"dtype": "F32", "shape": [64], "data_offsets": [%d, %d]}'
    for places in ([("a", 0), ("a", 256), ("b", 512)], [("a", 0), ("b", 256), ("b", 256)]):
        text = "{" + ", ".join(entry % (n, at, at + 256) for n, at in places) + "}"
        size = max(at for _, at in places) + 256
        body = len(text).to_bytes(8, "little") + text.encode() + bytes(size)
        header, _ = update_header()
        try:
            found, _ = read_update((header, body), DUE, ZERO, BLOCKS)
        except FrameError:
            continue
        assert found.blocks.equals(ZERO)


def test_a_bomb_takes_no_memory():
    header, _ = update_header(compression="zlib")
    bomb = zlib.compress(bytes(60 << 20), 9)
    tracemalloc.start()
    with pytest.raises(FrameError, match="not in one piece of at most"):
        read_update((header, bomb), DUE, ZERO, BLOCKS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("more", [b"x", zlib.compress(b"more")])
def test_what_follows_compressed_blocks_is_refused(more):
    header, _ = update_header(compression="zlib")
    for body in (zlib.compress(_tensors()) + more, zlib.compress(_tensors())[:-3]):
        with pytest.raises(FrameError, match="not in one piece"):
            read_update((header, body), DUE, ZERO, BLOCKS)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"kind": "hello"}, "'kind'"), ({"round": -1}, "'round'"), ({"kept": ["1"]}, "'kept.0'"),
    ({"awaited": [2]}, "report of round 2 in round 2"), ({"awaited": [-1]}, "round -1"),
    ({"compression": "x"}, "'compression'"), ({"more": 1}, "'more'")])
def test_asks_that_are_refused(changes, reason):
    header, body = asked()
    with pytest.raises(FrameError, match=reason):
        read_ask((header | changes, body), ZERO, BLOCKS)


def test_a_server_that_sends_no_finite_blocks_is_refused():
    header, _ = asked()
    body = _tensors(**{"decoder/a": torch.full([64], float("nan"))})
    with pytest.raises(FrameError, match="not finite"):
        read_ask((header, body), ZERO, BLOCKS)


def test_a_hello_of_another_version_is_named_whatever_its_form():
    with pytest.raises(FrameError, match="version 2, the server has 1"):
        read_hello(({"kind": "hello", "version": 2, "news": []}, b""))
    for bad in ({"kind": "update"}, {}, {"kind": ["hello"]}, hello("c1", clients=[1])):
        with pytest.raises(FrameError):
            read_hello((bad, b""))


def test_refusals():
    assert read_refusal(({"kind": "update"}, b"")) is None
    assert read_refusal(({"kind": "refusal", "reason": "no"}, b"")) == "no"
    with pytest.raises(FrameError, match="'reason'"):
        read_refusal(({"kind": "refusal", "reason": "\x1b[2J"}, b""))


# Whatever comes: a value, or a FrameError

GOOD = [update_header(), update_header(events=[event("c1", 2)]), final_header(), asked(),
        (hello("c1"), b""), ({"kind": "refusal", "reason": "no"}, b"")]


@st.composite
def frames(draw):
    header, body = draw(st.sampled_from(GOOD))
    header = json.loads(json.dumps(header))
    for _ in range(draw(st.integers(0, 2))):
        place, key = header, draw(st.sampled_from(sorted(header)))
        while isinstance(place.get(key), dict) and place[key] and draw(st.booleans()):
            place, key = place[key], draw(st.sampled_from(sorted(place[key])))
        place[key] = draw(values)
    if body and draw(st.booleans()):
        at = draw(st.integers(0, len(body) - 1))
        body = body[:at] + draw(st.binary(max_size=4)) + body[at + draw(st.integers(0, 4)):]
    return unpack(pack(header, body))


@given(frames())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_whatever_comes_is_read_or_refused(frame):
    for read in (lambda: read_update(frame, DUE, ZERO, BLOCKS), lambda: read_final(frame, DUE),
                 lambda: read_ask(frame, ZERO, BLOCKS), lambda: read_hello(frame),
                 lambda: read_refusal(frame)):
        with contextlib.suppress(FrameError):
            read()


def test_a_fault_is_said_as_a_terminal_can_take_it():
    header, body = unpack(update_frame(update("c1", 2, ZERO), 2, [], "none"))
    frame = unpack(pack(header | {"fault": "not\u202efinite\u2028at all"}, body))
    found, _ = read_update(frame, DUE, ZERO, BLOCKS)
    assert found.fault == "not finite at all"
