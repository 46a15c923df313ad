"""Routes: the first that matches takes a message, each is a relay of its own, and one that is away delays no other."""

import re
import shlex
import threading
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
from tenacity import wait_fixed

from outbox import Outbox, Relay, Relays, Route, SubscriptionError, Unavailable, routes
from outbox.model.message import Message
from outbox.model.subscription import Subscription
from outbox.model.topics import Topics
from outbox.relay.routes import route_subscriptions
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import leading_to
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination, fill
from tests.support.waiting import eventually


def test_each_route_leaves_out_the_topics_of_those_before_it():
    found = route_subscriptions(["orders.urgent", "orders.*", "users", "*"], "shop")

    assert [(each.name, each.topics, each.split_from) for each in found] == [
        ("shop:orders.urgent", ("orders.urgent",), "shop"),
        ("shop:orders.*", ("!orders.urgent", "orders.*"), "shop"),
        ("shop:users", ("users",), "shop"),
        ("shop", ("!orders.*", "!users"), None),
    ]


def test_no_route_shares_topics_with_another():
    """Also where patterns overlap; so each of them may begin, whichever of the others have begun."""
    found = route_subscriptions(["a.*.x", "*.eu", "orders.*", "o*u", "a.*", "*"], "relay")

    topics = [Topics.of(each.topics) for each in found]
    assert [one.shares(other) for one, other in combinations(topics, 2)] == [False] * 15
    assert [each.shares(each) for each in topics] == [True] * 6


def test_two_ways_to_write_a_pattern_have_one_name():
    assert [each.name for each in route_subscriptions(["orders.**", "*"], "relay")] == ["relay:orders.*", "relay"]


@pytest.mark.parametrize("topic", ["orders.urgent", "orders.new", "orders", "users", "mail", "orders.urgent.x"])
def test_each_topic_has_one_route(topic):
    found = route_subscriptions(["orders.urgent", "orders.*", "*s", "*"], "relay")

    assert sum(Topics.of(each.topics).matches(topic) for each in found) == 1


WRONG = {
    "no last route": (["orders.*"], r"never be sent; add the route '\*' as the last one"),
    "none at all": ([], r"add the route '\*' as the last one"),
    "one behind all": (["*", "orders"], r"'orders' would never get a message, because '\*' before it takes all"),
    "one that another covers": (["a*", "ab*", "*"], r"'ab\*' would never get a message, because 'a\*' before it"),
    "an exception": (["!orders", "*"], "'!orders' is an exception; put a route for these topics before the others"),
    "no topic": (["a b", "*"], "routes: one must be 1 to 249 characters"),
    "the name of a backfill": (["backfill", "*"], "the name 'relay:backfill' belongs to a backfill"),
}


@pytest.mark.parametrize(("patterns", "error"), WRONG.values(), ids=WRONG)
def test_routes_that_lose_messages_are_refused(patterns, error):
    with pytest.raises(SubscriptionError, match=error):
        route_subscriptions(patterns, "relay")


@pytest.mark.parametrize("deadline", ["10s", 10, timedelta(0)])
def test_a_deadline_that_is_no_length_of_time_is_refused(sqlite_engine, deadline):
    problem = f"deadline must be a timedelta greater than 0, not {deadline!r}; write timedelta(seconds=10)"
    with pytest.raises(TypeError, match=re.escape(problem)):
        routes(Outbox(sqlite_engine), {"*": Route(to="stdout:", deadline=deadline)})


def test_a_number_in_place_of_a_retry_policy_is_refused(sqlite_engine):
    with pytest.raises(TypeError, match=r"retry must be a RetryPolicy\(attempts=…, wait=…\), not int"):
        routes(Outbox(sqlite_engine), {"*": "stdout:"}, retry=3)  # type: ignore[arg-type]


