"""Direct send in trouble: nothing blocks or reaches the committing caller, nothing is lost, and the relay finds it."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, Reject, Retry, Unavailable, create_engine
from outbox.direct import delivery
from outbox.direct import sends as rounds
from outbox.direct.sends import DirectSends
from outbox.model.verdict import DONE
from outbox.store.log.log import Log
from outbox.store.subscriptions.acks import Acks
from outbox.writing.notifier import Notifier
from tests.support.destination import relay_to
from tests.support.direct import stored_acks
from tests.support.directly import (
    at_rest,
    before_each_call,
    briefly,
    marked,
    promises,
    relayed,
    send,
    settled,
    without_grace,
    writing_directly,
)
from tests.support.readers import bodies
from tests.support.servers.proxy import TcpProxy
from tests.support.several import behind
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


@pytest.fixture(autouse=True)
def at_leisure(monkeypatch):
    """A busy machine gives a thread no turn for seconds. Where a test is not about its end, the right to send lasts."""
    monkeypatch.setattr(delivery, "RIGHT_SECONDS", 300.0)


def write(outbox: Outbox, *numbers: int) -> None:
    """One transaction a message."""
    for number in numbers:
        with outbox.begin() as session:
            send(outbox, session, b"%d" % number)


def numbers(found: list[bytes]) -> list[int]:
    return sorted(map(int, found))


@pytest.mark.parametrize(
    "answer",
    [Unavailable("away"), Retry("not now"), Reject("never"), ValueError("raised"), SystemExit(3)],
    ids=lambda a: type(a).__name__,
)
def test_what_the_destination_refuses_is_left_to_the_relay(engine, destination, answer):
    """With all that is to be counted about it: for the relay it is the first attempt."""

    def refusing(message: Message):
        if message.body == b"2":
            if isinstance(answer, BaseException):
                raise answer
            return answer
        return DONE

    destination.answer = refusing
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            send(outbox, session, b"1", b"2", b"3")
        # The first call has but one message.
        assert eventually(lambda: at_rest(outbox) and destination.calls == 2)
    arrived = list(destination.bodies)
    destination.answer = lambda message: DONE

    without_grace(engine)
    relay_to(destination, Outbox(engine)).until_empty()

    assert arrived == ([b"1"] if isinstance(answer, BaseException) else [b"1", b"3"])
    assert sorted(destination.bodies) == [b"1", b"2", b"3"]
    assert {message.attempt for message in destination.messages} == {1}


def test_while_the_destination_is_away_all_goes_by_the_relay(engine, destination, caplog):
    """It counts as away for a second after each failed call."""
    caplog.set_level(logging.WARNING, "outbox")
    destination.answer = lambda message: 1 / 0
    written = [1]

    def by_the_relay() -> bool:
        written.append(written[-1] + 1)
        write(outbox, written[-1])
        return b"%d" % written[-1] not in marked(engine)

    with writing_directly(engine, destination) as outbox:
        write(outbox, 1)
        assert eventually(lambda: destination.calls == 1)
        assert eventually(by_the_relay)
        destination.answer = lambda message: DONE
        assert eventually(lambda: promises(outbox))
        write(outbox, 0)
        assert eventually(lambda: at_rest(outbox) and b"0" in destination.bodies)

    assert {b"0", b"1"} <= set(marked(engine))
    assert sorted(numbers(destination.bodies) + numbers(relayed(engine))) == [0, *written]
    assert {record.message for record in caplog.records if "direct" in record.message} == {
        "direct sends of relay go by the relay meanwhile: ZeroDivisionError"
    }


def test_a_destination_that_hangs_blocks_nobody(engine, destination, monkeypatch):
    """After a second nothing is promised any more, and a close gives up: until all of that is done it hangs."""
    briefly(monkeypatch)
    over = threading.Event()
    destination.hanging = lambda _messages: not over.is_set()
    first = 0
    with writing_directly(engine, destination) as outbox:
        while not destination.calls:
            # One that gets no turn within its right is the relay's.
            write(outbox, first)
            first += 1
            eventually(lambda: destination.calls, 2)
        write(outbox, *range(first, first + 10))
        assert eventually(lambda: not promises(outbox))
        by_the_writer = marked(engine)
        write(outbox, *range(first + 10, first + 20))
        assert marked(engine) == by_the_writer
        outbox.close()
    over.set()
    assert eventually(lambda: not threads())
    held = numbers(destination.bodies)

    # What came back late was sent, acked or not; the rest of the queue was not any more.
    assert len(held) < 10
    assert set(numbers(relayed(engine))) | set(held) == set(range(first + 20))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outbox-direct"]


def test_a_slow_destination_holds_up_no_commit_and_nothing_is_sent_twice(engine, destination, monkeypatch):
    """What its turn does not come for within the right to send is left to the compensation."""
    briefly(monkeypatch)
    committed = threading.Event()

    def until_all_are_committed(_messages: object) -> None:
        assert committed.wait(300)
        # By now the right to send has ended for all that waited.
        time.sleep(1.1)

    before_each_call(destination, until_all_are_committed)
    with writing_directly(engine, destination) as outbox:
        monkeypatch.setattr(rounds, "MOST_AT_ONCE", 1)
        write(outbox, *range(20))
        committed.set()
    arrived = numbers(destination.bodies)
    left = numbers(relayed(engine))

    assert len(arrived) <= 1
    assert sorted(arrived + left) == list(range(20))


def test_a_full_queue_leaves_the_rest_to_the_relay(engine, destination, monkeypatch):
    monkeypatch.setattr(DirectSends, "most_waiting", 5)
    over = threading.Event()
    destination.hanging = lambda _messages: not over.is_set()
    with writing_directly(engine, destination) as outbox:
        write(outbox, 0)
        assert eventually(lambda: destination.calls == 1)
        write(outbox, *range(1, 20))
        over.set()
        assert eventually(lambda: at_rest(outbox))

    arrived = numbers(destination.bodies)
    assert 1 <= len(arrived) == len(marked(engine)) <= 7
    assert sorted(arrived + numbers(relayed(engine))) == list(range(20))


def test_a_transaction_with_more_than_the_queue_holds_goes_by_the_relay(engine, destination):
    """Also when it sends them one by one: its first ones only are the writer's."""
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"%d" % n) for n in range(10_001)])
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"%d" % n) for n in range(10_001, 20_001)])
            outbox.send_all(session, [Message("orders", b"%d" % n) for n in range(20_001, 20_003)])
        assert eventually(lambda: at_rest(outbox) and len(destination.messages) == 10_000, 300)
        assert max(len(ids) for ids in stored_acks(engine)) <= 1000

    assert numbers(destination.bodies) == list(range(10_001, 20_001))
    assert numbers(relayed(engine)) == [*range(10_001), 20_001, 20_002]


