"""Destinations behind a network that fails, and the contract of senders to them: the same bad weather for all."""

import copy
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outbox.model.message import Message, stored_message, uuid7
from outbox.model.verdict import Done, Reject, Unavailable, Verdict
from outbox.senders.port import Sender
from outbox.testing.sender_contract import Destination, Stored, a_message, check_all_done, check_eventually_done
from outbox.testing.sender_contract import check_stored as check_exactly_stored
from tests.support.pausing import paused
from tests.support.servers.proxy import Direction, TcpProxy
from tests.support.waiting import eventually

TOP = Path(__file__).parents[2]
_FIELDS = ("message_id", "topic", "key", "tags", "headers", "content_type", "body")


class Place(Destination):
    """A destination that is reached through a proxy."""

    #: Twice what a sender takes, for a busy machine.
    deadline = 60.0
    #: How long a call of its senders may take.
    seconds = 8.0
    #: Makes a sender of the URL.
    sender: Any
    url: str
    #: The server behind it, where it may be killed and paused.
    server: Any = None

    def __init__(self, proxy: TcpProxy) -> None:
        self.proxy = proxy

    def open(self, *, seconds: float | None = None) -> Any:
        """A sender through the proxy; patient enough for a machine that is busy with other tests."""
        timeout = timedelta(seconds=self.seconds if seconds is None else seconds)
        return type(self).sender(self.url, timeout=timeout)

    def disappear(self) -> None:
        """The proxy refuses."""
        self.proxy.refuse()

    def fall_silent(self) -> None:
        """The proxy passes nothing on."""
        self.proxy.black_hole()

    def lose_next_answer(self) -> None:
        """The proxy resets the connection at the server's next word."""
        self.proxy.cut_after(0, "to_client")

    def cut_after(self, n_bytes: int, direction: Direction) -> None:
        """The proxy resets the connection after so many more bytes."""
        self.proxy.cut_after(n_bytes, direction)

    def recover(self) -> None:
        """The proxy passes everything on."""
        self.proxy.pass_through()

    def check_stored(self, sent: Sequence[Message]) -> None:
        """Require that exactly these messages are stored, each key in order, and all copies of one to the byte."""
        check_exactly_stored(self, sent)
        self.check_copies()

    def close(self) -> None:
        """Remove what was made for the test, where that is needed."""

    def raw(self) -> Sequence[tuple[UUID, object]]:
        """The id of every copy, and its bytes as the destination has them, headers and properties included."""
        return [(one.message_id, one) for one in self.stored()]

    def check_copies(self) -> None:
        """Require that a later copy of a message has the same bytes as the first."""
        firsts: dict[UUID, object] = {}
        for message_id, found in self.raw():
            first = firsts.setdefault(message_id, found)
            assert found == first, f"a copy is {found!r:.500}, the first was {first!r:.500}"


