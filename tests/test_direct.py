"""Direct send: what its writer may send arrives right after the real commit, once; all else goes by the relay."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from outbox import DatabaseError, Message, Outbox, SubscriptionError, create_engine
from tests.direct import stored_acks
from tests.directly import at_rest, briefly, marked, promises, relayed, send, settled, writing_directly
from tests.fire.destination import Destination, relay_to
from tests.handles import conninfo_of
from tests.readers import bodies
from tests.waiting import eventually

AWAITED = {"postgresql": "postgresql+psycopg_async", "sqlite": "sqlite+aiosqlite"}


@pytest.fixture
def destination() -> Destination:
    return Destination()


@pytest.fixture
def outbox(engine: Engine, destination: Destination) -> Iterator[Outbox]:
    with writing_directly(engine, destination) as outbox:
        yield outbox


def test_a_message_is_sent_right_after_its_commit_and_once(outbox, engine, destination):
    with outbox.begin() as session:
        send(outbox, session, b"1", b"2")

    assert settled(outbox, destination, [b"1", b"2"])
    assert [message.attempt for message in destination.messages] == [1, 1]
    assert relayed(engine) == []
    assert marked(engine) == [b"1", b"2"]


def test_order_time_and_end_are_the_relays_business(outbox, engine, destination):
    moment = datetime.now(UTC) + timedelta(hours=1)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"keyed", key="k")
        outbox.send(session, "orders", b"delayed", delay=timedelta(hours=1))
        outbox.send(session, "orders", b"at", deliver_at=moment)
        outbox.send(session, "orders", b"expiring", expires_at=moment)
        outbox.send_all(session, [Message("orders", b"direct"), Message("orders", b"keyed too", key="k")])

    assert settled(outbox, destination, [b"direct"])
    assert marked(engine) == [b"direct"]
    assert relayed(engine) == [b"keyed", b"expiring", b"keyed too"]


@pytest.mark.parametrize("length", [1, 4, 5, 9, 60])
def test_of_many_those_without_a_key_are_marked(outbox, engine, destination, length):
    messages = [Message("orders", str(n), key="k" if n % 3 == 1 else None) for n in range(length)]
    with outbox.begin() as session:
        outbox.send_all(session, messages)

    direct = [message.body for message in messages if message.key is None]
    assert settled(outbox, destination, direct)
    assert marked(engine) == direct


def test_a_repetition_is_not_sent(outbox, destination):
    """The first of a dedup key is sent by its writer, the second does not exist."""
    for body in (b"first", b"again"):
        with outbox.begin() as session:
            outbox.send(session, "orders", body, dedup_key="d")
            send(outbox, session, b"beside " + body)

    assert settled(outbox, destination, [b"first", b"beside first", b"beside again"])


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
            assert eventually(lambda: len(destination.bodies) == number + 1, 5)  # noqa: B023 - asked at once

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


def test_awaited_sessions_send_directly_too(engine, destination):
    awaited = AsyncEngine(create_engine(engine.url.set(drivername=AWAITED[engine.dialect.name]), poolclass=NullPool))

    async def write(outbox: Outbox) -> None:
        async with AsyncSession(awaited) as session, session.begin():
            await outbox.asend(session, "orders", b"session")
            await outbox.asend(session, "orders", b"keyed", key="k")
        async with awaited.connect() as connection:
            await outbox.asend(connection, "orders", b"connection")
            await connection.commit()
        async with outbox.abegin() as session:
            await outbox.asend(session, "orders", b"begun")

    with writing_directly(awaited, destination) as outbox:
        asyncio.run(write(outbox))

        assert settled(outbox, destination, [b"session", b"connection", b"begun"])
    assert relayed(engine) == [b"keyed"]


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


def test_a_selection_of_topics_holds_for_writers_too(engine, destination):
    relay_to(destination, Outbox(engine), topics=["orders"]).until_empty()
    with writing_directly(engine, destination) as outbox, outbox.begin() as session:
        outbox.send(session, "orders", b"selected")
        outbox.send(session, "mails", b"not")

    relay_to(destination, Outbox(engine), topics=["orders"]).until_empty()
    assert (marked(engine), destination.bodies) == ([b"selected"], [b"selected"])


def test_another_subscription_has_everything(outbox, engine, destination):
    other = Destination()
    with outbox.begin() as session:
        send(outbox, session, b"direct")
        outbox.send(session, "orders", b"keyed", key="k")
    assert settled(outbox, destination, [b"direct"])

    relay_to(other, Outbox(engine), name="other").until_empty()

    assert other.bodies == [b"direct", b"keyed"]


def test_two_outboxes_on_one_engine_send_what_is_their_own(engine, destination):
    other = Destination()
    with writing_directly(engine, destination) as outbox:
        second = Outbox(engine, sender=other, direct="second")
        assert eventually(lambda: promises(second))
        with Session(engine) as session:
            send(outbox, session, b"first")
            send(second, session, b"second")
            session.commit()

        assert settled(outbox, destination, [b"first"])
        assert settled(second, other, [b"second"])
        second.close()


def test_writers_to_another_destination_than_the_relays_leave_all_to_it(engine, destination, caplog):
    """It is said once, and nothing is lost or late."""
    caplog.set_level(logging.WARNING, "outbox")
    elsewhere = Destination()
    elsewhere.destination = "elsewhere"
    relay_to(destination, Outbox(engine)).until_empty()
    outbox = Outbox(engine, sender=elsewhere, direct="relay")
    for number in range(3):
        with outbox.begin() as session:
            send(outbox, session, str(number).encode())
        time.sleep(1.0)
    outbox.close()

    relay_to(destination, Outbox(engine)).until_empty()
    said = [record.message for record in caplog.records if "direct sends of relay" in record.message]
    assert len(said) == 1
    assert "sends to test, this writer to elsewhere" in said[0]
    assert (elsewhere.calls, destination.bodies) == (0, [b"0", b"1", b"2"])


def test_what_cannot_be_is_refused_at_once(engine):
    with pytest.raises(TypeError, match=r"direct needs a destination: Outbox\(…, sender=…, direct=…\)"):
        Outbox(engine, direct="relay")
    with pytest.raises(SubscriptionError, match="run the relay of that name"):
        Outbox(engine, sender=Destination(), direct="relay:compensation")
    with pytest.raises(DatabaseError, match="StaticPool"):
        Outbox(create_engine("sqlite://", poolclass=StaticPool), sender=Destination(), direct="relay")


def test_before_the_tables_are_there_nothing_is_direct(tmp_path, caplog):
    outbox = Outbox(create_engine(f"sqlite:///{tmp_path / 'new.sqlite3'}"), sender=Destination(), direct="relay")
    promised = promises(outbox)

    heard = eventually(lambda: "outbox db upgrade" in caplog.text, 20)

    assert (promised, heard, promises(outbox)) == (False, True, False)
    outbox.close()


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


def test_acks_are_one_a_batch_and_go_when_they_are_passed(engine, destination, monkeypatch):
    briefly(monkeypatch)
    with writing_directly(engine, destination) as outbox:
        for start in range(0, 500, 100):
            with outbox.begin() as session:
                send(outbox, session, *(str(n).encode() for n in range(start, start + 100)))
        assert settled(outbox, destination, [str(n).encode() for n in range(500)])
    acks = stored_acks(engine)
    relay = relay_to(destination, Outbox(engine))
    relay.start()
    gone = eventually(lambda: stored_acks(engine) == [])
    relay.stop()
    relay.join(20)

    assert sorted(id for ids in acks for id in ids) == list(range(1, 501))
    assert (len(acks), gone) == (destination.calls, True)


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


def test_in_a_database_without_the_compensation_nothing_is_marked(outbox, engine, sqlite_template, pg_engine, tmp_path):
    """A session on another database: there only a relay of that database would send it."""
    other = pg_engine if engine.dialect.name == "sqlite" else engine
    if engine.dialect.name == "sqlite":
        path = tmp_path / "other.sqlite3"
        path.write_bytes(sqlite_template.read_bytes())
        other = create_engine(f"sqlite:///{path}")
    else:
        with other.begin() as connection:
            connection.execute(text("DELETE FROM outbox_subscription WHERE name = 'relay:compensation'"))

    with Session(other) as session, session.begin():
        outbox.send(session, "orders", b"elsewhere")
        for length in (2, 60):
            outbox.send_all(session, [Message("orders", b"more")] * length)

    assert (bodies(other), marked(other)) == ([b"elsewhere"] + [b"more"] * 62, [])
