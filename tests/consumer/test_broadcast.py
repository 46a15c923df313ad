"""A broadcast consumer: every instance gets every message, and one that does not come back is forgotten."""

import socket
from contextlib import closing
from typing import Any

import pytest

from outbox import Consumer, Message, Outbox, SubscriptionError
from outbox.admin import pausing
from outbox.store.subscriptions.instances import drop_gone
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import upkeep
from tests.support.consumers import consumer_of, parked, texts, write
from tests.support.destination import briskly
from tests.support.waiting import eventually


@pytest.fixture
def soon(monkeypatch):
    """Look for instances that are gone at once, and often."""
    monkeypatch.setattr(upkeep, "PRUNE_PROGRESS", 0.1)


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox on every supported database."""
    return Outbox(engine)


def instance(
    outbox: Outbox, name: str, got: list[Message] | None = None, consumer: str = "cache", **options: Any
) -> Consumer:
    """An instance that notes what it gets."""
    messages: list[Message] = [] if got is None else got
    made = consumer_of(outbox, consumer, broadcast=True, instance=name, **options)
    made.on("orders")(messages.append)
    return made


def subscriptions(outbox: Outbox) -> list[str]:
    """The names of all subscriptions but the one that is always there."""
    with closing(outbox.database.open()) as channel:
        return [each.name for each in Subscriptions(channel).all() if each.name != "relay"]


def age(outbox: Outbox, name: str, days: int) -> None:
    """Let it be so many days since an instance was seen: by its row, its progress, and its lease if it has one."""
    moments = (("subscription", "name", "created_at"), ("lease", "subscription", "lease_until"))
    with closing(outbox.database.open()) as channel:
        for table, column, moment in (*moments, ("progress", "subscription", "settled_at")):
            channel.run(
                f"UPDATE {{{table}}} SET {moment} = {{later}} WHERE {column} = :name AND {moment} IS NOT NULL",
                name=name,
                seconds=-86_400.0 * days,
            )


def test_every_instance_gets_every_message_from_when_it_is_there(outbox):
    write(outbox, "before")
    got: dict[str, list[Message]] = {"a": [], "b": []}
    instances = [instance(outbox, name, messages) for name, messages in got.items()]
    for each in instances:
        each.until_empty()
    write(outbox, "1", "2")
    for each in instances:
        each.until_empty()

    assert {name: texts(messages) for name, messages in got.items()} == {"a": ["1", "2"], "b": ["1", "2"]}
    assert subscriptions(outbox) == ["cache@a", "cache@b"]


def test_an_instance_is_named_after_its_host(outbox):
    consumer = outbox.consumer("cache", broadcast=True)

    assert (consumer.name, consumer.start_at) == (f"cache@{socket.gethostname()}", "latest")


def test_what_is_paused_of_all_instances_is_paused_of_a_new_one(outbox):
    """A paused instance is not forgotten either."""
    instance(outbox, "a").until_empty()
    with closing(outbox.database.open()) as channel:
        pausing.pause(channel, "cache", by="ops@host")
        with pytest.raises(SubscriptionError, match="cache@b is paused by ops@host"):
            instance(outbox, "b").until_empty()
        age(outbox, "cache@a", days=8)

        assert drop_gone(channel, "cache@") == 0
        assert [len(each.pauses) for each in Subscriptions(channel).get_all("cache")] == [1, 1]


def test_an_instance_that_comes_back_goes_on_where_it_was(outbox):
    got: list[Message] = []
    instance(outbox, "a", got).until_empty()
    write(outbox, "1")
    age(outbox, "cache@a", days=6)
    with closing(outbox.database.open()) as channel:
        assert drop_gone(channel, "cache@") == 0
    instance(outbox, "a", got).until_empty()

    assert texts(got) == ["1"]


def test_an_instance_that_was_away_for_7_days_is_dropped_by_another(outbox, soon):
    for consumer, name in (("cache", "gone"), ("cache", "here"), ("cached", "gone")):
        instance(outbox, name, consumer=consumer).until_empty()
    group = consumer_of(outbox, "cache")
    group.on("orders")(lambda _message: None)
    group.until_empty()
    write(outbox, "1")
    failing = consumer_of(outbox, "cache", broadcast=True, instance="gone")
    failing.on("orders")(lambda _message: 1)
    failing.once()
    left = len(parked(outbox, "cache@gone"))
    for name in ("cache@gone", "cached@gone", "cache"):
        age(outbox, name, days=8)
    age(outbox, "cache@here", days=6)

    with instance(outbox, "b", settings=briskly()):
        assert eventually(lambda: subscriptions(outbox) == ["cache", "cache@b", "cache@here", "cached@gone"])
    assert (left, parked(outbox, "cache@gone")) == (1, [])


def test_an_instance_that_was_killed_is_seen_until_its_lease_ends(outbox, soon):
    for name in ("gone", "killed"):
        instance(outbox, name).until_empty()
        age(outbox, f"cache@{name}", days=8)
    with closing(outbox.database.open()) as channel:
        channel.run(
            "UPDATE {lease} SET lease_until = {later} WHERE subscription = 'cache@killed'", seconds=-86_400.0 * 6
        )

    with instance(outbox, "b", settings=briskly()):
        assert eventually(lambda: subscriptions(outbox) == ["cache@b", "cache@killed"])


def test_instances_that_come_back_together_after_7_days_keep_each_other(outbox):
    got: dict[str, list[Message]] = {"a": [], "b": []}
    for name in got:
        instance(outbox, name).until_empty()
    write(outbox, "1")
    for name in got:
        age(outbox, f"cache@{name}", days=8)
    for name, messages in got.items():
        instance(outbox, name, messages).until_empty()

    assert {name: texts(messages) for name, messages in got.items()} == {"a": ["1"], "b": ["1"]}


def test_an_idle_instance_shows_that_it_is_there(sqlite_engine, monkeypatch):
    """On SQLite nothing moves a position but messages."""
    monkeypatch.setattr(upkeep, "STORE_SAME", 0.1)
    outbox = Outbox(sqlite_engine)
    idle = instance(outbox, "a", settings=briskly())
    with idle:
        assert eventually(lambda: subscriptions(outbox) == ["cache@a"])

        def stored() -> int:
            with closing(outbox.database.open()) as channel:
                return int(channel.rows("SELECT count(*) FROM {progress} WHERE subscription = 'cache@a'")[0][0])

        first = stored()
        assert eventually(lambda: stored() > first + 2)