def rage(place: Place, *, seconds: float) -> None:
    """Break something every now and then, and mend it."""
    chance = random.Random(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice((place.disappear, place.fall_silent, place.lose_next_answer))()
        time.sleep(chance.uniform(0, 1))
        place.recover()
        time.sleep(chance.uniform(0, 0.5))


def send_through(
    sender: Sender, storm: Callable[[], None], *, topics: Sequence[str] = ("orders",)
) -> tuple[list[Message], int]:
    """Send messages with 20 keys, and some without, while the storm lasts, until all are `Done`.

    Return them, and the number of calls after which some were not.
    """
    sent: list[Message] = []
    failed = 0
    with ThreadPoolExecutor(1) as pool:
        raging = pool.submit(storm)
        while not raging.done():
            numbers = range(len(sent), len(sent) + 200)
            part = [a_message(topics[n % len(topics)], n, key=f"k{n % 20}" if n % 4 else None) for n in numbers]
            sent += part
            while part:
                verdicts = sender.send(part)
                part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
                failed += bool(part)
                time.sleep(0.02 if part else 0.01)
        raging.result()
    return sent, failed


def ended(sender: Sender, calls: Sequence[Future[Sequence[Verdict]]]) -> list[Sequence[Verdict]]:
    """Close a sender until its calls have ended, of which one may begin only after a close; return their verdicts."""

    def are_over() -> bool:
        sender.close()
        return all(call.done() for call in calls)

    assert eventually(are_over)
    return [call.result() for call in calls]


def life_of(server: Any) -> int | None:
    """A number that changes when a server is started anew."""
    return None if server._program is None else server._program.pid


def stored_of(message: Message) -> Stored:
    """A message that a consumer of an outbox has read."""
    return Stored(**{field: getattr(message, field) for field in _FIELDS})


#: Each process ends in its own way, and makes its sender after the fork that began it.
_PROGRAM = """
import importlib, os, sys
from datetime import timedelta
from outbox.model.message import Message
from outbox.model.verdict import DONE

module, name, url, *ways = sys.argv[1:]
Sender = getattr(importlib.import_module(module), name)

def send():
    assert list(sender.send([Message("alpha", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

for way in ways:
    process = os.fork()
    if not process:
        sender = Sender(url, timeout=timedelta(minutes=2))  # no process stands still for so long
        send()
        exec(way)
        sys.exit()
    wait(process)
"""
_WAYS = {
    "pass": 20,  # nobody closes it
    "sender.close()": 20,
    "pid = os.fork(); send(); send(); pid and wait(pid)": 100,
    "pid = os.fork(); send(); sender.close(); pid and wait(pid)": 60,
    "pid = os.fork(); pid or sys.exit(); wait(pid); send()": 40,
    "pid = os.fork(); pid or (sender.close(), sys.exit()); wait(pid); send()": 40,
}


#: Rows with headers that nothing can carry; see `RemoteSenderContract`.
UNFIT_HEADERS: Sequence[tuple[Mapping[str, Any], str]] = (
    ({"headers": '{"a b": "c"}'}, "headers['a b']: the name must be of letters, digits and -"),
    ({"headers": '{"a": "\\ud800"}'}, "headers['a']: must be one line of UTF-8"),
    ({"headers": "[oops"}, "headers: must be a JSON object of strings, not '[oops'"),
)


def a_row(**fields: Any) -> Message:
    """A message as it is read from a row that anybody may have written."""
    usual = {
        "message_id": uuid7(), "topic": "alpha", "key": None, "tags": None, "headers": None, "body": b"",
        "content_type": None, "created_at": datetime.now(UTC), "deliver_at": None, "expires_at": None,
    }  # fmt: skip
    return stored_message((1, *(usual | fields).values()))


def a_full_message() -> Message:
    """A message with a value in each field, and characters that headers and addresses do not take as they are."""
    sent = a_message(
        "orders",
        b"{}",
        key="order 7: ü%",
        tags="placed/päid",
        headers={"X-Trace": "a: b", "name": "Zoë"},
        content_type="application/json",
    )
    sent.created_at = datetime(2026, 1, 31, 14, 0, 0, 123456, tzinfo=UTC).astimezone(timezone(timedelta(hours=2)))
    return sent


class RemoteSenderContract:
    """The suite. A module has the fixture `mortal`: a place whose server may be killed and paused.

    The weather of real servers is a storm; `tests/unit/test_remote_sender.py` has the same of the skeleton.
    """

    #: The fixture with a place of the test.
    at: str

    #: Whether the destination stores no second copy.
    drops_copies = False
    #: Whether `close` ends a call that waits, and how many calls may wait at once.
    closing_ends_calls = True
    calls = 2
    #: After so many bytes a connection is cut: the login, the first messages, and the answers.
    cuts: Sequence[int] = range(0, 900, 43)
    #: The same with `--full`. Odd and even numbers take turns in both: before the odd ones the sender is closed.
    full_cuts: Sequence[int] = range(0, 900, 7)
    #: The topics of the messages that are sent in bad weather.
    topics: Sequence[str] = ("alpha",)
    #: How often the server is killed, and the bytes of each body that a paused server gets.
    kills = 2
    body = 100_000
    #: The bytes of a big body.
    big = 900_000
    #: How many more files and threads than before an outage there may be after it.
    slack = 1
    #: Fields of rows that the destination cannot carry, each with a part of the text, and the beginning of all texts.
    unfit: Sequence[tuple[Mapping[str, Any], str]]
    refuses = ""

    @pytest.fixture
    def place(self, request: pytest.FixtureRequest) -> Any:
        """A place of this test."""
        return request.getfixturevalue(self.at)

    def test_rows_that_another_hand_wrote_are_rejected_alone(
        self, place: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The limits of `Message` are no limits of the table. The connection stays as it was."""
        sender = place.open(seconds=60)
        fit = [a_message("alpha", n) for n in range(len(self.unfit) + 1)]
        rows = [a_row(**fields) for fields, _ in self.unfit]

        verdicts = sender.send([fit[0], *chain.from_iterable(zip(rows, fit[1:], strict=True))])

        sender.close()
        check_all_done(verdicts[::2], fit)
        for (fields, reason), refused in zip(self.unfit, verdicts[1::2], strict=True):
            assert isinstance(refused, Reject), fields
            assert refused.error.startswith(self.refuses)
            assert reason in refused.error
        place.check_stored(fit)
        assert [each for each in caplog.records if each.levelno > logging.INFO] == []

    @pytest.mark.storm
    def test_a_connection_that_is_cut_anywhere_loses_and_reorders_nothing(self, place: Place, full: bool) -> None:
        """In the login, between messages and within them, and in the answers."""
        sender = place.open()
        sent: list[Message] = []
        failed = 0
        cuts = self.full_cuts if full else self.cuts
        for cut in cuts:
            for direction in ("to_server", "to_client"):
                if cut % 2:
                    sender.close()  # so that the next call has to connect
                part = [a_message("alpha", f"{cut}-{direction}-{n}", key=f"k{n % 2}") for n in range(6)]
                sent += part
                place.cut_after(cut, direction)
                failed += not all(isinstance(verdict, Done) for verdict in sender.send(part))
                place.recover()
                check_eventually_done(sender, part)

        sender.close()
        place.check_stored(sent)
        assert failed > len(cuts) / 8, "hardly anything was cut"  # many cuts lie behind the end of a short answer

    @pytest.mark.storm
    def test_bad_weather_loses_and_reorders_nothing(self, place: Place, full: bool) -> None:
        """Connections are refused, silent or cut at random."""
        sender = place.open(seconds=0.7)

        storm = partial(rage, place, seconds=60 if full else 4)
        sent, failed = send_through(sender, storm, topics=self.topics)

        sender.close()
        place.check_stored(sent)
        assert not self.drops_copies or len(place.stored()) == len(sent)
        assert failed > 0, "the weather was fine"

    @pytest.mark.storm
    def test_a_second_copy_has_the_id_and_the_bytes_of_the_first(self, place: Place) -> None:
        """The answer to the first is lost, and even after another the message may be sent once more."""
        sender = place.open()
        check_all_done(sender.send(first := [a_message("alpha", 1)]), first)
        sent = a_message("alpha", {"n": 2}, key="k", tags="t", headers={"a": "b"})

        place.lose_next_answer()
        sender.send([sent])
        place.recover()
        for _ in range(2):
            sent = copy.copy(sent)
            sent.attempt += 1
            check_eventually_done(sender, [sent])

        sender.close()
        place.check_stored([*first, sent])
        copies = [message_id for message_id, _ in place.raw()].count(sent.message_id)
        assert copies == 1 if self.drops_copies else copies > 1

    @pytest.mark.storm
    def test_a_paused_server_is_unavailable_in_time_and_found_again(self, mortal: Place) -> None:
        """It stops in the middle of a call."""
        sender = mortal.open(seconds=1)
        sent = [a_message("alpha", bytes(self.body), key=f"k{n % 10}") for n in range(60)]
        check_eventually_done(sender, sent[:10])

        with paused(mortal.server):
            for _ in range(2):
                began = time.monotonic()
                assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
                assert time.monotonic() - began < 60

        check_eventually_done(sender, sent)
        sender.close()
        assert eventually(lambda: {one.message_id for one in mortal.stored()} == {one.message_id for one in sent})
        mortal.check_stored(sent)

    @pytest.mark.storm
    def test_a_server_that_is_killed_has_everything_that_is_done_and_is_found_again_with_few_words(
        self, mortal: Place, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log tells of the connection, of the outage once a minute, and of the next connection."""
        began = time.monotonic()  # which nobody sets back, unlike the time of a record
        caplog.set_level(logging.INFO)  # before the sender connects in its own thread
        sender = mortal.open(seconds=2)
        # Connected before the first kill, also on a busy machine.
        check_eventually_done(sender, first := [a_message("alpha", "first")], seconds=60)

        def storm() -> None:
            for _ in range(self.kills):
                time.sleep(0.7)
                mortal.server.kill()
                time.sleep(0.3)
                mortal.server.start()

        sent, _ = send_through(sender, storm, topics=("alpha",))
        sender.close()

        mortal.check_stored([*first, *sent])
        assert [record.getMessage() for record in caplog.records if not record.name.startswith("outbox.")] == []
        lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        [connected] = {line for line in lines if line.startswith("INFO ")}
        outage = [line for line in lines if line != connected]
        assert ": connected to " in connected
        assert all(line.startswith("WARNING ") for line in outage)
        assert 1 <= len(outage) <= 1 + (time.monotonic() - began) / 60
        # On a busy machine the first connection may already be made in vain, and an outage is told once a minute.
        outages = sum(not is_connected for is_connected, _ in groupby(lines, lambda line: line == connected))
        assert lines.count(connected) == outages + (lines[0] == connected)

    @pytest.mark.storm
    def test_several_threads_may_send_at_once(self, place: Place) -> None:
        """Each gets its own verdicts."""
        sender = place.open(seconds=20)
        calls = [[a_message("alpha", n, key=f"{call}-{n % 3}") for n in range(60)] for call in range(8)]

        with ThreadPoolExecutor(8) as pool:
            for verdicts, sent in zip(pool.map(sender.send, calls), calls, strict=True):
                check_all_done(verdicts, sent)

        sender.close()
        place.check_stored([message for sent in calls for message in sent])

    @pytest.mark.storm
    def test_big_bodies_go_through_in_one_call(self, place: Place) -> None:
        """More than may be under way at once."""
        sender = place.open(seconds=20)
        sent = [a_message("alpha", bytes(self.big), key=f"k{n % 5}" if n % 2 else None) for n in range(40)]

        check_eventually_done(sender, sent)

        sender.close()
        place.check_stored(sent)

    @pytest.mark.storm
    @pytest.mark.parametrize("connected", [True, False])
    def test_closing_ends_calls_that_wait(self, place: Place, *, connected: bool) -> None:
        """For answers, or for the connection."""
        if not self.closing_ends_calls:
            pytest.skip("a call ends by its own deadline")
        sender = place.open(seconds=120)
        if connected:
            check_all_done(sender.send(sent := [a_message("alpha", 1)]), sent)
        place.fall_silent()

        with ThreadPoolExecutor(self.calls) as pool:
            waiting = [pool.submit(sender.send, [a_message("alpha", n)]) for n in range(self.calls)]
            verdicts = [verdict for verdicts in ended(sender, waiting) for verdict in verdicts]

        # A client that found out by itself, before the close, that nobody answers says that.
        assert {type(verdict) for verdict in verdicts} == {Unavailable}

    def test_a_closed_sender_leaves_no_thread_behind_and_begins_anew(self, place: Place) -> None:
        """Closing is no end."""
        before = _threads()
        sender = place.open()
        for n in range(2):
            check_all_done(sender.send(sent := [a_message("alpha", n)]), sent)
            sender.close()
            # Threads of others may end meanwhile.
            assert {thread.name for thread in _threads() - before} == set()

    @pytest.mark.storm
    def test_outages_leave_nothing_behind(self, place: Place) -> None:
        """Connections that failed do not pile up, nor do their threads."""
        sender = place.open(seconds=2)
        check_eventually_done(sender, [a_message("alpha", 1)])
        before = _held()

        for n in range(4):
            (place.disappear, place.fall_silent)[n % 2]()
            sender.send([a_message("alpha", bytes(10_000)) for _ in range(50)])
            place.recover()
            check_eventually_done(sender, [a_message("alpha", 2)])

        # The proxy notices a little later that a connection was closed.
        assert eventually(lambda: all(now <= then + self.slack for now, then in zip(_held(), before, strict=True))), (
            before,
            _held(),
        )
        sender.close()

    @pytest.mark.storm
    @pytest.mark.timeout(900)
    def test_a_process_may_fork_and_end_as_it_likes(self, place: Place) -> None:
        """Each process has a connection of its own, and none has a word to say at its end."""
        sender = type(place).sender
        arguments = [sender.__module__, sender.__name__, place.url, *_WAYS]

        done = subprocess.run(
            [sys.executable, "-W", "default", "-c", _PROGRAM, *arguments],
            capture_output=True, text=True, timeout=600, check=False, cwd=TOP,
        )  # fmt: skip

        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert len(place.stored()) == sum(_WAYS.values())


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("outbox-")}


def _held() -> tuple[int, int]:
    """How many files and sockets, and how many threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
