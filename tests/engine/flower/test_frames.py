"""Frames: what is packed comes back; anything else is refused in one line."""

import json
import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapfl.engine.flower import frames
from tapfl.engine.flower.frames import FrameError, pack, receive, request_again, unpack

HEADER = {"kind": "x", "text": "Grüße \U0001f600", "numbers": [1, -2.5, 1e100], "none": None}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2**60, 2**60) | st.text(max_size=5)
    | st.floats(-1e100, 1e100),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3), max_leaves=8)


def framed(text, body=b""):
    return struct.pack("!IQ", len(text), len(body)) + text + body


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.binary(max_size=40))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_what_is_packed_comes_back(header, body):
    assert unpack(pack(header, body)) == (header, body)


@given(st.binary(max_size=80) | st.binary(max_size=60).map(framed)
       | st.text(max_size=40).map(lambda text: framed(text.encode())))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_garbage_is_a_frame_error(data):
    try:
        header, _ = unpack(data, 1000)
    except FrameError:
        return
    assert isinstance(header, dict)


def test_every_truncation_and_every_longer_message_is_refused():
    whole = pack(HEADER, b"12345")
    for cut in range(len(whole)):
        with pytest.raises(FrameError):
            unpack(whole[:cut])
    with pytest.raises(FrameError, match="the message says"):
        unpack(whole + b"x")


@pytest.mark.parametrize(("text", "reason"), [
    (b"", "no JSON"), (b"{", "no JSON"), (b"[1]", "no JSON object"), (b'"x"', "no JSON object"),
    (b'{"a": NaN}', "no JSON"), (b'{"a": [-Infinity]}', "no JSON"), (b'{"a": 1e999}', "no JSON"),
    (b'{"a": -1e101}', "no JSON"),
    (b'{"a": 9223372036854775808}', "no JSON"), (b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
    (b'{"a": "\\ud800"}', "no JSON"), (b'{"\\uDFFF": 1}', "no JSON"), (b'{"a": "\xff"}', "no JSON"),
    (b'{"a": "\xed\xa0\x80"}', "no JSON"), (b"[" * 100_000, "no JSON"),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "no JSON"), ("{}".encode("utf-16"), "no JSON")],
    ids=range(17))
def test_headers_that_are_no_plain_object(text, reason):
    with pytest.raises(FrameError, match=reason):
        unpack(framed(text))


def test_lengths_are_checked_before_anything_is_read():
    with pytest.raises(FrameError, match="at most 5 are expected"):
        unpack(pack({}, b"123456"), limit=5)
    with pytest.raises(FrameError, match="a header of 4294967295 bytes"):
        unpack(struct.pack("!IQ", 2**32 - 1, 0))
    with pytest.raises(FrameError, match="a message of 18446744073709551615 bytes"):
        unpack(struct.pack("!IQ", 2, 2**64 - 1) + b"{}", limit=10)
    with pytest.raises(FrameError, match="the message says"):
        unpack(struct.pack("!IQ", 2, 2**64 - 1) + b"{}")


def test_a_header_too_long_or_no_json_is_not_sent(monkeypatch):
    for header in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(FrameError, match="cannot be written"):
            pack(header)
    monkeypatch.setattr(frames, "HEADER_LIMIT", 10)
    with pytest.raises(FrameError, match="a header of 21 bytes, at most 10"):
        pack({"a": "0123456789ab"})


def test_a_peers_words_are_one_printable_line():
    text = str(FrameError("a\nb\x1b[31mred\u202e" + "x" * 10_000))
    assert text.startswith("a b [31mred x")
    assert len(text) == frames.LINE
    assert text.isprintable()


def test_a_frame_crosses_a_socket():
    one, other = socket.socketpair()
    with one, other:
        frames.send(one, pack(HEADER, b"body"))
        assert unpack(receive(other)) == (HEADER, b"body")
        frames.send(one, pack({}, b"123456"))
        with pytest.raises(FrameError, match="at most 5"):
            receive(other, limit=5)


def test_a_length_is_a_claim_and_takes_no_memory():
    one, other = socket.socketpair()
    with one, other:
        one.sendall(struct.pack("!IQ", 2, 8 << 30) + b"{}")
        one.close()
        tracemalloc.start()
        with pytest.raises(FrameError, match="ended after 2 of"):
            receive(other, limit=16 << 30)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8 << 20


def test_the_header_is_plain_json():
    data = pack(HEADER)
    assert json.loads(data[12:]) == HEADER


def listening(path, *turns):
    """Listen at a path; each turn gets a connection. Return the thread."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()

    def serve():
        with server:
            for turn in turns:
                connection, _ = server.accept()
                with connection:
                    turn(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def answers(connection):
    frames.send(connection, pack({"got": unpack(receive(connection))[0]["n"]}))


def dies(connection):
    receive(connection)


def dies_while_it_answers(connection):
    frames.send(connection, pack({"got": unpack(receive(connection))[0]["n"]})[:-3])


@pytest.mark.parametrize("death", [dies, dies_while_it_answers])
def test_one_who_dies_over_a_message_is_asked_once_more(tmp_path, death):
    thread = listening(tmp_path / "s", death, answers)
    assert unpack(request_again(tmp_path / "s", pack({"n": 3}), 5, pause=0.01))[0] == {"got": 3}
    thread.join()
    thread = listening(tmp_path / "t", death, death)
    with pytest.raises(FrameError, match="the connection ended"):
        request_again(tmp_path / "t", pack({"n": 3}), 5, pause=0.01)
    thread.join()


def test_one_who_is_not_there_is_waited_for(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(FileNotFoundError):
        request_again(path, pack({"n": 3}), 5, absent=0.05, pause=0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:  # by one who was killed
        left.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        request_again(path, pack({"n": 3}), 0.05, pause=0.01)
    path.unlink()
    threads = []
    later = threading.Timer(0.1, lambda: threads.append(listening(path, answers)))
    later.start()
    assert unpack(request_again(path, pack({"n": 4}), 5, pause=0.01))[0] == {"got": 4}
    later.join(), threads[0].join()


def test_one_who_hangs_has_as_long_as_the_server_waits(tmp_path):
    waits = threading.Event()
    thread = listening(tmp_path / "s", lambda connection: waits.wait(5))
    with pytest.raises(TimeoutError):
        request_again(tmp_path / "s", pack({"n": 3}), 0.1, pause=0.01)
    waits.set()
    thread.join()
