"""What the proxy passes on, looked at from behind it: a server in the SuperLink's place."""

import http.server
import shutil
import socket
import ssl
import threading
import time

import pytest

pytest.importorskip("cryptography")

from tapfl.deploy.keys import make_keys
from tapfl.deploy.processes import Processes, free_port
from tapfl.deploy.superlink import BODY_LIMIT, SuperLink
from tapfl.deploy.supervise import Supervisor

pytestmark = pytest.mark.skipif(shutil.which("nginx", path="/usr/sbin:/usr/bin") is None,
                                reason="needs nginx")


class Behind(http.server.BaseHTTPRequestHandler):
    """Remembers the paths that reach it."""

    def do_POST(self):
        self.server.paths.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """Return how to reach the proxy, and the paths that come through."""
    folder = tmp_path_factory.mktemp("proxy")
    keys = folder / "keys"
    make_keys(keys, [], [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Behind) as behind:
        behind.paths = []
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trust.load_cert_chain(keys / "server.pem", keys / "server.key")
        behind.socket = trust.wrap_socket(behind.socket, server_side=True)
        threading.Thread(target=behind.serve_forever, daemon=True).start()
        processes = Processes(folder / "deploy")
        port = free_port()
        try:
            SuperLink(Supervisor(processes, print), keys, behind.server_port).publish(
                f"127.0.0.1:{port}")
            trusting = ssl.create_default_context(cafile=keys / "ca.pem")

            def connect():
                plain = socket.create_connection(("127.0.0.1", port), timeout=10)
                return trusting.wrap_socket(plain, server_hostname="localhost")

            yield connect, behind.paths
        finally:
            processes.stop()
            behind.shutdown()


def post(connect, path, length=0, body=b""):
    with connect() as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
                           "Connection: close\r\n\r\n".encode() + body)
        return int(connection.recv(100).split()[1])


def test_nodes_get_through(proxy):
    connect, paths = proxy
    paths.clear()
    assert post(connect, "/v1/fleet/pull-messages", 3, b"abc") == 200
    assert paths == ["/v1/fleet/pull-messages"]


@pytest.mark.parametrize("path", [
    "/v1/control/..%2ffleet/x", "/v1/control/list-runs/%2e%2e/%2e%2e/fleet/",
    "/v1/control/list-runs%3f/../../fleet/", "/v1/control/list-runs%23/../../fleet/",
    "/v1/fleet/../control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/#/../../control/list-runs", "//v1/fleet//x", "https://x/v1/control/list-runs"])
def test_what_reaches_the_superlink_is_the_path_that_was_looked_at(proxy, path):
    connect, paths = proxy
    paths.clear()
    post(connect, path)
    for found in paths:
        assert found.startswith("/v1/fleet/")
        assert ".." not in found
        assert "control" not in found


def test_a_request_that_is_not_whole_costs_the_superlink_nothing(proxy):
    """Whoever may connect could have it hold many, before it asks who they are."""
    connect, paths = proxy
    paths.clear()
    with connect() as connection:
        connection.sendall(b"POST /v1/fleet/slow HTTP/1.1\r\nHost: x\r\n"
                           b"Content-Length: 9\r\n\r\nab")
        time.sleep(0.3)
        assert paths == []
        connection.sendall(b"cdefghi")
        assert connection.recv(100).split()[1] == b"200"
    assert paths == ["/v1/fleet/slow"]
    assert post(connect, "/v1/fleet/large", (BODY_LIMIT << 20) + 1) == 413
