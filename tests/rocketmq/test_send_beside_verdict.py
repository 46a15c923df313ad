"""A send beside the verdict on its transaction: what was stored is delivered, or the send raises.

PostgreSQL only: on SQLite one of the two waits for the other from its beginning on.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.errors import MQClientError, VerdictStandsError
from outbox.model.verdict import DONE
from outbox.rocketmq import Transaction, TransactionMQProducer
from tests.rocketmq.parts import (
    COMMIT,
    HALF_TOPIC,
    ROLLBACK,
    Listener,
    arrived,
    check_back,
    half_rows,
    halves,
    looked_at,
    producer_of,
    verdicts,
)
from tests.support.handles import a_psycopg_connection
from tests.support.readers import waiting
from tests.support.waiting import eventually

GATE = 7


@pytest.fixture
def engine(pg_engine: Engine) -> Engine:
    """The database that these tests are about."""
    return pg_engine


@pytest.fixture
def producer(outbox: Outbox) -> Iterator[TransactionMQProducer]:
    """A producer that does not check back by itself, and whose business transactions may be fenced at once."""
    made = producer_of(outbox, Listener())
    yield made
    made.shutdown()


def begun(producer: TransactionMQProducer, way: Any = "listener") -> Transaction:
    """A transaction with a message."""
    transaction = producer.begin_transaction(verdict=way)
    transaction.send("orders", "1")
    return transaction


@contextmanager
def stopped_inside(engine: Engine, which: str) -> Iterator[Connection]:
    """Stop statements that append rows of some topics, in their middle, until the connection's transaction ends.

    Such a statement has its snapshot already, and nothing of it is committed.
    """
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE OR REPLACE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS"
                f" 'BEGIN PERFORM pg_advisory_xact_lock({GATE}); RETURN NEW; END'"
            )
        )
        connection.execute(
            text(
                f"CREATE TRIGGER gate BEFORE INSERT ON outbox_message FOR EACH ROW WHEN (NEW.topic {which}"
                f" '{HALF_TOPIC}') EXECUTE FUNCTION gate()"
            )
        )
    with engine.connect() as gate:
        gate.execute(text(f"SELECT pg_advisory_xact_lock({GATE})"))
        yield gate


class Beside:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: Exception | None = None
        self.result: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return not self._thread.is_alive()

    def end(self) -> Any:
        """Wait for its end; return what it returned, or the error that it raised."""
        self._thread.join()
        return self.error or self.result


def by_word(transaction, producer, engine):
    producer.end_transaction(transaction.id, COMMIT)


def by_itself(transaction, producer, engine):
    transaction.commit()


def by_driver(transaction, producer, engine):
    with a_psycopg_connection(engine) as connection:
        transaction.join(connection)
        transaction.commit(connection)
        connection.commit()


def by_join(transaction, producer, engine):
    with Session(engine) as session, session.begin():
        transaction.join(session)


COMMITS = [(by_word, "listener"), (by_itself, "listener"), (by_driver, "join"), (by_join, "join")]


@pytest.mark.parametrize(("commit", "way"), COMMITS)
def test_a_commit_delivers_a_message_whose_send_is_under_way(engine, outbox, producer, commit, way):
    transaction = begun(producer, way)
    with stopped_inside(engine, "=") as gate:
        send = Beside(lambda: transaction.send("orders", "2"))
        assert eventually(lambda: waiting(engine) == 1)
        end = Beside(lambda: commit(transaction, producer, engine))
        assert eventually(lambda: end.ended or waiting(engine) == 2)
        gate.rollback()
    errors = [each.error for each in (send, end) if isinstance(each.end(), Exception)]

    assert (errors, arrived(outbox)) == ([], ["1", "2"])


@pytest.mark.parametrize("by", ["word", "itself"])
def test_a_rollback_waits_for_a_send_that_is_under_way(engine, outbox, producer, by):
    """So no send returns after the rollback as if its message still had a verdict before it."""
    transaction = begun(producer)
    end = {"word": lambda: producer.end_transaction(transaction.id, ROLLBACK), "itself": transaction.rollback}[by]
    with stopped_inside(engine, "=") as gate:
        send = Beside(lambda: transaction.send("orders", "2"))
        assert eventually(lambda: waiting(engine) == 1)
        rollback = Beside(end)
        assert eventually(lambda: rollback.ended or waiting(engine) == 2)
        before = verdicts(engine)
        gate.rollback()
    send.end(), rollback.end()

    assert (before, send.error, rollback.error) == ({}, None, None)
    assert (verdicts(engine), arrived(outbox), halves(engine)) == ({transaction.id: "rollback"}, [], 2)


def test_a_fence_does_not_overtake_a_send_that_is_under_way(engine, outbox, producer):
    transaction = begun(producer, "join")
    rows = half_rows(outbox)
    with stopped_inside(engine, "=") as gate:
        send = Beside(lambda: transaction.send("orders", "2"))
        assert eventually(lambda: waiting(engine) == 1)
        (found,) = looked_at(outbox, rows)
        before = verdicts(engine)
        gate.rollback()
    send.end()

    assert (found is DONE, before, send.error) == (False, {}, None)
    assert (looked_at(outbox, rows), verdicts(engine)) == ([DONE], {transaction.id: "rollback"})


@pytest.mark.parametrize(("commit", "way"), COMMITS)
def test_a_send_beside_a_commit_that_is_under_way_raises_after_it(engine, outbox, producer, commit, way):
    """The commit has looked for messages before, and would leave this one behind."""
    transaction = begun(producer, way)
    with stopped_inside(engine, "<>") as gate:
        end = Beside(lambda: commit(transaction, producer, engine))
        assert eventually(lambda: waiting(engine) == 1)
        send = Beside(lambda: transaction.send("orders", "2"))
        assert eventually(lambda: send.ended or waiting(engine) == 2)
        gate.rollback()
    end.end()

    assert isinstance(send.end(), VerdictStandsError)
    assert "was committed before by producer" in str(send.error)
    assert (end.error, arrived(outbox), halves(engine)) == (None, ["1"], 1)


def test_a_send_beside_a_business_that_rolls_back_after_its_commit_was_written_is_stored(engine, outbox, producer):
    """Another try of the business delivers it."""
    transaction = begun(producer, "join")
    other = producer_of(outbox, Listener())
    with a_psycopg_connection(engine) as business:
        transaction.join(business)
        transaction.commit(business)
        # As a process does that has the transaction's id only.
        rest = other._begin("join", id=transaction.id)
        send = Beside(lambda: rest.send("orders", "2"))
        assert eventually(lambda: waiting(engine) == 1)
        business.rollback()
        send.end()
        transaction.join(business)
        transaction.commit(business)
        business.commit()
    other.shutdown()

    assert (send.error, arrived(outbox)) == (None, ["1", "2"])


def test_a_send_meets_the_rollback_of_a_checker(engine, outbox, producer):
    transaction = begun(producer, "join")
    check_back(outbox)

    with pytest.raises(VerdictStandsError, match=r"was rolled back before by check .*; this send"):
        transaction.send("orders", "2")

    assert halves(engine) == 1


def test_a_send_after_the_join_is_not_held_up_by_it(engine, outbox, producer):
    """However long the business takes; right before its commit it looks again."""
    transaction = begun(producer, "join")
    with engine.connect() as business:
        transaction.join(business)
        with stopped_inside(engine, "=") as gate:
            send = Beside(lambda: transaction.send("orders", "2"))
            assert eventually(lambda: waiting(engine) == 1)
            commit = Beside(business.commit)
            assert eventually(lambda: commit.ended or waiting(engine) == 2)
            gate.rollback()
        send.end(), commit.end()

    assert (send.error, commit.error, arrived(outbox)) == (None, None, ["1", "2"])


def test_a_rollback_beside_a_joined_business_waits_for_it_and_holds_it_up_with_nothing(engine, outbox, producer):
    """Each would have what the other wants if the rollback took anything before the verdict's own row."""
    transaction = begun(producer, "join")
    with engine.connect() as business:
        transaction.join(business)
        rollback = Beside(transaction_of(producer, transaction).rollback)
        assert eventually(lambda: waiting(engine) == 1)
        business.commit()

    assert isinstance(rollback.end(), VerdictStandsError)
    assert arrived(outbox) == ["1"]


def transaction_of(producer, transaction):
    """The transaction as another thread holds it, which does not know of the business."""
    other = producer._begin(transaction.verdict, id=transaction.id)
    other._sent |= transaction._sent
    return other


def test_a_send_that_a_business_with_an_older_snapshot_does_not_see_raises(engine, outbox, producer, monkeypatch):
    """The message is stored before the business restores, and its id is noted after that."""
    transaction = begun(producer, "join")
    prepare = producer._broker.prepare
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as business:
        business.execute(text("SELECT 1"))
        transaction.join(business)

        def prepare_and_commit(*args):
            place = prepare(*args)
            business.commit()
            return place

        monkeypatch.setattr(producer._broker, "prepare", prepare_and_commit)
        with pytest.raises(MQClientError, match="would leave this message behind"):
            transaction.send("orders", "2")

    assert arrived(outbox) == ["1"]
