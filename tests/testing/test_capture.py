"""A test knows what its application has sent, whatever becomes of the transactions."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Message, Outbox, TransactionAbortedError
from outbox.testing.capture import Capture
from tests.support.handles import HANDLES
from tests.support.readers import bodies

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]
Send = Callable[[str], None]


@pytest.fixture
def capture() -> Iterator[Capture]:
    with Capture() as capture:
        yield capture


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def texts(messages: list[Message]) -> list[str]:
    return [message.body.decode() for message in messages]


def sender(outbox: Outbox, handle: Any) -> Send:
    """Sends on one handle."""
    return lambda body: [outbox.send(handle, "orders", body)].clear()


# Transactions of the application


def committed(handle: Any, send: Send) -> None:
    send("1")
    handle.commit()


def rolled_back(handle: Any, send: Send) -> None:
    send("gone")
    handle.rollback()


def one_after_the_other(handle: Any, send: Send) -> None:
    send("gone")
    handle.rollback()
    send("1")
    handle.commit()
    send("gone")
    handle.rollback()
    send("2")
    handle.commit()


def closed(handle: Any, send: Send) -> None:
    send("gone")
    handle.close()


def savepoint_released(handle: Any, send: Send) -> None:
    send("1")
    with handle.begin_nested():
        send("2")
    handle.commit()


def savepoint_rolled_back(handle: Any, send: Send) -> None:
    send("1")
    savepoint = handle.begin_nested()
    send("gone")
    savepoint.rollback()
    send("2")
    handle.commit()


def savepoint_released_in_a_transaction_rolled_back(handle: Any, send: Send) -> None:
    with handle.begin_nested():
        send("gone")
    handle.rollback()


def three_deep_the_middle_rolled_back(handle: Any, send: Send) -> None:
    send("1")
    with handle.begin_nested():
        send("2")
        middle = handle.begin_nested()
        send("gone")
        with handle.begin_nested():
            send("gone too")
        middle.rollback()
        send("3")
    handle.commit()


def three_deep_the_inner_raises(handle: Any, send: Send) -> None:
    with handle.begin_nested(), handle.begin_nested():
        send("1")
        with suppress(RuntimeError), handle.begin_nested():
            send("gone")
            raise RuntimeError
        send("2")
    handle.commit()


def three_deep_all_released_the_outer_rolled_back(handle: Any, send: Send) -> None:
    send("1")
    outer = handle.begin_nested()
    with handle.begin_nested(), handle.begin_nested():
        send("gone")
    outer.rollback()
    handle.commit()


def savepoints_beside_each_other(handle: Any, send: Send) -> None:
    for n in range(4):
        savepoint = handle.begin_nested()
        send("gone" if n % 2 else str(n))
        savepoint.rollback() if n % 2 else savepoint.commit()
    handle.commit()


def savepoints_made_by_hand(handle: Any, send: Send) -> None:
    send("1")
    handle.execute(text("SAVEPOINT mine"))
    send("gone")
    handle.execute(text("rollback to savepoint mine"))
    send("gone too")
    handle.execute(text("ROLLBACK TO mine"))
    send("2")
    handle.execute(text("release mine"))
    handle.commit()


def a_statement_fails_in_a_savepoint(handle: Any, send: Send) -> None:
    send("1")
    with suppress(DBAPIError), handle.begin_nested():
        send("gone")
        handle.execute(text("SELECT * FROM there_is_no_such_table"))
    handle.commit()


def an_exception_in_the_block(handle: Any, send: Send) -> None:
    with suppress(RuntimeError), handle.begin():
        send("gone")
        raise RuntimeError


FOR_ALL = [
    committed, rolled_back, one_after_the_other, closed, savepoint_released, savepoint_rolled_back,
    savepoint_released_in_a_transaction_rolled_back, three_deep_the_middle_rolled_back, three_deep_the_inner_raises,
    three_deep_all_released_the_outer_rolled_back, savepoints_beside_each_other, savepoints_made_by_hand,
    a_statement_fails_in_a_savepoint, an_exception_in_the_block,
]  # fmt: skip


@pytest.mark.parametrize("kind", HANDLES)
def test_what_is_captured_is_what_the_log_holds(engine, outbox, capture, kind):
    for script in FOR_ALL:
        capture.clear()
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox_message"))
        with HANDLES[kind](engine) as handle:
            script(handle, sender(outbox, handle))

        in_the_log = [body.decode() for body in bodies(engine)]
        found = (script.__name__, texts(capture.messages), texts(capture.committed))
        assert found == (script.__name__, in_the_log, in_the_log)
        assert not [text for text in in_the_log if text.startswith("gone")], script.__name__
        assert not [text for text in texts(capture.rolled_back) if not text.startswith("gone")], script.__name__


def test_a_message_counts_before_its_transaction_is_decided(engine, outbox, capture):
    with Session(engine) as session:
        outbox.send(session, "orders", "1")

        undecided = texts(capture.messages), texts(capture.committed)

    assert undecided == (["1"], [])
    assert (texts(capture.messages), texts(capture.rolled_back)) == ([], ["1"])


def test_a_session_that_is_invalidated_has_sent_nothing(engine, outbox, capture):
    with Session(engine) as session:
        outbox.send(session, "orders", "gone")
        session.invalidate()

    assert texts(capture.messages) == []


def test_a_connection_that_is_dropped_has_sent_nothing(pg_engine, capture):
    outbox = Outbox(pg_engine)
    connection = pg_engine.connect()
    outbox.send(connection, "orders", "gone")
    del connection
    gc.collect()

    assert texts(capture.messages) == []


def test_the_commit_of_a_failed_transaction_is_none(pg_engine, capture):
    """PostgreSQL would make a rollback of it, without an error of its own."""
    outbox = Outbox(pg_engine)
    with Session(pg_engine) as session:
        outbox.send(session, "orders", "gone")
        with suppress(DBAPIError):
            session.execute(text("SELECT * FROM there_is_no_such_table"))
        with pytest.raises(TransactionAbortedError):
            session.connection().commit()

    assert (texts(capture.messages), texts(capture.committed)) == ([], [])


def test_a_commit_that_fails_has_sent_nothing(pg_engine, capture):
    """A constraint that is checked at the very end."""
    outbox = Outbox(pg_engine)
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE TABLE late (n int, UNIQUE (n) DEFERRABLE INITIALLY DEFERRED)"))
    with Session(pg_engine) as session:
        outbox.send(session, "orders", "gone")
        session.execute(text("INSERT INTO late VALUES (1), (1)"))
        with pytest.raises(DBAPIError):
            session.commit()
        session.rollback()
        outbox.send(session, "orders", "1")
        session.commit()

    assert (texts(capture.committed), texts(capture.rolled_back)) == (["1"], ["gone"])


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_a_transaction_in_two_phases_is_followed(postgres, pg_engine, capture, decision):
    outbox = Outbox(pg_engine)
    with pg_engine.connect() as connection:
        transaction = connection.begin_twophase()
        outbox.send(connection, "orders", "1")
        transaction.prepare()
        assert texts(capture.messages) == ["1"]
        getattr(transaction, decision)()

    assert texts(capture.messages) == texts(capture.committed) == (["1"] if decision == "commit" else [])


def test_a_repetition_that_is_not_written_is_not_captured(engine, outbox, capture):
    with outbox.begin() as session:
        outbox.send(session, "orders", "1", dedup_key="order-1")
        outbox.send(session, "orders", "again", dedup_key="order-1")
        twins = [Message("orders", "2", dedup_key="order-2"), Message("orders", "again", dedup_key="order-2")]
        outbox.send_all(session, twins)

    assert texts(capture.messages) == texts(capture.committed) == ["1", "2"]


def test_engines_made_before_and_after_are_watched(sqlite_engine, capture):
    """Also what is derived from one by other options."""
    derived = sqlite_engine.execution_options(compiled_cache=None)
    for number, engine in enumerate([sqlite_engine, derived]):
        outbox = Outbox(engine)
        with engine.begin() as connection:
            outbox.send(connection, "orders", str(number))
        with engine.connect() as connection:
            outbox.send(connection, "orders", "gone")

    assert texts(capture.messages) == texts(capture.committed) == ["0", "1"]


def test_nothing_is_watched_before_and_after(engine, outbox):
    with outbox.begin() as session:
        outbox.send(session, "orders", "before")
    with Capture() as capture, outbox.begin() as session:
        outbox.send(session, "orders", "during")
    with outbox.begin() as session:
        outbox.send(session, "orders", "after")

    assert texts(capture.messages) == ["during"]


def test_what_began_before_the_capture_is_followed_too(engine, outbox):
    """A savepoint of a fixture, say."""
    with engine.connect() as connection:
        connection.begin()
        before = connection.begin_nested()
        with Capture() as capture:
            outbox.send(connection, "orders", "gone")
            inner = connection.begin_nested()
            outbox.send(connection, "orders", "gone")
            inner.commit()
            before.rollback()
            outbox.send(connection, "orders", "1")
            connection.commit()

    assert texts(capture.messages) == texts(capture.committed) == ["1"]


# Tests that roll everything back


@contextmanager
def rolled_back_at_the_end(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        transaction = connection.begin()
        yield connection
        if transaction.is_active:
            transaction.rollback()


@pytest.mark.parametrize("mode", JoinMode.__args__)  # type: ignore[attr-defined]
def test_what_a_rolled_back_test_committed_counts(engine, outbox, capture, mode):
    """While the test runs, and after it; what the application itself rolls back never does."""
    with rolled_back_at_the_end(engine) as connection:
        with Session(connection, join_transaction_mode=mode) as session:
            outbox.send(session, "orders", "1")
            session.commit()
            with session.begin_nested():
                outbox.send(session, "orders", "2")
            savepoint = session.begin_nested()
            outbox.send(session, "orders", "gone")
            savepoint.rollback()
            session.commit()
        with Session(connection, join_transaction_mode=mode) as session:
            outbox.send(session, "orders", "gone as well")
            session.rollback()
        during = texts(capture.messages)

    assert (during, texts(capture.messages)) == (["1", "2"], ["1", "2"])
    if mode == "control_fully":
        assert [body.decode() for body in bodies(engine)] == texts(capture.committed) == ["1", "2"]
    else:
        assert (bodies(engine), capture.committed) == ([], [])


@pytest.mark.parametrize("mode", ["conditional_savepoint", "create_savepoint"])
def test_a_rolled_back_test_may_hold_a_savepoint(engine, outbox, capture, mode):
    """Then every Session has one of its own inside, and may roll back alone."""
    with rolled_back_at_the_end(engine) as connection:
        for number in range(4):
            with connection.begin_nested(), Session(connection, join_transaction_mode=mode) as session:
                outbox.send(session, "orders", "gone" if number % 2 else str(number))
                session.rollback() if number % 2 else session.commit()

    assert texts(capture.messages) == ["0", "2"]


def test_what_is_sent_on_the_tests_own_connection_is_gone_with_it(engine, outbox, capture):
    """Nobody has committed anything there."""
    with rolled_back_at_the_end(engine) as connection:
        outbox.send(connection, "orders", "1")
        during = texts(capture.messages)

    assert (during, texts(capture.messages)) == (["1"], [])
