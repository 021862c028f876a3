"""Real SuperLink, proxy and SuperNodes on loopback, with TLS and keys."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import yaml

from tapfl.cli import main
from tapfl.config import load_config
from tapfl.deploy.keys import make_keys
from tapfl.deploy.processes import free_port, recorded
from tapfl.deploy.server import Server
from tapfl.engine.flower.job import Job
from tapfl.engine.process import end_with_parent
from tapfl.engine.results import read_results
from tapfl.engine.run import run
from tests.experiment import read_events, tiny_experiment

pytestmark = [pytest.mark.long,
              pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None,
                                 reason="needs nginx")]


def events(folder):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in read_events(folder)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """The same federation in one process, and over servers."""
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("deployed")
    config = tiny_experiment(folder, methods=["fedavg", "tap"],
                             federation={"clients": ["shapes", "news", "looks"]},
                             train={"rounds": 3})
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run(config, folder / "here", device="cpu")
    assert main(["deploy", "local", str(path), "--clients", "3", "--proxy", "--device", "cpu",
                 "--out", str(folder / "there")]) == 0
    return folder


def test_results_and_events_are_those_of_one_process(deployed):
    here = [row for row in read_results(deployed / "here" / "results.csv")
            if not row["metric"].startswith("general_")]
    assert read_results(deployed / "there" / "results.csv") == here
    assert events(deployed / "here") == events(deployed / "there")


def test_its_status_is_known_afterwards(deployed, capsys):
    capsys.readouterr()
    assert main(["deploy", "status", str(deployed / "there"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished"
    assert len(found["nodes"]) == 3
    assert found["bytes_up"] > 0
    assert found["processes"] == []


def test_what_it_wrote_is_its_owners_alone(deployed):
    written = list((deployed / "there").rglob("*"))
    assert deployed / "there" / "deploy" / "flower" / "superlink.db" in written
    assert [str(path) for path in written if path.stat().st_mode & 0o077] == []


def test_a_clients_folder_answers_without_a_server(deployed, capsys):
    capsys.readouterr()
    folder = deployed / "there" / "deploy" / "nodes" / "news"
    assert main(["predict", str(folder), "--client", "news", "--task", "agnews",
                 "--text", "shares rise"]) == 0
    assert "business" in capsys.readouterr().out


def kill(path, name=None):
    found = json.loads(path.read_text())
    os.kill((found if name is None else found[name])["pid"], signal.SIGKILL)


def test_whatever_is_killed_comes_to_the_same_end(deployed):
    """The run and the proxy, which are started again, then the command itself with all of it."""
    out = deployed / "disturbed"
    log = out / "deploy" / "log.jsonl"
    command = [sys.executable, "-m", "tapfl", "deploy", "local", str(deployed / "config.yaml"),
               "--clients", "3", "--proxy", "--device", "cpu", "--out", str(out)]

    def rounds(count):
        while not log.is_file() or log.read_text().count('"cohort"') < count:
            assert going.poll() is None
            time.sleep(0.1)

    going = subprocess.Popen(command, preexec_fn=end_with_parent)
    try:
        rounds(1)
        kill(out / "deploy" / "serverapp.json")
        kill(out / "deploy" / "processes.json", "proxy")
        rounds(2)
        going.kill()
        going.wait()
        going = subprocess.Popen(command, preexec_fn=end_with_parent)
        assert going.wait(300) == 0
    finally:
        going.terminate()
        going.wait()
    said = log.read_text()
    assert "proxy was killed by signal 9" in said
    assert "the run's process is gone; submitting it again" in said
    assert said.count('"goes on"') + said.count('"starts"') == 3
    assert (out / "results.csv").read_text() == (deployed / "there" / "results.csv").read_text()
    assert events(out) == events(deployed / "there")
    assert recorded(out / "deploy") == {}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that others could reach, though only on loopback."""
    pytest.importorskip("flwr")
    folder = tmp_path_factory.mktemp("server")
    make_keys(folder / "keys", [], ["known"])
    with Server(folder / "out", folder / "keys", public=f"127.0.0.1:{free_port()}") as server:
        yield server, folder / "keys"


def test_a_node_that_claims_another_ones_client_is_refused(deployed, tmp_path):
    config = load_config(str(deployed / "config.yaml"), ["federation.clients=[news, looks]"])
    keys, out, log = tmp_path / "keys", tmp_path / "out", tmp_path / "out" / "deploy" / "log.jsonl"
    make_keys(keys, [], ["good", "bad"])
    hosts = {"good": ["news"], "bad": ["looks"]}

    def node(key, client, under_way):
        return subprocess.Popen(
            [sys.executable, "-m", "tapfl", "deploy", "client", str(deployed / "config.yaml"),
             "--set", "federation.clients=[news, looks]", "--clients", client, "--out",
             str(tmp_path / f"{key}-{client}"), "--superlink", under_way.address, "--ca",
             str(keys / "ca.pem"), "--key", str(keys / "nodes" / f"{key}.key"), "--device", "cpu"],
            preexec_fn=end_with_parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with Server(out, keys, hosts=hosts) as under_way:
        nodes = [node("bad", "news", under_way)]
        try:
            for said in under_way.begin(Job(config=config, out=out, log=log)):
                if "refused: " in said.get("says", ""):
                    nodes[0].terminate()
                    nodes[0].wait()
                    nodes += [node("good", "news", under_way), node("bad", "looks", under_way)]
        finally:
            for each in nodes:
                each.terminate()
                each.wait()
    said = log.read_text()
    assert "client 'news' is not this node's: the key 'bad' has looks" in said
    assert said.count("joined with news") == said.count("joined with looks") == 1
    assert (out / "results.csv").is_file()


def ask(address, path, keys):
    trust = ssl.create_default_context(cafile=keys / "ca.pem")
    request = urllib.request.Request(f"https://{address}{path}", data=b"{}", method="POST")
    try:
        with urllib.request.urlopen(request, context=trust, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_control_is_refused_from_outside(server):
    """Whoever holds the authority's certificate reaches Control at the SuperLink, not outside."""
    under_way, keys = server
    inside = f"127.0.0.1:{under_way.superlink.port}"
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/get-nodes",
                 "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run",
                 "//v1/control/start-run", "/health", "/"):
        status, body = ask(under_way.address, path, keys)
        assert status in (403, 400), (path, status)
        assert b"nginx" in body
    for path in ("/v1/control/start-run",):  # the same question is understood inside
        status, body = ask(inside, path, keys)
        assert b"nginx" not in body
    status, body = ask(under_way.address, "/v1/fleet/pull-messages", keys)
    assert b"nginx" not in body  # Flower's own answer


def test_another_authority_is_not_trusted(server, tmp_path):
    make_keys(tmp_path, [], [])
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(server[0].address, "/v1/fleet/pull-messages", tmp_path)
