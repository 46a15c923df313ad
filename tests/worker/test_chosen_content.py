"""Tags and a filter choose messages beside topics: in every read, in a status, and when altered."""

import json

import pytest
from sqlalchemy import text

from outbox import FilterError, Message, Outbox, Relay, Route, SubscriptionError, routes
from outbox.store.log.log import Limits
from outbox.store.operations.status import statuses
from outbox.worker.settings import Settings
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination
from tests.support.readers import delivered, texts

CHOSEN = {"topics": ("orders",), "tags": ("TagA", "TagB"), "filter": "price > 100 AND region <> 'us'"}


def mixed(number: int) -> list[Message]:
    """Messages of which one in 8 has all that `CHOSEN` asks for; the bodies tell which."""
    made = []
    for n in range(number):
        topic, tags, region = ("orders", "users")[n % 2], ("TagA", "TagC")[n // 2 % 2], ("eu", "us")[n // 4 % 2]
        chosen = (topic, tags, region) == ("orders", "TagA", "eu")
        headers = {"region": region, "price": str(100.5 + n)}
        made.append(Message(topic, f"{n} {'chosen' if chosen else 'other'}", tags=tags, headers=headers))
    return made


def put(outbox: Outbox, messages: list[Message]) -> list[str]:
    """Write messages; return the bodies of those that are chosen."""
    with outbox.begin() as session:
        outbox.send_all(session, messages)
    return [message.body.decode() for message in messages if message.body.endswith(b"chosen")]


@pytest.mark.parametrize("number", [40, 3_000], ids=["one read", "pages"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_topics_tags_and_filter_have_to_be_true(engine, number, partitions):
    outbox = Outbox(engine)
    chosen = put(outbox, mixed(number))

    found = delivered(
        outbox.database, name="some", partitions=partitions, settings=Settings(limits=Limits(rows=100)), **CHOSEN
    )

    assert sorted(texts(found)) == sorted(chosen)
    assert len(chosen) == number // 8


def test_what_commits_late_is_chosen_too(pg_engine):
    outbox = Outbox(pg_engine)
    destination = Destination()
    relay = Relay(outbox, destination, filter="price > 100")
    with outbox.begin() as late:
        outbox.send(late, "orders", "late", headers={"price": "101"})
        outbox.send(late, "orders", "late and cheap", headers={"price": "99"})
        put(Outbox(pg_engine), mixed(8))
        relay.until_empty()
    relay.until_empty()

    assert destination.bodies[-1] == b"late"
    assert len(destination.bodies) == 9


def test_large_bodies_are_read_only_if_they_are_chosen(engine):
    outbox = Outbox(engine)
    large = b"x" * 100_000
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", large, headers={"n": str(n)}) for n in range(40)])

    found = delivered(outbox.database, name="some", filter="n IN ('3', '30')", settings=Settings(limits=Limits(rows=9)))

    assert [(message.headers, message.body) for message in found] == [({"n": "3"}, large), ({"n": "30"}, large)]


@pytest.mark.parametrize("headers", ["{", '{"a":5}', '{"a":"\\ud800"}'])
def test_a_row_of_another_hand_holds_up_nobody(engine, headers):
    outbox = Outbox(engine)
    put(outbox, mixed(1))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_message SET headers = :headers"), {"headers": headers})
    put(outbox, mixed(1))

    assert texts(delivered(outbox.database, name="some", filter="region = 'eu'")) == ["0 chosen"]


@pytest.mark.parametrize(
    ("differing", "told"),
    [
        ({"tags": ("TagA",)}, "has tags TagA,TagB, this worker asks for TagA; .* alter relay --tags TagA( |$)"),
        ({"tags": None}, "has tags TagA,TagB, this worker asks for all; .* alter relay --tags '\\*'"),
        ({"filter": "price > 5"}, "this worker asks for price > 5; .* alter relay --filter 'price > 5'"),
        ({"filter": None}, "this worker asks for all; .* alter relay --filter TRUE"),
    ],
)
def test_a_worker_that_declares_others_is_refused(sqlite_engine, differing, told):
    outbox = Outbox(sqlite_engine)
    delivered(outbox.database, **CHOSEN)

    with pytest.raises(SubscriptionError, match=told):
        delivered(outbox.database, **CHOSEN | differing)


def test_an_altered_selection_counts_from_the_position(engine):
    outbox = Outbox(engine)
    delivered(outbox.database, filter="region = 'eu'")
    passed = put(outbox, mixed(8))
    assert len(delivered(outbox.database, filter="region = 'eu'")) == 4

    answer = command_line(engine, "subscriptions", "alter", "relay", "--filter", "region = 'us'", "--tags", "TagA")
    put(outbox, mixed(8))

    assert (answer.code, len(passed)) == (0, 1), answer.err
    assert "relay: all topics, tags TagA, region = 'us' to callable:tests" in answer.err
    assert texts(delivered(outbox.database, filter="region = 'us'", tags=("TagA",))) == ["4 other", "5 other"]


def test_alter_takes_tags_and_filter_away(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    delivered(outbox.database, **CHOSEN)

    answer = command_line(sqlite_engine, "subscriptions", "alter", "relay", "--filter", "TRUE", "--tags", "*", "--json")

    found = answer.json["subscription"]
    assert (found["topics"], found["tags"], found["filter"]) == (["orders"], None, None)


def test_a_status_counts_what_is_chosen(engine):
    outbox = Outbox(engine)
    delivered(outbox.database, **CHOSEN)
    chosen = put(outbox, mixed(80))

    channel = outbox.database.open()
    _, found = statuses(channel)
    channel.close()

    assert [each.backlog for each in found] == [len(chosen)]


def test_a_consumer_handles_what_is_chosen(engine):
    outbox = Outbox(engine)
    handled = []
    consumer = outbox.consumer("billing", topics=["orders"], tags="TagA || TagB", filter="price > 100")
    consumer.on("orders")(lambda message: handled.append(message.body))
    put(outbox, mixed(8))

    consumer.until_empty()

    assert handled == [b"0 chosen", b"4 other"]


def test_a_route_may_narrow_its_topics(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    orders, rest = Destination(), Destination()
    put(outbox, mixed(8))

    for relay in routes(outbox, {"orders": Route(to=orders, tags="TagA", filter="region = 'eu'"), "*": rest}):
        relay.until_empty()

    assert (orders.bodies, rest.bodies) == ([b"0 chosen"], [b"1 other", b"3 other", b"5 other", b"7 other"])


def test_the_command_line_takes_tags_and_filter(sqlite_engine):
    put(Outbox(sqlite_engine), mixed(8))

    given = ["--topics", "orders", "--tags", "TagA || TagB", "--filter", "price > 100 AND region <> 'us'"]
    answer = command_line(sqlite_engine, "relay", "--to", "stdout:", "--until-empty", *given)

    assert (answer.code, [json.loads(line)["topic"] for line in answer.out.splitlines()]) == (0, ["orders"])
    listed = command_line(sqlite_engine, "subscriptions", "list", "--json").json["subscriptions"][0]
    assert (listed["tags"], listed["filter"]) == (["TagA", "TagB"], "price > 100 AND region <> 'us'")


@pytest.mark.parametrize("verb", [["relay", "--to", "stdout:"], ["subscriptions", "alter", "relay"]])
def test_the_command_line_shows_the_place_of_a_mistake(sqlite_engine, verb):
    Relay(Outbox(sqlite_engine), Destination()).once()

    answer = command_line(sqlite_engine, *verb, "--filter", "price > 'x'")

    assert answer.code != 0
    assert answer.err.endswith("only numbers have an order\n  price > 'x'\n          ^\n")


@pytest.mark.parametrize("wrong", [{"tags": "||"}, {"filter": "price >"}])
def test_mistakes_are_told_before_a_relay_begins(sqlite_engine, wrong):
    with pytest.raises(FilterError):
        Relay(Outbox(sqlite_engine), Destination(), **wrong)
    with pytest.raises(FilterError):
        Route(to=Destination(), **wrong)
    with pytest.raises(FilterError):
        Outbox(sqlite_engine).consumer("billing", **wrong)
