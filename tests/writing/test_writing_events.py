"""Who listens is told what was written, committed and rolled back; and nothing that is not so."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox import Message, Outbox, TransactionAbortedError
from outbox.rocketmq import TransactionMQProducer
from outbox.telemetry.events import Committed, Event, RolledBack, Written
from tests.support.handles import ASYNC_HANDLES, HANDLES, awaited, conninfo_of

Send = Callable[[str], object]
Told = list[tuple[str, list[str]]]


def listening(outbox: Outbox) -> Told:
    """Listen; returns the list that fills with each event's name and the bodies of its messages."""
    told: Told = []

    @outbox.listen
    def note(event: Event) -> None:
        assert isinstance(event, Written | Committed | RolledBack)
        assert event.database is outbox.database
        told.append((type(event).__name__, [message.body.decode() for message in event.messages]))

    return told


# Transactions, and what is told of each


def committed(handle: Any, send: Send) -> Told:
    send("1")
    send("2")
    handle.commit()
    handle.commit()
    return [("Written", ["1"]), ("Written", ["2"]), ("Committed", ["1", "2"])]


def rolled_back(handle: Any, send: Send) -> Told:
    send("1")
    handle.rollback()
    send("2")
    handle.close()
    return [("Written", ["1"]), ("RolledBack", ["1"]), ("Written", ["2"]), ("RolledBack", ["2"])]


def a_savepoint_released(handle: Any, send: Send) -> Told:
    with handle.begin_nested():
        send("1")
    handle.commit()
    return [("Written", ["1"]), ("Committed", ["1"])]


def a_savepoint_rolled_back(handle: Any, send: Send) -> Told:
    send("1")
    with handle.begin_nested():
        send("2")
        inner = handle.begin_nested()
        send("3")
        inner.rollback()
    outer = handle.begin_nested()
    send("4")
    outer.rollback()
    handle.commit()
    return [
        ("Written", ["1"]), ("Written", ["2"]), ("Written", ["3"]), ("RolledBack", ["3"]), ("Written", ["4"]),
        ("RolledBack", ["4"]), ("Committed", ["1", "2"]),
    ]  # fmt: skip


def everything_rolled_back_to_a_savepoint(handle: Any, send: Send) -> Told:
    savepoint = handle.begin_nested()
    send("1")
    savepoint.rollback()
    handle.commit()
    return [("Written", ["1"]), ("RolledBack", ["1"])]


@pytest.mark.parametrize("kind", HANDLES)
@pytest.mark.parametrize(
    "script",
    [
        committed, rolled_back, a_savepoint_released, a_savepoint_rolled_back, everything_rolled_back_to_a_savepoint,
    ],
    ids=lambda script: script.__name__,
)  # fmt: skip
def test_a_transaction_is_told_as_it_ends(engine, kind, script):
    outbox = Outbox(engine)
    told = listening(outbox)
    with HANDLES[kind](engine) as handle:
        expected = script(handle, lambda body: outbox.send(handle, "orders", body))

    assert told == expected


@pytest.mark.parametrize("kind", ASYNC_HANDLES)
def test_awaited_handles_are_told_the_same(engine, kind):
    told: Told = []

    async def act() -> None:
        nonlocal told
        twin = awaited(engine)
        outbox = Outbox(twin)
        told = listening(outbox)
        async with ASYNC_HANDLES[kind](twin) as handle:
            await outbox.asend(handle, "orders", "1")
            with suppress(ZeroDivisionError):
                async with handle.begin_nested():
                    await outbox.asend(handle, "orders", "2")
                    raise ZeroDivisionError
            await handle.commit()
        await twin.dispose()

    asyncio.run(act())

    assert told == [("Written", ["1"]), ("Written", ["2"]), ("RolledBack", ["2"]), ("Committed", ["1"])]


