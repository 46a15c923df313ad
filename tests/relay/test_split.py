"""A split subscription: the new one goes on exactly where the old one stood, and nothing is sent by both."""

import threading
import time
from datetime import timedelta

import pytest
from sqlalchemy import text
from tenacity import wait_fixed

from outbox import Outbox, Reject, Relays, Retry, SubscriptionError, Unavailable, Verdict, routes
from outbox.admin.split import split
from outbox.model.message import Message
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.destination import Destination, failing, fill, relay_to
from tests.support.parked import decide, states
from tests.support.waiting import eventually

#: Odd, so that each key has messages of both topics.
KEYS = 41


@pytest.fixture
def messages(full):
    """How many messages are written while the subscription is split."""
    return 40_000 if full else 4_000


def write(outbox: Outbox, number: int, count: int, first: int = 0) -> None:
    """Messages of keys of this writer's own, of two topics in turns, a few in each transaction."""
    for begin in range(first, first + count, 5):
        with outbox.begin() as session:
            outbox.send_all(
                session,
                [
                    Message("orders.new" if n % 2 else "mail", str(n), key=f"{number}-{n % KEYS}")
                    for n in range(begin, begin + 5)
                ],
            )
        time.sleep(0.005)


def bodies_by_key(*destinations: Destination) -> dict[str | None, list[int]]:
    """What arrived, by key and in order."""
    found: dict[str | None, list[int]] = {}
    for destination in destinations:
        for message in destination.messages:
            found.setdefault(message.key, []).append(int(message.body))
    return found


@pytest.mark.storm
def test_under_load_nothing_is_lost_doubled_or_reordered(engine, messages):
    """A relay is at work, the next ones wait for their topics, and writers write on."""
    outbox, writers, is_split = Outbox(engine), 3, threading.Event()
    written = [0] * writers
    both, orders, rest = Destination(), Destination(), Destination()
    rest.destination = both.destination

    def write_on(number: int) -> None:
        while written[number] < messages // writers or not is_split.is_set():
            write(outbox, number, 5, written[number])
            written[number] += 5

    threads = [threading.Thread(target=write_on, args=(n,), daemon=True) for n in range(writers)]
    relay = relay_to(both, outbox)
    relay.start()
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(both.messages) > messages // 10, 120)
    relays = Relays(routes(outbox, {"orders.*": orders, "*": rest}), pause=wait_fixed(0.1))
    running = threading.Thread(target=relays.run)
    running.start()
    channel = outbox.database.open()

    try:
        origin, made, _ = split(channel, "relay", ["orders.*"], destination="test")
        still_writing = all(thread.is_alive() for thread in threads)
    finally:
        is_split.set()
        channel.close()
    relay.stop()
    relay.join(60)
    for thread in threads:
        thread.join()
    came = eventually(lambda: len(both.messages) + len(orders.messages) + len(rest.messages) >= sum(written), 120)
    relays.stop()
    running.join(60)

    assert (origin.topics, made.name, made.topics) == (("!orders.*",), "relay:orders.*", ("orders.*",))
    assert (came, still_writing) == (True, True)
    assert {message.topic for message in orders.messages} == {"orders.new"}
    assert {message.topic for message in rest.messages} == {"mail"}
    # The old destination had both topics of a key; from the split on each of the two has its own, in their order.
    for topic, after in (("orders.new", orders), ("mail", rest)):
        before = [message for message in both.messages if message.topic == topic]
        one = Destination()
        one.messages = before + after.messages
        found = bodies_by_key(one)
        assert all(each == sorted(set(each)) for each in found.values())
    everything = sorted(n for each in bodies_by_key(both, orders, rest).values() for n in each)
    assert everything == sorted(n for each in written for n in range(each))


