"""Which key may speak for which clients."""

import pytest

from tapfl.cli import main
from tapfl.deploy.hosts import FILE, read_hosts
from tapfl.errors import TapflError

CLIENTS = ["blood", "tissue", "scans"]


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "nodes").mkdir()
    for name in ("laboratory", "radiology", "spare"):
        (tmp_path / "nodes" / f"{name}.pub").write_text("ecdsa-sha2-nistp384 AAAA")
    return tmp_path


def test_without_a_file_nothing_is_bound(keys):
    assert read_hosts(keys, CLIENTS) is None


def test_clients_of_each_key(keys):
    (keys / FILE).write_text("laboratory: [blood, tissue]\nradiology: [scans, tissue]\n")
    assert read_hosts(keys, CLIENTS) == {"laboratory": ["blood", "tissue"],
                                         "radiology": ["scans", "tissue"]}


@pytest.mark.parametrize(("text", "message"), [
    ("- blood", "expected a mapping of keys to values, got list"),
    ("laboratory: blood", "laboratory: Input should be a valid list, got 'blood'"),
    ("laboratory: [1]", "laboratory.0: Input should be a valid string, got 1"),
    ("labratory: [blood]", "labratory: no key of that name among "),
    ("laboratory: [bloot]", "laboratory: unknown client 'bloot'; did you mean 'blood'?"),
    ("laboratory: [blood, scans]", "no node has the client 'tissue'; expected every client"),
    ("laboratory: [blood", "not valid YAML"), ("", "no node has the client 'blood'"),
    ("laboratory: [blood]\nlaboratory: [scans]", "laboratory")])
def test_a_bad_file_is_one_line(keys, text, message):
    (keys / FILE).write_text(text)
    with pytest.raises(TapflError) as caught:
        read_hosts(keys, CLIENTS)
    assert str(caught.value).startswith(str(keys / FILE))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_says_so_before_it_starts_anything(keys, tmp_path, capsys):
    pytest.importorskip("flwr")
    (keys / FILE).write_text("laboratory: [blood]")
    out = tmp_path / "out"
    assert main(["deploy", "server", "quickstart", "--keys", str(keys), "--out", str(out)]) == 2
    assert "unknown client 'blood'" in capsys.readouterr().err
    assert not out.exists()
