"""Clients of a front: kinds and topics, and open streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.settings import PRODUCER
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.runtime.clock import clock as own_clock
from outbox.store.fronts.clients import AGAIN

#: A client without an open stream is there for so long after the last heartbeat, as in RocketMQ.
ALIVE_SECONDS = 30.0
MOST_CLIENTS = 5000
#: A client sends its settings so soon after it has opened a stream, if it sends them at all.
_SETTINGS_SECONDS = 1.0
#: A look for clients that have gone goes through all of them, so a crowd of new ones does not cause more.
_LOOK_SECONDS = 1.0


class Stream(Protocol):
    """An open stream to a client."""

    def write(self, command: Wire) -> bool:
        """Write a command, from any thread but the stream's; return whether the stream took it and stays open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPolicy:
    """What clients of a front may do.

    `most`: further clients are refused until one has gone. `create_topics`: a missing topic
    is made with the type NORMAL when a client asks. `strict_groups`: only added consumer groups receive.
    """

    most: int = MOST_CLIENTS
    create_topics: bool = False
    strict_groups: bool = False


@dataclass(slots=True)
class Client:
    """A client: its kind and topics, the open streams from the oldest on, and the last sign of life by the clock.

    `kind`: None until known. `noted`: the moment when the row of the client was written last; None: a row is due.
    `looked`: no look for a row is due.
    """

    seen: float
    kind: int | None = None
    topics: frozenset[str] = frozenset()
    streams: dict[Stream, None] = field(default_factory=dict)
    noted: float | None = None
    looked: bool = False


class Clients:
    """All clients of a front; any thread may ask."""

    def __init__(self, most: int = MOST_CLIENTS, *, clock: Callable[[], float] = own_clock) -> None:
        """`most`: further clients are refused. `clock`: returns seconds that never go back."""
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        #: The number of open streams beyond the first one of each client: each counts as a client.
        self._beyond = 0
        #: Clients without a stream whose kind is not known.
        self._strange: set[str] = set()
        #: No client has gone before this moment by the clock, as far as a look at all of them can tell.
        self._full_until = 0.0

    def opened(self, id: str, stream: Stream) -> None:
        """Note a client's stream, asked instead of older streams until the end; each counts as a client.

        Raises:
            RefusedError: there are too many clients.
        """
        with self._lock:
            client = self._of(id)
            if client.streams:
                self._require_room()
                self._beyond += 1
            client.streams[stream] = None

    def closed(self, id: str, stream: Stream) -> None:
        """Forget a client's stream; kind and topics stay."""
        with self._lock:
            client = self._clients.get(id)
            if client is None or stream not in client.streams:
                return
            del client.streams[stream]
            self._beyond -= bool(client.streams)
            client.seen = self._clock()
            if client.kind is None and not client.streams:
                del self._clients[id]

    def declared(self, id: str, kind: int, topics: frozenset[str]) -> None:
        """Note the settings of a client.

        Raises:
            RefusedError: there are too many clients.
        """
        with self._lock:
            client = self._of(id)
            if (client.kind, client.topics) != (kind, topics):
                client.kind, client.topics, client.noted = kind, topics, None

    def beat(self, id: str) -> bool:
        """Note a sign of life; return whether the kind of the client is known."""
        with self._lock:
            client = self._clients.get(id)
            if client is None or client.kind is None:
                if client is None and len(self._strange) < self._most:
                    self._strange.add(id)
                return False
            client.seen = self._clock()
            return True

    def gone(self, id: str) -> None:
        """Forget kind and topics of a client after a good-bye; open streams stay noted until the end."""
        with self._lock:
            client = self._clients.get(id)
            if client is None:
                return
            client.kind, client.topics, client.looked = None, frozenset(), True
            if not client.streams:
                del self._clients[id]

    def counts(self) -> tuple[int, int]:
        """Return the numbers of clients and of their open streams."""
        with self._lock:
            return len(self._clients), sum(len(client.streams) for client in self._clients.values())

    def alive(self, id: str) -> bool:
        """Return whether a client has an open stream, or a recent heartbeat."""
        with self._lock:
            client = self._clients.get(id)
            return client is not None and self._is_alive(client)

    def producers(self, topic: str) -> list[Stream]:
        """Return the newest stream of each producer of a topic."""
        with self._lock:
            return [
                next(reversed(client.streams))
                for client in self._clients.values()
                if client.streams and client.kind == PRODUCER and topic in client.topics
            ]

    def due(self) -> list[tuple[str, int, frozenset[str]]]:
        """Return the clients whose rows are due: id, kind and topics."""
        again = self._clock() - AGAIN.total_seconds()
        with self._lock:
            return [
                (id, client.kind, client.topics)
                for id, client in self._clients.items()
                if client.kind is not None and (client.noted is None or client.noted <= again)
                if self._is_alive(client)
            ]

    def noted(self, clients: Collection[tuple[str, int, frozenset[str]]]) -> None:
        """Note that the rows of clients were written."""
        with self._lock:
            for id, kind, topics in clients:
                client = self._clients.get(id)
                if client is not None and (client.kind, client.topics) == (kind, topics):
                    client.noted = self._clock()

    def asked(self, ids: Collection[str]) -> None:
        """Let the rows of clients be written anew, for another front."""
        with self._lock:
            for id in ids:
                if id in self._clients:
                    self._clients[id].noted = None

    def unknown(self) -> list[str]:
        """Return clients for a look at the rows: streams without settings, and heartbeats of unknown clients."""
        before = self._clock() - _SETTINGS_SECONDS
        with self._lock:
            silent = [
                id
                for id, client in self._clients.items()
                if client.kind is None and not client.looked and client.seen <= before
            ]
            return [*silent, *self._strange]

    def learned(self, asked: Collection[str], found: Collection[tuple[str, int, frozenset[str]]]) -> None:
        """Note kinds and topics from rows, after a look for some clients."""
        with self._lock:
            self._strange.difference_update(asked)
            for id in asked:
                if id in self._clients:
                    self._clients[id].looked = True
            for id, kind, topics in found:
                with suppress(RefusedError):
                    client = self._of(id)
                    if client.kind is None:
                        client.kind, client.topics, client.noted = kind, topics, self._clock()

    def _of(self, id: str) -> Client:
        """Return a client after a sign of life; a new client, if there is room."""
        client = self._clients.get(id)
        if client is None:
            self._require_room()
            client = self._clients[id] = Client(self._clock())
        client.seen = self._clock()
        return client

    def _require_room(self) -> None:
        """Refuse another client or stream if there are too many; first forget clients that have gone."""
        if self._number() >= self._most and self._clock() >= self._full_until:
            self._clients = {each: found for each, found in self._clients.items() if self._is_alive(found)}
            self._full_until = self._clock() + _LOOK_SECONDS
        if self._number() >= self._most:
            raise RefusedError(
                Code.TOO_MANY_REQUESTS, f"the front has {self._most} clients, as many as --max-clients allows"
            )

    def _number(self) -> int:
        return len(self._clients) + self._beyond

    def _is_alive(self, client: Client) -> bool:
        return bool(client.streams) or self._clock() - client.seen < ALIVE_SECONDS
