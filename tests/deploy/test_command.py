"""The options of `tapfl deploy`, without servers."""

import grp
import os
import stat
import subprocess
import sys

import pytest
import yaml

from tapfl.cli import main
from tapfl.deploy.resident import open_to
from tapfl.engine.flower.frames import pack, request, unpack
from tapfl.engine.flower.serving import listen
from tapfl.errors import TapflError
from tests.experiment import tiny_experiment

SERVER = ["--superlink", "127.0.0.1:1", "--ca", "ca.pem", "--key", "a.key"]


@pytest.mark.parametrize(("options", "line"), [
    ([], "expected --superlink, --ca and --key, or --socket"),
    (SERVER[:4], "expected --superlink, --ca and --key, or --socket"),
    (["--socket", "s", "--key", "a.key"], "--key: belongs to the SuperNode, which --socket leaves"),
    (["--socket", "s", "--allow", "everything"], "--allow everything: expected some of scores"),
    ([*SERVER, "--group", "a"], "--group: goes with --socket"),
    (SERVER, "ca.pem: no such file")])
def test_ways_to_a_server(options, line, tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", "client", "quickstart", "--clients", "g0-0", "--out", "node",
                 *options]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.long
def test_a_resident_alone_answers_at_its_socket(tmp_path):
    config = tiny_experiment(tmp_path, data={"train": 8, "test": 2})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    place = tmp_path / "s"
    command = [sys.executable, "-m", "tapfl", "deploy", "client", str(path), "--clients", "news",
               "--out", str(tmp_path / "node"), "--socket", str(place), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, umask=0o022) as process:
        try:
            assert process.stdout.readline().startswith("ready: news at ")
            header, _ = unpack(request(place, pack({"kind": "hello"}), 60))
            assert [client["id"] for client in header["clients"]] == ["news"]
            node = tmp_path / "node"
            open_to_others = [str(found) for found in (node, *node.rglob("*"))
                              if found.stat().st_mode & 0o077]
            assert open_to_others == []  # labels, samples and the like
        finally:
            process.terminate()
        assert process.wait(60) == 130
    assert not place.exists()


def test_a_socket_is_opened_to_a_group_and_to_nobody_else(tmp_path):
    place = tmp_path / "made" / "for" / "s"
    before = os.umask(0o077)
    try:
        server = listen(place)
    finally:
        os.umask(before)
    with server:
        for folder in (place.parent, place.parent.parent):  # the group has to get there
            assert stat.S_IMODE(folder.stat().st_mode) == 0o711
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        open_to(grp.getgrgid(os.getgid()).gr_name, place)
        assert stat.S_IMODE(place.stat().st_mode) == 0o660
        with pytest.raises(TapflError, match="--group nobodys-group: no such group"):
            open_to("nobodys-group", place)
