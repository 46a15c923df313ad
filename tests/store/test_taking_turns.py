"""Who declares, alters, splits or drops a subscription does so alone: nobody acts on what another one has changed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, SubscriptionError
from outbox.admin.backfill import backfill
from outbox.admin.commands import alter, drop, reset
from outbox.admin.split import split
from outbox.model.subscription import Declaration
from outbox.model.topics import Topics
from outbox.runtime import failpoints
from outbox.schema import metadata
from outbox.store.database import Channel, Database
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import leading_to
from tests.support.destination import Destination, relay_to
from tests.support.readers import declared

#: A change of subscriptions, on a channel of its own.
Change = Callable[[Channel], object]


def relay(**differing: Any) -> Change:
    """The worker of all topics, or of others, begins."""
    return lambda channel: Subscriptions(channel).declare(declared(destination="test", **differing))


def route(topic: str = "orders.*") -> Change:
    """The worker of a route begins, whose topics nobody else has sent."""
    given = Declaration(name=f"relay:{topic}", destination="other", topics=(topic,), split_from="relay")
    return lambda channel: Subscriptions(channel).declare(given)


def altered(**changes: Any) -> Change:
    """As `outbox subscriptions alter relay`."""

    def change(channel: Channel) -> object:
        stored = Subscriptions(channel).get("relay")
        return alter(channel, replace(stored, **changes), before=stored)

    return change


def both(engine: Engine, first: Change, second: Change) -> list[str]:
    """Let the second begin when the first has read everything and written nothing; return their errors."""
    errors: list[str] = []
    begins = threading.Thread(target=carry_out, args=(engine, second, errors))

    def reached(name: str) -> None:
        if name == "subscription.checked" and begins.ident is None:
            begins.start()
            begins.join(1)

    with armed(reached):
        carry_out(engine, first, errors)
    begins.join(60)
    return errors


def carry_out(engine: Engine, change: Change, errors: list[str]) -> None:
    """On a channel of its own; note why it is refused."""
    with closing(Outbox(engine).database.open()) as channel:
        try:
            change(channel)
        except SubscriptionError as error:
            errors.append(str(error))


def beginning_before_it_alters(other: threading.Thread) -> Callable[[str], None]:
    """Let another command begin when the first one has its leases; it has read everything when it asks for them."""
    asked = threading.Event()

    def reached(name: str) -> None:
        if name == "command.after_ask":
            asked.set()
        elif name == "command.before_alter" and threading.current_thread() is not other:
            other.start()
            assert asked.wait(60)

    return reached


@contextmanager
def armed(reached: Callable[[str], None]) -> Iterator[None]:
    """Call `reached` at each crash point meanwhile."""
    failpoints.arm(reached)
    try:
        yield
    finally:
        failpoints.arm(None)


def sent_twice(engine: Engine) -> list[tuple[str, str]]:
    """The names of relays that share topics."""
    with closing(Outbox(engine).database.open()) as channel:
        relays = [each for each in Subscriptions(channel).all() if each.destination is not None]
    return [(a.name, b.name) for a, b in combinations(relays, 2) if Topics.of(a.topics).shares(Topics.of(b.topics))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["relay first", "route first"])
def test_a_relay_of_all_topics_and_a_route_that_begin_at_the_same_moment_do_not_both_begin(engine, order):
    changes = [relay(), route()]

    errors = both(engine, *(changes[n] for n in order))

    assert (len(errors), sent_twice(engine)) == (1, [])


def test_a_relay_does_not_begin_with_the_topics_of_a_route_that_has_begun(engine, channel):
    route()(channel)

    with pytest.raises(SubscriptionError) as raised:
        relay()(channel)

    assert str(raised.value) == (
        "subscription 'relay' has not begun yet, and 'relay:orders.*' would send some of these topics too; run the"
        f" relay with routes: outbox relay --name relay --route 'orders.*=URL' --route '*=URL' {leading_to(engine)};"
        " or give this worker another --name"
    )
    relay(topics=("!orders.*",))(channel)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["alter first", "route first"])
def test_a_relay_is_not_given_topics_with_which_a_route_begins_at_the_same_moment(engine, channel, order):
    relay(topics=("users",))(channel)
    changes = [altered(topics=None), route()]

    errors = both(engine, *(changes[n] for n in order))

    assert (len(errors), sent_twice(engine)) == (1, [])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("relay", id="one from the migration", marks=pytest.mark.storm),
        pytest.param("billing", id="a new one"),
    ],
)
@pytest.mark.parametrize("differing", [{"topics": ("a",)}, {"destination": "nats://h:4222"}, {"kind": "check"}])
def test_of_two_workers_that_declare_different_things_at_once_one_is_refused(engine, name, differing):
    one = declared(name=name)
    other = replace(one, **differing)

    errors = both(
        engine,
        lambda channel: Subscriptions(channel).declare(one),
        lambda channel: Subscriptions(channel).declare(other),
    )

    assert len(errors) == 1
    with closing(Outbox(engine).database.open()) as channel:
        stored = Subscriptions(channel).get(name)
    assert (stored.kind, stored.topics, stored.destination) == (one.kind, one.topics, one.destination)


def test_a_split_does_not_undo_hosts_that_a_worker_stores_at_the_same_moment(engine, channel):
    hosts = declared(destination="nats://b:1,c:1")
    seen = Subscriptions(channel).declare(declared(destination="nats://a:1,b:1"))

    errors = both(
        engine,
        splitting,
        lambda own: Subscriptions(own).store_hosts(seen, hosts),
    )

    now = Subscriptions(channel).get("relay")
    assert (errors, now.topics, now.destination) == ([], ("!orders",), "nats://b:1,c:1")


def test_a_split_does_not_undo_an_alteration_of_just_before(engine, channel):
    """It has read the subscription before, and then waits for the lease that the other command has."""
    relay()(channel)
    errors: list[str] = []
    splits = threading.Thread(target=carry_out, args=(engine, splitting, errors))

    with armed(beginning_before_it_alters(splits)):
        altered(on_dead="continue")(channel)
    splits.join(60)

    now = Subscriptions(channel).get("relay")
    assert errors == ["relay was altered meanwhile; try again"]
    assert (now.on_dead, now.topics) == ("continue", None)


def test_an_alteration_that_waits_for_a_reset_tries_again(engine, channel):
    """The leases that it waits for are gone then, and it says so."""
    relay()(channel)
    errors: list[str] = []
    alters = threading.Thread(target=carry_out, args=(engine, altered(on_dead="continue"), errors))

    with armed(beginning_before_it_alters(alters)):
        reset(channel, "relay", "earliest")
    alters.join(60)
    found = Subscriptions(channel).get("relay")
    altered(on_dead="continue")(channel)

    assert [error.partition(";")[0] for error in errors] == [
        "the partitions of relay were changed meanwhile, or it was dropped"
    ]
    assert (found.on_dead, found.generation) == ("block", 2)
    assert Subscriptions(channel).get("relay").on_dead == "continue"


def splitting(channel: Channel) -> object:
    """As `outbox subscriptions split relay`."""
    return split(channel, "relay", ["orders"], destination="other")


def test_a_subscription_is_not_dropped_by_a_command_that_has_lost_its_lease(engine, channel, monkeypatch):
    """A worker has taken it, and is at work."""
    relay_to(Destination(), Outbox(engine)).until_empty()
    change = Subscriptions.changing

    def late(self: Subscriptions) -> object:
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1, owner = 'w0rker'"))
        return change(self)

    monkeypatch.setattr(Subscriptions, "changing", late)
    with pytest.raises(Exception, match="relay: a worker took the lease meanwhile"):
        drop(channel, "relay")

    assert Subscriptions(channel).find("relay") is not None


@pytest.mark.parametrize(
    ("command", "after"),
    [
        (
            lambda channel, stored: alter(channel, replace(stored, destination="new")),
            {"relay": "new", "relay:backfill": "new"},
        ),
        (lambda channel, stored: drop(channel, stored.name), {}),
    ],
    ids=["alter", "drop"],
)
def test_a_command_leaves_no_backfill_behind_that_begins_at_the_same_moment(
    engine, channel, monkeypatch, command, after
):
    """It had looked for a backfill before; the next time it takes that along."""
    stored = Subscriptions(channel).declare(declared(destination="old"))
    change = Subscriptions.changing

    def late(self: Subscriptions) -> object:
        monkeypatch.setattr(Subscriptions, "changing", change)
        with closing(Outbox(engine).database.open()) as own:
            backfill(own, "relay", ["orders"])
        return change(self)

    monkeypatch.setattr(Subscriptions, "changing", late)
    with pytest.raises(SubscriptionError) as raised:
        command(channel, stored)

    assert str(raised.value) == "a backfill of relay began or ended meanwhile; try again"
    assert destinations(channel) == {"relay": "old", "relay:backfill": "old"}
    command(channel, stored)
    assert destinations(channel) == after


def destinations(channel: Channel) -> dict[str, str | None]:
    """Where each subscription sends."""
    return {each.name: each.destination for each in Subscriptions(channel).all()}


def test_outboxes_of_one_database_do_not_wait_for_each_other(pg_engine):
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA shop"))
    metadata("shop").create_all(pg_engine)
    one, other = Database(pg_engine).open(), Database(pg_engine, "shop").open()

    with closing(one), closing(other), Subscriptions(one).changing():
        made = Subscriptions(other).declare(declared(), "latest")

    assert made.name == "relay"
