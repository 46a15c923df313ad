"""Decisions of people: rows that the holder of the lease carries out, and stamps in the same transaction."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Reject, Relay
from outbox.admin.split import split
from outbox.model.lease import Partition
from outbox.store.database import Channel
from outbox.store.subscriptions import decisions as rooms
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.worker import decisions as carrying
from outbox.worker.decisions import OpenDecisions
from tests.support.destination import Destination, fill, relay_to
from tests.support.parked import decide, decisions, states

NAME = "relay"


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """Four dead letters, each of a key of its own."""
    outbox = Outbox(engine)
    fill(outbox, 4, keys=4)
    relay_to(Destination(lambda _message: Reject("no")), outbox).until_empty()
    return outbox


def ids_of(channel: Channel) -> list[int]:
    return [id for (id,) in channel.rows("SELECT id FROM {parked} ORDER BY id")]


def open_decisions(channel: Channel, partition: Partition) -> OpenDecisions:
    """Return the decisions as the lease holder of a partition carries them out."""
    name = partition.subscription
    return OpenDecisions(channel, Parked(channel, name, partition), partition, blocks=True)


def test_a_decision_is_stamped_with_what_came_of_it(engine, outbox, channel):
    first, *others = ids_of(channel)
    outbox.admin.discard(first, reason="seen", by="ann")
    outbox.admin.replay(*others[:2], by="ben")

    assert decisions(engine) == [
        ("ann", "discard", NAME, "seen", [first], 1, True),
        ("ben", "replay", NAME, None, others[:2], 2, True),
    ]


def test_a_decision_is_open_until_the_worker_has_carried_it_out(engine, outbox, channel):
    (first, *_) = ids_of(channel)
    with closing(outbox.database.open()) as other:
        assert Leases(other).acquire(Partition(NAME), "a worker", timedelta(minutes=5))
        outbox.admin.discard(first, reason="seen", by="ann")
    before = decisions(engine)
    shown = [(each.id, each.decision, each.decided_by, each.decision_reason) for each in outbox.admin.parked(limit=2)]

    channel.run("UPDATE {lease} SET owner = NULL, lease_until = NULL")
    Relay(outbox, Destination()).until_empty()

    assert shown == [(first, "discard", "ann", "seen"), (first + 1, None, None, None)]
    assert (before, decisions(engine)) == (
        [("ann", "discard", NAME, "seen", [first], None, False)],
        [("ann", "discard", NAME, "seen", [first], 1, True)],
    )


def test_a_message_that_is_gone_is_not_counted(engine, outbox, channel):
    first, *_ = ids_of(channel)
    decide(engine, "discard")
    channel.run("DELETE FROM {parked} WHERE id = :id", id=first)

    Relay(outbox, Destination()).until_empty()

    assert [each[-2:] for each in decisions(engine)] == [(3, True)]


def test_a_later_decision_takes_its_messages_from_an_earlier_one(engine, outbox, channel):
    first, *others = ids_of(channel)
    decide(engine, "discard")
    with channel.transaction():
        Decisions(channel, NAME).write("replay", [first], by="ben", reason=None)

    destination = Destination()
    Relay(outbox, destination).until_empty()

    assert [each[1:2] + each[-3:] for each in decisions(engine)] == [
        ("discard", [first, *others], 3, True),
        ("replay", [first], 1, True),
    ]
    assert len(destination.bodies) == 1


def test_each_partition_carries_out_its_own_part(engine, outbox, channel):
    """The holder that comes last stamps the decision."""
    decide(engine, "discard")
    found = list[list[int]]()
    for number in range(2):
        room = open_decisions(channel, Partition(NAME, 1, number, 2))
        with channel.transaction():
            found.append([id for each in room.carry_out(room.open()) for id in each.messages])
        found.append(room.open())

    ids = {id: slot % 2 for id, slot in channel.rows("SELECT id, slot FROM {message}")}
    parts = [[id for id, number in ids.items() if number == wanted] for wanted in range(2)]
    assert all(parts)
    assert found == [parts[0], [1], parts[1], []]
    assert [each[-2:] for each in decisions(engine)] == [(4, True)]


def test_a_decision_on_many_messages_is_carried_out_in_portions(engine, outbox, channel, monkeypatch):
    monkeypatch.setattr(carrying, "MOST", 1)
    monkeypatch.setattr(rooms, "MOST_IDS", 3)
    decide(engine, "discard")
    room, portions = open_decisions(channel, Partition(NAME)), list[int]()
    ids = ids_of(channel)

    while open := room.open():
        with channel.transaction():
            portions.append(sum(len(each.messages) for each in room.carry_out(open)))

    assert portions == [1, 1, 1, 1]
    assert [each[-3:] for each in decisions(engine)] == [(ids[:3], 3, True), (ids[3:], 1, True)]


@pytest.mark.parametrize("goes", ["reset", "drop"])
def test_open_decisions_are_closed_with_the_messages(engine, outbox, channel, goes):
    decide(engine, "replay")

    outbox.admin.reset(NAME, "earliest") if goes == "reset" else outbox.admin.drop(NAME)

    assert [each[-2:] for each in decisions(engine) if each[1] == "replay"] == [(0, True)]


def test_open_decisions_follow_the_messages_of_a_split(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, b"", key=topic) for topic in ("orders", "mail")])
    relay_to(Destination(lambda _message: Reject("no")), outbox).until_empty()
    decide(engine, "discard")
    with closing(outbox.database.open()) as channel:
        split(channel, NAME, ["mail"], destination="nats://other", as_name="mail")
        for name in (NAME, "mail"):
            room = open_decisions(channel, Partition(name))
            with channel.transaction():
                room.carry_out(room.open())

    discards = [(each[2], *each[-2:]) for each in decisions(engine) if each[1] == "discard"]
    assert (discards, states(engine)) == ([(NAME, 1, True), ("mail", 1, True)], {})


#: Plans with the words for an index, by database.
EXPLAIN = {"postgresql": "EXPLAIN ", "sqlite": "EXPLAIN QUERY PLAN "}


@pytest.mark.parametrize("analysed", [True, False])
def test_a_look_without_open_decisions_is_one_probe_of_an_index(engine, channel, analysed):
    """However many decisions are kept."""
    many = """
        INSERT INTO {decision} (at, by, verb, subscription, choice, done_at)
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)
        SELECT {now}, 'ann', 'discard', 'relay', '{{}}', {now} FROM n
    """
    channel.run(many)
    if analysed:
        channel.run("ANALYZE {decision}")

    explain = channel.database.sql(EXPLAIN[engine.dialect.name] + rooms._OPEN)
    plan = "\n".join(str(row[-1]) for row in channel.rows(explain, subscription=NAME))

    # By done_at is as good: few decisions are open.
    by_index = re.search("outbox_decision_(open|done_at)", plan) is not None
    assert (by_index, "Seq Scan" in plan or "SCAN" in plan) == (True, False), plan


def test_decisions_go_after_ninety_days(engine, outbox, channel):
    first, second, *_ = ids_of(channel)
    for id in (first, second):
        outbox.admin.discard(id, reason="seen", by="ann")
    decide(engine, "discard")
    long_ago = channel.database.dialect.clock.bind(channel.now() - rooms.RETENTION - timedelta(minutes=1))
    channel.run("UPDATE {decision} SET done_at = :then WHERE id = 1", then=long_ago)

    gone = rooms.prune(channel)

    with engine.connect() as connection:
        left = connection.scalars(text("SELECT id FROM outbox_decision ORDER BY id")).all()
    assert (gone, list(left)) == (1, [2, 3])