def test_large_bodies_are_read_as_many_at_once_as_memory_allows(engine, destination):
    sizes: list[int] = []
    before_each_call(destination, lambda messages: sizes.append(sum(len(message.body) for message in messages)))
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            for _ in range(5):
                send(outbox, session, bytes(4 * 1024 * 1024))
        assert eventually(lambda: at_rest(outbox) and len(destination.messages) == 5)

    assert sum(sizes) == 5 * 4 * 1024 * 1024
    assert max(sizes) <= 8 * 1024 * 1024


def test_our_own_errors_end_nothing(engine, destination, monkeypatch, caplog):
    """A surprise in the thread turns direct sends off for a moment, and what was in hand comes after it."""
    with writing_directly(engine, destination) as outbox:
        surprises = [RuntimeError("surprise")]

        def surprising(*arguments: Any):
            if surprises:
                raise surprises.pop()
            return reading(*arguments)

        reading = Log.at
        monkeypatch.setattr(Log, "at", surprising)
        write(outbox, 1)
        assert eventually(lambda: destination.bodies == [b"1"])
        assert eventually(lambda: promises(outbox))
        write(outbox, 2)
        assert settled(outbox, destination, [b"1", b"2"])

    assert "RuntimeError" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_begun_anew(engine, destination, monkeypatch):
    """As for want of memory."""

    class Deadly(BaseException):
        """Ends a thread."""

    with writing_directly(engine, destination) as outbox:

        def dying(*_: object):
            monkeypatch.setattr(delivery.DirectDelivery, "deliver", delivering)
            raise Deadly

        delivering = delivery.DirectDelivery.deliver
        monkeypatch.setattr(delivery.DirectDelivery, "deliver", dying)
        write(outbox, 1)
        assert eventually(lambda: not threads())
        assert eventually(lambda: promises(outbox))
        write(outbox, 2)

        assert settled(outbox, destination, [b"2"])
    assert relayed(engine) == [b"1"]


def test_what_a_closed_outbox_writes_is_the_relay_s(engine, destination):
    """Its sender is closed."""
    with writing_directly(engine, destination) as outbox:
        write(outbox, 1)
        outbox.close()
        write(outbox, 2)
        promised, working = promises(outbox), threads()

    assert (promised, working) == (False, [])
    assert (destination.bodies, relayed(engine)) == ([b"1"], [b"2"])


def test_close_sends_what_waits(engine, destination, monkeypatch):
    monkeypatch.setattr(DirectSends.close, "__defaults__", (120.0,))
    before_each_call(destination, lambda _: time.sleep(0.05))
    with writing_directly(engine, destination) as outbox:
        write(outbox, *range(30))
        outbox.close()

    assert numbers(destination.bodies) == list(range(30))
    assert threads() == []


