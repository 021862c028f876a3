"""The report of a run while it goes on, served to this machine's own browser."""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tapfl.errors import TapflError
from tapfl.report.gather import gather
from tapfl.report.html import render
from tapfl.report.markup import tag

ADDRESS = "127.0.0.1"
EVERY = 3.0  # seconds; a page is made again no sooner
PATHS = ("/", "/report")


class Watch:
    """A run's page, made again when it is asked for and old."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._made = 0.0
        self._page = b""
        self._complete = False

    def page(self) -> bytes:
        """Return the page as it is now; that of a complete run is made once."""
        with self._lock:
            if not self._complete and (not self._page or time.monotonic() - self._made > EVERY):
                gathered = gather([self.folder])
                self._page = render(gathered, watched=True).encode()
                self._complete = gathered.finished
                self._made = time.monotonic()
            return self._page


class Server(ThreadingHTTPServer):
    """Answers on the loopback address alone."""

    daemon_threads = True

    def __init__(self, watch: Watch, port: int) -> None:
        self.watch = watch
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            raise TapflError(f"--port {port}: cannot be used ({error})") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        if not self._is_local():
            return self._send(HTTPStatus.FORBIDDEN, b"this page is for this machine alone", whole)
        if self.path not in PATHS:
            return self._send(HTTPStatus.NOT_FOUND, b"there is one page here: /", whole)
        try:
            return self._send(HTTPStatus.OK, self.server.watch.page(), whole)
        except TapflError as error:  # such as a run that is gone by now
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE,
                              tag("p", str(error)).encode(), whole)

    def _is_local(self) -> bool:
        """Refuse a page of somebody else's whose name was made to point at this machine."""
        name, _, port = self.headers.get("Host", "").partition(":")
        return (name in (ADDRESS, "localhost") and port in ("", str(self.server.server_port))
                and self.headers.get("Origin") in (None, f"http://{name}:{port}"))

    def _send(self, status: HTTPStatus, content: bytes, whole: bool) -> None:
        self.send_response(status)
        kind = "html" if status is HTTPStatus.OK else "plain"
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if whole:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the terminal belongs to whoever started this."""


def serve(folder: Path, port: int) -> Server:
    """Return a server of a run's page; a folder without a run is refused at once."""
    watch = Watch(folder)
    watch.page()
    return Server(watch, port)
