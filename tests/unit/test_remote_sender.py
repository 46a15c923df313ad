"""The skeleton of senders that speak asyncio: the contract in all weather, its drivers, and its close."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Literal

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Unavailable, Verdict
from outbox.senders.connection_log import ConnectionLog
from outbox.senders.remote import Call, Connection, RemoteSender
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_stored
from tests.support.remote import ended
from tests.support.stub_server import (
    Once,
    Point,
    StubConnection,
    StubServer,
    fine,
    leap,
    refusing,
    silent,
)
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


# The contract of every remote sender, with a server in memory


@pytest.fixture
def stub() -> StubServer:
    """A server of this test."""
    return StubServer()


@pytest.fixture
def sender(stub: StubServer) -> Iterator[RemoteSender]:
    """A sender to the server."""
    with closing(stub.open()) as sender:
        yield sender


class TestRemoteSender(SenderContract):
    """The skeleton passes the contract."""

    @pytest.fixture
    def destination(self, stub: StubServer) -> StubServer:
        """A server of each test."""
        return stub


def numbered(number: int, keys: int = 3) -> list[Message]:
    """Return messages of so many keys, and one in four without a key."""
    return [a_message("alpha", n, key=f"k{n % keys}" if n % 4 else None) for n in range(number)]


def not_done(sender: RemoteSender, sent: list[Message]) -> list[Message]:
    """Send messages; return those that are to be sent again."""
    return [one for one, verdict in zip(sent, sender.send(sent), strict=True) if verdict is not DONE]


def concerning_everything(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the reasons of verdicts that say that the destination takes nothing."""
    return [each.error for each in verdicts if isinstance(each, Unavailable) and each.everything]


def threads() -> list[str]:
    """Return the names of the threads of senders to a stub."""
    return [thread.name for thread in threading.enumerate() if thread.name == "outbox-stub"]


@pytest.mark.parametrize(
    ("weather", "why"),
    [
        (refusing, "Stub: stub: refused"),
        (silent, "Stub: stub: no answer"),
    ],
)
def test_a_server_that_is_away_takes_nothing_and_is_found_again(stub, sender, weather, why):
    """Before the first connection."""
    sent = numbered(3)
    stub.weather = weather
    verdicts = sender.send(sent)
    stub.recover()

    assert concerning_everything(verdicts) == [why] * 3
    assert sender.send(sent) == [DONE] * 3
    assert [each.is_closed for each in stub.connections] == [True, False]


@pytest.mark.parametrize(
    ("weather", "why"),
    [
        (refusing, "Stub: stub: cut"),
        (silent, "Stub: stub: no answer within 54 s"),
    ],
)
def test_a_connection_that_fails_in_a_call_is_closed_and_the_next_call_makes_another(stub, sender, weather, why):
    """What a silent server is given is `Unavailable` at the end of the call."""
    check_all_done(sender.send(first := numbered(3)), first)
    stub.weather = weather
    verdicts = sender.send(sent := numbered(3))
    stub.recover()

    assert concerning_everything(verdicts) == [why] * 3
    assert sender.send(sent) == [DONE] * 3
    assert [each.is_closed for each in stub.connections] == [True, False]


def test_a_driver_that_knows_no_time_is_cut_off_at_the_end_of_the_call():
    """`open` is cancelled, although the driver itself would wait for ever."""

    class Deaf(StubConnection):
        async def open(self, deadline: float) -> None:
            """Wait for ever, and far beyond the share of the server."""
            leap(deadline + 60)
            await asyncio.get_running_loop().create_future()

    stub = StubServer()
    with closing(RemoteSender("Stub", "stub://host", ("stub",), partial(Deaf, stub=stub), seconds=60)) as sender:
        assert concerning_everything(sender.send(numbered(1))) == ["Stub: no answer within 54 s"]


def test_a_driver_that_blocks_its_thread_holds_up_no_caller(stub):
    """The caller has a clock of its own, and the next call another thread."""
    over = threading.Event()

    def block_once(_connection: StubConnection, point: Point) -> None:
        if point == "open" and len(stub.connections) == 1:
            over.wait()

    stub.weather = block_once
    with closing(RemoteSender("Stub", "stub://host", ("stub",), stub.connect, seconds=1)) as sender:
        verdicts = [sender.send(numbered(1))]
        sender.deadline = timedelta(minutes=1)
        verdicts.append(sender.send(numbered(1)))
        over.set()

    assert concerning_everything(verdicts[0]) == ["Stub: no answer within 1 s"]
    assert verdicts[1] == [DONE]


@pytest.mark.parametrize(("point", "copies"), [("open", 0), ("store", 0), ("answer", 12)])
def test_a_connection_that_is_cut_anywhere_loses_and_reorders_nothing(stub, sender, point: Point, copies: int):
    """In the login, before each message, and before each answer. Only an answer that is lost makes a copy."""
    every: list[Message] = []
    for n in range(1, 13):
        sender.close()  # so that the next call has to connect
        every += (sent := numbered(12))
        stub.weather = Once(point, 1 if point == "open" else n)
        left = not_done(sender, sent)
        stub.recover()
        assert (left != [], not_done(sender, left)) == (True, [])

    check_stored(stub, every)
    assert len(stub.copies) == len(every) + copies


def test_bad_weather_loses_and_reorders_nothing(stub, sender):
    """At each point a connection may break or fall silent."""
    chance = random.Random(1)
    seen: Counter[str] = Counter()

    def bad(connection: StubConnection, point: Point) -> None:
        strikes = chance.choices((fine, refusing, silent), (20, 1, 1))[0]
        seen[strikes.__name__] += 1
        strikes(connection, point)

    stub.weather = bad
    every: list[Message] = []
    for _ in range(20):
        every += (left := numbered(50, keys=20))
        while left:
            left = not_done(sender, left)

    check_stored(stub, every)
    assert min(seen["refusing"], seen["silent"]) > 20


