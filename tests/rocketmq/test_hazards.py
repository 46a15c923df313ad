"""Hazards of a verdict in a business transaction: each closed, on every database that has it.

The names H1 to H14 are those of the notes on such protocols; those that only InnoDB has are not here.
"""

import threading
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox.errors import MQClientError, NoTransactionError, OutboxError, VerdictStandsError
from outbox.model.verdict import DONE
from tests.rocketmq.parts import (
    COMMIT,
    Listener,
    arrived,
    check_back,
    half_rows,
    producer_of,
    verdicts,
)
from tests.rocketmq.places import INSERT, UNDER_WAY, place_on
from tests.support.handles import HANDLES, a_psycopg_connection
from tests.support.readers import waiting
from tests.support.waiting import eventually

# H1: savepoints


@pytest.mark.parametrize("handle", ["Session", "Connection"])
def test_h1_no_verdict_in_a_savepoint(place, handle):
    """It would be undone with the savepoint, while the business may be committed."""
    transaction = place.begun()
    with HANDLES[handle](place.business) as business:
        business.execute(INSERT)
        with pytest.raises(NoTransactionError, match="outside of every savepoint"), business.begin_nested():
            transaction.join(business)
        transaction.join(business)
        business.commit()

    assert place.outcome() == (["ann"], ["1"])


@pytest.mark.parametrize("handle", ["Session", "Connection"])
def test_h1_a_verdict_in_a_savepoint_that_was_opened_by_text_is_committed_by_nobody(place, handle):
    """SQLAlchemy does not know of it, and the application swallows what is raised."""
    transaction = place.begun()
    with HANDLES[handle](place.business) as business:
        business.execute(text("SAVEPOINT mine"))
        with suppress(NoTransactionError):
            transaction.join(business)
        business.execute(text("ROLLBACK TO SAVEPOINT mine"))
        business.execute(INSERT)
        with pytest.raises(OutboxError, match="savepoint"):
            business.commit()
        business.rollback()

    assert place.outcome() == ([], [])


@pytest.mark.parametrize("undone", [True, False])
def test_h1_savepoints_after_the_verdict_undo_what_was_done_in_them_only(place, undone):
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        savepoint = business.begin_nested()
        business.execute(text("INSERT INTO orders (customer) VALUES ('bob')"))
        if undone:
            savepoint.rollback()
        else:
            savepoint.commit()
        business.commit()

    assert place.outcome() == (["ann"] if undone else ["ann", "bob"], ["1"])


def test_h1_a_psycopg_savepoint_is_refused(pg_engine):
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        with a_psycopg_connection(pg_engine) as business, pytest.raises(NoTransactionError), business.transaction():
            business.execute("INSERT INTO orders (customer) VALUES ('ann')")
            with business.transaction():
                transaction.join(business)

        assert place.outcome() == ([], [])


# H2: the error is swallowed


@pytest.mark.parametrize(
    ("handle", "first"), [("Session", "effect"), ("scoped_session", "verdict"), ("Connection", "verdict")]
)
def test_h2_a_swallowed_fence_commits_no_effect(place, handle, first):
    transaction = place.begun()
    place.check()
    with HANDLES[handle](place.business) as business:
        if first == "effect":
            business.execute(INSERT)
        with suppress(VerdictStandsError):
            transaction.join(business)
        with suppress(Exception):
            business.execute(INSERT)
        with pytest.raises(OutboxError):
            business.commit()
        business.rollback()

    assert (place.outcome(), verdicts(place.outbox.engine)) == (([], []), {transaction.id: "rollback"})


def test_h2_a_swallowed_fence_on_a_driver_of_its_own_commits_no_effect(pg_engine):
    """PostgreSQL answers its COMMIT with a rollback."""
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        place.check()
        with a_psycopg_connection(pg_engine) as business:
            business.execute("INSERT INTO orders (customer) VALUES ('ann')")
            with pytest.raises(VerdictStandsError):
                transaction.join(business)
            business.commit()

        assert place.outcome() == ([], [])


