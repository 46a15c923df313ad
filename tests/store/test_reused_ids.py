"""Ids of the log that are given out again: no message is taken for another one, and none is lost."""

import threading
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import DatabaseError, Message, Outbox, Reject, Retry, Verdict
from outbox.model.lease import Partition
from outbox.model.parking import Parking
from outbox.model.position import Position, Progress
from outbox.model.verdict import DONE
from outbox.store.log.log import Log
from outbox.store.operations.check import findings
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from tests.support.command_line import leading_to
from tests.support.destination import Destination, relay_to
from tests.support.parked import by_id, decide
from tests.support.reused_ids import begin_again
from tests.support.waiting import eventually

RETRY = Parking(state="retry", holds=True, delay=timedelta(0))
DEAD = Parking(state="dead", holds=True)


def send(outbox: Outbox, *bodies: str) -> None:
    with outbox.begin() as session:
        outbox.send_all(session, [Message("t", body, key=body) for body in bodies])


def parked(engine: Engine) -> list[tuple[int, bytes, str]]:
    """Id, body and state of what is parked."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT id, body, state FROM outbox_parked ORDER BY id"))
        return [(row[0], bytes(row[1]), row[2]) for row in rows]


def settled(engine: Engine) -> tuple[Any, ...]:
    """Where the subscription stands."""
    with engine.connect() as connection:
        newest = "SELECT base, target, after_id FROM outbox_progress ORDER BY epoch DESC, n DESC LIMIT 1"
        return tuple(connection.execute(text(newest)).one())


def test_a_message_under_the_id_of_another_that_is_parked_stops_the_relay(engine):
    """Nothing of its batch is settled; when the other one is gone, all of it comes."""
    outbox, destination = Outbox(engine), Destination(lambda _message: Reject("never"))
    send(outbox, "old")
    relay_to(destination, outbox).until_empty()
    begin_again(engine)
    send(outbox, "retried", "dead", "accepted")
    verdicts: dict[bytes, Verdict] = {
        b"retried": Retry("later", timedelta(hours=1)),
        b"dead": Reject("never"),
        b"accepted": DONE,
    }
    destination.answer = lambda message: verdicts[message.body]
    before = settled(engine)

    with pytest.raises(DatabaseError) as raised:
        relay_to(destination, outbox).until_empty()

    assert str(raised.value) == (
        "relay: message 1 of the log cannot be parked, because another message is parked under this id; nothing was"
        " settled. Ids are given out again when the log was truncated or its sequence restored: run outbox doctor"
        f" {leading_to(engine)}, which says how to mend the log. Then replay or discard the parked"
        f" message (outbox parked show 1 --name relay {leading_to(engine)}); the worker goes on when it is gone"
    )
    assert (parked(engine), settled(engine)) == ([(1, b"old", "dead")], before)
    with closing(outbox.database.open()) as channel:
        (finding,) = findings(channel)
    assert str(finding) == (
        "outbox_parked: has message 1 of relay, but another message has this id now: ids were given again; replay or"
        " discard the parked message, and run doctor again; to see the message, run: outbox parked show 1 --name"
        f" relay {leading_to(engine)}"
    )
    decide(engine, "discard")
    relay_to(destination, outbox).until_empty()
    assert parked(engine) == [(1, b"retried", "retry"), (2, b"dead", "dead")]
    with closing(outbox.database.open()) as channel:
        assert findings(channel) == []
    assert b"accepted" in destination.bodies


@pytest.mark.parametrize("count", [3, 5], ids=["as many as before", "more than before"])
def test_ids_that_are_given_out_again_and_reach_the_position_stop_the_relay(sqlite_engine, count):
    """The log was emptied and its sequence cleared: the new messages lie before the position, but nobody has them."""
    outbox, destination = Outbox(sqlite_engine), Destination()
    send(outbox, "old 1", "old 2", "old 3")
    relay_to(destination, outbox).until_empty()
    do(sqlite_engine, "DELETE FROM outbox_message", "DELETE FROM sqlite_sequence WHERE name = 'outbox_message'")
    new = [f"new {n}" for n in range(count)]
    send(outbox, *new)
    before = settled(sqlite_engine)

    for _ in range(2):
        with pytest.raises(DatabaseError, match=r"relay: it has passed message 3 .* run outbox doctor .*, which says"):
            relay_to(destination, outbox).until_empty()
    with closing(outbox.database.open()) as channel:
        (finding,) = findings(channel)

    assert (settled(sqlite_engine), destination.bodies) == (before, [b"old 1", b"old 2", b"old 3"])
    assert "relay has passed message 3, but another message has this id now" in finding.problem
    do(sqlite_engine, finding.fix.partition(": ")[2])
    relay_to(destination, outbox).until_empty()
    with closing(outbox.database.open()) as channel:
        assert findings(channel) == []
    assert destination.bodies[3:] == [body.encode() for body in new]


@pytest.mark.parametrize("verdict", [DONE, Reject("never")], ids=["accepted", "parked"])
def test_ids_that_are_given_out_again_under_a_relay_at_work_are_not_settled(sqlite_engine, verdict):
    """One transaction empties the log and fills it beyond the position, so that the relay never sees it shorter."""
    outbox, destination = Outbox(sqlite_engine), Destination()
    send(outbox, "old 1", "old 2")
    relay_to(destination, outbox).until_empty()
    before = settled(sqlite_engine)
    relay, errors = relay_to(destination, outbox), []

    def run() -> None:
        try:
            relay.run()
        except DatabaseError as error:
            errors.append(str(error))

    at_work = threading.Thread(target=run, daemon=True)
    at_work.start()
    send(outbox, "old 3")
    assert eventually(lambda: settled(sqlite_engine) != before)
    before = settled(sqlite_engine)
    destination.answer = lambda _message: verdict
    new = [f"new {n}" for n in range(5)]
    with outbox.begin() as session:
        session.execute(text("DELETE FROM outbox_message"))
        session.execute(text("DELETE FROM sqlite_sequence WHERE name = 'outbox_message'"))
        outbox.send_all(session, [Message("t", body) for body in new])

    assert eventually(lambda: errors or settled(sqlite_engine) != before)
    relay.stop()
    at_work.join(60)
    with closing(outbox.database.open()) as channel:
        (finding,) = findings(channel)

    assert (settled(sqlite_engine), parked(sqlite_engine)) == (before, [])
    assert [error.partition(" of the log")[0] for error in errors] == ["relay: it has passed message 3"]
    assert "relay has passed message 3, but another message has this id now" in finding.problem
    do(sqlite_engine, finding.fix.partition(": ")[2])
    relay_to(destination, outbox).until_empty()
    came = destination.bodies[3:] + [body for _, body, _ in parked(sqlite_engine)]
    assert sorted(came) == [body.encode() for body in new]


def test_a_relay_at_work_goes_on_when_what_it_has_passed_was_purged(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    send(outbox, "1", "2")
    relay_to(Destination(), outbox).until_empty()
    do(sqlite_engine, "DELETE FROM outbox_message")
    send(outbox, "3")

    with closing(outbox.database.open()) as channel:
        lease = Leases(channel).acquire(Partition("relay"), "worker", timedelta(minutes=1))
        assert lease is not None
        here = Log().now(channel).incarnation
        assert ProgressLog(channel).settle(lease, 1, Progress(Position(4)), here)


def test_a_message_that_was_purged_is_not_taken_for_one_whose_id_was_given_again(sqlite_engine):
    outbox, destination = Outbox(sqlite_engine), Destination()
    send(outbox, "1", "2")
    relay_to(destination, outbox).until_empty()
    do(sqlite_engine, "DELETE FROM outbox_message")
    relay_to(destination, outbox).until_empty()
    send(outbox, "3")

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"1", b"2", b"3"]


def do(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_a_message_that_is_parked_already_stays_as_it_is(engine, channel):
    outbox = Outbox(engine)
    send(outbox, "first", "second")
    parks = Parked(channel, "relay")

    for parking, ids in ((RETRY, [1]), (DEAD, [1, 2])):
        with channel.transaction():
            parks.park(by_id({parking: ids}))

    assert parked(engine) == [(1, b"first", "retry"), (2, b"second", "dead")]


def test_messages_are_compared_only_where_some_were_parked_already(engine, channel, monkeypatch):
    outbox, compared = Outbox(engine), []

    def rows(_statement, /, **parameters):
        compared.append(parameters["ids"])
        return []

    send(outbox, "first", "second", "third")
    parks = Parked(channel, "relay")
    monkeypatch.setattr(channel, "rows", rows)
    for ids in ([1, 2], [2, 3]):
        with channel.transaction():
            parks.park(by_id({RETRY: ids}))

    assert compared == [outbox.database.bind([2, 3])]


def test_another_subscription_may_have_parked_what_it_likes(engine, channel):
    outbox = Outbox(engine)
    send(outbox, "old")
    with channel.transaction():
        Parked(channel, "other").park(by_id({DEAD: [1]}))
    begin_again(engine)
    send(outbox, "new")

    with channel.transaction():
        Parked(channel, "relay").park(by_id({DEAD: [1]}))

    assert sorted(parked(engine)) == [(1, b"new", "dead"), (1, b"old", "dead")]
