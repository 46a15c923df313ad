"""An endpoint for webhooks: a web server that keeps what it is sent.

As a program it keeps it in a file, so that it may be killed: `python webhook_endpoint.py PORT FILE`. It uses nothing
but Python's own library, which reads HTTP with other code than the driver that writes it.
"""

import base64
import json
import os
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Received:
    """One request. Names of headers are as they came."""

    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What it is answered."""

    status: int = 204
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Judge = Callable[[Received], Answer]


class Endpoint(ThreadingHTTPServer):
    """A server that asks `judge` for each answer, and keeps what is answered with a status from 200 to 299."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        scheme = "http" if tls is None else "https"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{scheme}://127.0.0.1:{self.server_port}"
        self.judge: Judge = lambda received: Answer()
        #: Every request, and those that were accepted, in the order of arrival.
        self.asked: list[Received] = []
        self.kept: list[Received] = []
        #: How many connections there were.
        self.connections = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def answer(self, received: Received) -> Answer:
        """Decide about a request, and keep it."""
        with self._lock:
            self.asked.append(received)
        answer = self.judge(received)
        if 200 <= answer.status < 300:
            with self._lock:
                self.keep(received)
        return answer

    def keep(self, received: Received) -> None:
        """Keep it in memory."""
        self.kept.append(received)

    def verify_request(self, request: object, client_address: object) -> bool:
        """Count the connection."""
        self.connections += 1
        return True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients whose connection is cut are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Say which program this is."""
        self._write(Answer(200, str(os.getpid()).encode()))

    def do_POST(self) -> None:
        """Take a webhook, if all of it has come."""
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        self._write(self.server.answer(Received(self.path, dict(self.headers.items()), body)))

    def _write(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status >= 200 and answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if answer.body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class FilingEndpoint(Endpoint):
    """Keeps what it is sent in a file, of which nothing is lost when the program is killed."""

    def __init__(self, port: int, path: str) -> None:
        super().__init__(port)
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def keep(self, received: Received) -> None:
        """Append a line."""
        body = base64.b64encode(received.body).decode()
        line = {"target": received.target, "headers": dict(received.headers), "body": body}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_file(path: Path) -> list[Received]:
    """What such a program has kept. The last line may be torn."""
    lines = (json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
    return [Received(line["target"], line["headers"], base64.b64decode(line["body"])) for line in lines]


if __name__ == "__main__":
    FilingEndpoint(int(sys.argv[1]), sys.argv[2]).serve_forever()
