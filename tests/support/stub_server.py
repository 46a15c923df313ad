"""A server in memory, behind the skeleton of remote senders: the weather changes at a word, and no time passes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from outbox.model.verdict import DONE, Unavailable
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.remote import Call, Connection, RemoteSender
from outbox.testing.sender_contract import Destination, Stored
from tests.support.remote import stored_of

#: Points of a call at which a server may fail: at the login, before a message is stored, and before the answer.
Point = Literal["open", "store", "answer"]
#: At a point of a connection: go on, perhaps after a wait, or raise what a driver raises.
Weather = Callable[["StubConnection", Point], Awaitable[None] | None]
NAME = "stub"


class Silence(Exception):  # noqa: N818 - a state of the network
    """No byte comes any more."""


class StubServer(Destination):
    """Stores messages in memory.

    `weather`: asked at each point. `waits`: whether a silent server is waited for in real time; if not, the clock of
    the sender's event loop leaps to the end of the wait.
    """

    deadline = 60.0

    def __init__(self, *names: str) -> None:
        self.names = names or (NAME,)
        self.copies: list[Stored] = []
        self.connections: list[StubConnection] = []
        self.weather: Weather = fine
        self.waits = False
        #: The most messages that were under way at once, and the most bytes of their bodies.
        self.most = self.most_bytes = 0
        self._failing: set[str] = set()

    def open(self) -> RemoteSender:
        """Return a sender with a minute for each call."""
        return RemoteSender("Stub", "stub://host", self.names, self.connect, seconds=60)

    def connect(self, server: str, log: ConnectionLog) -> "StubConnection":
        """Make a connection, as the skeleton asks for it."""
        self.connections.append(StubConnection(server, log, self))
        return self.connections[-1]

    def stored(self) -> Sequence[Stored]:
        """Return all copies."""
        return list(self.copies)

    def fail(self, topic: str) -> None:
        """Refuse a topic."""
        self._failing.add(topic)

    def refuses(self, topic: str) -> bool:
        """Return whether messages of a topic are refused."""
        return topic in self._failing

    def disappear(self) -> None:
        """Refuse connections, and break those that are open."""
        self.weather = refusing

    def fall_silent(self) -> None:
        """Answer no more."""
        self.weather = silent

    def lose_next_answer(self) -> None:
        """Break the connection that waits for the next answer."""
        self.weather = Once("answer")

    def recover(self) -> None:
        """Work again."""
        self.weather = fine

    def open_connections(self) -> list["StubConnection"]:
        """Return the connections that nobody has closed."""
        return [each for each in self.connections if not each.is_closed]


class StubConnection(Connection):
    """A connection to a stub: all messages that may be under way are, and the server stores one after the other."""

    def __init__(self, server: str, log: ConnectionLog, stub: StubServer) -> None:
        super().__init__(server, log)
        self._stub = stub
        #: Whether the next call needs another connection, although this one is open.
        self.is_stale = False

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed or stale."""
        return self.is_closed or self.is_stale

    async def open(self, deadline: float) -> None:
        """Log in."""
        await self._come("open", deadline)
        self.log.connected(self.server)

    async def carry(self, call: Call) -> None:
        """Have the messages stored, and each answered."""
        stub, chains = self._stub, call.chains
        while chains.left:
            under_way = chains.take_all()
            stub.most = max(stub.most, len(under_way))
            stub.most_bytes = max(stub.most_bytes, sum(len(call.messages[index].body) for index in under_way))
            for index in under_way:
                message = call.messages[index]
                await self._come("store", call.deadline)
                if stub.refuses(message.topic):
                    chains.settle(index, Unavailable("refused"))
                    continue
                stub.copies.append(stored_of(message))
                await self._come("answer", call.deadline)
                chains.settle(index, DONE)

    async def close(self) -> None:
        """Close."""
        self.is_closed = True

    async def _come(self, point: Point, deadline: float) -> None:
        """Come to a point; wait for a silent server until the deadline."""
        await asyncio.sleep(0)
        if self.is_closed:
            raise ConnectionError("another call has closed the connection")
        try:
            wait = self._stub.weather(self, point)
            if wait is not None:
                await wait
        except Silence:
            if not self._stub.waits:
                leap(deadline)
            async with asyncio.timeout_at(deadline):
                await asyncio.get_running_loop().create_future()


class Once:
    """The connection breaks at the `n`-th time that any call comes to a point."""

    def __init__(self, point: Point, n: int = 1) -> None:
        self._point = point
        self._left = n

    def __call__(self, _connection: StubConnection, point: Point) -> None:
        """Count, and break."""
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                raise ConnectionResetError("cut")


def fine(_connection: StubConnection, _point: Point) -> None:
    """Go on."""


def refusing(_connection: StubConnection, point: Point) -> None:
    """Refuse and break everything."""
    raise ConnectionRefusedError("refused" if point == "open" else "cut")


def silent(_connection: StubConnection, _point: Point) -> None:
    """Wait for an answer that never comes."""
    raise Silence


def leap(until: float) -> None:
    """Let the clock of the running event loop leap to a moment, so that whoever waits for the moment need not."""
    loop: Any = asyncio.get_running_loop()
    ahead = max(until, loop.time()) - time.monotonic()
    loop.time = lambda: time.monotonic() + ahead
