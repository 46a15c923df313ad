"""Subscriptions are what their name says, and begin where they were told."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Reject, Relay, SubscriptionError
from outbox.model.lease import Partition
from outbox.model.message import uuid7
from outbox.model.subscription import Start, Subscription
from outbox.store.database import Channel
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.destination import Destination, failing, relay_to
from tests.support.parked import states
from tests.support.readers import Collector, declared, delivered, send, texts, worker
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox whose subscription nobody has declared yet."""
    return Outbox(engine)


# What a subscription is


def test_the_first_worker_fixes_what_the_migration_left_open(outbox, channel):
    subscriptions = Subscriptions(channel)
    before = subscriptions.get("relay")
    subscriptions.declare(declared(topics=("a", "b"), on_dead="continue"))
    after = subscriptions.get("relay")

    assert (before.destination, before.topics, before.on_dead) == (None, None, None)
    assert after == replace(before, destination="callable:tests", topics=("a", "b"), on_dead="continue")


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        ({"topics": ("orders",)}, "has topics all, this worker asks for orders; .* alter relay --topics orders"),
        (
            {"topics": ("!orders",)},
            (
                "has topics all, this worker asks for !orders; .* split relay --topics orders --to URL --as"
                " relay:orders.*; or give .* --name"
            ),
        ),
        (
            {"destination": "nats://elsewhere"},
            "has destination callable:tests, this worker asks for nats://elsewhere; .* alter relay --to nats://elsewhere",
        ),
        (
            {"on_dead": "continue"},
            "has on-dead block, this worker asks for continue; .* alter relay --on-dead continue",
        ),
    ],
)
def test_a_worker_that_declares_something_else_is_refused(outbox, differing, told):
    """Two of one name and different selections would pass over each other's messages."""
    send(outbox, "1")
    assert texts(delivered(outbox.database)) == ["1"]
    send(outbox, "2")

    with pytest.raises(SubscriptionError, match=rf"subscription 'relay' {told}"):
        delivered(outbox.database, **differing)

    with closing(outbox.database.open()) as channel:
        holder = Leases(channel).look(Partition("relay"))
    # The lease is that of a worker that may be well.
    assert holder is not None and holder.notice is None
    assert texts(delivered(outbox.database)) == ["2"]


