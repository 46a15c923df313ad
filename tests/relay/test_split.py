"""A split subscription: the new one goes on exactly where the old one stood, and nothing is sent by both."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import text
from tenacity import wait_fixed

from outbox import LeaseLostError, Outbox, Reject, Relays, Retry, SubscriptionError, Unavailable, Verdict, routes
from outbox.admin.commands import alter
from outbox.admin.split import split
from outbox.direct.delivery import DirectDelivery
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.command_line import outbox as command_line
from tests.support.destination import Destination, failing, fill, relay_to
from tests.support.direct import append, declare_compensation
from tests.support.parked import states
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
    """Dead letters, messages that wait, and those behind them, with the requests on them."""
    outbox, orders, rest = Outbox(engine), Destination(), Destination()
    answers: dict[bytes, Verdict] = {b"dead": Reject("never"), b"retry": Retry("later"), b"wait": Unavailable("away")}
    relay = relay_to(Destination(lambda message: answers[message.body]), outbox)
    with outbox.begin() as session:
        for topic in ("orders.new", "mail"):
            for body in answers:
                outbox.send(session, topic, body, key=f"{topic}-{body.decode()}")
                outbox.send(session, topic, b"behind", key=f"{topic}-{body.decode()}")
    relay.once()
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_parked SET request = 'replay' WHERE state = 'dead'"))
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
    assert "is the compensation of 'x'" in refused(outbox, "relay", ["users"], as_name="x:compensation")


def test_a_subscription_with_direct_writers_is_not_split(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    relay_to(Destination(), outbox).once()
    with sqlite_engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_subscription (name, created_at, kind) VALUES ('relay:compensation', '2026-01-01',"
                " 'compensation')"
            )
        )

    assert "relay has direct writers" in refused(outbox, "relay", ["orders"])


def test_messages_that_writers_have_sent_themselves_have_to_be_passed_first(engine):
    """The new subscription would send them a second time."""
    outbox = Outbox(engine)
    relay_to(Destination(), outbox).once()
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
        session.execute(text("UPDATE outbox_message SET direct = 'relay'"))

    assert "has not passed them yet" in refused(outbox, "relay", ["orders"])

    with outbox.begin() as session:
        outbox.send(session, "mail", b"2")
    relay_to(Destination(), outbox).until_empty()
    channel = outbox.database.open()
    assert split(channel, "relay", ["orders"], destination="test")[1].topics == ("orders",)
    channel.close()


def test_a_message_that_its_writer_commits_late_has_to_be_passed_as_well(pg_engine):
    """Its transaction was open at the position of the relay, although it began before that."""
    outbox = Outbox(pg_engine)
    with pg_engine.connect() as late:
        append(late, "1")
        with outbox.begin() as session:
            outbox.send(session, "mail", b"2")
        relay_to(Destination(), outbox).until_empty()
        late.commit()

    assert "has not passed them yet" in refused(outbox, "relay", ["t"])

    with outbox.begin() as session:
        outbox.send(session, "mail", b"3")
    relay_to(Destination(), outbox).until_empty()
    channel = outbox.database.open()
    assert split(channel, "relay", ["t"], destination="test")[1].topics == ("t",)
    channel.close()


def begins(outbox: Outbox) -> None:
    declare_compensation(outbox.database.engine)


def commits(outbox: Outbox) -> None:
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
        session.execute(text("UPDATE outbox_message SET direct = 'relay'"))


@pytest.mark.parametrize(("happens", "why"), [(begins, "has direct writers"), (commits, "has not passed them yet")])
def test_a_writer_that_begins_while_a_split_waits_for_a_worker_is_noticed(engine, happens, why):
    outbox, said = Outbox(engine), list[str]()
    relay_to(Destination(), outbox).once()
    channel = outbox.database.open()
    leases, partition = Leases(channel), Partition("relay")
    lease = leases.acquire(partition, "w0rker", timedelta(minutes=5))
    assert lease is not None
    before = Subscriptions(channel).find("relay")

    def wait_and_split() -> None:
        own = outbox.database.open()
        with pytest.raises(SubscriptionError) as raised:
            split(own, "relay", ["orders"], destination="test", wait=timedelta(seconds=30))
        said.append(str(raised.value))
        own.close()

    waiting = threading.Thread(target=wait_and_split)
    waiting.start()
    assert eventually(lambda: (holder := leases.look(partition)) is not None and holder.wanted)
    happens(outbox)
    leases.release(lease)
    waiting.join(60)

    assert [why in each for each in said] == [True]
    assert (Subscriptions(channel).find("relay"), Subscriptions(channel).find("relay:orders")) == (before, None)
    channel.close()


def test_a_writer_that_begins_in_the_midst_of_a_split_sees_which_topics_are_left(engine, monkeypatch):
    """It waits for the end of the split; otherwise it would send topics that the new subscription sends, too."""
    outbox = Outbox(engine)
    relay_to(Destination(), outbox).once()
    delivery, found, waited = DirectDelivery(outbox.database, Destination(), "relay"), [], []
    writer = threading.Thread(target=lambda: found.append(delivery.refresh()))
    give = Parked.give

    def while_the_writer_begins(self, *arguments):
        writer.start()
        writer.join(1)
        waited.append(writer.is_alive())
        return give(self, *arguments)

    monkeypatch.setattr(Parked, "give", while_the_writer_begins)
    channel = outbox.database.open()
    split(channel, "relay", ["orders"], destination="test")
    channel.close()
    writer.join(60)
    delivery.close()

    assert (waited, [each and each.topics.chosen() for each in found]) == ([True], [("!orders",)])


def test_what_was_read_before_a_split_does_not_undo_it(engine):
    outbox = Outbox(engine)
    relay_to(Destination(), outbox, topics=["orders", "mail"]).once()
    channel = outbox.database.open()
    read = Subscriptions(channel).get("relay")
    split(channel, "relay", ["orders"], destination="test")

    with pytest.raises(SubscriptionError, match="the topics of relay were altered meanwhile; try again"):
        alter(channel, replace(read, topics=("mail", "orders", "users")), before=read)
    alter(channel, replace(read, on_dead="continue"), before=read)

    now = Subscriptions(channel).get("relay")
    channel.close()
    assert (now.topics, now.on_dead) == (("mail",), "continue")


def test_a_route_of_a_route_is_a_route(engine):
    """Also if it was made without `--as`: it has the name that a relay with routes looks for."""
    outbox = Outbox(engine)
    Relays(routes(outbox, {"orders.*": Destination(), "*": Destination()})).until_empty()
    channel = outbox.database.open()

    made = split(channel, "relay:orders.*", ["orders.eu.*"], destination="test")[1]
    channel.close()

    assert made.name == "relay:orders.eu.*"
    Relays(routes(outbox, {"orders.eu.*": Destination(), "orders.*": Destination(), "*": Destination()})).until_empty()


def test_a_worker_at_work_is_not_robbed(engine):
    outbox = Outbox(engine)
    relay_to(Destination(), outbox).once()
    channel = outbox.database.open()
    assert Leases(channel).acquire(Partition("relay"), "w0rker", timedelta(minutes=5))
    channel.close()

    assert "worker w0rker holds the lease of relay" in refused(outbox, "relay", ["orders"])


def test_a_split_that_loses_its_lease_changes_nothing(engine, monkeypatch):
    outbox = Outbox(engine)
    relay_to(Destination(), outbox).once()
    channel = outbox.database.open()
    before = Subscriptions(channel).all()
    create_at = Subscriptions.create_at

    def rob(self, made, progress):
        create_at(self, made, progress)
        raise LeaseLostError("robbed")

    monkeypatch.setattr(Subscriptions, "create_at", rob)
    with pytest.raises(LeaseLostError):
        split(channel, "relay", ["orders"], destination="test")

    assert Subscriptions(channel).all() == before
    channel.close()


def test_the_command_tells_what_it_did(engine):
    outbox = Outbox(engine)
    relay_to(Destination(lambda _message: Reject("never")), outbox).once()
    with outbox.begin() as session:
        outbox.send(session, "orders.new", b"1", key="k")
    relay_to(Destination(lambda _message: Reject("never")), outbox).until_empty()

    done = command_line(
        engine, "subscriptions", "split", "relay", "--topics", "orders.*", "--to", "nats://h:4222", "--as", "orders"
    )
    missing = command_line(engine, "subscriptions", "split", "relay", "--topics", "users")

    assert (done.code, done.err.strip()) == (
        0,
        "orders: orders.* to nats://h:4222, from where relay stands, with 1 parked message; relay: !orders.* to test",
    )
    assert (missing.code, "give --to URL or --to-file PATH" in missing.err) == (2, True)
    (dead,) = command_line(engine, "parked", "list", "--name", "orders", "--state", "dead", "--json").json["parked"]
    assert (dead["topic"], dead["key"]) == ("orders.new", "k")


def test_the_new_subscription_is_told_as_it_is_stored(engine):
    outbox = Outbox(engine)
    relay_to(Destination(), outbox).until_empty()

    made = outbox.admin.split("relay", ["orders.*"], destination="nats://h:4222").made

    assert [made] == [each for each in outbox.admin.subscriptions() if each.name == made.name]
