"""The skeleton of senders that speak asyncio: an own event loop, one connection, a deadline for each call.

A destination says how to open a connection, how to send the messages of a call, and how to close. When the connection
fails, or a call runs out of time, the next call makes a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import Unavailable, Verdict
from outbox.runtime.event_loop import BackgroundLoop
from outbox.senders.connection_log import ConnectionLog, reason_of
from outbox.senders.key_order import Chains
from outbox.senders.port import Doubt, Stored, destination_of

MOST_BYTES_UNDER_WAY = 8 * 1024 * 1024
#: The share of a call's time that the event loop keeps itself. The rest is for a machine too busy to notice in time.
_SHARE = 0.9


def one_of_a_key(messages: Sequence[Message]) -> Chains:
    """Return the usual order: a message waits for the previous message of the key; 512 are under way at most."""
    return Chains(messages, most=512, most_bytes=MOST_BYTES_UNDER_WAY)


class Call:
    """One call of `send`: messages, verdicts, and the end of the call by the loop's clock."""

    def __init__(self, messages: Sequence[Message], chains: Chains, seconds: float) -> None:
        self.messages = messages
        self.chains = chains
        self.seconds = seconds
        self.deadline = asyncio.get_running_loop().time() + seconds


class Connection(ABC):
    """A connection to a server, or a pool of connections. After a loss another connection is made."""

    def __init__(self, server: str, log: ConnectionLog) -> None:
        self.server = server
        self.log = log
        #: The calls that use the connection.
        self.calls = 0
        self.is_closed = False

    @property
    def is_lost(self) -> bool:
        """Whether the next call needs another connection."""
        return self.is_closed

    @abstractmethod
    async def open(self, deadline: float) -> None:
        """Connect and log in before the deadline, or raise. At the end of the call this is cancelled."""

    @abstractmethod
    async def carry(self, call: Call) -> None:
        """Settle the messages of a call before its deadline; raise if the connection is of no more use."""

    @abstractmethod
    async def close(self) -> None:
        """Close the socket at once; whatever is under way fails. Closing twice does no harm."""

    async def doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Return the settings under which the destination drops messages of these topics, as far as it tells."""
        return []

    async def leave(self) -> None:
        """Close the connection when the sender is closed."""
        await self.close()

    def words(self, error: Exception) -> str:
        """Return an error of the driver in words for people."""
        return reason_of(error)


class RemoteSender:
    """Sends by one connection at a time.

    `send` may be called in any thread, also in several at once, and returns before the deadline whatever the server
    does.

    Args:
        name: the kind of destination, for texts.
        url: the URL of the user.
        servers: asked for a connection in random order; for texts, too.
        connect: makes a connection to a server, not open yet.
        seconds: the time of a call.
        chains: the order and the number of messages under way.
    """

    def __init__(
        self,
        name: str,
        url: str,
        servers: Sequence[str],
        connect: Callable[[str, ConnectionLog], Connection],
        *,
        seconds: float,
        chains: Callable[[Sequence[Message]], Chains] = one_of_a_key,
    ) -> None:
        self.destination = destination_of(url)
        self.deadline = timedelta(seconds=seconds)
        self._name = name
        log = ConnectionLog(logging.getLogger(type(self).__module__), name)
        self._loop = BackgroundLoop(
            f"outbox-{name.lower()}", make=lambda: _Link(name, servers, connect, chains, log), close=_Link.close
        )

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send the messages; return one verdict per message, in their order."""
        if not messages:
            return []
        seconds = self.deadline.total_seconds()
        try:
            return self._loop.run(lambda link: link.deliver(messages, seconds * _SHARE), timeout=seconds)
        except TimeoutError:
            reason = f"no answer within {seconds:g} s"
        except CancelledError:  # by another thread: it has closed the sender, or its own call ran out of time
            reason = _CLOSED
        return [Unavailable(f"{self._name}: {reason}", everything=True)] * len(messages)

    def _doubts(self, topics: Mapping[str, Stored]) -> list[Doubt]:
        """Ask for the doubts, by a connection; for `doubts` of senders whose destination tells its settings."""
        seconds = self.deadline.total_seconds()
        return self._loop.run(lambda link: link.doubts(topics, seconds * _SHARE), timeout=seconds)

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._loop.stop()