def test_the_values_of_a_commit(engine):
    """On the thread that commits; a repetition of a dedup key is not written."""
    outbox, told, threads = Outbox(engine), list[Event](), set[int]()
    outbox.listen(told.append)
    outbox.listen(lambda _: threads.add(threading.get_ident()))
    first, second = Message("orders", "1", dedup_key="1"), Message("orders", "2")

    with outbox.begin() as session:
        outbox.send_all(session, [first, Message("orders", "again", dedup_key="1"), second])
        connection = session.connection()

    (seconds,) = [event.seconds for event in told if isinstance(event, Committed)]
    assert told == [
        Written(database=outbox.database, connection=connection, messages=[first, second]),
        Committed(database=outbox.database, messages=(first, second), seconds=seconds),
    ]
    assert 0 < seconds < 60
    assert threads == {threading.get_ident()}


def test_a_commit_that_fails_is_a_rollback(pg_engine):
    """By a constraint that is checked at the very end, or because a statement had failed."""
    outbox = Outbox(pg_engine)
    told = listening(outbox)
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE TABLE late (n int, UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)"))
    with pytest.raises(DBAPIError), outbox.begin() as session:
        outbox.send(session, "orders", "1")
        session.execute(text("INSERT INTO late VALUES (1), (1)"))
    with pg_engine.connect() as connection:
        outbox.send(connection, "orders", "2")
        with suppress(DBAPIError):
            connection.execute(text("SELECT * FROM there_is_no_such_table"))
        with pytest.raises(TransactionAbortedError):
            connection.commit()

    assert told == [("Written", ["1"]), ("RolledBack", ["1"]), ("Written", ["2"]), ("RolledBack", ["2"])]


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_two_phases(pg_engine, decision):
    outbox = Outbox(pg_engine)
    told = listening(outbox)
    with pg_engine.connect() as connection:
        transaction = connection.begin_twophase()
        outbox.send(connection, "orders", "1")
        transaction.prepare()
        prepared = list(told)
        getattr(transaction, decision)()

    assert prepared == [("Written", ["1"])]
    assert told == [("Written", ["1"]), ("Committed" if decision == "commit" else "RolledBack", ["1"])]


def test_of_a_psycopg_connection_only_the_writing_is_noticed(pg_engine):
    outbox = Outbox(pg_engine)
    told = listening(outbox)
    with psycopg.connect(conninfo_of(pg_engine.url)) as connection:
        outbox.send(connection, "orders", "1")

    assert told == [("Written", ["1"])]


def test_each_outbox_has_its_own_listeners(engine):
    one, other = Outbox(engine), Outbox(engine)
    of_one, of_other = listening(one), listening(other)
    with engine.begin() as connection:
        one.send(connection, "orders", "1")
        other.send(connection, "orders", "2")

    assert of_one == [("Written", ["1"]), ("Committed", ["1"])]
    assert of_other == [("Written", ["2"]), ("Committed", ["2"])]


def test_what_was_written_before_somebody_listened_is_not_told(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", "before")
        kept = outbox.transactions.running(session.connection())
        assert kept is not None
        assert (kept.messages, kept.savepoints) == ([], [])
        told = listening(outbox)
        outbox.send(session, "orders", "1")
    with outbox.begin() as session:
        outbox.send(session, "orders", "2")
        outbox.unlisten(next(iter(outbox.listeners._functions)))

    assert told == [("Written", ["1"]), ("Committed", ["1"]), ("Written", ["2"])]


def test_a_listener_that_raises_disturbs_no_transaction(engine):
    outbox = Outbox(engine)

    @outbox.listen
    def broken(event: Event) -> None:
        raise ZeroDivisionError

    told = listening(outbox)
    with outbox.begin() as session:
        outbox.send(session, "orders", "1")
    with suppress(RuntimeError), outbox.begin() as session:
        outbox.send(session, "orders", "2")
        raise RuntimeError

    assert told == [("Written", ["1"]), ("Committed", ["1"]), ("Written", ["2"]), ("RolledBack", ["2"])]


def test_half_messages_are_not_told(pg_engine):
    """Neither they nor what is restored from them."""
    outbox = Outbox(pg_engine)
    told = listening(outbox)
    producer = TransactionMQProducer("orders", outbox)
    transaction = producer.begin_transaction(verdict="join")
    transaction.send("orders", b"1")
    with outbox.begin() as session:
        transaction.join(session)
        outbox.send(session, "orders", b"2")

    assert told == [("Written", ["2"]), ("Committed", ["2"])]