def test_h2_any_other_error_of_the_verdict_commits_no_effect_either(place):
    """A table that is locked for too long, or on SQLite any other writer: of that only a statement is undone."""
    transaction = place.begun()
    kind = place.business.dialect.name
    plain = sqlalchemy.create_engine(place.business.url, connect_args={"timeout": 0.1} if kind == "sqlite" else {})
    table = "outbox_record" if place.way == "record" else "outbox_op"
    with plain.connect() as business, place.business.connect() as other:
        business.execute(text("SELECT 1"))
        if kind == "sqlite":
            other.execute(text("SELECT 1"))
        else:
            other.execute(text(f"LOCK TABLE {table}"))
            business.execute(text("SET LOCAL lock_timeout = 100"))
        with pytest.raises(sqlalchemy.exc.OperationalError):
            transaction.join(business)
        other.rollback()
        with suppress(sqlalchemy.exc.DBAPIError):
            business.execute(INSERT)
        with pytest.raises((OutboxError, sqlalchemy.exc.OperationalError)):
            business.commit()
        business.rollback()
    plain.dispose()

    assert place.outcome() == ([], [])


def test_h2_a_business_that_sees_some_of_the_messages_only_commits_nothing(pg_engine):
    """Its snapshot is older than one of them; the application swallows what is raised."""
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        with pg_engine.connect().execution_options(isolation_level="REPEATABLE READ") as business:
            transaction.join(business)
            business.execute(INSERT)
            transaction.send("orders", "2")
            with suppress(MQClientError):
                business.commit()
            with pytest.raises((OutboxError, sqlalchemy.exc.InvalidRequestError)):
                business.commit()

        assert place.outcome() == ([], [])


def test_h2_a_business_that_sees_none_of_the_messages_is_told_why(pg_engine):
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.producer.begin_transaction(verdict="join")
        with pg_engine.connect().execution_options(isolation_level="REPEATABLE READ") as business:
            business.execute(INSERT)
            transaction.send("orders", "1")
            transaction.join(business)
            with pytest.raises(MQClientError, match="send first, then begin"):
                business.commit()

        assert place.outcome() == ([], [])


def test_h2_messages_that_follow_the_verdict_are_refused(pg_engine):
    """The commit has appended the messages before; nobody would append a later one."""
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        with a_psycopg_connection(pg_engine) as business:
            transaction.join(business)
            business.execute("INSERT INTO orders (customer) VALUES ('ann')")
            transaction.commit(business)
            with pytest.raises(MQClientError, match="would leave this message behind"):
                transaction.send("orders", "late")
            business.commit()
        with pytest.raises(VerdictStandsError, match="was committed before"):
            transaction.send("orders", "later")

        assert place.outcome() == (["ann"], ["1"])


# H3, H4: what a checker sees


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("way", ["join", "record"])
def test_h3_a_checker_that_waited_for_the_business_reads_what_it_came_to(pg_engine, way, end, monkeypatch):
    """Its insert met a row that its own snapshot does not see."""
    monkeypatch.setattr("outbox.rocketmq.business.PATIENCE_SECONDS", 30.0)
    monkeypatch.setattr("outbox.rocketmq.checker.PATIENCE_SECONDS", 30.0)
    with place_on(pg_engine, way, pg_engine) as place:
        transaction = place.begun()
        rows = half_rows(place.outbox)
        found: list[Any] = []
        with pg_engine.connect() as business:
            transaction.join(business)
            business.execute(INSERT)
            checker = threading.Thread(target=lambda: found.extend(place.look(rows)))
            checker.start()
            assert eventually(lambda: waiting(pg_engine) == 1)
            getattr(business, end)()
        checker.join()
        decided = {"commit": "commit", "rollback": "rollback"}[end]

        assert (found, verdicts(pg_engine)) == ([DONE], {transaction.id: decided})
        assert place.outcome() == ((["ann"], ["1"]) if end == "commit" else ([], []))


