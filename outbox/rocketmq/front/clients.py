"""Clients of a front: what they are, their open streams, and questions to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.settings import PRODUCER
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.runtime.clock import clock as own_clock

#: A client without an open stream is there for so long after the last heartbeat, as in RocketMQ.
ALIVE_SECONDS = 30.0
MOST_CLIENTS = 5000
#: Streams that are tried for a question: each may take seconds, and a question has a time limit.
_MOST_TRIED = 2


class Stream(Protocol):
    """An open stream to a client."""

    def write(self, command: Wire) -> bool:
        """Write a command, from any thread but the stream's; return whether the stream took it and stays open."""


@dataclass(slots=True)
class Client:
    """A client: its kind and topics, the open streams from the oldest on, and when it was seen last by the clock.

    `kind`: None until the client has sent settings.
    """

    seen: float
    kind: int | None = None
    topics: frozenset[str] = frozenset()
    streams: list[Stream] = field(default_factory=list)


class Clients:
    """All clients of a front; any thread may ask."""

    def __init__(self, most: int = MOST_CLIENTS, *, clock: Callable[[], float] = own_clock) -> None:
        """`most`: further clients are refused. `clock`: returns seconds that never go back."""
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        #: The number of questions that no producer took: the next one begins with another producer.
        self._missed = 0

    def opened(self, id: str, stream: Stream) -> None:
        """Note a client's stream, which is asked instead of older ones while it is open.

        Raises:
            RefusedError: there are too many clients.
        """
        with self._lock:
            self._of(id).streams.append(stream)

    def closed(self, id: str, stream: Stream) -> None:
        """Forget a client's stream; what the client is stays."""
        with self._lock:
            client = self._clients.get(id)
            if client is None or stream not in client.streams:
                return
            client.streams.remove(stream)
            client.seen = self._clock()
            if client.kind is None and not client.streams:
                del self._clients[id]

    def declared(self, id: str, kind: int, topics: frozenset[str]) -> None:
        """Note what a client says of itself.

        Raises:
            RefusedError: there are too many clients.
        """
        with self._lock:
            client = self._of(id)
            client.kind, client.topics = kind, topics

    def beat(self, id: str) -> bool:
        """Note a sign of life; return whether the client has sent settings."""
        with self._lock:
            client = self._clients.get(id)
            if client is None or client.kind is None:
                return False
            client.seen = self._clock()
            return True

    def gone(self, id: str) -> None:
        """Forget what a client is after a good-bye; its streams are noted until their end."""
        with self._lock:
            client = self._clients.get(id)
            if client is None:
                return
            client.kind, client.topics = None, frozenset()
            if not client.streams:
                del self._clients[id]

    def alive(self, id: str) -> bool:
        """Return whether a client has an open stream, or a recent heartbeat."""
        with self._lock:
            client = self._clients.get(id)
            return client is not None and self._is_alive(client)

    def ask(self, topic: str, command: Wire, *, turn: int) -> bool:
        """Write a command to a producer of a topic; return False if no producer took the command.

        `turn`: chooses the producer; the next number chooses the next one.
        """
        with self._lock:
            streams = [
                client.streams[-1]
                for client in self._clients.values()
                if client.streams and client.kind == PRODUCER and topic in client.topics
            ]
            first = (turn + self._missed) % len(streams) if streams else 0
        if any(stream.write(command) for stream in (streams[first:] + streams[:first])[:_MOST_TRIED]):
            return True
        with self._lock:
            self._missed += 1
        return False

    def _of(self, id: str) -> Client:
        """Return a client after a sign of life; a new client, if there is room."""
        client = self._clients.get(id)
        if client is None:
            if len(self._clients) >= self._most:
                self._clients = {each: found for each, found in self._clients.items() if self._is_alive(found)}
            if len(self._clients) >= self._most:
                raise RefusedError(
                    Code.TOO_MANY_REQUESTS, f"the front has {self._most} clients, as many as --max-clients allows"
                )
            client = self._clients[id] = Client(self._clock())
        client.seen = self._clock()
        return client

    def _is_alive(self, client: Client) -> bool:
        return bool(client.streams) or self._clock() - client.seen < ALIVE_SECONDS
