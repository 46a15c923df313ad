"""Partitions from the command line: how many, who has which, and what changing their number says."""

import re
from dataclasses import replace
from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.admin.repartition import repartition
from outbox.admin.split import split
from outbox.errors import SubscriptionError
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.slots import slot_of
from outbox.model.subscription import Declaration
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import outbox
from tests.support.parked import by_id
from tests.support.partitions import KEYS, LENGTH, OnePartition, apart

ONE_DATABASE = pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
NOW = timedelta(0)


@pytest.fixture
def relay(channel):
    """The subscription of these tests."""
    return Subscriptions(channel).declare(Declaration(name="relay", destination="stdout:"))


def stored(channel):
    """How many partitions there are, how many are ordered, and of which generation they are."""
    found = Subscriptions(channel).get("relay")
    return found.partitions, found.next_partitions, found.generation


def test_the_first_relay_says_how_many(engine, channel, shop, tmp_path):
    """Later ones take what is stored; one that asks for another number says so."""
    to = f"file://{tmp_path / 'sent'}"
    with shop.begin() as session:
        shop.send_all(session, [Message("orders", b"x", key=key) for key in KEYS])

    first = outbox(engine, "relay", "--to", to, "--partitions", "4", "--until-empty")
    second = outbox(engine, "relay", "--to", to, "--until-empty")
    third = outbox(engine, "relay", "--to", to, "--partitions", "2", "--until-empty")

    assert (first.code, second.code, third.code, stored(channel)) == (0, 0, 0, (4, None, 2))
    differs = "relay has 4 partitions, and not 2; to change that, run: outbox subscriptions alter relay --partitions 2"
    assert [differs in each.err for each in (first, second, third)] == [False, False, True]
    assert len((tmp_path / "sent").read_text().splitlines()) == len(KEYS)


def test_one_partition_becomes_four_at_once(engine, channel, relay):
    ended = outbox(engine, "subscriptions", "alter", "relay", "--partitions", "4")

    assert (ended.code, stored(channel)) == (0, (4, None, 2))
    assert ended.err == "relay: all topics to stdout:, a dead letter: block, 4 partitions\n"
    assert outbox(engine, "subscriptions", "alter", "relay", "--partitions", "4").err == ended.err
    assert stored(channel) == (4, None, 2)


@ONE_DATABASE
def test_partitions_that_stand_apart_meet_first(engine, channel, shop, relay):
    """Nobody runs them: the command says so, and the next relays carry it out."""
    apart(shop, channel)

    plain = outbox(engine, "subscriptions", "alter", "relay", "--partitions", "1", "--wait", "0s")
    machine = outbox(engine, "subscriptions", "alter", "relay", "--partitions", "3", "--wait", "0s", "--json")

    assert plain.err.endswith(
        "2 partitions; 1 partition as soon as its relays have handled each up to where the foremost is; to look, run:"
        " outbox status\n"
    )
    assert (machine.json["subscription"]["partitions"], machine.json["subscription"]["next_partitions"]) == (2, 3)
    assert stored(channel) == (2, 3, 2)


@ONE_DATABASE
def test_status_shows_partitions(engine, channel, shop, relay):
    apart(shop, channel)
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    assert Leases(channel).acquire(Subscriptions(channel).get("relay").partition(1), "host:7:abc", LENGTH)
    backlogs = [sum(slot_of(key, shop.database.slots) % 2 == number for key in KEYS) for number in range(2)]
    left = [max(0, backlogs[0] - 3), backlogs[1]]

    table = outbox(engine, "status").out.splitlines()
    found = outbox(engine, "status", "--json").json["subscriptions"][0]

    assert [line.split()[:3] for line in table[-2:]] == [
        ["relay", f"{number}/2→3", str(left[number])] for number in range(2)
    ]
    assert [line.split()[-1] for line in table[-2:]] == ["nobody", "host:7"]
    assert (found["backlog"], found["live"], found["worker"], found["next_partitions"]) == (sum(left), False, None, 3)
    assert [(each["number"], each["backlog"], each["worker"]) for each in found["partitions"]] == [
        (0, left[0], None),
        (1, left[1], "host:7:abc"),
    ]


@ONE_DATABASE
def test_status_warns_of_a_partition_that_nobody_runs(engine, channel, shop, relay):
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    for number in (0, 2):
        assert Leases(channel).acquire(Subscriptions(channel).get("relay").partition(number), "host:7:abc", LENGTH)
    channel.run("UPDATE {progress} SET settled_at = '2020-01-01 00:00:00'")

    (found,) = Outbox(engine).admin.diagnosis()

    assert (found.kind, found.subscription, found.what) == ("not_run", "relay", "no worker runs for partition 1")


