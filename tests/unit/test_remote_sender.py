"""The skeleton of senders that speak asyncio: a driver that cancels its own work, and a close while a call connects."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.remote import Call, Connection, RemoteSender
from tests.support.waiting import eventually

At = Literal["open", "carry"]


class Driver:
    """Connections to nowhere; the first cancels its own work, and the others take everything."""

    def __init__(self, at: At) -> None:
        self.at = at
        self.made: list[Fake] = []

    def connect(self, server: str, log: ConnectionLog) -> Fake:
        """Make a connection."""
        self.made.append(Fake(server, log, None if self.made else self.at))
        return self.made[-1]


class Fake(Connection):
    """A connection that cancels a future for which it waits, when it is to."""

    def __init__(self, server: str, log: ConnectionLog, at: At | None) -> None:
        super().__init__(server, log)
        self._at = at

    async def open(self, deadline: float) -> None:
        """Connect."""
        await self._come("open")

    async def carry(self, call: Call) -> None:
        """Accept all messages."""
        await self._come("carry")
        while (index := call.chains.take()) is not None:
            call.chains.settle(index, DONE)

    async def close(self) -> None:
        """Close."""
        self.is_closed = True

    async def _come(self, here: At) -> None:
        if here == self._at:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future


@pytest.mark.parametrize("at", ["open", "carry"])
def test_a_driver_that_cancels_its_own_work_has_failed_and_nobody_has_closed_the_sender(at: At):
    driver = Driver(at)
    sender = RemoteSender("Test", "test://host", ("host",), driver.connect, seconds=60)

    verdicts = [sender.send([Message("orders", b"1")]) for _ in range(2)]
    closed = [each.is_closed for each in driver.made]
    sender.close()

    why = "Test: host: the driver has cancelled its own work"
    assert verdicts == [[Unavailable(why, everything=True)], [DONE]]
    assert closed == [True, False]


class Saying(Fake):
    """A connection that takes its time to say good-bye."""

    said = False

    async def leave(self) -> None:
        """Close."""
        self.said = True
        await asyncio.sleep(0.2)
        await self.close()


class Opening(Fake):
    """A connection that is open when another one has said good-bye, or never."""

    def __init__(self, server: str, log: ConnectionLog, other: Saying | None) -> None:
        super().__init__(server, log, None)
        self._other = other
        self.begun = threading.Event()

    async def open(self, deadline: float) -> None:
        """Connect."""
        self.begun.set()
        while self._other is None or not self._other.said:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("opens", [False, True])
def test_a_connection_that_a_call_makes_during_the_close_is_closed(opens: bool):
    made: list[Fake] = []

    def connect(server: str, log: ConnectionLog) -> Fake:
        lost = next((each for each in made if isinstance(each, Saying)), None)
        made.append(Saying(server, log, "carry") if lost is None else Opening(server, log, lost if opens else None))
        return made[-1]

    sender = RemoteSender("Test", "test://host", ("host",), connect, seconds=60)
    sender.send([Message("orders", b"1")])
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sender.send, [Message("orders", b"2")])
        assert eventually(lambda: any(isinstance(each, Opening) and each.begun.is_set() for each in made))
        sender.close()
        verdicts = call.result(60)

    assert verdicts == [Unavailable("Test: the sender was closed", everything=True)]
    assert [each.is_closed for each in made] == [True, True]