def destinations(engine: Engine) -> list[str]:
    """As they are stored, sorted by the name of their subscriptions."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT destination FROM outbox_subscription ORDER BY name")).scalars())


def test_the_hosts_of_a_destination_are_exchanged_one_by_one(engine, outbox):
    """A rolling deploy that adds a node, and then takes another away; the newest text is kept."""
    stored = []
    for hosts in ("a:1,b:1", "b:1,c:1", "c:1,d:1"):
        delivered(outbox.database, destination=f"nats://{hosts}/orders")
        stored += destinations(engine)

    assert stored == ["nats://a:1,b:1/orders", "nats://b:1,c:1/orders", "nats://c:1,d:1/orders"]
    with pytest.raises(SubscriptionError, match="destination nats://c:1,d:1/orders, this worker asks for nats://a:1"):
        delivered(outbox.database, destination="nats://a:1/orders")


def test_a_named_destination_is_the_same_whatever_its_hosts_are(engine, outbox):
    delivered(outbox.database, destination="nats://a:1/orders?as=main")
    delivered(outbox.database, destination="nats://z:9/orders?as=main")

    assert destinations(engine) == ["nats://z:9/orders?as=main"]
    with pytest.raises(SubscriptionError, match="alter relay --to 'nats://z:9/orders\\?as=other'"):
        delivered(outbox.database, destination="nats://z:9/orders?as=other")


def test_the_hosts_that_a_worker_declares_undo_no_change_that_was_ordered_meanwhile(engine, outbox, channel):
    subscriptions = Subscriptions(channel)
    seen = subscriptions.declare(declared(destination="nats://a:1,b:1"))
    subscriptions.alter(replace(seen, destination="kafka://k:1"))
    subscriptions.store_hosts(seen, declared(destination="nats://b:1,c:1"))

    assert destinations(engine) == ["kafka://k:1"]


def test_a_worker_that_connects_again_does_not_undo_the_hosts_of_a_newer_one(engine, outbox):
    older = worker(outbox.database, Collector(), destination="nats://a:1,b:1")
    older.until_empty()
    delivered(outbox.database, destination="nats://b:1,c:1")
    older.until_empty()

    assert destinations(engine) == ["nats://b:1,c:1"]


def test_a_selection_is_refused_whatever_it_was_before(outbox):
    delivered(outbox.database, topics=("a", "b"))

    for topics in (None, ("a",), ("a", "b", "c"), ()):
        with pytest.raises(SubscriptionError, match="topics a,b"):
            delivered(outbox.database, topics=topics)
    delivered(outbox.database, topics=("a", "b"))


def test_what_a_worker_does_not_say_is_as_it_is_stored(outbox):
    delivered(outbox.database, on_dead="continue")

    delivered(outbox.database)


def test_subscriptions_read_the_same_log_each_on_its_own(outbox):
    send(outbox, "1", "2")
    first = texts(delivered(outbox.database, name="one"))
    send(outbox, "3")

    assert (first, texts(delivered(outbox.database, name="two"))) == (["1", "2"], ["1", "2", "3"])
    assert texts(delivered(outbox.database, name="one")) == ["3"]


def altered_while_standing_by(outbox: Outbox, channel: Channel, relay: Relay, caplog, **changes: Any) -> None:
    """Let a relay wait for the lease of somebody who changes its subscription, and then work until nothing is left."""
    caplog.set_level("INFO", "outbox.lease")
    subscriptions, leases = Subscriptions(channel), Leases(channel)
    lease = leases.acquire(Partition("relay"), "somebody", timedelta(minutes=10))
    assert lease is not None
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(relay.until_empty)
        stands_by = eventually(lambda: "standing by" in caplog.text)
        subscriptions.alter(replace(subscriptions.get("relay"), **changes))
        leases.release(lease)
        assert stands_by
        done.result(60)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"topics": ("invoices",)}, "has topics invoices, this worker asks for all"),
        ({"destination": "callable:another"}, "has destination callable:another, this worker asks for test"),
    ],
    ids=["topics", "destination"],
)
def test_a_worker_that_stood_by_refuses_what_was_altered_meanwhile(outbox, channel, destination, caplog, changes, told):
    """Under the old selection it would pass over messages, or send them to where they no longer belong."""
    relay_to(destination, outbox).until_empty()
    send(outbox, "1")

    with pytest.raises(SubscriptionError, match=told):
        altered_while_standing_by(outbox, channel, relay_to(destination, outbox), caplog, **changes)

    assert destination.bodies == []
    topics, to = changes.get("topics"), changes.get("destination", "test")
    assert texts(delivered(outbox.database, topics=topics, destination=to)) == ([] if topics else ["1"])


def test_a_worker_that_stood_by_follows_the_policy_that_was_stored_meanwhile(outbox, channel, caplog):
    """It has said nothing about dead letters, so what is stored counts: the key goes on behind one."""
    destination = Destination(failing({b"1"}, Reject("never")))
    relay_to(destination, outbox).until_empty()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key="a") for n in range(1, 4)])

    altered_while_standing_by(outbox, channel, relay_to(destination, outbox), caplog, on_dead="continue")

    assert (destination.bodies, states(outbox.engine)) == ([b"2", b"3"], {"dead": 1})


def test_a_selection_brings_its_topics_only(outbox):
    with outbox.begin() as session:
        for topic in ("a", "b", "c", "a"):
            outbox.send(session, topic, topic)

    assert texts(delivered(outbox.database, name="some", topics=("a", "c"))) == ["a", "c", "a"]
    assert texts(delivered(outbox.database, name="none", topics=())) == []


def test_an_unknown_name_is_told_which_there_are(outbox, channel):
    delivered(outbox.database, name="billing")

    with pytest.raises(SubscriptionError, match="no subscription 'bilking'; there are: billing, relay"):
        Subscriptions(channel).get("bilking")


@pytest.mark.parametrize("name", ["a b", "ä😀", "'; DROP TABLE outbox_subscription; --", "%s", ":name", "x" * 500])
def test_a_name_is_kept_as_it_is(outbox, channel, name):
    send(outbox, "1")

    assert texts(delivered(outbox.database, name=name)) == ["1"]
    assert [found.name for found in Subscriptions(channel).all()] == sorted([name, "relay"])


def test_a_dropped_subscription_begins_anew_with_a_new_worker(outbox, channel):
    send(outbox, "1")
    delivered(outbox.database, name="billing")
    drop(channel, "billing")

    assert Subscriptions(channel).find("billing") is None
    assert texts(delivered(outbox.database, name="billing", topics=("orders",))) == ["1"]


# What a worker has known and does not find again


def drop(channel: Channel, name: str = "relay") -> None:
    """As somebody who does not ask for the lease."""
    with Subscriptions(channel).changing():
        Subscriptions(channel).drop(name)


def test_a_subscription_that_is_dropped_under_its_worker_is_not_created_again(outbox, channel):
    """Everything would be sent again."""
    destination, errors = Destination(), list[Exception]()
    relay = relay_to(destination, outbox)
    send(outbox, "1")

    def run() -> None:
        try:
            relay.run(signals=False)
        except SubscriptionError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(lambda: destination.bodies == [b"1"])
    drop(channel)
    send(outbox, "2")
    thread.join(60)

    assert [str(error) for error in errors] == ["subscription 'relay' was dropped under this worker"]
    assert (Subscriptions(channel).find("relay"), destination.bodies.count(b"1")) == (None, 1)


def test_a_relay_in_an_application_waits_for_the_subscription_that_was_dropped_under_it(outbox, channel, caplog):
    """It tries again and again, and goes on when somebody has made the subscription."""
    destination = Destination()
    relay = relay_to(destination, outbox)
    relay.start()
    try:
        send(outbox, "1")
        assert eventually(lambda: destination.bodies == [b"1"])
        drop(channel)
        send(outbox, "2")
        assert eventually(lambda: "subscription 'relay' was dropped under this worker" in caplog.text)
        missing = Subscriptions(channel).find("relay")
        Subscriptions(channel).declare(declared(destination="test"), "latest")
        send(outbox, "3")
        came = eventually(lambda: b"3" in destination.bodies)
    finally:
        relay.stop()
        relay.join(60)

    assert (missing, came, destination.bodies.count(b"1")) == (None, True, 1)


@pytest.mark.parametrize("start", ["earliest", "latest", None])
def test_a_subscription_that_is_dropped_while_its_worker_connects_again_is_not_created(
    outbox, channel, monkeypatch, start
):
    """The worker has seen that it is there; one that somebody else creates has no start."""
    send(outbox, "1")
    collector = Collector()
    again = worker(outbox.database, collector, start=start, name="billing")
    if start is None:
        Subscriptions(channel).declare(declared("billing"))
    again.until_empty()
    declare = Subscriptions.declare

    def too_late(self: Subscriptions, *arguments: Any) -> Subscription:
        monkeypatch.setattr(Subscriptions, "declare", declare)
        drop(channel, "billing")
        return declare(self, *arguments)

    monkeypatch.setattr(Subscriptions, "declare", too_late)
    with pytest.raises(SubscriptionError, match="there is no subscription 'billing'"):
        again.until_empty()

    assert Subscriptions(channel).find("billing") is None
    assert texts(collector.messages) == ([] if start == "latest" else ["1"])


# Where a new one begins


def begun(outbox: Outbox, start: Start, name: str = "new") -> list[str]:
    """What a subscription delivers that begins at `start` if it is new."""
    return texts(delivered(outbox.database, name=name, start=start))


def test_a_new_subscription_begins_at_the_earliest_message(outbox):
    send(outbox, "1")

    assert begun(outbox, "earliest") == ["1"]


def test_a_new_subscription_may_begin_at_the_latest_position(outbox):
    send(outbox, "1")
    before = begun(outbox, "latest")
    send(outbox, "2")

    assert (before, begun(outbox, "latest")) == ([], ["2"])


def test_where_it_begins_counts_once(outbox):
    """A worker that comes back goes on from where it was."""
    send(outbox, "1")
    begun(outbox, "earliest")
    send(outbox, "2")

    assert begun(outbox, "latest") == ["2"]


MOMENTS = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2, 2, 3, 5)]


def append(outbox: Outbox, *rows: tuple[int, datetime, str]) -> None:
    """Rows of the log, each with id, moment and body."""
    log = tables_of(outbox.database).message
    with outbox.engine.begin() as connection:
        for id, moment, body in rows:
            place = {"id": id, "created_at": moment, "message_id": uuid7()}
            connection.execute(log.insert().values(topic="orders", slot=0, **place, body=body.encode()))


BEGINNINGS = [
    (datetime(2025, 1, 1, tzinfo=UTC), ["0", "1", "2", "3", "4"]),
    (MOMENTS[0], ["0", "1", "2", "3", "4"]),
    (MOMENTS[1], ["1", "2", "3", "4"]),
    (MOMENTS[1].astimezone(timezone(timedelta(hours=9))), ["1", "2", "3", "4"]),
    (MOMENTS[1] + timedelta(milliseconds=1), ["3", "4"]),
    (datetime(2026, 1, 4, tzinfo=UTC), ["4"]),
    (MOMENTS[4], ["4"]),
    (datetime(2027, 1, 1, tzinfo=UTC), []),
]


@pytest.mark.parametrize("holes", [False, True])
def test_a_new_subscription_may_begin_at_a_moment(outbox, holes):
    append(outbox, *((7 * n + 3 if holes else n + 1, moment, str(n)) for n, moment in enumerate(MOMENTS)))

    found = [begun(outbox, start, name=f"from {n}") for n, (start, _) in enumerate(BEGINNINGS)]

    assert found == [expected for _, expected in BEGINNINGS]


def test_a_moment_within_a_long_statement_passes_no_message_over(outbox):
    """All rows of a statement have the moment of its beginning; others are written in between, with later moments."""
    began = datetime(2026, 1, 1, 12, tzinfo=UTC)
    moment = began + timedelta(seconds=30)
    append(
        outbox, (1, began, "long"), (2, moment, "short"), *((id, began, "long") for id in range(3, 8)),
        (8, moment + timedelta(seconds=1), "next"),
    )  # fmt: skip

    assert begun(outbox, moment) == ["short", *["long"] * 5, "next"]


def test_a_moment_in_an_empty_log_is_the_beginning(outbox):
    before = begun(outbox, datetime(2026, 1, 1, tzinfo=UTC))
    send(outbox, "1")

    assert (before, begun(outbox, "earliest")) == ([], ["1"])


def test_what_commits_late_belongs_to_a_moment_by_its_id(pg_engine):
    """The window from a moment on is the rest of the log by ids, and what comes later by commit."""
    outbox = Outbox(pg_engine)
    send(outbox, "1")
    with pg_engine.connect() as connection:
        outbox.send(connection, "orders", "late")
        send(outbox, "2")
        before = begun(outbox, datetime(2026, 1, 1, tzinfo=UTC))
        connection.commit()

    assert (before, begun(outbox, "earliest")) == (["1", "2"], ["late"])
