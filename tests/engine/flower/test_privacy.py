"""What leaves a node, field by field: a new one must be added here, and to docs/privacy.md."""

import json
import re
import shutil
import struct
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from tapfl.engine.clientstore import ClientStore
from tapfl.engine.flower.agreement import agreement, weights_mark
from tapfl.engine.flower.allow import ALLOW
from tapfl.engine.flower.frames import pack, unpack
from tapfl.engine.flower.resident import Resident
from tapfl.engine.flower.told import told
from tapfl.errors import TapflError
from tapfl.events import Diverged, Left, Message, Missing, Note, OfClient, Refused
from tests.engine.flower.memory import EVERYTHING, Listening, residents, served
from tests.engine.flower.test_resident import GROUPS, ask, small

DOCUMENT = Path(__file__).parents[3] / "docs" / "privacy.md"

# Every field of every message, by its kind. A star stands for a name: a task, a method, a metric.
ALWAYS = {
    "hello": {"kind", "version", "tapfl", "code", "torch", "threads", "config", "weights",
              "start", "clients[].id", "clients[].tasks[]", "clients[].samples",
              "clients[].known"},
    "update": {"kind", "client", "round", "samples", "losses.*", "fault", "compression",
               "reports[]", "reports[].round"},
    "final": {"kind", "client", "seconds.*", "reports[].round"},
    "refusal": {"kind", "reason"},
}
EVENT = {"event", "method", "round", "client"}
ALLOWED = {
    "scores": {"rows": {"seed", "method", "client", "task", "dataset", "metric", "value",
                        "samples"},
               "curve": EVENT | {"task", "values.*", "samples"}},
    "losses": {"personal": EVENT | {"losses.*"}, "diverged": EVENT | {"tasks[]", "reason"}},
    "replacements": {"replacement": EVENT | {"task", "federated_loss", "personal_loss", "margin",
                                             "initial", "blocks[]", "share"}},
    "notes": {"note": EVENT | {"values.*"}},
}
NAMES = {"losses", "seconds", "values"}  # objects whose keys are names


def fields(value, path=""):
    """Yield the fields of plain JSON, by where they are."""
    if value in ({}, []):
        yield path + (".*" if value == {} else "[]")
    elif isinstance(value, dict):
        for key, inner in value.items():
            name = "*" if path.rpartition(".")[2] in NAMES else key
            yield from fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner, f"{path}[]")
    else:
        yield path


def apart(header):
    """Return a message without rows and events, and these: with their kinds."""
    parts = [("rows", row) for row in header.pop("rows", [])]
    for place in (header, *header.get("reports", [])):
        parts += [(event["event"], event) for event in place.pop("events", [])]
    return header, parts


def heard(folder, allow, **more):
    """Return the messages of all nodes in a whole run, with what they allow."""
    config = small(folder, **more)
    nodes = residents(config, folder, GROUPS, allow=allow)
    transport = Listening(nodes)
    served(config, folder / "server", transport)
    transport.heard.append(nodes[0].answer(b"garbage")[0])
    for node in nodes:
        node.close()
    return transport.heard


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    return heard(tmp_path_factory.mktemp("quiet"), ())


@pytest.fixture(scope="module")
def open_(tmp_path_factory):
    return heard(tmp_path_factory.mktemp("open"), EVERYTHING)


@pytest.mark.parametrize("which", ["quiet", "open_"])
def test_messages_have_the_listed_fields_and_no_others(which, request):
    found = {kind: set() for kind in ALWAYS}
    for data in request.getfixturevalue(which):
        header, _ = apart(unpack(data)[0])
        found[header["kind"]] |= set(fields(header))
    assert found == ALWAYS


def test_with_nothing_allowed_there_are_no_events_and_no_rows(quiet):
    assert [part for data in quiet for part in apart(unpack(data)[0])[1]] == []


def test_what_is_allowed_adds_the_listed_fields_and_no_others(open_):
    found = {}
    for data in open_:
        for kind, part in apart(unpack(data)[0])[1]:
            found.setdefault(kind, set()).update(fields(part))
    listed = {kind: keys for kinds in ALLOWED.values() for kind, keys in kinds.items()}
    assert found == {kind: listed[kind] for kind in ("rows", "curve", "personal", "replacement")}
    for event in (Diverged("tap", 0, "a", ["t"], "no"), Note("tap", 0, "a", {"x": 1})):
        assert set(fields(json.loads(json.dumps(event.record())))) == listed[event.kind]


def test_every_event_of_a_client_belongs_to_something_that_can_be_allowed():
    assert {name: {cls.kind for cls in kinds} for name, kinds in ALLOW.items()} == {
        name: set(kinds) - {"rows"} for name, kinds in ALLOWED.items()}
    theirs = {cls for kinds in ALLOW.values() for cls in kinds}
    assert set(OfClient.__subclasses__()) - theirs == {Refused, Missing, Left}  # the server's own


