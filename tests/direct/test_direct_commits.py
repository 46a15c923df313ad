"""Direct send: only the real commit counts, whatever savepoints, outer transactions and slow commits come before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine
from tests.support.destination import Destination
from tests.support.directly import at_rest, briefly, marked, relayed, send, settled, writing_directly
from tests.support.handles import conninfo_of
from tests.support.readers import bodies
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


@pytest.fixture
def outbox(engine: Engine, destination: Destination) -> Iterator[Outbox]:
    with writing_directly(engine, destination) as outbox:
        yield outbox


def test_nothing_is_sent_before_the_commit_and_nothing_after_a_rollback(outbox, engine, destination):
    with Session(engine) as session:
        send(outbox, session, b"rolled back")
        session.flush()
        time.sleep(0.2)
        session.rollback()
        send(outbox, session, b"left open")
    with pytest.raises(ZeroDivisionError), outbox.begin() as session:
        send(outbox, session, b"raised")
        _ = 1 / 0
    time.sleep(0.2)

    assert (at_rest(outbox), destination.calls, bodies(engine)) == (True, 0, [])


def test_a_savepoint_takes_its_messages_with_it(outbox, engine, destination):
    with outbox.begin() as session:
        send(outbox, session, b"outer")
        with session.begin_nested():
            send(outbox, session, b"released")
            inner = session.begin_nested()
            send(outbox, session, b"rolled back")
            inner.rollback()
        time.sleep(0.1)
        assert destination.calls == 0

    assert settled(outbox, destination, [b"outer", b"released"])
    assert relayed(engine) == []


def test_the_place_of_a_rolled_back_message_may_be_anothers(outbox, engine, destination):
    """SQLite hands its id out again, here to a message of a writer that sends nothing by itself."""
    other = Outbox(engine)
    with engine.connect() as connection:
        savepoint = connection.begin_nested()
        send(outbox, connection, b"rolled back")
        savepoint.rollback()
        other.send(connection, "orders", b"by the relay", key="k")
        connection.commit()
    with outbox.begin() as session:
        send(outbox, session, b"direct")

    assert settled(outbox, destination, [b"direct"])
    assert relayed(engine) == [b"by the relay"]


def test_the_place_of_a_rolled_back_message_may_be_another_writers(outbox, engine, destination, caplog):
    """That one sends it, and the first does not stumble over it."""
    with writing_directly(engine, Destination()) as other, engine.connect() as connection:
        savepoint = connection.begin_nested()
        send(outbox, connection, b"rolled back")
        savepoint.rollback()
        send(other, connection, b"the other's")
        connection.commit()
        with outbox.begin() as session:
            send(outbox, session, b"direct")

        assert settled(outbox, destination, [b"direct"])
        assert marked(engine) == [b"the other's", b"direct"]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint", "control_fully"])
@pytest.mark.parametrize("outer_commits", [True, False], ids=["commits", "rolls back"])
def test_a_session_inside_somebody_elses_transaction(outbox, engine, destination, mode, outer_commits):
    """Its own commit is one only where the mode says that it controls the outer transaction."""
    own = mode == "control_fully"
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            send(outbox, session, b"1")
            session.commit()
            time.sleep(0.1)
            before = list(destination.bodies) if not own else []
        if outer.is_active:
            outer.commit() if outer_commits else outer.rollback()

    expected = [b"1"] if outer_commits or own else []
    assert before == []
    assert settled(outbox, destination, expected)
    assert bodies(engine) == expected


def test_a_test_that_rolls_everything_back_sends_nothing(outbox, engine, destination):
    """The recipe of SQLAlchemy's documentation: the application commits as often as it likes."""
    with engine.connect() as connection:
        outer = connection.begin()
        for number in range(3):
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                send(outbox, session, str(number).encode())
                session.commit()
        outer.rollback()
    time.sleep(0.2)

    assert (at_rest(outbox), destination.calls, bodies(engine)) == (True, 0, [])


def test_a_connection_that_its_owner_keeps(outbox, engine, destination):
    """It never comes back to the pool, which would tell that the commit is over."""
    with engine.connect() as connection:
        for number in range(3):
            send(outbox, connection, str(number).encode())
            connection.commit()
            assert eventually(lambda: len(destination.bodies) == number + 1)  # noqa: B023 - asked at once

    assert settled(outbox, destination, [b"0", b"1", b"2"])


def test_a_session_that_commits_in_another_thread(outbox, engine, destination):
    if engine.dialect.name == "sqlite":
        engine = create_engine(engine.url.update_query_dict({"check_same_thread": "false"}))
    session = Session(engine)
    send(outbox, session, b"1")
    thread = threading.Thread(target=session.commit)
    thread.start()
    thread.join()

    assert settled(outbox, destination, [b"1"])
    session.close()


def test_the_commit_of_the_drivers_own_connection_is_seen_by_nobody(pg_engine, destination):
    with writing_directly(pg_engine, destination) as outbox, psycopg.connect(conninfo_of(pg_engine.url)) as driver:
        outbox.send(driver, "orders", b"1")
        driver.commit()

    assert (marked(pg_engine), destination.calls, relayed(pg_engine)) == ([], 0, [b"1"])


def test_two_phases_are_sent_after_the_second(pg_engine, destination):
    with writing_directly(pg_engine, destination) as outbox:
        with Session(pg_engine, twophase=True) as session:
            send(outbox, session, b"1")
            session.prepare()
            time.sleep(0.1)
            before = destination.calls
            session.commit()

        assert before == 0
        assert settled(outbox, destination, [b"1"])


def test_a_commit_that_fails_sends_nothing(pg_engine, destination):
    """A deferred constraint speaks up at COMMIT, when the writer has been told that it comes."""
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with writing_directly(pg_engine, destination) as outbox:
        with pytest.raises(Exception, match="duplicate key"), pg_engine.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (1), (1)"))
            send(outbox, connection, b"1")
        with outbox.begin() as session:
            send(outbox, session, b"2")

        assert settled(outbox, destination, [b"2"])


@pytest.mark.parametrize("seconds", [0.1, 1.0])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "returned"])
def test_a_commit_that_takes_long_is_waited_for(pg_engine, destination, seconds, kept):
    slow_commits(pg_engine, seconds)
    with writing_directly(pg_engine, destination) as outbox, pg_engine.connect() as connection:
        send(outbox, connection, b"1")
        before = time.monotonic()
        connection.commit()
        took = time.monotonic() - before
        if not kept:
            connection.close()

        assert took >= seconds
        assert settled(outbox, destination, [b"1"])


def test_a_commit_that_takes_longer_than_the_right_to_send_is_left_to_the_compensation(
    pg_engine, destination, monkeypatch
):
    """The right counts from before the commit, the grace from after it: nobody sends twice."""
    briefly(monkeypatch)
    slow_commits(pg_engine, 1.5)
    with writing_directly(pg_engine, destination) as outbox:
        with outbox.begin() as session:
            send(outbox, session, b"1")
        assert eventually(lambda: at_rest(outbox))
        assert destination.calls == 0
    assert relayed(pg_engine) == [b"1"]


def slow_commits(engine: Engine, seconds: float) -> None:
    """From now on a commit of messages takes so long."""
    with engine.begin() as connection:
        connection.execute(
            text(f"""
            CREATE FUNCTION doze() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$""")
        )
        connection.execute(
            text("""CREATE CONSTRAINT TRIGGER doze AFTER INSERT ON outbox_message
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION doze()""")
        )
