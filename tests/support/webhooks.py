"""Webhooks for tests: an endpoint behind a network that fails, and what stands in for one where it must be watched."""

import http.client
import signal
import socket
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from outbox.senders.webhook import WebhookSender
from outbox.senders.webhook_reading import read_message
from outbox.testing.sender_contract import Stored
from outbox.testing.servers import LocalServer
from tests.support import webhook_endpoint
from tests.support.remote import Place, stored_of
from tests.support.servers.proxy import TcpProxy
from tests.support.stand_ins import StandIn
from tests.support.webhook_endpoint import Answer, Endpoint, Received, read_file

#: A password with a character that a URL has to quote.
SECRET = "s3cr3t/Sesame"
REFUSAL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"


class Hook(Place):
    """A path of an endpoint, reached through a proxy."""

    sender = WebhookSender

    def __init__(self, endpoint: Endpoint, proxy: TcpProxy) -> None:
        super().__init__(proxy)
        self.endpoint = endpoint
        self.url = f"http://127.0.0.1:{proxy.port}/hooks/{uuid.uuid4().hex[:12]}?tenant=7"
        self._failing: set[str] = set()
        endpoint.judge = self._judge

    def stored(self) -> list[Stored]:
        """What was accepted, as a consumer of an outbox reads it."""
        return stored(self.endpoint.kept)

    def fail(self, topic: str) -> None:
        """Answer 500 to it."""
        self._failing.add(topic)

    def recover(self) -> None:
        """The proxy passes everything on."""
        self._failing.clear()
        super().recover()

    def _judge(self, received: Received) -> Answer:
        return Answer(500) if received.headers["Outbox-Topic"] in self._failing else Answer()


def stored(received: Sequence[Received]) -> list[Stored]:
    """What a consumer of an outbox makes of requests."""
    return [stored_of(read_message(each.headers, each.body)) for each in received]


class Gate:
    """Judges for an endpoint: it sees what arrives, and answers when it is told to."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._waiting: list[tuple[bytes, threading.Event]] = []
        self._changed = threading.Condition()
        endpoint.judge = self._judge

    def arrivals(self, at_least: int) -> list[bytes]:
        """The bodies that wait for an answer, sorted; `at_least` so many, and what comes right behind."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._waiting) >= at_least, timeout=60)
        time.sleep(0.2)
        with self._changed:
            return sorted(body for body, _ in self._waiting)

    def answer(self) -> None:
        """Accept all of them."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for _, may_go in waiting:
            may_go.set()

    def _judge(self, received: Received) -> Answer:
        may_go = threading.Event()
        with self._changed:
            self._waiting.append((received.body, may_go))
            self._changed.notify_all()
        may_go.wait(60)
        return Answer()


class EndpointProgram(LocalServer):
    """An endpoint in a process of its own, which may be killed and paused."""

    _stop_signals = (signal.SIGTERM,)

    def __init__(self) -> None:
        super().__init__("webhook", None, None)
        self.file = self.folder / "kept.jsonl"
        self.file.touch()

    @property
    def url(self) -> str:
        """Where it is, without a proxy."""
        return f"http://127.0.0.1:{self.port}/hooks"

    @property
    def kept(self) -> list[Received]:
        """Everything that it has accepted, in all its lives."""
        return read_file(self.file)

    def _command(self) -> Sequence[str | Path]:
        return [sys.executable, str(webhook_endpoint.__file__), str(self.port), self.file]

    def _answers(self) -> bool:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            client.request("GET", "/")
            said = client.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            client.close()
        return self._program is not None and said == str(self._program.pid).encode()


class Filed(Place):
    """A path of such a program, and what was accepted there, as a consumer of an outbox reads it."""

    sender = WebhookSender

    def __init__(self, server: EndpointProgram, proxy: TcpProxy) -> None:
        super().__init__(proxy)
        self.server = server
        self._path = f"/hooks/{uuid.uuid4().hex[:12]}"
        self.url = f"http://127.0.0.1:{proxy.port}{self._path}"

    def stored(self) -> list[Stored]:
        """In all its lives."""
        return stored([each for each in self.server.kept if each.target == self._path])


class Parrot(StandIn):
    """Stands in for a server: it says the same to everybody, whatever it is asked, and keeps what it heard.

    What it says is a text, or several with pauses between them.
    """

    def __init__(self, *said: bytes, pause: float = 0.0, closes: bool = True) -> None:
        super().__init__()
        self.heard = b""
        self.connections = 0
        self._said = said
        self._pause = pause
        self._closes = closes
        self.url = f"http://127.0.0.1:{self.port}/hook"

    def serve(self, client: socket.socket) -> None:
        """Speak beside the next client."""
        self.connections += 1
        threading.Thread(target=self._speak, args=(client,), daemon=True).start()

    def _speak(self, client: socket.socket) -> None:
        try:
            with client:
                self.heard += client.recv(65_536)
                for part in self._said:
                    client.sendall(part)
                    time.sleep(self._pause)
                while not self._closes and (more := client.recv(65_536)):
                    self.heard += more
        except OSError:
            pass  # the client has heard enough


class Babbler(StandIn):
    """Stands in for a server that says more than it is asked for on its first connection."""

    def __init__(
        self,
        *said: Sequence[bytes],
        tls: ssl.SSLContext | None = None,
        pause: float | None = 0.05,
        later: bytes = REFUSAL,
    ) -> None:
        """Answer the requests of the first connection with these, one after the other; each may come in parts.

        Without a pause between parts they come in one packet; None: each pause lasts until `go_on`. `later`: the answer
        to all requests of other connections.
        """
        super().__init__()
        self.connections = 0
        self.go_on = threading.Event()
        #: All parts of the first answer were said.
        self.has_answered = threading.Event()
        self._pause = pause
        self._later = later
        self._said = said
        self._tls = tls
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.port}/hook"

    def serve(self, client: socket.socket) -> None:
        """Speak beside the next client."""
        said = self._said if self.connections == 0 else [[self._later]] * 100
        self.connections += 1
        threading.Thread(target=self._speak, args=(client, said), daemon=True).start()

    def _speak(self, client: socket.socket, said: Sequence[Sequence[bytes]]) -> None:
        with suppress(OSError), client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            safe = client if self._tls is None else self._tls.wrap_socket(client, server_side=True)
            with safe, safe.makefile("rb") as requests:
                for parts in said:
                    length = 0
                    while (line := requests.readline()) != b"\r\n":
                        if not line:
                            return
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.partition(b":")[2])
                    requests.read(length)
                    safe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, self._pause == 0)
                    for part in parts:
                        safe.sendall(part)
                        self.go_on.wait(self._pause)
                    safe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, False)
                    self.has_answered.set()
                requests.readline()


def told(url: str, what: str) -> str:
    """The text of a verdict on a webhook's URL."""
    return f"Webhook: {url}: {what}"