def test_messages_go_by_their_topics_in_the_form_of_their_route(engine):
    outbox = Outbox(engine)
    orders, rest = Destination(), Destination()
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, topic) for topic in ("orders.new", "users", "orders.old", "mail")])

    by_orders = Route(to=orders, prefix="shop.", on_dead="block", deadline=timedelta(seconds=2))
    table: dict[str, Any] = {"orders.*": by_orders, "*": rest}
    Relays(routes(outbox, table, on_dead="continue")).until_empty()

    assert [message.topic for message in orders.messages] == ["shop.orders.new", "shop.orders.old"]
    assert [message.topic for message in rest.messages] == ["users", "mail"]
    channel = outbox.database.open()
    stored = [(each.name, each.topics, each.on_dead) for each in Subscriptions(channel).all()]
    channel.close()
    assert stored == [("relay", ("!orders.*",), "continue"), ("relay:orders.*", ("orders.*",), "block")]


def test_an_option_that_routes_share_counts_for_each_that_has_none_of_its_own(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, topic) for topic in ("orders.new", "mail")])
    own, shared = Destination(), Destination()

    table: dict[str, Any] = {"orders.*": Route(to=own, envelope="debezium", prefix="own."), "*": shared}
    Relays(routes(outbox, table, envelope="cloudevents", prefix="shared.")).until_empty()

    assert [(each.topic, each.content_type) for each in own.messages] == [("own.orders.new", "text/plain")]
    assert [(each.topic, each.content_type) for each in shared.messages] == [
        ("shared.mail", "application/cloudevents+json")
    ]


def test_a_destination_that_is_down_delays_no_other(engine):
    """Two relays in one process: one destination is away until the other has everything."""
    outbox = Outbox(engine)
    down, up = Destination(lambda _message: Unavailable("away", everything=True)), Destination()
    relays = Relays(routes(outbox, {"topic1": down, "*": up}), pause=wait_fixed(0.1))
    thread = threading.Thread(target=relays.run)
    thread.start()
    try:
        fill(outbox, 300, topics=2)
        others_came = eventually(lambda: len(up.messages) == 150)
        nothing_came = down.messages == []
        down.answer = up.answer
        all_came = eventually(lambda: len(down.messages) == 150)
    finally:
        relays.stop()
        thread.join(60)

    assert (others_came, nothing_came, all_came) == (True, True, True)
    assert {message.topic for message in down.messages} == {"topic1"}


def test_lines_of_routes_name_their_subscriptions(sqlite_engine, caplog):
    """They work for one database, so that its name alone would not tell them apart."""
    outbox = Outbox(sqlite_engine)
    relays = Relays(routes(outbox, {"a": Destination(), "*": Destination()}))

    with caplog.at_level("INFO", "outbox"):
        relays.until_empty()

    labels = {each.label for each in relays._supervised}
    assert labels == {f"{sqlite_engine.url.database} relay:a", f"{sqlite_engine.url.database} relay"}


def test_topics_are_split_before_anything_else_is_altered(sqlite_engine):
    """Were they only taken away, a new subscription would send all of them again."""
    outbox = Outbox(sqlite_engine)
    Relay(outbox, Destination()).until_empty()
    table: dict[str, Any] = {"a": Destination(), "orders.*": Destination(), "*": lambda _message: None}

    with pytest.raises(SubscriptionError) as raised:
        routes(outbox, table)[-1].until_empty()

    assert "; it has destination test, this worker asks for callable:" in str(raised.value)
    assert "run: outbox subscriptions alter" not in str(raised.value)
    assert "outbox subscriptions split relay --topics a --to URL" in str(raised.value)


def test_topics_that_another_subscription_has_sent_do_not_begin_anew(engine):
    outbox = Outbox(engine)
    Relay(outbox, Destination()).until_empty()
    orders = Destination()
    with outbox.begin() as session:
        outbox.send(session, "orders.new", b"1")

    with pytest.raises(ExceptionGroup) as raised:
        Relays(routes(outbox, {"orders.*": orders, "*": Destination()})).until_empty()

    assert sorted(map(str, raised.value.exceptions)) == [
        (
            "subscription 'relay' has topics all, this worker asks for !orders.*; give them to another subscription,"
            " from where this one stands: outbox subscriptions split relay --topics 'orders.*' --to URL --as"
            f" 'relay:orders.*' {leading_to(engine)}; or give this worker another --name"
        ),
        (
            "subscription 'relay:orders.*' is not there yet, and 'relay' has its topics; to begin where that one"
            " stands, run: outbox subscriptions split relay --topics 'orders.*' --to test --as 'relay:orders.*'"
            f" {leading_to(engine)}"
        ),
    ]
    assert orders.messages == []


