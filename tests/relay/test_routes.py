"""Routes: the first that matches takes a message, each is a relay of its own, and a sick one delays no other."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from outbox import Outbox, Relay, Relays, Route, SubscriptionError, Unavailable, routes
from outbox.model.message import Message
from outbox.model.topics import Topics
from outbox.relay.routes import route_subscriptions
from outbox.store.subscriptions.subscriptions import Subscriptions
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
    "the name of direct sends": (["compensation", "*"], "the name 'relay:compensation' belongs to direct sends"),
}


@pytest.mark.parametrize(("patterns", "error"), WRONG.values(), ids=WRONG)
def test_routes_that_lose_messages_are_refused(patterns, error):
    with pytest.raises(SubscriptionError, match=error):
        route_subscriptions(patterns, "relay")


@pytest.mark.parametrize("deadline", ["10s", 10])
def test_a_deadline_of_another_type_is_refused_at_once(deadline):
    with pytest.raises(TypeError, match=f"deadline: must be a timedelta, not {deadline!r}; write timedelta"):
        Route(to="stdout:", deadline=deadline)


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


def test_a_destination_that_is_down_delays_no_other(engine):
    """Two relays in one process: one destination is away until the other has everything."""
    outbox = Outbox(engine)
    down, up = Destination(lambda _message: Unavailable("away", everything=True)), Destination()
    relays = Relays(routes(outbox, {"topic1": down, "*": up}), pause=wait_fixed(0.1))
    thread = threading.Thread(target=relays.run)
    thread.start()
    try:
        fill(outbox, 300, topics=2)
        others_came = eventually(lambda: len(up.messages) == 150, 30)
        nothing_came = down.messages == []
        down.answer = up.answer
        all_came = eventually(lambda: len(down.messages) == 150, 30)
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

    labels = {each.label for each in relays._beside}
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
            " from where this one stands: outbox subscriptions split relay --topics 'orders.*' --to URL; or give this"
            " worker another --name"
        ),
        (
            "subscription 'relay:orders.*' is not there yet, and 'relay' has its topics; to begin where that one"
            " stands, run: outbox subscriptions split relay --topics 'orders.*' --to test"
        ),
    ]
    assert orders.messages == []
