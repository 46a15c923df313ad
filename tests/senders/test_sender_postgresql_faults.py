"""Another PostgreSQL in bad weather: the contract, lost answers, late transactions, and crashes."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from outbox import Message, create_engine, migrate
from outbox.model.verdict import DONE, Done, Unavailable
from outbox.senders.postgresql import PostgresSender
from outbox.testing.sender_contract import a_message, check_all_done, check_stored
from outbox.testing.servers import PostgresServer
from tests.support.handles import conninfo_of
from tests.support.other_outbox import OtherOutbox
from tests.support.places import opened
from tests.support.remote import RemoteSenderContract
from tests.support.servers.postgresql import backend_pids
from tests.support.servers.proxy import Direction, TcpProxy


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of this test, which may be killed; it does not wait for the disk by default."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def fragile(server: PostgresServer) -> Iterator[OtherOutbox]:
    """An outbox on it, behind a proxy."""
    engine = create_engine(server.create_database("shop"))
    migrate.upgrade(engine)
    with TcpProxy("127.0.0.1", server.port) as proxy:
        yield OtherOutbox(engine, proxy)
    engine.dispose()


@pytest.fixture
def mortal(fragile: OtherOutbox, server: PostgresServer) -> OtherOutbox:
    """An outbox on a server of this test."""
    fragile.server = server
    return fragile


sender = opened("other")


class TestBadWeather(RemoteSenderContract):
    """A second copy is never stored."""

    at = "other"
    drops_copies = True
    full_cuts = range(900)
    unfit = (
        ({"topic": "a b"}, "topic: must be 1 to 249 characters of [A-Za-z0-9._%|-], not . or .., but is 'a b'"),
        ({"topic": b"orders"}, "topic: must be a str, not bytes"),
        (
            {"topic": "RMQ_SYS_TRANS_HALF_TOPIC"},
            "topic: RMQ_SYS_TRANS_HALF_TOPIC is reserved for half messages",
        ),
        ({"key": ""}, "key: must not be empty"),
        ({"key": "a\0b"}, "key: must not contain NUL"),
        ({"key": "\ud800"}, "key: holds a lone surrogate, which is not text"),
        ({"key": "k" * 1025}, "key: must be at most 1024 bytes of UTF-8"),
        ({"key": b"k"}, "key: must be a str, not bytes"),
        ({"tags": "a|b"}, "tags: must be at most 255 characters without | and control characters"),
        ({"tags": "a\0"}, "tags: must be at most 255 characters without | and control characters"),
        ({"headers": "[oops"}, "headers: must be a JSON object of strings, not '[oops'"),
        ({"headers": '{"a": 7}'}, "headers['a']: must be a string, not int"),
        ({"headers": '{"a": "\\ud800"}'}, "headers['a']: must be UTF-8 without NUL"),
        ({"headers": '{"a": "\\u0000"}'}, "headers['a']: must be UTF-8 without NUL"),
        ({"content_type": "a\0b"}, "content_type: must be 1 to 255 printable ASCII characters"),
        ({"body": "text"}, "body: must be bytes, not str"),
        ({"body": bytes(4 * 1024 * 1024 + 1)}, "body: must be at most 4194304 bytes, not 4194305"),
        ({"created_at": 2**63 - 1}, "created_at: must lie between the years 1970 and 9000"),
        ({"created_at": datetime(1800, 1, 1, tzinfo=UTC)}, "created_at: must lie between the years 1970 and 9000"),
        ({"expires_at": datetime(9500, 1, 1, tzinfo=UTC)}, "expires_at: must lie between the years 1970 and 9000"),
        ({"message_id": "no id"}, "message_id: is not a UUID"),
    )


def batch(first: int, number: int = 200) -> list[Message]:
    """Messages of 20 keys and of none."""
    return [a_message("orders", n, key=f"k{n % 20}" if n % 4 else None) for n in range(first, first + number)]


def send_until_done(sender: PostgresSender, part: list[Message]) -> int:
    """Send what is not done yet again and again, as a worker does; return the number of calls."""
    for calls in count(1):
        verdicts = sender.send(part)
        part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
        if not part:
            return calls
        time.sleep(0.02)
    raise AssertionError


# Every answer may be lost


@pytest.mark.storm
@pytest.mark.parametrize("direction", ["to_client", "to_server"])
def test_a_connection_that_is_cut_at_any_byte_loses_and_doubles_nothing(other, sender, full, direction: Direction):
    """Until the call fits. Then all of it is in the log, or nothing is; and its repetition writes what is missing."""
    step = 1 if full else 5 if direction == "to_client" else 23
    sent: list[Message] = [a_message("orders", "first")]
    check_all_done(sender.send(sent), sent)
    written: Counter[bool] = Counter()

    for allowed in count(0, step):
        part = [a_message("orders", f"{allowed}-{n}", key="k") for n in range(3)]
        other.proxy.cut_after(allowed, direction)
        verdicts = sender.send(part)
        other.proxy.pass_through()
        if verdicts == [DONE] * 3:
            sent += part
            break
        assert {type(verdict) for verdict in verdicts} == {Unavailable}
        at_once = len(other.stored()) - len(sent)
        assert at_once in (0, 3)
        written[at_once == 3] += 1
        check_all_done(sender.send(part), part)
        sent += part

    check_stored(other, sent)
    assert [row["message_id"] for row in other.rows()] == [message.message_id for message in sent]
    # The server answers after the COMMIT, so what is lost of its answers was written.
    assert written[True] > (50 if full else 10) if direction == "to_client" else written[False] > (500 if full else 20)


@pytest.mark.storm
def test_a_transaction_that_arrives_late_changes_nothing(other, sender):
    """It was held back on its way, while its messages were sent again over another connection, and more after them."""
    sent = batch(0)
    check_all_done(sender.send(sent[:10]), sent[:10])
    other.fall_silent()
    assert {type(verdict) for verdict in sender.send(sent[:100])} == {Unavailable}

    with closing(PostgresSender(conninfo_of(other.engine.url))) as direct:
        check_all_done(direct.send(sent[:40]), sent[:40])
        other.recover()
        check_all_done(direct.send(sent), sent)
    time.sleep(0.5)

    check_stored(other, sent)


@pytest.mark.storm
def test_a_transaction_that_is_still_open_is_waited_for(other):
    """The repetition of a call finds its ids taken by the call itself, which ends one way or the other."""
    sent = batch(0, 20)
    other.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$"
    )
    other.execute("CREATE TRIGGER t BEFORE INSERT ON outbox_message FOR EACH ROW EXECUTE FUNCTION slow()")

    with ThreadPoolExecutor(4) as pool, closing(other.open()) as one, closing(other.open()) as two:
        senders = [one, two, one, two]
        calls = [pool.submit(send_until_done, each, sent) for each in senders]
        for call in calls:
            call.result(60)

    check_stored(other, sent)


def test_calls_with_the_same_messages_in_other_orders_do_not_block_each_other(other):
    """Nobody waits in a circle: the ids are taken in one order, whatever that of the call is."""
    sent = [a_message("orders", n) for n in range(400)]
    chance = random.Random(1)
    orders = [chance.sample(sent, len(sent)) for _ in range(6)]
    url = conninfo_of(other.engine.url)
    senders = [PostgresSender(url, timeout=timedelta(seconds=30)) for _ in orders]

    with ThreadPoolExecutor(len(orders)) as pool:
        found = list(pool.map(lambda sender, order: sender.send(order), senders, orders))
    for sender in senders:
        sender.close()

    assert [verdict for verdicts in found for verdict in verdicts if verdict is not DONE] == []
    check_stored(other, sent)


# The server dies, pauses, and comes back


@pytest.mark.storm
def test_a_server_that_was_restarted_between_two_calls_is_no_failure(fragile, server):
    """A connection that was closed while nobody used it is made again before anything is sent."""
    with closing(PostgresSender(conninfo_of(fragile.engine.url))) as sender:
        for n in range(2):
            assert sender.send([a_message("orders", n)]) == [DONE]
            server.restart()
        assert sender.send([a_message("orders", 2)]) == [DONE]


@pytest.mark.storm
def test_what_is_done_survives_a_server_that_is_killed_in_the_middle(fragile, server, full):
    """Its default is not to wait for the disk, so each crash of it takes back what did."""
    sent: list[Message] = []
    stop = threading.Event()
    with closing(PostgresSender(conninfo_of(fragile.engine.url), timeout=timedelta(seconds=2))) as sender:
        with ThreadPoolExecutor(1) as pool:
            storm = pool.submit(crash, server, times=8 if full else 4, stop=stop)
            while not storm.done():
                sent += (part := batch(len(sent)))
                send_until_done(sender, part)
            storm.result()
        sent += (part := batch(len(sent)))
        send_until_done(sender, part)

    check_stored(fragile, sent)


def crash(server: PostgresServer, *, times: int, stop: threading.Event) -> None:
    """Kill the server, or one of its processes, for which it ends all others and recovers."""
    chance = random.Random(2)
    for n in range(times):
        time.sleep(chance.uniform(0.3, 1.0))
        if n % 2:
            server.kill()
            server.start()
        else:
            for pid in backend_pids(server, "shop")[:1]:
                with suppress(ProcessLookupError):  # it has ended by itself meanwhile
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)


# Threads, forks, and the end


@pytest.mark.storm
def test_several_threads_are_all_answered_in_time(other, sender):
    """They wait for each other no longer than for the server."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    other.fall_silent()
    began = time.monotonic()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sender.send, [[a_message("orders", n)] for n in range(4)]))

    assert time.monotonic() - began < other.deadline
    assert [type(verdict) for [verdict] in found] == [Unavailable] * 4
