"""The page of a run under way: this machine alone, one page, news when there are some."""

import http.client
import threading
from contextlib import contextmanager

import pytest

from tapfl.cli import main
from tapfl.errors import TapflError
from tapfl.report import watch
from tapfl.report.watch import serve
from tests.report.pages import Page
from tests.report.runs import write_run
from tests.report.test_html import edit_record, round_event, write_events


@contextmanager
def served(folder):
    with serve(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_the_page_follows_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "EVERY", 0.0)
    folder = write_run(tmp_path / "run", finished=False)
    write_events(folder, round_event())
    with served(folder) as server:
        status, text, headers = ask(server)
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        assert 'data-state="watched"' in text
        assert "connect-src 'self'" in text
        assert "1 of 4" in Page(text).text
        write_events(folder, round_event(), round_event(round=1))
        assert "2 of 4" in Page(ask(server, "/report")[1]).text
        edit_record(folder, lambda record: record.update(finished=True))
        text = ask(server, "/report")[1]
        assert 'data-state="complete"' in text
        assert "section-results" in Page(text).attributes("id")
        (folder / "results.csv").unlink()
        assert ask(server)[0] == 200  # a complete run does not change: its page is kept


def test_a_page_is_not_made_for_every_request(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", finished=False)
    monkeypatch.setattr(watch, "EVERY", 3600.0)
    with served(folder) as server:
        first = ask(server)[1]
        write_events(folder, round_event())
        assert ask(server)[1] == first


def test_nothing_else_is_served_and_to_nobody_else(tmp_path):
    folder = write_run(tmp_path / "run")
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/run.json", "/../run.json", "//etc/passwd", "/report/", "/?a",
                     "/favicon.ico"):
            assert ask(server, path)[0] == 404
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1:1",
                     "localhost.evil.example", ""):
            status, text, _ = ask(server, Host=host)
            assert status == 403
            assert "Results" not in text
        port = server.server_port
        assert ask(server, Host=f"localhost:{port}")[0] == 200
        assert ask(server, Host=f"localhost:{port}", Origin="http://evil.example")[0] == 403
        assert ask(server, method="POST")[0] == 501
        status, text, headers = ask(server, method="HEAD")
        assert (status, text) == (200, "")
        assert int(headers["Content-Length"]) > 1000


def test_a_run_that_goes_away(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "EVERY", 0.0)
    folder = write_run(tmp_path / "run", finished=False)
    with served(folder) as server:
        (folder / "run.json").unlink()
        status, text, _ = ask(server)
        assert status == 503
        assert "no run here" in text


def test_bad_input_is_one_line(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err
    folder = write_run(tmp_path / "run")
    with served(folder) as server, pytest.raises(TapflError, match="--port"):
        serve(folder, server.server_port)
    with pytest.raises(TapflError, match="--port 99999"):
        serve(folder, 99999)
