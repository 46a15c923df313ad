"""Direct send: what its writer may send arrives right after the real commit, once; all else goes by the relay."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool, StaticPool

from outbox import DatabaseError, Message, Outbox, SubscriptionError, create_engine
from outbox.telemetry.events import SentDirectly
from tests.support.destination import Destination, relay_to
from tests.support.direct import stored_acks
from tests.support.directly import at_rest, briefly, marked, promises, relayed, send, settled, writing_directly
from tests.support.readers import bodies
from tests.support.waiting import eventually

AWAITED = {"postgresql": "postgresql+psycopg_async", "sqlite": "sqlite+aiosqlite"}


@pytest.fixture
def outbox(engine: Engine, destination: Destination) -> Iterator[Outbox]:
    with writing_directly(engine, destination) as outbox:
        yield outbox


def test_a_message_is_sent_right_after_its_commit_and_once(outbox, engine, destination):
    told: list[SentDirectly] = []
    outbox.listen(lambda event: told.append(event) if isinstance(event, SentDirectly) else None)
    with outbox.begin() as session:
        send(outbox, session, b"1", b"2")

    assert settled(outbox, destination, [b"1", b"2"])
    assert [message.attempt for message in destination.messages] == [1, 1]
    assert relayed(engine) == []
    assert marked(engine) == [b"1", b"2"]
    assert eventually(lambda: [m.body for event in told for m in event.messages] == [b"1", b"2"])
    assert {event.subscription for event in told} == {"relay"}


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


def test_writers_that_know_of_one_more_host_than_the_relay_send_directly(engine, destination):
    """A cluster has a node more, and the applications were deployed first."""
    destination.destination = "nats://a:4222/shop"
    relay_to(destination, Outbox(engine)).until_empty()
    wider = Destination()
    wider.destination = "nats://a:4222,b:4222/shop"
    with writing_directly(engine, wider) as outbox:
        with outbox.begin() as session:
            send(outbox, session, b"1")

        assert settled(outbox, wider, [b"1"])


@pytest.mark.storm
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
    with pytest.raises(SubscriptionError, match="is the compensation of"):
        Outbox(engine, sender=Destination(), direct="relay:compensation")
    with pytest.raises(DatabaseError, match="StaticPool"):
        Outbox(create_engine("sqlite://", poolclass=StaticPool), sender=Destination(), direct="relay")


def test_before_the_tables_are_there_nothing_is_direct(tmp_path, caplog):
    outbox = Outbox(create_engine(f"sqlite:///{tmp_path / 'new.sqlite3'}"), sender=Destination(), direct="relay")
    promised = promises(outbox)

    heard = eventually(lambda: "outbox db upgrade" in caplog.text)

    assert (promised, heard, promises(outbox)) == (False, True, False)
    outbox.close()


@pytest.mark.storm
def test_acks_are_one_a_batch_and_go_when_they_are_passed(engine, destination, monkeypatch):
    briefly(monkeypatch)
    with writing_directly(engine, destination) as outbox:
        for start in range(0, 500, 100):
            with outbox.begin() as session:
                send(outbox, session, *(str(n).encode() for n in range(start, start + 100)))
        assert eventually(lambda: at_rest(outbox) and destination.calls > 0)
    acks, sent, calls = stored_acks(engine), sorted(map(int, destination.bodies)), destination.calls
    relay = relay_to(destination, Outbox(engine))
    relay.start()
    gone = eventually(lambda: stored_acks(engine) == [])
    relay.stop()
    relay.join(60)

    assert sorted(id for ids in acks for id in ids) == [number + 1 for number in sent]
    assert (len(acks), gone) == (calls, True)


def test_in_a_database_without_the_compensation_nothing_is_marked(outbox, engine, sqlite_template, tmp_path):
    """A session on another database: there only a relay of that database would send it."""
    other = to_other = engine
    if engine.dialect.name == "sqlite":
        path = tmp_path / "other.sqlite3"
        path.write_bytes(sqlite_template.read_bytes())
        other = create_engine(f"sqlite:///{path}")
        # Where a creator leads cannot be told.
        to_other = create_engine("sqlite://", creator=lambda: sqlite3.connect(path), poolclass=NullPool)
    else:
        with other.begin() as connection:
            connection.execute(text("DELETE FROM outbox_subscription WHERE name = 'relay:compensation'"))

    with Session(to_other) as session, session.begin():
        outbox.send(session, "orders", b"elsewhere")
        for length in (2, 60):
            outbox.send_all(session, [Message("orders", b"more") for _ in range(length)])

    assert (bodies(other), marked(other)) == ([b"elsewhere"] + [b"more"] * 62, [])
