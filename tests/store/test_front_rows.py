"""Rows that the fronts of an outbox share: topics, consumer groups, and clients with the last moment of each."""

from contextlib import closing

import pytest

from outbox import Outbox
from outbox.store.fronts.clients import ClientRow, ClientRows
from outbox.store.fronts.groups import ConsumerGroup, GroupRows
from outbox.store.fronts.topics import TopicRows


@pytest.fixture
def channel(engine):
    """A connection of our own."""
    with closing(Outbox(engine).database.open()) as opened:
        yield opened


def test_a_topic_has_the_type_with_which_it_was_added_until_it_is_dropped(channel):
    topics = TopicRows(channel)

    stored = [topics.add("paid", type_) for type_ in ("TRANSACTION", "NORMAL")]
    topics.add("orders", "NORMAL")
    dropped = [topics.drop("orders") for _ in range(2)]

    assert (stored, dropped, topics.all()) == (["TRANSACTION"] * 2, [True, False], {"paid": "TRANSACTION"})


def test_a_group_that_is_there_changes_only_when_it_is_told_to(channel):
    groups, first, second = GroupRows(channel), ConsumerGroup("g", True, 3), ConsumerGroup("g", False, 5)

    added = [groups.add(first), groups.add(second)]
    before = groups.all()
    groups.change(second)

    assert (added, before, groups.all()) == ([True, False], {"g": first}, {"g": second})
    assert (groups.drop("g"), groups.all()) == (True, {})


def seen_at(channel):
    return dict(channel.rows("SELECT id, seen_at FROM {client}"))


def test_a_client_that_is_there_and_fresh_is_not_written_again(channel):
    clients = ClientRows(channel)
    old, fresh, moved = (ClientRow(each, "PRODUCER", frozenset({"paid", "ü"})) for each in ("a'b", "fresh", "moved"))
    clients.seen([old, fresh, moved])
    channel.run("UPDATE {client} SET seen_at = {later}", seconds=-60.0)
    channel.run("UPDATE {client} SET seen_at = {later} WHERE id = :id", seconds=-2000.0, id=old.id)
    before = seen_at(channel)

    clients.seen([old, fresh, moved._replace(topics=frozenset({"other"})), ClientRow("new", "PRODUCER", frozenset())])

    now = seen_at(channel)
    assert {id for id in now if now[id] != before.get(id)} == {old.id, moved.id, "new"}
    assert sorted(clients.find([old.id, moved.id, "strange"])) == [
        old, ClientRow("moved", "PRODUCER", frozenset({"other"})),
    ]  # fmt: skip


def test_any_number_of_new_clients_is_one_statement(channel):
    statements, run = [], channel._driver_channel.run

    def counted(statement, bound):
        statements.append(statement)
        return run(statement, bound)

    channel._driver_channel.run = counted
    ClientRows(channel).seen([ClientRow(str(number), "PRODUCER", frozenset()) for number in range(500)])

    assert (len(statements), len(seen_at(channel))) == (1, 500)


def test_clients_that_were_not_seen_for_an_hour_go(channel):
    clients = ClientRows(channel)
    clients.seen([ClientRow(each, "PRODUCER", frozenset()) for each in ("here", "gone")])
    channel.run("UPDATE {client} SET seen_at = {later} WHERE id = :id", seconds=-3601.0, id="gone")

    assert (clients.prune(), list(seen_at(channel))) == (1, ["here"])