def test_a_forgotten_outbox_leaves_no_thread_and_no_engine_behind(engine, destination):
    url = engine.url.render_as_string(hide_password=False)

    def used() -> tuple[weakref.ref[object], Notifier]:
        outbox = Outbox(create_engine(url), sender=destination, direct="relay")
        assert eventually(lambda: promises(outbox))
        write(outbox, 1)
        return weakref.ref(outbox.engine), outbox.notifier

    forgotten, notifier = used()
    gc.collect()
    ended = eventually(lambda: not threads())
    notifier.close()
    del notifier
    gc.collect()

    assert (ended, destination.bodies, forgotten()) == (True, [b"1"], None)


def test_the_database_goes_away_and_comes_back(postgres, pg_engine, destination):
    """The writer's thread is told by its connection alone; commits reach the database by another way."""
    with (
        TcpProxy("127.0.0.1", postgres.port) as proxy,
        behind(proxy, pg_engine) as through,
        writing_directly(pg_engine, destination, worker_engine=through) as outbox,
    ):
        write(outbox, 1)
        assert eventually(lambda: destination.bodies == [b"1"])
        proxy.refuse()
        write(outbox, 2)
        assert eventually(lambda: not promises(outbox))
        write(outbox, 3)
        proxy.pass_through()
        assert eventually(lambda: promises(outbox))
        write(outbox, 4)
        assert eventually(lambda: at_rest(outbox))

    arrived = numbers(destination.bodies)
    assert {1, 4} <= set(arrived) <= {1, 2, 4}
    assert sorted(arrived + numbers(relayed(pg_engine))) == [1, 2, 3, 4]


def test_a_connection_that_is_cut_costs_nothing(pg_engine, destination):
    """An idle one that the server has ended: read again on a new one, within the right to send."""
    with writing_directly(pg_engine, destination) as outbox:
        for round in range(3):
            kill_the_others(pg_engine)
            write(outbox, round)
            assert eventually(lambda: at_rest(outbox) and len(destination.messages) == round + 1)  # noqa: B023
            assert eventually(lambda: promises(outbox))

    assert numbers(destination.bodies) == [0, 1, 2]
    assert relayed(pg_engine) == []


def kill_the_others(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_a_connection_that_is_cut_between_sending_and_acking_is_opened_again(pg_engine, destination):
    with writing_directly(pg_engine, destination) as outbox:
        before_each_call(destination, lambda _: kill_the_others(pg_engine))
        with outbox.begin() as session:
            send(outbox, session, b"1", b"2")
        assert eventually(lambda: at_rest(outbox) and destination.calls == 2)

    assert relayed(pg_engine) == []


def test_what_was_sent_is_not_sent_again_by_its_writer_because_its_ack_failed(engine, destination, monkeypatch):
    """Only what is left of the transaction is tried again."""
    insert, failures = Acks.insert, [1, 2]

    def failing(acks: Acks, writer: str, ids: Sequence[int]) -> None:
        if failures:
            failures.pop()
            raise OSError("away")
        insert(acks, writer, ids)

    monkeypatch.setattr(Acks, "insert", failing)
    with writing_directly(engine, destination) as outbox:
        write(outbox, 1)
        assert eventually(lambda: at_rest(outbox) and not failures and promises(outbox))
        write(outbox, 2)
        assert eventually(lambda: at_rest(outbox) and b"2" in destination.bodies)

    assert destination.bodies == [b"1", b"2"]


def test_the_relay_beside_it_has_its_turn_and_the_writer_its_right(engine, destination, monkeypatch):
    """One sender for both. A call of the relay that takes longer than the right to send ends the writer's."""
    briefly(monkeypatch)
    slow = threading.Event()
    destination.hanging = lambda messages: messages[0].key is not None and not slow.is_set()
    with writing_directly(engine, destination) as outbox:
        relay = outbox.start()
        with outbox.begin() as session:
            outbox.send(session, "orders", b"1", key="k")
        assert eventually(lambda: destination.calls == 1)
        write(outbox, 2)
        # Until the compensation waits for its turn as well, behind the writer.
        time.sleep(3.5)
        slow.set()
        assert eventually(lambda: len(destination.messages) == 2)
        time.sleep(1)
        outbox.stop()
        assert not relay.stopping

    assert sorted(destination.bodies) == [b"1", b"2"]


def test_a_commit_in_the_middle_of_a_commit_hook(engine, destination):
    """As by a signal handler, which may interrupt whatever it likes."""
    with writing_directly(engine, destination) as outbox:
        sends = outbox._direct
        assert sends is not None
        with sends._lock:
            write(outbox, 1)
        assert settled(outbox, destination, [b"1"])


def test_bodies_are_what_was_committed(engine, destination):
    """Never what memory remembers: read back by id, so that a trigger's or a hook's last word counts."""
    with writing_directly(engine, destination) as outbox:
        with outbox.begin() as session:
            send(outbox, session, b"before")
            session.connection().exec_driver_sql(
                "UPDATE outbox_message SET body = 'after'"
                if engine.dialect.name == "postgresql"
                else "UPDATE outbox_message SET body = x'6166746572'"
            )
        assert settled(outbox, destination, [b"after"])
    assert bodies(engine) == [b"after"]