def errors(outbox: Outbox, table: dict[str, Any]) -> list[str]:
    """Run the routes; return why each of them that could not begin could not, in the order of the routes."""
    relays = Relays(routes(outbox, table))
    with pytest.raises(ExceptionGroup) as raised:
        relays.until_empty()
    return [str(error) for error in raised.value.exceptions]


def test_a_route_inside_of_another_one_does_not_begin_anew(engine):
    """The outer route has sent its messages. The command in the error makes the route, where the outer one stands."""
    outbox, before, eu, other = Outbox(engine), Destination(), Destination(), Destination()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders.eu.new", "1"), Message("orders.us.new", "2")])
    Relays(routes(outbox, {"orders.*": before, "*": Destination()})).until_empty()
    table: dict[str, Any] = {"orders.eu.*": eu, "orders.*": other, "*": Destination()}

    found = errors(outbox, table)
    command = "outbox subscriptions split 'relay:orders.*' --topics 'orders.eu.*' --to {} --as 'relay:orders.eu.*'"
    command += f" {leading_to(engine)}"
    missing = (
        "subscription 'relay:orders.eu.*' is not there yet, and 'relay:orders.*' has its topics; to begin where that"
        f" one stands, run: {command.format('test')}"
    )
    assert found == [
        missing,
        (
            "subscription 'relay:orders.*' has topics orders.*, this worker asks for !orders.eu.*,orders.*; give them"
            f" to another subscription, from where this one stands: {command.format('URL')}; or give this worker"
            " another --name"
        ),
        f"relay waits until all routes can begin: {missing}",
    ]
    assert (before.bodies, eu.bodies, other.bodies) == ([b"1", b"2"], [], [])

    made = command_line(engine, *shlex.split(command.format("nats://h:4222"))[1:])
    eu.destination = "nats://h:4222"
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders.eu.new", "3"), Message("orders.us.new", "4")])
    Relays(routes(outbox, table)).until_empty()
    assert (made.code, eu.bodies, other.bodies) == (0, [b"3"], [b"4"])


def test_a_route_that_begins_while_another_one_looks_for_it_is_no_obstacle(engine, monkeypatch):
    """The relays of a process begin at the same moment."""
    outbox = Outbox(engine)
    orders, rest = routes(outbox, {"orders.*": Destination(), "*": Destination()})
    look = Subscriptions.all
    seen: list[list[str]] = []

    def look_too_early(self: Subscriptions) -> list[Subscription]:
        found = look(self)
        seen.append([each.name for each in found])
        if len(seen) == 1:
            orders.until_empty()
        return found

    monkeypatch.setattr(Subscriptions, "all", look_too_early)
    rest.until_empty()

    assert seen[0] == [rest.name]
    assert seen[-1] == [rest.name, orders.name]


def test_a_new_route_among_several_is_split_in_any_order(engine):
    """Both are inside of what `relay` had; the inner one is split from the outer one if that was made first."""
    outbox, urgent, orders, rest = Outbox(engine), Destination(), Destination(), Destination()
    Relay(outbox, Destination()).until_empty()
    table: dict[str, Any] = {"orders.urgent": urgent, "orders.*": orders, "*": rest}
    urgent.destination = orders.destination = "nats://h:4222"

    commands = []
    for number in (1, 0):
        found = re.search(r"run: outbox (.*)", errors(outbox, table)[number])
        assert found is not None
        commands.append(shlex.split(found[1]))
        assert command_line(engine, *commands[-1]).code == 0
    Relays(routes(outbox, table)).until_empty()

    assert [each[2 : each.index("--database")] for each in commands] == [
        ["relay", "--topics", "orders.*", "--to", "nats://h:4222", "--as", "relay:orders.*"],
        ["relay:orders.*", "--topics", "orders.urgent", "--to", "nats://h:4222", "--as", "relay:orders.urgent"],
    ]