def test_parked_messages_move_with_their_topics(engine):
    """Dead letters, messages that wait, and those behind them, with the decisions on them."""
    outbox, orders, rest = Outbox(engine), Destination(), Destination()
    answers: dict[bytes, Verdict] = {b"dead": Reject("never"), b"retry": Retry("later"), b"wait": Unavailable("away")}
    relay = relay_to(Destination(lambda message: answers[message.body]), outbox)
    with outbox.begin() as session:
        for topic in ("orders.new", "mail"):
            for body in answers:
                outbox.send(session, topic, body, key=f"{topic}-{body.decode()}")
                outbox.send(session, topic, b"behind", key=f"{topic}-{body.decode()}")
    relay.once()
    decide(engine, "replay")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_parked SET due_at = created_at WHERE due_at IS NOT NULL"))
    channel = outbox.database.open()

    *_, moved = split(channel, "relay", ["orders.*"], destination="test")
    channel.close()
    assert moved == 6
    for destination, name, topics in ((orders, "relay:orders.*", ["orders.*"]), (rest, "relay", ["!orders.*"])):
        relay_to(destination, outbox, name=name, topics=topics).until_empty()

    for destination, topic in ((orders, "orders.new"), (rest, "mail")):
        assert {message.topic for message in destination.messages} == {topic}
        found = {body: destination.of_key(f"{topic}-{body.decode()}") for body in answers}
        assert found == {body: [body, b"behind"] for body in answers}
    assert sum(states(engine).values()) == 0


def test_a_message_behind_another_topic_goes_on_when_they_are_separated(engine):
    outbox, orders = Outbox(engine), Destination()
    relay = relay_to(Destination(failing({b"1"}, Unavailable("away"))), outbox)
    with outbox.begin() as session:
        outbox.send(session, "mail", b"1", key="k")
        outbox.send(session, "orders", b"2", key="k")
    relay.once()
    channel = outbox.database.open()

    split(channel, "relay", ["orders"], destination="test")
    channel.close()
    relay_to(orders, outbox, name="relay:orders", topics=["orders"]).until_empty()

    assert orders.bodies == [b"2"]


def test_a_backlog_is_split_inside_of_a_window(engine):
    """A position that came to the middle of a window is taken over with it."""
    outbox, first, orders, rest = Outbox(engine), Destination(), Destination(), Destination()
    fill(outbox, 1000, topics=2)
    relay_to(first, outbox).once()
    channel = outbox.database.open()

    split(channel, "relay", ["topic1"], destination="test")
    channel.close()
    relay_to(orders, outbox, name="relay:topic1", topics=["topic1"]).until_empty()
    relay_to(rest, outbox, topics=["!topic1"]).until_empty()

    assert len(first.messages) == 200
    assert sorted(int(body) for body in first.bodies + orders.bodies + rest.bodies) == list(range(1000))
    assert {message.topic for message in orders.messages} == {"topic1"}


def refused(outbox: Outbox, *arguments, **options) -> str:
    """Why a split is refused; nothing has changed then."""
    channel = outbox.database.open()
    try:
        before = Subscriptions(channel).all()
        with pytest.raises(SubscriptionError) as raised:
            split(channel, *arguments, **{"destination": "nats://h:4222", "wait": timedelta(0), **options})
        assert Subscriptions(channel).all() == before
    finally:
        channel.close()
    return str(raised.value)


def test_what_cannot_be_split_is_refused(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    assert "relay has no destination yet" in refused(outbox, "relay", ["a"])
    relay_to(Destination(), outbox, topics=["users", "orders.*"]).once()

    assert "relay has no topics that match mail" in refused(outbox, "relay", ["mail"])
    assert "would have no topics left" in refused(outbox, "relay", ["*"])
    assert "takes names and patterns, and no exceptions" in refused(outbox, "relay", ["orders.*", "!orders.x"])
    assert "'*.new' has only a part of the topics of 'orders.*'" in refused(outbox, "relay", ["*.new"])
    assert "there is no subscription 'other'" in refused(outbox, "other", ["orders.*"])
    assert "there is a subscription 'relay' already" in refused(outbox, "relay", ["users"], as_name="relay")
    assert "is the backfill of 'x'" in refused(outbox, "relay", ["users"], as_name="x:backfill")
