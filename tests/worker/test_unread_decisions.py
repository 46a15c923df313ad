"""Decisions on messages that no worker has read yet: carried out when the reader meets the message in the log."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, SubscriptionError, Unavailable
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import Decisions
from outbox.worker.settle import Settlement
from tests.support.destination import Destination, fill, relay_to
from tests.support.parked import decisions, states
from tests.support.waiting import eventually

NAME = "relay"


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def send(outbox: Outbox, *bodies: str, key: str | None = "a", topic: str = "orders") -> list[uuid.UUID]:
    """Messages of a key; return their ids."""
    with outbox.begin() as session:
        return outbox.send_all(session, [Message(topic, body.encode(), key=key) for body in bodies])


def rows(channel: Channel) -> list[tuple[bytes, str | None, str | None, str | None]]:
    """Body, state, unit and error of what is parked."""
    found = channel.rows("SELECT body, state, unit, error FROM {parked} ORDER BY id")
    return [(bytes(body), state, unit, error) for body, state, unit, error in found]


def test_a_message_that_is_set_aside_is_never_handed_over_and_holds_its_key(engine, outbox, channel):
    """What stands before the message goes out."""
    destination = Destination()
    _, poison, _ = send(outbox, "before", "poison", "after")
    send(outbox, "other", key="b")
    (decided,) = outbox.admin.set_aside(poison, reason="kills", by="ann")

    relay_to(destination, outbox).until_empty()

    assert (decided.messages, decided.unread, decided.worker) == (0, 1, None)
    assert sorted(destination.bodies) == [b"before", b"other"]
    assert rows(channel) == [
        (b"poison", "dead", "a", "set aside by ann: kills"),
        (b"after", None, "a", None),
    ]
    assert decisions(engine) == [("ann", "set_aside", NAME, "kills", [2], 1, True)]


def test_where_dead_letters_hold_nothing_the_key_goes_on(outbox, channel):
    destination = Destination()
    poison, _ = send(outbox, "poison", "after")
    outbox.admin.set_aside(poison, reason="kills")

    relay_to(destination, outbox, on_dead="continue").until_empty()

    assert (destination.bodies, [row[:3] for row in rows(channel)]) == ([b"after"], [(b"poison", "dead", None)])


def test_a_message_that_is_discarded_is_gone_when_it_is_read(engine, outbox):
    destination = Destination()
    send(outbox, "1", "2")
    send(outbox, "mail", topic="mail")
    (decided,) = outbox.admin.discard(all=True, topic="orders", unread=True, reason="cancelled", by="ann")
    send(outbox, "later")

    relay_to(destination, outbox).until_empty()

    assert (decided.unread, destination.bodies, states(engine)) == (2, [b"mail", b"later"], {})
    assert decisions(engine) == [("ann", "discard", NAME, "cancelled", [1, 2], 2, True)]
    with engine.connect() as connection:
        choice = connection.scalar(text("SELECT choice FROM outbox_decision"))
    assert json.loads(choice) == {"states": ["dead"], "topic": "orders", "ids": [1, 2]}


def test_a_discarded_message_gives_its_dedup_key_back(outbox):
    with outbox.begin() as session:
        id = outbox.send(session, "orders", b"1", dedup_key="job")
    outbox.admin.discard(id, unread=True, reason="cancelled")
    destination = Destination()
    relay_to(destination, outbox).until_empty()

    with outbox.begin() as session:
        outbox.send(session, "orders", b"2", dedup_key="job")
    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"2"]


def test_each_partition_meets_its_own_messages(engine, outbox):
    fill(outbox, 12, keys=12)
    outbox.admin.discard(all=True, unread=True, reason="cancelled", by="ann")
    destination = Destination()

    relay_to(destination, outbox, partitions=3).until_empty()

    assert (destination.bodies, states(engine)) == ([], {})
    assert [each[-2:] for each in decisions(engine)] == [(12, True)]


def test_a_worker_that_begins_waits_for_a_decision_that_another_partition_has_in_hand(pg_engine):
    """Else the worker would send a message that was set aside long before."""
    outbox, destination = Outbox(pg_engine), Destination()
    (id,) = send(outbox, "poison")
    outbox.admin.set_aside(id, reason="kills", by="ann")
    relay = relay_to(destination, outbox)
    with pg_engine.connect() as other:
        other.execute(text("SELECT id FROM outbox_decision FOR UPDATE"))
        relay.start()
        waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        with pg_engine.connect() as looker:
            assert eventually(lambda: looker.scalar(waits) or destination.bodies)
    assert eventually(lambda: states(pg_engine) or destination.bodies)
    relay.stop()
    relay.join(60)

    assert (destination.bodies, states(pg_engine)) == ([], {"dead": 1})


@pytest.mark.parametrize("same", [True, False], ids=["delivered meanwhile", "another message of the id"])
def test_a_decision_whose_message_never_comes_is_closed(engine, outbox, channel, same):
    """A person was too late; or the log was truncated since, and another message has the id."""
    destination = Destination()
    (message_id,) = send(outbox, "1")
    if same:
        relay_to(destination, outbox).until_empty()
    with channel.transaction():
        known = message_id if same else uuid.uuid4()
        Decisions(channel, NAME).write("discard", [1], by="ann", reason=None, unread={1: known})

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"1"]
    assert [each[-2:] for each in decisions(engine)] == [(0, True)]


def test_a_decision_stays_open_if_its_settle_fails(engine, outbox, channel, monkeypatch):
    """The stamp is in the transaction of the batch."""
    poison, _ = send(outbox, "poison", "after")
    outbox.admin.set_aside(poison, reason="kills", by="ann")
    append = Settlement._append

    def failing(settlement: Settlement, end: Any) -> None:
        if settlement._channel.rows("SELECT 1 FROM {parked}"):
            monkeypatch.undo()
            raise RuntimeError("the disk is full")
        append(settlement, end)

    monkeypatch.setattr(Settlement, "_append", failing)
    with pytest.raises(RuntimeError, match="full"):
        relay_to(Destination(), outbox).once()
    failed = decisions(engine)
    relay_to(Destination(), outbox).until_empty()

    assert [each[-2:] for each in (*failed, *decisions(engine))] == [(None, False), (1, True)]


def test_a_parked_message_is_set_aside(outbox, channel):
    """The head stays the head; what stands behind it leaves its unit."""
    send(outbox, "head", "middle", "last")
    relay_to(Destination(lambda _message: Unavailable("away")), outbox).once()

    outbox.admin.set_aside(2, reason="no")
    outbox.admin.set_aside(1, reason="no")

    assert [row[:3] for row in rows(channel)] == [
        (b"head", "dead", "a"),
        (b"middle", "dead", None),
        (b"last", None, "a"),
    ]


def test_what_a_decision_on_unread_messages_cannot_be_is_refused(outbox):
    (id,) = send(outbox, "1")
    admin, all_unread = outbox.admin, {"all": True, "unread": True, "reason": "x"}

    said = []
    for decide in (
        lambda: admin.discard(**all_unread, state="retry"),
        lambda: admin.discard(**all_unread, error_like="HTTP"),
        lambda: admin.replay(id, unread=True),
        lambda: admin.discard(id, reason="x"),
    ):
        with pytest.raises(SubscriptionError) as refused:
            decide()
        said.append(str(refused.value).partition(";")[0])

    assert said == [
        "unread: a choice by state means parked messages",
        "unread: a choice by error_like means parked messages",
        "unread: what no worker has read yet is delivered without a replay",
        "no dead messages of relay: 1",
    ]
