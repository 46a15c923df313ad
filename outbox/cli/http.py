"""The HTTP server of `--http`: answers probes in threads of its own, whatever the works do."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

import click

from outbox.admin.gauges import Looks
from outbox.cli.output import printable, say, scrubbed
from outbox.errors import MissingExtraError
from outbox.relay.supervisor import Supervisor
from outbox.runtime.document import json_text
from outbox.store.failure import in_one_line
from outbox.telemetry.events import EVERYWHERE
from outbox.telemetry.metrics import OF_STATE, Metrics

logger = logging.getLogger("outbox")

#: At most so many connections are open, each for at most so many seconds.
MOST_CONNECTIONS = 16
MOST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_TEXT = "text/plain; charset=utf-8"

#: Status, content type and body.
Answer = tuple[int, str, bytes]


@contextmanager
def serving(host: str, port: int, supervisor: Supervisor, looks: Looks) -> Iterator[int]:
    """Answer probes about works at an address until the block ends; yield the port, which is a free one for 0.

    `looks`: at the databases of the works.
    """
    with ExitStack() as open:
        routes: dict[str, Callable[[], Answer]] = {
            "/livez": lambda: _livez(supervisor),
            "/readyz": lambda: _readyz(supervisor),
            "/metrics": _metrics(open, looks),
            "/status": lambda: _status(looks),
        }
        try:
            server = open.enter_context(_Server(host, port, routes))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "that is no name of a host"
            fix = "give an address of this machine and a free port"
            raise click.UsageError(f"--http {host}:{port}: {why}; {fix}") from None
        threading.Thread(target=server.serve_forever, name="outbox-http", daemon=True).start()
        open.callback(server.shutdown)
        at = server.socket.getsockname()[1]
        say(f"http://{f'[{host}]' if ':' in host else host}:{at} answers {' '.join(routes)}")
        yield at


def _livez(supervisor: Supervisor) -> Answer:
    """Answer whether the loop of each work goes round. A destination or a database that is away is no reason."""
    stuck = [each.name for each in supervisor.health if each.stuck]
    return _text(503, f"stuck: {', '.join(stuck)}") if stuck else _text(200, "ok")


def _readyz(supervisor: Supervisor) -> Answer:
    """Answer whether each work has reached its database, and works or stands by."""
    health = supervisor.health
    troubles = [f"{each.name}: {'stuck' if each.stuck else each.trouble}" for each in health if not each.ready]
    if not health:
        troubles = ["not begun yet"]
    return _text(503, "\n".join(troubles)) if troubles else _text(200, "ok")


def _status(looks: Looks) -> Answer:
    """Answer what `outbox status --json` prints; for several databases, an object with a status for each."""
    found = looks.all()
    texts = {
        label: json_text({"error": scrubbed(in_one_line(look)[0])} if isinstance(look, Exception) else look.document())
        for label, look in found.items()
    }
    inner = ",".join(f"{json.dumps(label)}:{text}" for label, text in texts.items())
    body = f"{{{inner}}}" if len(texts) > 1 else "".join(texts.values())
    failed = any(isinstance(each, Exception) for each in found.values())
    return 503 if failed else 200, "application/json", body.encode()


def _metrics(open: ExitStack, looks: Looks) -> Callable[[], Answer]:
    """Count events until the block ends; return the answer to /metrics."""
    try:
        from outbox.telemetry.prometheus import CONTENT_TYPE, PrometheusExporter
    except MissingExtraError as error:
        missing = str(error)
        return lambda: _text(501, missing)
    exporter = PrometheusExporter()
    exporter.observe(OF_STATE, looks.samples)
    open.callback(EVERYWHERE.unlisten, EVERYWHERE.listen(Metrics(exporter).told))
    return lambda: (200, CONTENT_TYPE, exporter.exposed())


def _text(status: int, text: str) -> Answer:
    lines = (printable(scrubbed(line)) for line in text.split("\n"))
    return status, _TEXT, "".join(f"{line}\n" for line in lines).encode()


class _Server(ThreadingMixIn, TCPServer):
    """Serves each connection in a thread. A connection that is slow, or the oldest of too many, is cut off."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, routes: Mapping[str, Callable[[], Answer]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        #: Since when each open connection is open, the oldest first.
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:
            # For want of descriptors; the server would try again at once, and take a processor.
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                _cut_off(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut slow connections off; called twice a second."""
        with self._lock:
            for request, since in self._open.items():
                if time.monotonic() - since > MOST_SECONDS:
                    _cut_off(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, unless the client went away or was cut off."""
        error = sys.exception()
        if not isinstance(error, OSError):
            logger.error("--http: a request failed", exc_info=error)


def _cut_off(request: socket.socket) -> None:
    """End the connection; the thread that reads or writes there notices."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    server_version, sys_version = "outbox", ""

    def do_GET(self) -> None:
        """Answer a probe."""
        status, kind, body = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> Answer:
        routes = self.server.routes
        try:
            path = urlsplit(self.path).path
        except ValueError:
            return _text(400, f"no address; try {' '.join(routes)}")
        route = routes.get(path)
        if route is None:
            return _text(404, f"try {' '.join(routes)}")
        try:
            return route()
        except Exception as error:
            # A monitor would take an empty answer for a process that is gone.
            logger.exception("--http: %s failed", path)
            return _text(500, in_one_line(error)[0])

    do_HEAD = do_GET  # noqa: N815 - the name that the server calls

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a probe comes every few seconds."""
