"""Clients of a front: their settings, their open streams, and questions to them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.settings import PRODUCER, topics_of
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.runtime.clock import clock

#: A client without an open stream is there for so long after the last heartbeat, as in RocketMQ.
ALIVE_SECONDS = 30.0
#: A client that shows no sign for so long is forgotten.
_FORGOTTEN_SECONDS = 3600.0
MOST_CLIENTS = 5000
#: Streams that are tried for a question: each may take seconds, and a question has a time limit.
_MOST_TRIED = 2


class Stream(Protocol):
    """An open stream to a client."""

    def write(self, command: Wire) -> bool:
        """Write a command, from any thread but the stream's; return whether the stream took it and stays open."""


@dataclass(slots=True)
class Client:
    """A client: the last settings, the open stream, and the moment of the last sign of life by `clock`."""

    seen: float
    settings: Wire | None = None
    topics: frozenset[str] = field(default_factory=frozenset)
    stream: Stream | None = None


class Clients:
    """All clients of a front; any thread may ask."""

    def __init__(self, most: int = MOST_CLIENTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        #: The number of questions so far, by which producers of a topic take turns.
        self._asked = 0

    def opened(self, id: str, stream: Stream) -> None:
        """Note a client's stream, instead of an older one.

        Raises:
            RefusedError: there are too many clients.
        """
        with self._lock:
            self._of(id).stream = stream

    def closed(self, id: str, stream: Stream) -> None:
        """Forget a client's stream, unless a newer stream is open; the settings stay."""
        with self._lock:
            client = self._clients.get(id)
            if client is not None and client.stream is stream:
                client.stream = None
                client.seen = clock()

    def declared(self, id: str, settings: Wire) -> None:
        """Note a client's settings."""
        with self._lock:
            client = self._of(id)
            client.settings, client.topics = settings, topics_of(settings)

    def beat(self, id: str) -> bool:
        """Note a sign of life; return whether the client's settings are known."""
        with self._lock:
            client = self._clients.get(id)
            if client is None or client.settings is None:
                return False
            client.seen = clock()
            return True

    def gone(self, id: str) -> None:
        """Forget a client after a good-bye."""
        with self._lock:
            self._clients.pop(id, None)

    def alive(self, id: str) -> bool:
        """Return whether a client has an open stream, or a recent heartbeat."""
        with self._lock:
            client = self._clients.get(id)
            return client is not None and (client.stream is not None or clock() - client.seen < ALIVE_SECONDS)

    def settings(self, id: str) -> Wire | None:
        """Return the last settings of a client; None: it has sent none."""
        with self._lock:
            client = self._clients.get(id)
            return None if client is None else client.settings

    def ask(self, topic: str, command: Wire) -> bool:
        """Write a command to a producer of a topic, by turns; return False if no producer took the command."""
        with self._lock:
            streams = [
                client.stream
                for client in self._clients.values()
                if client.stream is not None and client.settings is not None
                if client.settings.client_type == PRODUCER and topic in client.topics
            ]
            self._asked += 1
            first = self._asked % len(streams) if streams else 0
        return any(stream.write(command) for stream in (streams[first:] + streams[:first])[:_MOST_TRIED])

    def _of(self, id: str) -> Client:
        """Return a client after a sign of life; a new client, if there is room."""
        client = self._clients.get(id)
        if client is None:
            if len(self._clients) >= self._most:
                self._forget()
            if len(self._clients) >= self._most:
                raise RefusedError(Code.TOO_MANY_REQUESTS, f"there are {self._most} clients")
            client = self._clients[id] = Client(clock())
        client.seen = clock()
        return client

    def _forget(self) -> None:
        oldest = clock() - _FORGOTTEN_SECONDS
        for id in [id for id, each in self._clients.items() if each.stream is None and each.seen < oldest]:
            del self._clients[id]
