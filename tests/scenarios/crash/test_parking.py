"""Messages with a time of their own: delayed ones, expired ones, and their place in the order of their key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outbox import Message, Outbox, Retry
from outbox.model.verdict import DONE
from tests.support.destination import Destination, failing, relay_to
from tests.support.leases import step_clock
from tests.support.parked import decide, states
from tests.support.waiting import eventually

HALF_AN_HOUR = timedelta(minutes=30)


@pytest.mark.storm
def test_a_delayed_message_comes_when_it_is_due_and_blocks_nothing(engine):
    outbox, destination = Outbox(engine), Destination()
    relay = relay_to(destination, outbox)
    with outbox.begin() as session:
        outbox.send_all(
            session,
            [
                Message("orders", b"reminder", key="order-1", delay=timedelta(minutes=10)),
                Message("orders", b"placed", key="order-1"),
                Message("orders", b"in an hour", key="order-1", deliver_at=datetime.now(UTC) + timedelta(hours=1)),
                Message("orders", b"at once", deliver_at=datetime.now(UTC) - timedelta(hours=1)),
            ],
        )

    relay.start()
    eventually(lambda: len(destination.messages) == 2 and states(engine) == {"delayed": 2})
    early = destination.bodies
    step_clock(engine, HALF_AN_HOUR, "outbox_parked.due_at")
    eventually(lambda: len(destination.messages) == 3 and states(engine) == {"delayed": 1})
    relay.stop()
    relay.join(60)

    assert early == [b"placed", b"at once"]
    assert destination.bodies == [b"placed", b"at once", b"reminder"]
    assert states(engine) == {"delayed": 1}


@pytest.mark.storm
def test_a_delayed_message_stands_behind_what_is_held_when_it_falls_due(engine):
    """Due while its key is held: after what is held then, before what comes later."""
    outbox, destination = Outbox(engine), Destination(failing({b"bad"}, Retry("no", timedelta(hours=1))))
    relay = relay_to(destination, outbox, on_dead="block")
    with outbox.begin() as session:
        outbox.send(session, "t", b"delayed", key="k", delay=timedelta(minutes=10))
        outbox.send(session, "t", b"bad", key="k")
        outbox.send(session, "t", b"behind", key="k")

    relay.start()
    eventually(lambda: states(engine) == {"delayed": 1, "retry": 1, "behind": 1})
    step_clock(engine, HALF_AN_HOUR, "outbox_parked.due_at")
    eventually(lambda: states(engine) == {"retry": 1, "behind": 2})
    with outbox.begin() as session:
        outbox.send(session, "t", b"later", key="k")
    held = eventually(lambda: states(engine) == {"retry": 1, "behind": 3})
    relay.stop()
    relay.join(60)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_parked SET state = 'dead', due_at = NULL WHERE state = 'retry'")
    destination.answer = lambda _message: DONE
    decide(engine, "replay")
    relay_to(destination, outbox).until_empty()

    assert held
    assert destination.bodies == [b"bad", b"behind", b"delayed", b"later"]


def test_an_expired_message_dies_and_blocks_nothing(engine):
    outbox, destination = Outbox(engine), Destination()
    with outbox.begin() as session:
        outbox.send(session, "t", b"old", key="k", expires_at=datetime.now(UTC) - timedelta(seconds=1))
        outbox.send(session, "t", b"good", key="k", expires_at=datetime.now(UTC) + timedelta(hours=1))

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"good"]
    assert states(engine) == {"dead": 1}


def test_a_replayed_message_does_not_expire_again(engine):
    outbox, destination = Outbox(engine), Destination()
    with outbox.begin() as session:
        outbox.send(session, "t", b"old", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    relay_to(destination, outbox).until_empty()

    decide(engine, "replay")
    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"old"]
    assert states(engine) == {}


def test_a_retried_message_keeps_its_id_and_its_bytes(engine):
    outbox, attempts = Outbox(engine), []

    def answer(message):
        attempts.append((message.attempt, message.message_id, message.body, dict(message.headers)))
        return DONE if message.attempt == 3 else Retry("again", timedelta(milliseconds=50))

    destination = Destination(answer)
    with outbox.begin() as session:
        sent = outbox.send(session, "t", b"\x00\xff", key="k", headers={"a": "é"})
    relay = relay_to(destination, outbox)

    relay.start()
    eventually(lambda: len(destination.messages) == 1)
    relay.stop()
    relay.join(60)

    assert attempts == [(n, sent, b"\x00\xff", {"a": "é"}) for n in (1, 2, 3)]