def test_a_route_that_no_split_can_make_is_refused_in_words(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    Relays(routes(outbox, {"orders.*": Destination(), "*": Destination()})).until_empty()

    across = errors(outbox, {"*.eu": Destination(), "orders.*": Destination(), "*": Destination()})
    wider = errors(outbox, {"orders*": Destination(), "*": Destination()})

    why = "has its topics; a new route takes topics of one subscription, which keeps others. Put what has them before"
    both = f"is not there yet, and 'relay' and 'relay:orders.*' {why.replace('has', 'have', 1)} it among the routes"
    assert (f"'relay:*.eu' {both}" in across[0], f"'relay:orders*' {both}" in wider[0]) == (True, True)


def test_no_route_begins_while_another_one_cannot(engine):
    """Nobody has the topic `mail`, but the process as a whole is not yet what is stored."""
    outbox, mail = Outbox(engine), Destination()
    Relay(outbox, Destination(), topics=["users.*"]).until_empty()
    with outbox.begin() as session:
        outbox.send(session, "mail", b"1")

    found = errors(outbox, {"users.new": Destination(), "mail": mail, "*": Destination()})

    assert found[1].startswith("relay:mail waits until all routes can begin: subscription 'relay:users.new' is not")
    assert mail.bodies == []


def test_a_route_that_has_begun_depends_on_no_other(engine, channel):
    """What is altered of another one stops that one only; this one goes on when it connects again."""
    outbox, orders = Outbox(engine), Destination()
    table: dict[str, Any] = {"orders.*": orders, "*": Destination()}
    begun, rest = routes(outbox, table)
    begun.until_empty()
    rest.until_empty()
    with Subscriptions(channel).changing():
        Subscriptions(channel).alter(replace(Subscriptions(channel).get("relay"), destination="elsewhere"))
    with outbox.begin() as session:
        outbox.send(session, "orders.new", b"1")

    begun.until_empty()
    with pytest.raises(SubscriptionError, match=r"waits until all routes can begin: .*'relay' has destination"):
        routes(outbox, table)[0].until_empty()

    assert orders.bodies == [b"1"]


def test_a_relay_that_misses_the_routes_is_sent_to_them(engine):
    """To alter the subscription would have both destinations get each message."""
    outbox = Outbox(engine)
    table: dict[str, Any] = {"orders.eu.*": Destination(), "orders.*": Destination(), "*": Destination()}
    Relays(routes(outbox, table)).until_empty()

    with pytest.raises(SubscriptionError) as old:
        Relay(outbox, Destination()).until_empty()
    del table["orders.eu.*"]
    fewer = errors(outbox, table)

    assert str(old.value) == (
        "subscription 'relay' has topics !orders.*, this worker asks for all; 'relay:orders.*' and 'relay:orders.eu.*'"
        " would send some of these topics too; run the relay with routes: outbox relay --name relay --route"
        f" 'orders.eu.*=URL' --route 'orders.*=URL' --route '*=URL' {leading_to(engine)}; or give this"
        " worker another --name"
    )
    assert fewer[0] == (
        "subscription 'relay:orders.*' has topics !orders.eu.*,orders.*, this worker asks for orders.*;"
        " 'relay:orders.eu.*' would send some of these topics too; run the relay with routes: outbox relay"
        f" --name relay --route 'orders.eu.*=URL' --route 'orders.*=URL' {leading_to(engine)}; or give"
        " this worker another --name"
    )


def test_topics_that_a_route_has_are_not_given_to_another_one_too(engine):
    outbox = Outbox(engine)
    Relays(routes(outbox, {"orders.*": Destination(), "*": Destination()})).until_empty()

    back = command_line(engine, "subscriptions", "alter", "relay", "--topics", "*")
    more = command_line(engine, "subscriptions", "alter", "relay:orders.*", "--topics", "orders.*,users")
    fewer = command_line(engine, "subscriptions", "alter", "relay", "--topics", "!orders.*,!users")
    then_more = command_line(engine, "subscriptions", "alter", "relay:orders.*", "--topics", "orders.*,users")

    assert (back.code, back.err.strip()) == (
        2,
        (
            "Error: the topics of relay stay as they are: 'relay:orders.*' would send some of these topics too; run"
            " the relay with routes: outbox relay --name relay --route 'orders.*=URL' --route '*=URL'"
        ),
    )
    assert (more.code, "the topics of relay:orders.* stay as they are: 'relay' would send" in more.err) == (2, True)
    assert (fewer.code, then_more.code) == (0, 0)
