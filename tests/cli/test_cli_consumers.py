"""Consumers from the command line: which there are, what waits for them, and how they begin again."""

from datetime import timedelta

import pytest

from outbox.admin.backfill import backfill
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Kind
from outbox.model.verdict import Reject
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import outbox
from tests.support.destination import fill

ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)


@pytest.fixture
def seen(channel, shop):
    """What a consumer with two partitions has handled of ten messages, of which it has rejected the last."""
    seen: list[bytes] = []
    consumer = shop.consumer("billing", topics=["topic0"], partitions=2)

    @consumer.on()
    def handle(message: Message):
        seen.append(message.body)
        return Reject("never") if message.body == b"9" else None

    fill(shop, 10)
    consumer.until_empty()
    return seen


def declare(channel, name: str, kind: Kind) -> None:
    """A subscription that nobody runs."""
    Subscriptions(channel).declare(Declaration(name=name, destination=None, kind=kind))


def listed(engine, *arguments: str) -> list[str]:
    """The names that a command shows, as a table and as JSON."""
    table = [line.split()[0] for line in outbox(engine, "consumers", *arguments).out.split("\n\n")[0].splitlines()[1:]]
    assert table == [each["name"] for each in outbox(engine, "consumers", *arguments, "--json").json["consumers"]]
    return table


def test_the_list_shows_what_waits_and_who_works_on_it(engine, channel, shop, seen):
    fill(shop, 10, first=10)
    assert Leases(channel).acquire(Subscriptions(channel).get("billing").partition(1), "host:7:x", timedelta(minutes=1))

    table = [line.split() for line in outbox(engine, "consumers", "list").out.splitlines()]
    (found,) = outbox(engine, "consumers", "list", "--json").json["consumers"]

    # The first partition has some of the ten messages, the second has the others.
    backlogs = [each["backlog"] for each in found["partitions"]]
    assert (len(seen), sum(backlogs), found["backlog"], found["parked"]["dead"]) == (10, 10, 10, 1)
    assert table[1][:2] == ["billing", "10"] and table[1][-4:] == ["1", "0", "0", "host:7"]
    assert [row[:3] + row[-1:] for row in table[-2:]] == [
        ["billing", "0/2", str(backlogs[0]), "nobody"],
        ["billing", "1/2", str(backlogs[1]), "host:7"],
    ]
    assert [each["worker"] for each in found["partitions"]] == [None, "host:7:x"]
    assert min(each["lag_seconds"] for each in found["partitions"]) >= 0


@ONE_DATABASE
def test_the_list_has_instances_and_backfills_and_no_relay(engine, channel, shop, seen):
    declare(channel, "news@a", "broadcast")
    Subscriptions(channel).declare(Declaration(name="sender", destination="test"))
    backfill(channel, "billing", ["topic0"])
    backfill(channel, "sender", ["topic0"])

    assert listed(engine, "list") == ["billing", "billing:backfill", "news@a"]
    places = outbox(engine, "subscriptions", "list").out.splitlines()[1:4]
    assert [place in line for place, line in zip(["(consumer)", "(consumer)", "(broadcast)"], places, strict=True)] == [
        True
    ] * 3


@ONE_DATABASE
def test_a_filter_of_several_lines_is_shown_in_one(engine, channel):
    subscription = Declaration(name="billing", destination=None, kind="consumer", filter="price > 100\n  AND a = 'x'")
    Subscriptions(channel).declare(subscription)

    assert "all topics, price > 100 AND a = 'x'  (consumer)" in outbox(engine, "subscriptions", "list").out


@ONE_DATABASE
def test_one_is_shown_with_its_partitions_also_if_it_has_one(engine, channel, seen):
    declare(channel, "news@a", "broadcast")
    declare(channel, "news@b", "broadcast")

    assert [listed(engine, "show", name) for name in ("billing", "news@a", "news")] == [
        ["billing"],
        ["news@a"],
        ["news@a", "news@b"],
    ]
    assert outbox(engine, "consumers", "show", "news@a").out.splitlines()[-1].split()[:2] == ["news@a", "0/1"]


@ONE_DATABASE
@pytest.mark.parametrize(
    ("name", "why"),
    [("relay", "relay is no consumer but of the kind relay; see outbox status"), ("nope", "there is no subscription")],
)
def test_what_is_no_consumer_is_not_shown(engine, channel, name, why):
    ended = outbox(engine, "consumers", "show", name)

    assert (ended.code, why in ended.err) == (2, True)


def test_a_consumer_begins_again(engine, channel, shop, seen):
    ended = outbox(engine, "consumers", "reset", "billing", "--to", "earliest", "--yes", "--json")
    again = shop.consumer("billing", topics=["topic0"])
    again.on()(lambda message: seen.append(message.body))
    again.until_empty()

    assert (ended.json["reset"], ended.json["parked"]) == (["billing"], {"dead": 1})
    assert sorted(seen[10:]) == sorted(seen[:10])


@ONE_DATABASE
def test_a_consumer_is_dropped(engine, channel, seen):
    ended = outbox(engine, "consumers", "drop", "billing", "--yes")

    assert (ended.code, ended.err) == (0, "billing is dropped, with the messages that were parked (1 dead)\n")
    assert listed(engine, "list") == []