@pytest.mark.parametrize("which", ["quiet", "open_"])
def test_bodies_have_exchanged_blocks_and_nothing_beside_them(which, request):
    names = set()
    for data in request.getfixturevalue(which):
        header, body = unpack(data)
        if header["kind"] != "update":
            assert body == b""
            continue
        (length,) = struct.unpack("<Q", body[:8])
        names |= set(json.loads(body[8:8 + length]))
    assert "encoder/text" in names
    assert "__metadata__" not in names
    assert not [name for name in names if name.startswith("decoder/")]  # FedPer's private blocks


@pytest.mark.parametrize("which", ["quiet", "open_"])
def test_no_place_on_the_machine_is_named(which, request, tmp_path_factory):
    place = str(tmp_path_factory.getbasetemp()).encode()
    assert not [data for data in request.getfixturevalue(which) if place in data]


def test_with_local_privacy_updates_tell_no_losses(tmp_path):
    updates = [header for header, _ in map(unpack, heard(tmp_path, (), privacy={"mode": "local"}))
               if header["kind"] == "update"]
    assert len(updates) == 6
    assert [header for header in updates if header["losses"] or header["events"]] == []


# Faults

def test_why_a_node_failed_stays_in_its_own_log(tmp_path, monkeypatch):
    said = []
    node = Resident(small(tmp_path), ["news"], tmp_path / "node", notify=said.append)
    for error, words in ((TapflError(f"{tmp_path}/patients.csv: row 7: 'Jane Doe'"), "an error"),
                         (OSError(28, "No space left on device", f"{tmp_path}/state"),
                          "No space left on device")):
        def fails(*arguments, error=error):
            raise error

        data = ask(node)
        with monkeypatch.context() as patch:
            patch.setattr(ClientStore, "flush", fails)
            header, _ = unpack(node.answer(data)[0])
        assert header == {"kind": "refusal",
                          "reason": f"{words} on the node; its own log says more"}
        assert str(tmp_path) in str(said[-1])
        assert isinstance(said[-1], Message)
    assert "Jane Doe" in str(said[-2])
    node.close()


def test_fixed_words_are_told_and_nothing_else():
    assert told(TapflError("/a/b: Permission denied")) == (
        "Permission denied on the node; its own log says more")
    assert told(TapflError("/a/b")) == "an error on the node; its own log says more"


def test_a_resident_that_is_gone_is_not_located(tmp_path):
    pytest.importorskip("flwr")
    from tapfl.engine.flower.client_app import _pass_on
    from tapfl.engine.flower.records import content_of

    message = SimpleNamespace(content=content_of(pack({"kind": "hello"})),
                              metadata=SimpleNamespace(ttl=0.1))
    for config in ({"socket": str(tmp_path / "gone")}, {}):
        with pytest.raises(RuntimeError) as error:
            _pass_on(message, SimpleNamespace(node_config=config))
        assert str(tmp_path) not in str(error.value)
        assert "socket" in str(error.value) or "does not answer" in str(error.value)


# Weights

def test_weights_are_known_by_content_not_by_place(tmp_path):
    config = small(tmp_path)
    asset = str(resources.files("tapfl") / "assets" / "mini.safetensors")
    places = [tmp_path / name / "base.safetensors" for name in ("a", "b", "c")]
    for place in places:
        place.parent.mkdir()
        shutil.copy(asset, place)
    with places[2].open("ab") as file:
        file.write(b" ")

    def at(weights):
        return config.model_copy(update={
            "foundation": config.foundation.model_copy(update={"weights": weights})})

    one, two, other = (weights_mark(at(str(place))) for place in places)
    assert one == two
    assert one != other
    assert re.fullmatch("files [0-9a-f]{32}", one)
    assert weights_mark(at(str(tmp_path / "a"))) == weights_mark(at(str(tmp_path / "b")))
    assert weights_mark(at("facebook/flava-full")) == "facebook/flava-full"
    assert weights_mark(at({"text": "x", "image": str(tmp_path / "a")})).endswith(" + x")
    assert len({agreement(at(str(place))) for place in places}) == 1


# The document

def test_the_document_lists_every_field():
    """It speaks of every field by its name."""
    text = DOCUMENT.read_text()
    words = set(re.findall(r"`(\w+)`", text))
    listed = set.union(*ALWAYS.values(), *(keys for kinds in ALLOWED.values()
                                           for keys in kinds.values()))
    names = {part for name in listed for part in re.split(r"[.\[\]]+", name)}
    assert names - words - {"", "*", "kind", "event"} == set()
    assert set(ALLOW) <= words


def test_with_local_noise_no_loss_leaves_a_node(tmp_path):
    messages = heard(tmp_path, (), privacy={"mode": "local", "noise": 1.0})
    headers = [unpack(data)[0] for data in messages]
    updates = [header for header in headers if header["kind"] == "update"]
    assert updates
    assert all(header["losses"] == {} and header["fault"] is None for header in updates)
    record = json.loads((tmp_path / "server" / "run.json").read_text())
    (promised,) = record["privacy"].values()
    assert promised["epsilon"] > 0