def test_an_outage_is_logged_once_and_so_is_the_next_connection(stub, sender, caplog):
    """Not for each connection, of which a relay makes one in each call."""
    caplog.set_level(logging.INFO)
    sender.send(numbered(1))
    stub.disappear()
    for _ in range(5):
        sender.send(numbered(1))
    stub.recover()
    for _ in range(2):
        sender.send(numbered(1))

    assert [f"{each.levelname} {each.getMessage()}" for each in caplog.records] == [
        "INFO Stub: connected to stub",
        "WARNING Stub: stub: cut",
        "INFO Stub: connected to stub",
    ]


def test_several_threads_send_by_one_connection_and_each_has_its_own_verdicts(stub, sender):
    all_here = threading.Barrier(8)

    def send(call: int) -> tuple[list[Message], Sequence[Verdict]]:
        sent = [a_message("beta" if n % 8 == call else "alpha", n, key=f"{call}-{n}") for n in range(60)]
        all_here.wait()
        return sent, sender.send(sent)

    stub.fail("beta")
    with ThreadPoolExecutor(8) as pool:
        for sent, verdicts in pool.map(send, range(8)):
            assert [verdict is DONE for verdict in verdicts] == [one.topic == "alpha" for one in sent]
    assert len(stub.connections) == 1


def test_a_call_has_512_messages_under_way_at_most(stub, sender):
    check_all_done(sender.send(sent := [a_message("alpha", n) for n in range(1_500)]), sent)

    assert stub.most == 512


def test_a_call_has_no_more_under_way_than_8_megabytes_and_a_message(stub, sender):
    size = 900_000
    sent = [a_message("alpha", bytes(size), key=f"k{n}" if n % 2 else None) for n in range(40)]

    check_all_done(sender.send(sent), sent)

    assert stub.most_bytes == (8 * 1024 * 1024 // size + 1) * size
    check_stored(stub, sent)


@pytest.mark.parametrize("connected", [True, False])
def test_closing_ends_calls_that_wait(stub, sender, connected: bool):
    """For answers, or for the connection."""
    waiting = threading.Semaphore(0)

    def wait(connection: StubConnection, point: Point) -> None:
        waiting.release()
        silent(connection, point)

    if connected:
        sender.send(numbered(1))
    stub.weather, stub.waits = wait, True

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(sender.send, numbered(1)) for _ in range(2)]
        for _ in range(2 if connected else 1):  # one call connects for both
            waiting.acquire()
        verdicts = [verdict for verdicts in ended(sender, calls) for verdict in verdicts]

    assert concerning_everything(verdicts) == ["Stub: the sender was closed"] * 2
    assert stub.open_connections() == []


def test_a_closed_sender_leaves_no_thread_behind_and_begins_anew(stub, sender):
    found = []
    for _ in range(2):
        check_all_done(sender.send(sent := numbered(3)), sent)
        found.append((threads(), len(stub.open_connections())))
        sender.close()
        found.append((threads(), len(stub.open_connections())))

    assert found == [(["outbox-stub"], 1), ([], 0)] * 2


def test_outages_leave_nothing_behind(stub, sender):
    """A connection that failed is closed, whatever it failed at; and there is one thread."""
    for weather in (refusing, silent, Once("open"), Once("store"), Once("answer")) * 2:
        stub.weather = weather
        sender.send(numbered(3))
        stub.recover()
        check_all_done(sender.send(sent := numbered(3)), sent)

    assert (stub.open_connections(), threads()) == (stub.connections[-1:], ["outbox-stub"])


def test_a_connection_that_is_of_no_more_use_is_closed_when_its_last_call_has_ended(stub, sender):
    """A call that still uses the connection ends well; the next call makes another."""
    first_here = threading.Event()

    async def linger(connection: StubConnection) -> None:
        first_here.set()
        while connection.calls < 2:
            await asyncio.sleep(0)
        connection.is_stale = True
        while connection.calls > 1:
            await asyncio.sleep(0)

    def weather(connection: StubConnection, point: Point) -> Awaitable[None] | None:
        return linger(connection) if point == "store" and not first_here.is_set() else None

    stub.weather = weather
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(sender.send, numbered(3))]
        first_here.wait()
        calls.append(pool.submit(sender.send, numbered(3)))
        verdicts = [call.result() for call in calls]
    closed = [each.is_closed for each in stub.connections]

    assert (verdicts, closed) == ([[DONE] * 3] * 2, [True])
    assert sender.send(numbered(1)) == [DONE]
    assert [each.is_closed for each in stub.connections] == [True, False]


def test_another_server_of_the_address_is_taken():
    """One refuses and one is silent; each is given a share of the time, so that some is left for the next."""
    by_name = {"away": refusing, "mute": silent, "well": fine}
    for _ in range(20):
        stub = StubServer(*by_name)
        stub.weather = lambda connection, point: by_name[connection.server](connection, point)
        with closing(stub.open()) as sender:
            check_all_done(sender.send(sent := numbered(3)), sent)
            assert [each.server for each in stub.open_connections()] == ["well"]


def test_of_servers_that_are_all_away_each_is_told():
    stub = StubServer("away", "mute")
    stub.weather = lambda connection, point: {"away": refusing, "mute": silent}[connection.server](connection, point)
    with closing(stub.open()) as sender:
        [verdict] = sender.send(numbered(1))

    assert isinstance(verdict, Unavailable)
    assert sorted(verdict.error.removeprefix("Stub: ").split("; ")) == ["away: refused", "mute: no answer"]