@ONE_DATABASE
def test_the_list_shows_how_many_and_who(engine, channel, relay):
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 2)
    for number, owner in enumerate(["ann", "bob"]):
        assert Leases(channel).acquire(Subscriptions(channel).get("relay").partition(number), owner, LENGTH)

    row = outbox(engine, "subscriptions", "list").out.splitlines()[-1].split()
    (found,) = outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]

    assert ("2" in row, row[-2:]) == (True, ["ann,", "bob"])
    assert (found["partitions"], found["workers"], found["live"]) == (2, ["ann", "bob"], True)


@ONE_DATABASE
def test_workers_are_listed_with_the_partitions_that_each_has(engine, channel, relay):
    def listed(**owners: str) -> list[str]:
        for number, owner in owners.items():
            assert Leases(channel).acquire(
                Subscriptions(channel).get("relay").partition(int(number[1:])), owner, LENGTH
            )
        rows = outbox(engine, "workers").out.splitlines()[1:]
        return [found for row in rows for found in re.findall(r"\d of \d(?:: [\d,]+)?", row)]

    alone = listed(_0="a:1:x")
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 4)

    assert (alone, listed(_0="a:1:x", _1="b:2:x", _3="b:2:x")) == (["1 of 1"], ["1 of 4: 0", "2 of 4: 1,3"])


@ONE_DATABASE
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--partitions", "4", "--topics", "orders"], 2, "a change of its own"),
        (["--partitions", "0"], 2, "0 is not in the range"),
        (["--partitions", "257"], 2, "this outbox has 256 slots"),
        ([], 2, "nothing to alter"),
    ],
)
def test_some_changes_are_refused(engine, channel, relay, arguments, code, told):
    ended = outbox(engine, "subscriptions", "alter", "relay", *arguments)

    assert (ended.code, told in ended.err, stored(channel)) == (code, True, (1, None, 1))


def test_a_worker_that_does_not_give_its_lease_back_is_named(channel, relay):
    assert Leases(channel).acquire(relay.partition(0), "w0rker", LENGTH)

    with pytest.raises(SubscriptionError, match="worker w0rker holds the lease of relay"):
        repartition(channel, "relay", 2, wait=NOW)

    assert stored(channel) == (1, None, 1)


def test_a_subscription_with_partitions_is_split_into_two_with_as_many(shop, channel, relay):
    """Each partition of the new one begins where its twin stands, so that neither passes over the other's messages."""
    apart(shop, channel)
    origin = Subscriptions(channel).get("relay")
    before = ProgressLog(channel).standing(origin)
    with channel.transaction():
        Parked(channel, "relay").park(by_id({Parking(state="dead", holds=True): [1, 2]}))

    _, split_off, moved = split(channel, "relay", ["orders"], destination="stdout:")

    made = Subscriptions(channel).get("relay:orders")
    assert replace(split_off, created_at=made.created_at) == made
    assert (made.partitions, made.generation, moved) == (2, 1, 2)
    assert ProgressLog(channel).standing(made) == before == ProgressLog(channel).standing(origin)
    assert before[0] != before[1]


def test_a_subscription_whose_partitions_are_to_meet_is_not_split(shop, channel, relay):
    apart(shop, channel)
    repartition(channel, "relay", 3, wait=NOW)

    with pytest.raises(SubscriptionError, match="number of its partitions is being changed"):
        split(channel, "relay", ["orders"], destination="stdout:")


def test_a_dropped_subscription_leaves_no_partition(engine, channel, shop, relay):
    apart(shop, channel)

    ended = outbox(engine, "subscriptions", "drop", "relay", "--yes")

    left = [channel.rows(f"SELECT count(*) FROM {{{table}}}")[0][0] for table in ("lease", "progress", "subscription")]
    assert (ended.code, left) == (0, [0, 0, 0])


def test_requests_are_carried_out_on_dead_letters_of_all_partitions(engine, channel, shop, relay):
    with Subscriptions(channel).changing():
        Subscriptions(channel).repartition("relay", 3)
    with shop.begin() as session:
        shop.send_all(session, [Message("orders", b"x", key=key) for key in KEYS])
    with channel.transaction():
        Parked(channel, "relay").park(by_id({Parking(state="dead", holds=True): list(range(1, len(KEYS) + 1))}))

    ended = outbox(engine, "parked", "discard", "--all", "--yes", "--reason", "a test", "--json")

    assert (ended.code, ended.json["subscriptions"][0]["worker"]) == (0, None)
    assert channel.rows("SELECT count(*) FROM {parked}") == [(0,)]


def test_a_purge_waits_for_the_slowest_partition(engine, channel, shop, relay):
    apart(shop, channel)
    behind = OnePartition(channel, Subscriptions(channel).get("relay").partition(1))
    channel.run("UPDATE {message} SET created_at = '2020-01-01 00:00:00'")

    before = outbox(engine, "purge", "--older-than", "1h", "--json").json
    for number in range(2):
        worker = behind if number else OnePartition(channel, Partition("relay", 2, 0, 2))
        for _ in range(5):
            worker.step()
    after = outbox(engine, "purge", "--older-than", "1h", "--json").json

    assert (before["rows"], after["rows"]) == (0, len(KEYS))