@pytest.mark.parametrize("level", ["repeatable read", pytest.param("serializable", marks=pytest.mark.storm)])
@pytest.mark.parametrize("way", ["join", "record", "listener"])
def test_h4_the_isolation_that_a_database_has_by_default_makes_no_difference(pg_engine, level, way):
    """To what we do on connections of our own."""
    with pg_engine.begin() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'"))
    pg_engine.dispose()
    with place_on(pg_engine, way, pg_engine) as place:
        if way == "listener":
            place.producer = producer_of(place.outbox, Listener())
        transaction, other = place.begun("1"), place.begun("2")
        with Session(pg_engine) as session:
            session.execute(text("SELECT 1"))
            if way == "listener":
                other.commit()
            else:
                session.rollback()
                other.join(session)
            session.execute(INSERT)
            session.commit()
        check_back(place.outbox, None if way != "listener" else (lambda _: COMMIT), business=place.business)
        expected = {other.id: "commit", transaction.id: "commit" if way == "listener" else "rollback"}

        assert verdicts(pg_engine) == expected
        assert sorted(arrived(place.outbox)) == (["1", "2"] if way == "listener" else ["2"])


# H10: ids


def test_h10_ids_that_differ_in_case_or_in_a_space_are_two(engine):
    """A collation that takes them for one would give one the verdict of the other."""
    with place_on(engine, "join", engine) as place:
        transaction = place.begun()
        other = producer_of(place.outbox, Listener())
        for wrong in (transaction.id.upper(), transaction.id + " ", " " + transaction.id, transaction.id[:-1]):
            with pytest.raises(MQClientError, match="Find prepared transaction message failed"):
                other.end_transaction(wrong, COMMIT)
        other.shutdown()

        assert verdicts(engine) == {}


# H12: after an error of one look the next begins anew


def test_h12_a_checker_that_waited_in_vain_goes_on_with_the_others(pg_engine):
    with place_on(pg_engine, "join", pg_engine) as place:
        busy, free = place.begun("1"), place.begun("2")
        rows = half_rows(place.outbox)
        with pg_engine.connect() as business:
            busy.join(business)
            business.execute(INSERT)
            found = place.look(rows)
            business.commit()

        assert (found, verdicts(pg_engine)) == ([UNDER_WAY, DONE], {busy.id: "commit", free.id: "rollback"})
        assert place.outcome() == (["ann"], ["1"])


# H13, H14: snapshots older than the fence


@pytest.mark.parametrize(
    "level", ["READ COMMITTED", "REPEATABLE READ", pytest.param("SERIALIZABLE", marks=pytest.mark.storm)]
)
@pytest.mark.parametrize("way", ["join", "record"])
def test_h13_a_business_with_an_older_snapshot_than_the_fence_commits_nothing(pg_engine, way, level):
    """Whether it believes the error or not."""
    with place_on(pg_engine, way, pg_engine) as place:
        transaction = place.begun()
        with pg_engine.connect().execution_options(isolation_level=level) as business:
            business.execute(INSERT)
            place.check()
            with pytest.raises((VerdictStandsError, sqlalchemy.exc.OperationalError)):
                transaction.join(business)
            with pytest.raises(OutboxError):
                business.commit()

        assert (place.outcome(), verdicts(pg_engine)) == (([], []), {transaction.id: "rollback"})


@pytest.mark.parametrize("way", ["join", "record"])
def test_h14_a_deferred_transaction_of_sqlite_that_has_read_before_the_fence_commits_nothing(sqlite_engine, way):
    """SQLite answers at once that it is busy, and undoes the statement only."""
    with place_on(sqlite_engine, way, sqlite_engine) as place:
        transaction = place.begun()
        deferred = sqlalchemy.create_engine(sqlite_engine.url, connect_args={"isolation_level": None})
        with deferred.connect() as business:
            business.exec_driver_sql("BEGIN")
            business.execute(text("SELECT * FROM orders")).all()
            place.check()
            with pytest.raises((sqlalchemy.exc.OperationalError, VerdictStandsError)):
                transaction.join(business)
            with suppress(sqlalchemy.exc.OperationalError):
                business.execute(INSERT)
            with pytest.raises((OutboxError, sqlalchemy.exc.OperationalError)):
                business.commit()
        deferred.dispose()

        assert (place.outcome(), verdicts(sqlite_engine)) == (([], []), {transaction.id: "rollback"})