_CLOSED = "the sender was closed"


class _Link:
    """The connection to the servers, made when needed. Used in one event loop."""

    def __init__(
        self,
        name: str,
        servers: Sequence[str],
        connect: Callable[[str, ConnectionLog], Connection],
        chains: Callable[[Sequence[Message]], Chains],
        log: ConnectionLog,
    ) -> None:
        self._name = name
        self._servers = servers
        self._connect = connect
        self._chains = chains
        self._log = log
        self._connecting = asyncio.Lock()
        self._connection: Connection | None = None
        self._is_closed = False

    async def deliver(self, messages: Sequence[Message], seconds: float) -> list[Verdict]:
        """Send a call's messages; without an answer after `seconds` a message is `Unavailable`."""
        call = Call(messages, self._chains(messages), seconds)
        connection = None
        try:
            async with asyncio.timeout_at(call.deadline), self._connecting:
                connection = await self._connected(call.deadline)
            await self._carry(connection, call)
        except Exception as error:  # any program may listen at that port, and answer anything
            text = self._text(connection, call, error)
            if connection is not None:
                await connection.close()
            call.chains.give_up(text)
        return call.chains.verdicts()

    async def doubts(self, topics: Mapping[str, Stored], seconds: float) -> list[Doubt]:
        """Ask the destination for its doubts; raise after `seconds`."""
        deadline = asyncio.get_running_loop().time() + seconds
        async with asyncio.timeout_at(deadline):
            async with self._connecting:
                connection = await self._connected(deadline)
            return await connection.doubts(topics)

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        self._is_closed = True
        if self._connection is not None:
            await self._connection.leave()

    async def _carry(self, connection: Connection, call: Call) -> None:
        connection.calls += 1
        try:
            await _by_driver(connection.carry(call))
        finally:
            connection.calls -= 1
            if connection.is_lost and not connection.calls:
                await connection.close()

    async def _connected(self, deadline: float) -> Connection:
        """Return the connection, or a new connection to the first server that answers."""
        before, loop = self._connection, asyncio.get_running_loop()
        if before is not None and not before.is_lost:
            return before
        if before is not None and not before.calls:
            await before.close()
        errors = []
        servers = random.sample(self._servers, len(self._servers))
        for asked, server in enumerate(servers):
            # Some time must be left for the servers that come later, and for the messages.
            share = (deadline - loop.time()) / (len(servers) - asked + 1)
            connection = self._connect(server, self._log)
            try:
                await _by_driver(connection.open(loop.time() + share))
                if not self._is_closed:
                    self._connection = connection
                    return connection
            except Exception as error:  # any program may listen at that port, and answer anything
                errors.append(f"{server}: {connection.words(error)}")
            finally:
                if self._connection is not connection:
                    await connection.close()
        raise ConnectionError("; ".join(errors))

    def _text(self, connection: Connection | None, call: Call, error: Exception) -> str:
        """Log why a call failed; return the text for its verdicts."""
        if self._is_closed:
            return f"{self._name}: {_CLOSED}"
        if asyncio.get_running_loop().time() >= call.deadline:
            error = TimeoutError(f"no answer within {call.seconds:g} s")
        if connection is None:
            return self._log.lost(reason_of(error))
        return self._log.lost(f"{connection.server}: {connection.words(error)}")


async def _by_driver(work: Coroutine[Any, Any, None]) -> None:
    """Await the work of a driver; a cancellation of a future of its own is an error of the driver.

    Only a close of the sender, and another call that ran out of time, cancel the call itself.
    """
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionError("the driver has cancelled its own work") from None
