"""Hazards of a verdict in a business transaction: each closed, on every database that has it.

The names H1 to H14 and the table of races are those of the notes on such protocols; those that only InnoDB has are not
here.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine
from outbox.errors import MQClientError, NoTransactionError, OutboxError, VerdictStandsError
from outbox.model.verdict import DONE, Retry
from outbox.rocketmq import Transaction, TransactionMQProducer, TransactionResolution
from outbox.schema import record_metadata
from tests.rocketmq.parts import (
    COMMIT,
    HOUR,
    Listener,
    arrived,
    check_back,
    half_rows,
    looked_at,
    producer_of,
    verdicts,
)
from tests.support.handles import HANDLES, a_psycopg_connection
from tests.support.orders import Base, customers
from tests.support.readers import waiting
from tests.support.sessions import terminate
from tests.support.waiting import eventually

INSERT = text("INSERT INTO orders (customer) VALUES ('ann')")
UNDER_WAY = Retry("its business transaction is under way", HOUR, counts=False)


@dataclass
class Place:
    """An outbox, and a business whose transactions decide; for `record` in a database of its own."""

    outbox: Outbox
    business: Engine
    producer: TransactionMQProducer
    way: Any

    def begun(self, body: str = "1") -> Transaction:
        """A transaction with a message."""
        transaction = self.producer.begin_transaction(verdict=self.way)
        transaction.send("orders", body)
        return transaction

    def look(self, rows: Any) -> Any:
        """What a checker makes of them."""
        return looked_at(self.outbox, rows, business=self.business)

    def check(self) -> None:
        """Let the check service look."""
        check_back(self.outbox, business=self.business)

    def outcome(self) -> tuple[list[str], list[str]]:
        """What is durable of the business, and what was delivered, after everybody has looked."""
        self.check()
        return customers(self.business), arrived(self.outbox)


@contextmanager
def place_on(engine: Engine, way: str, business: Engine) -> Iterator[Place]:
    Base.metadata.create_all(business)
    if way == "record":
        record_metadata().create_all(business)
    outbox = Outbox(engine)
    producer = producer_of(outbox, business=business if way == "record" else None)
    yield Place(outbox, business, producer, way)
    producer.shutdown()
    outbox.close()


@pytest.fixture(params=["join", "record"])
def place(request, engine, tmp_path):
    way, business = request.param, engine
    if way == "record":
        business = business_of(request, engine, tmp_path)
    with place_on(engine, way, business) as made:
        yield made
    if business is not engine:
        business.dispose()


def business_of(request, engine, tmp_path):
    """Another database of the same kind, which has no outbox."""
    if engine.dialect.name == "sqlite":
        return create_engine(f"sqlite:///{tmp_path / 'business.sqlite3'}")
    return create_engine(request.getfixturevalue("postgres").create_database(f"business_{uuid4().hex}"))


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


# The table of races: the business is at it while a checker looks


def test_a_business_under_way_is_waited_for_and_not_counted(place):
    """Then it commits, and the next look finds that out."""
    transaction = place.begun()
    rows = half_rows(place.outbox)
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        (found,) = place.look(rows)
        business.commit()
    (after,) = place.look(rows)

    assert isinstance(found, Retry)
    why = "the business database does not say" if place.way == "record" else "its business transaction is under way"
    assert (found.counts, found.after, found.error.partition(":")[0]) == (False, HOUR, why)
    assert (after, verdicts(place.outbox.engine)) == (DONE, {transaction.id: "commit"})
    assert place.outcome() == (["ann"], ["1"])


@pytest.mark.parametrize("how", ["rolled back", "killed"])
def test_a_business_that_came_to_nothing_is_fenced(place, how):
    transaction = place.begun()
    rows = half_rows(place.outbox)
    business = place.business.connect()
    transaction.join(business)
    business.execute(INSERT)
    if how == "killed":
        kill(place.business, business)
    else:
        business.rollback()
    assert eventually(lambda: place.look(rows) == [DONE])
    with suppress(Exception):
        business.commit()
    business.close()

    assert verdicts(place.outbox.engine) == {transaction.id: "rollback"}
    assert place.outcome() == ([], [])


def kill(engine: Engine, business: Connection) -> None:
    """Have the connection die in the middle of its transaction."""
    if engine.dialect.name == "sqlite":
        business.connection.dbapi_connection.close()  # type: ignore[union-attr]
        return
    pid = business.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
    terminate(engine, "pid = :pid", pid=pid)


@pytest.mark.parametrize("has_read", [True, False])
def test_a_fence_that_was_first_is_met_by_the_business(pg_engine, place, has_read):
    """Also by one that has begun before, and only read so far."""
    if place.business.dialect.name == "sqlite":
        # Of engines that we make, a transaction has the file from its begin on: nobody fences meanwhile.
        has_read = False
    transaction = place.begun()
    with place.business.connect() as business:
        if has_read:
            business.execute(text("SELECT * FROM orders")).all()
        place.check()
        with pytest.raises(VerdictStandsError) as raised:
            transaction.join(business)

    assert (raised.value.transaction_id, raised.value.verdict) == (transaction.id, "rollback")
    assert place.outcome() == ([], [])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize("way", ["join", "record"])
def test_a_business_waits_for_a_fence_that_is_not_committed(pg_engine, way, ends):
    with place_on(pg_engine, way, pg_engine) as place:
        transaction = place.begun()
        table, column = ("outbox_record", "verdict") if way == "record" else ("outbox_op", "op")
        by = "" if way == "record" else ", decided_by"
        fence = text(
            f"INSERT INTO {table} (transaction_id, {column}{by}, decided_at) VALUES"
            f" (:id, 'rollback'{', :by' if by else ''}, now())"
        )
        raised: list[Exception] = []

        def do() -> None:
            try:
                with pg_engine.connect() as business:
                    transaction.join(business)
                    business.execute(INSERT)
                    business.commit()
            except Exception as error:
                raised.append(error)

        with pg_engine.connect() as checker:
            checker.execute(fence, {"id": transaction.id, **({"by": "check"} if by else {})})
            thread = threading.Thread(target=do)
            thread.start()
            assert eventually(lambda: waiting(pg_engine) == 1)
            getattr(checker, ends)()
        thread.join()

        assert [type(error) for error in raised] == ([VerdictStandsError] if ends == "commit" else [])
        assert place.outcome() == (([], []) if ends == "commit" else (["ann"], ["1"]))


def test_two_checkers_of_a_business_that_never_comes_agree(place):
    transaction = place.begun()
    rows = half_rows(place.outbox)
    found: list[Any] = []
    looks = [threading.Thread(target=lambda: found.append(place.look(rows))) for _ in range(4)]
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    again = place.look(rows)

    assert again == [DONE]
    assert [DONE] in found
    assert verdicts(place.outbox.engine) == {transaction.id: "rollback"}


def test_h6_two_checkers_wait_for_a_business_that_rolls_back(pg_engine, monkeypatch):
    monkeypatch.setattr("outbox.rocketmq.checker.PATIENCE_SECONDS", 30.0)
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        rows = half_rows(place.outbox)
        found: list[Any] = []
        with pg_engine.connect() as business:
            transaction.join(business)
            looks = [threading.Thread(target=lambda: found.append(place.look(rows))) for _ in range(3)]
            for look in looks:
                look.start()
            assert eventually(lambda: waiting(pg_engine) == 3)
            business.rollback()
        for look in looks:
            look.join()

        assert (found, verdicts(pg_engine)) == ([[DONE]] * 3, {transaction.id: "rollback"})


def test_a_file_that_is_busy_is_no_verdict(sqlite_engine):
    """Whoever has it, perhaps not even the business."""
    with place_on(sqlite_engine, "join", sqlite_engine) as place:
        transaction = place.begun()
        rows = half_rows(place.outbox)
        with sqlite_engine.connect() as somebody:
            somebody.execute(text("SELECT 1"))
            found = place.look(rows)
        before = verdicts(sqlite_engine)

        assert (found, before) == ([UNDER_WAY], {})
        assert (place.look(rows), verdicts(sqlite_engine)) == ([DONE], {transaction.id: "rollback"})


# Who else may end such a transaction


def test_a_word_does_not_commit_what_a_business_transaction_decides(place):
    """Its business may still be rolled back, by a fence that came first, say."""
    transaction = place.begun()
    errors = []
    for end in (transaction.commit, lambda: place.producer.end_transaction(transaction.id, COMMIT)):
        with pytest.raises(MQClientError) as raised:
            end()
        errors.append(str(raised.value))

    assert errors[0] == errors[1]
    assert (verdicts(place.outbox.engine), place.outcome()) == ({}, ([], []))


def test_a_word_that_rolls_back_keeps_the_business_from_committing(place):
    for by_itself in (True, False):
        transaction = place.begun()
        if by_itself:
            transaction.rollback()
        else:
            place.producer.end_transaction(transaction.id, TransactionResolution.ROLLBACK)
        with place.business.connect() as business, pytest.raises(VerdictStandsError):
            transaction.join(business)
            business.execute(INSERT)
            business.commit()

    assert place.outcome() == ([], [])


def test_a_word_that_rolls_back_too_late_is_refused(place):
    """The business is committed; for a record nobody has said so to the outbox yet."""
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    raised = []
    for end in (
        transaction.rollback,
        lambda: place.producer.end_transaction(transaction.id, TransactionResolution.ROLLBACK),
    ):
        with pytest.raises(VerdictStandsError) as error:
            end()
        raised.append(error.value.verdict)

    assert (raised, place.outcome()) == (["commit", "commit"], (["ann"], ["1"]))


def test_a_word_that_commits_what_is_committed_changes_nothing(place):
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    transaction.commit()
    place.producer.end_transaction(transaction.id, COMMIT)

    assert place.outcome() == (["ann"], ["1"])


# Business transactions that are done twice


def test_a_business_that_was_committed_is_not_committed_a_second_time(place):
    """The answer to its commit was lost, and the application tries again."""
    transaction = place.begun()
    for attempt in range(2):
        with place.business.connect() as business, suppress(VerdictStandsError):
            transaction.join(business)
            business.execute(text(f"INSERT INTO orders (customer) VALUES ('{attempt}')"))
            business.commit()

    assert place.outcome() == (["0"], ["1"])


def test_a_verdict_that_is_said_twice_in_one_business_transaction_is_one(place):
    transaction = place.begun()
    with place.business.connect() as business:
        for _ in range(3):
            transaction.join(business)
        business.execute(INSERT)
        business.commit()

    assert place.outcome() == (["ann"], ["1"])


def test_a_second_try_on_the_same_connection_decides_again(place):
    """Although this transaction, too, has sent something before."""
    transaction = place.begun()
    with place.business.connect() as business:
        transaction.join(business)
        business.rollback()
        if place.way != "record":
            place.outbox.send(business, "orders", "plain")
        transaction.join(business)
        business.execute(INSERT)
        business.commit()
    business_rows, messages = place.outcome()

    assert (business_rows, sorted(messages)) == (["ann"], ["1"] if place.way == "record" else ["1", "plain"])


def test_a_failed_prepare_of_two_phases_is_not_committed_in_one(pg_engine):
    """The application swallows what the first phase raises."""
    with place_on(pg_engine, "join", pg_engine) as place:
        transaction = place.begun()
        place.check()
        with pg_engine.connect() as business:
            both = business.begin_twophase()
            with suppress(VerdictStandsError):
                transaction.join(business)
            for end in (both.prepare, both.commit):
                with suppress(Exception):
                    end()

        with sqlalchemy.create_engine(pg_engine.url).connect() as business:
            twice = business.begin_twophase()
            with suppress(VerdictStandsError):
                transaction.join(business)
            business.execute(INSERT)
            errors = []
            for end in (twice.prepare, twice.commit):
                try:
                    end()
                except Exception as error:
                    errors.append(type(error))

        assert (place.outcome(), errors[:1]) == (([], []), [VerdictStandsError])
