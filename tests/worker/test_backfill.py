"""A backfill handles earlier messages beside its subscription, up to where it was ordered, and ends by itself."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import Outbox, Relay, RetryPolicy, SubscriptionError, create_engine
from outbox.admin import commands
from outbox.admin.backfill import backfill
from outbox.admin.repartition import repartition
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Kind
from outbox.model.verdict import DONE, Reject, Retry
from outbox.store.database import Channel
from outbox.store.log.log import Limits
from outbox.store.operations.restore import restore
from outbox.store.operations.status import statuses
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.destination import LONG_LEASE, Destination, Lines, failing, fill, relay_to, running
from tests.support.faults import arm_kill
from tests.support.leases import end_lease, step_clock
from tests.support.parked import decide, states
from tests.support.programs import run
from tests.support.readers import next_moment
from tests.support.waiting import eventually

NAME = "relay:backfill"


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox of which nothing was sent yet."""
    return Outbox(engine)


@pytest.fixture(params=[1, 3])
def sent(request, outbox: Outbox) -> tuple[Relay, Destination]:
    """A relay with one partition, or three, that has sent 300 messages of three topics, and its destination."""
    destination = Destination()
    fill(outbox, 300, topics=3)
    relay = relay_to(destination, outbox, partitions=request.param)
    relay.until_empty()
    return relay, destination


def names(channel: Channel) -> list[str]:
    """The subscriptions that there are."""
    return [each.name for each in Subscriptions(channel).all()]


def numbers(messages: list[Message]) -> list[int]:
    """What `fill` has numbered."""
    return [int(message.body) for message in messages]


def in_order(messages: list[Message]) -> bool:
    """Whether the messages of each key are in their order."""
    last: dict[str | None, int] = {}
    return all(last.get(m.key, -1) < (last := {**last, m.key: int(m.body)})[m.key] for m in messages)


def rows(engine: Engine) -> int:
    """How many rows the backfill has in the tables that all subscriptions share."""
    tables = ("lease", "progress", "parked")
    with engine.connect() as connection:
        counts = [text(f"SELECT count(*) FROM outbox_{each} WHERE subscription = '{NAME}'") for each in tables]
        return sum(connection.execute(count).scalar_one() for count in counts)


def test_the_messages_of_a_topic_come_again_up_to_now_and_then_it_is_gone(engine, channel, outbox, sent):
    relay, destination = sent
    backfill(channel, "relay", ["topic1"])
    fill(outbox, 30, first=300, topics=3)
    relay.until_empty()

    came = Counter(numbers(destination.messages))
    assert came == Counter(range(330)) + Counter(range(1, 300, 3))
    again = [m for n, m in enumerate(destination.messages) if n >= 300 and int(m.body) < 300]
    assert in_order(again)
    assert (names(channel), rows(engine)) == (["relay"], 0)


def test_relays_at_work_take_it_up_and_end_it_without_a_warning(engine, channel, outbox, sent, caplog):
    """Also a second one, which has nothing in common with the first."""
    caplog.set_level(logging.INFO, "outbox")
    relay, destination = sent
    other = relay_to(destination, outbox)
    with running(relay, other):
        for times in (2, 3):
            backfill(channel, "relay", ["topic1", "topic2"])
            assert eventually(lambda: names(channel) == ["relay"])
            assert Counter(numbers(destination.messages)) == Counter(
                {n: 1 if n % 3 == 0 else times for n in range(300)}
            )

    said = [record.getMessage() for record in caplog.records]
    assert said.count("relay:backfill has come to its end") == 2
    assert "relay:backfill: partition 0 has come to its end; giving it back" in said
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_topic_flows_on_meanwhile(channel, outbox, sent):
    """What is committed after the command comes once, what was committed before it comes twice."""
    relay, destination = sent
    number = 300
    stopping = threading.Event()

    def write_on() -> None:
        nonlocal number
        while not stopping.wait(0.01):
            fill(outbox, 10, first=number, topics=3)
            number += 10

    writer = threading.Thread(target=write_on)
    with running(relay):
        writer.start()
        assert eventually(lambda: number > 400)
        before = number
        backfill(channel, "relay", ["topic1"])
        after = number + 10
        assert eventually(lambda: number > after + 100 and names(channel) == ["relay"])
        stopping.set()
        writer.join()
        assert eventually(lambda: len(set(numbers(destination.messages))) == number)

    came = Counter(numbers(destination.messages))
    assert {n for n, times in came.items() if times == 2} >= set(range(1, before, 3))
    assert {n for n, times in came.items() if times == 2} <= set(range(1, after, 3))
    assert max(came.values()) == 2


def test_topics_that_the_subscription_never_had_are_handled_for_the_first_time(channel, outbox):
    destination = Destination()
    fill(outbox, 30, topics=3)
    relay = relay_to(destination, outbox, topics=["topic0"])
    relay.until_empty()

    backfill(channel, "relay", ["topic1"])
    relay.until_empty()

    assert sorted(numbers(destination.messages)) == sorted([*range(0, 30, 3), *range(1, 30, 3)])


def test_tags_and_filter_are_those_of_the_subscription(channel, outbox):
    destination = Destination()
    with outbox.begin() as session:
        for number in range(8):
            tags = "odd" if number % 2 else "even"
            outbox.send(session, "orders", str(number), tags=tags, headers={"total": str(number)})
    relay = relay_to(destination, outbox, topics=["mail"], tags="odd", filter="total > 2")
    relay.until_empty()

    backfill(channel, "relay", ["orders"])
    relay.until_empty()

    assert (destination.bodies, names(channel)) == ([b"3", b"5", b"7"], ["relay"])


def test_it_begins_at_a_moment(channel, outbox, sent):
    relay, destination = sent
    moment = next_moment(channel)
    fill(outbox, 30, first=300, topics=3)

    backfill(channel, "relay", ["topic1"], moment)
    relay.until_empty()

    assert Counter(numbers(destination.messages)) == Counter(range(330)) + Counter(range(301, 330, 3))


def test_what_fails_is_tried_again_before_the_end(engine, channel, outbox, sent):
    relay, destination = sent
    tried = Counter[int]()

    def twice(message: Message):
        tried[int(message.body)] += 1
        return Retry("not yet") if message.body == b"1" and tried[1] < 3 else DONE

    destination.answer = twice
    backfill(channel, "relay", ["topic1"])
    with running(relay):
        assert eventually(lambda: names(channel) == ["relay"])

    assert (tried[1], states(engine)) == (3, {})
    assert Counter(numbers(destination.messages)) == Counter(range(300)) + Counter(range(1, 300, 3))


@pytest.mark.parametrize("verb", ["discard", "replay"])
def test_a_dead_letter_keeps_it_until_a_person_decides(engine, channel, sent, verb):
    relay, destination = sent
    destination.answer = failing({b"1"}, Reject("never"))
    backfill(channel, "relay", ["topic1"])
    relay.until_empty()
    kept = names(channel)
    relay.until_empty()
    destination.answer = lambda _message: DONE
    decide(engine, verb)
    with running(relay):
        ended = eventually(lambda: names(channel) == ["relay"])

    assert (kept, ended, states(engine)) == (["relay", NAME], True, {})
    # The messages behind it waited in the order of their key.
    again = [n for n in numbers(destination.messages[300:]) if n % 20 == 1]
    assert again == [*([1] if verb == "replay" else []), *range(61, 300, 60)]


def test_it_is_dropped_under_a_relay_at_work_that_goes_on(engine, channel, outbox, sent):
    _, destination = sent
    destination.answer = lambda message: Retry("never") if message.topic == "topic1" else DONE
    backfill(channel, "relay", ["topic1"])
    slow = relay_to(destination, outbox, retry=RetryPolicy(attempts=1000, wait=wait_fixed(0.2)))
    with running(slow):
        assert eventually(lambda: states(engine).get("retry", 0) > 0)
        dropped = commands.drop(channel, NAME)
        fill(outbox, 3, first=300, topics=1)
        assert eventually(lambda: len(destination.messages) == 303)

    assert (dropped, names(channel), rows(engine)) == ([NAME], ["relay"], 0)


def test_it_follows_its_subscription(channel, outbox, sent):
    backfill(channel, "relay", ["topic1"])
    main = Subscriptions(channel).get("relay")
    commands.alter(channel, replace(main, destination="elsewhere"))
    altered = {each.name: each.destination for each in Subscriptions(channel).all()}
    elsewhere = Destination()
    elsewhere.destination = "elsewhere"
    relay_to(elsewhere, outbox).until_empty()
    backfill(channel, "relay", ["topic1"])
    dropped = commands.drop(channel, "relay")

    assert altered == {"relay": "elsewhere", NAME: "elsewhere"}
    assert sorted(numbers(elsewhere.messages)) == list(range(1, 300, 3))
    assert (dropped, names(channel)) == (["relay", NAME], [])


def test_a_reset_lets_it_go_on(channel, sent):
    relay, destination = sent
    backfill(channel, "relay", ["topic1"])

    commands.reset(channel, "relay", "latest")
    relay.until_empty()

    assert (names(channel), len(destination.messages)) == (["relay"], 400)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (
            lambda channel, made: backfill(channel, "relay", ["topic2"]),
            "a backfill of relay is under way: wait for its",
        ),
        (lambda channel, made: commands.reset(channel, NAME, "earliest"), "ends by itself; drop it, and begin another"),
        (lambda channel, made: repartition(channel, NAME, 2), "keeps the number of partitions with which it began"),
        (lambda channel, made: commands.alter(channel, replace(made, topics=None)), "follows relay; alter that one"),
        (lambda channel, made: backfill(channel, NAME, ["topic1"]), "is of the kind backfill; a backfill is for"),
    ],
    ids=["again", "reset", "repartition", "alter", "backfill"],
)
def test_while_it_is_under_way_some_commands_are_refused(channel, sent, act, why):
    made = backfill(channel, "relay", ["topic1"])

    with pytest.raises(SubscriptionError, match=why):
        act(channel, made)

    assert Subscriptions(channel).get(NAME) == made


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("relay", "relay", "relay has no destination yet"),
        ("news@a", "broadcast", "is of the kind broadcast; a backfill is for a relay or a consumer"),
        ("check:g", "check", "is of the kind check; a backfill is for a relay or a consumer"),
    ],
)
def test_some_subscriptions_have_none(channel, name, kind: Kind, why):
    Subscriptions(channel).declare(Declaration(name=name, destination=None, kind=kind))

    with pytest.raises(SubscriptionError, match=why):
        backfill(channel, name, ["topic1"])


def test_it_does_not_begin_at_latest(channel, sent):
    with pytest.raises(SubscriptionError, match="it begins at earliest or at a time"):
        backfill(channel, "relay", ["topic1"], "latest")


def test_its_name_is_not_run_alone(outbox):
    with pytest.raises(SubscriptionError, match="is the backfill of 'relay', whose workers do its work"):
        relay_to(Destination(), outbox, name=NAME)


def test_a_consumer_has_one_too(engine, channel, outbox):
    seen: list[int] = []
    consumer = outbox.consumer("billing", topics=["topic0", "topic1"])

    @consumer.on()
    def handle(message: Message) -> None:
        seen.append(int(message.body))

    fill(outbox, 30, topics=3)
    consumer.until_empty()
    backfill(channel, "billing", ["topic1"])
    fill(outbox, 3, first=30, topics=3)
    consumer.until_empty()

    assert Counter(seen) == Counter(n for n in range(33) if n % 3 != 2) + Counter(range(1, 30, 3))
    assert names(channel) == ["billing", "relay"]


def test_status_counts_what_is_left_of_it_and_nothing_after_its_end(channel, outbox, sent):
    backfill(channel, "relay", ["topic1"])
    fill(outbox, 30, first=300, topics=3)

    found = {each.name: each for each in statuses(channel)[1]}

    assert (str(found["relay"].unsettled), str(found[NAME].unsettled)) == ("30", "100")
    assert found[NAME].lag_seconds > 0


def test_a_partition_that_has_come_to_its_end_needs_no_worker(engine, channel, outbox):
    """One dead letter keeps the others waiting, which is nothing to warn of."""
    destination = Destination()
    fill(outbox, 300, topics=3)
    relay = relay_to(destination, outbox, partitions=3)
    relay.until_empty()
    destination.answer = failing({b"1"}, Reject("never"))
    backfill(channel, "relay", ["topic1"])
    relay.until_empty()

    (found,) = [each for each in statuses(channel)[1] if each.name == NAME]

    assert (str(found.unsettled), [each.arrived for each in found.partitions]) == ("0", [True] * 3)
    assert (found.unowned, found.parked["dead"]) == ((), 1)


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_restore_drops_it(channel, sent):
    """Its end is a position of the old server."""
    backfill(channel, "relay", ["topic1"])

    restore(channel)

    assert names(channel) == ["relay"]


# Processes


CHILD = ["-c", "import sys; from tests.worker.test_backfill import child; child(sys.argv[1])"]
ROWS = 20


def child(argument: str) -> None:
    """A relay that dies at the n-th time that a point is reached."""
    task = json.loads(argument)
    arm_kill(task["point"], task["hit"])
    settings = Settings(limits=Limits(rows=ROWS), lease=LONG_LEASE, renew_every=timedelta(milliseconds=100))
    Relay(Outbox(create_engine(task["url"])), Lines(Path(task["path"])), settings=settings).run()


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        pytest.param("relay.after_send", 3, marks=pytest.mark.storm),
        ("worker.before_settle", 3),
        pytest.param("worker.after_settle", 2, marks=pytest.mark.storm),
    ],
)
def test_killed_in_the_middle_it_goes_on(engine, channel, outbox, sent, tmp_path, point, hit):
    """At most a batch of each partition is sent again, and nothing is left out."""
    relay, destination = sent
    backfill(channel, "relay", ["topic1"])
    path = tmp_path / "lines"
    url = engine.url.render_as_string(hide_password=False)

    killed = run([*CHILD, json.dumps({"url": url, "path": str(path), "point": point, "hit": hit})], timeout=240)
    first = list(map(int, path.read_text().split()))
    under_way = names(channel)
    end_lease(engine)
    # The relay does not leave a part of the partitions to the dead.
    step_clock(engine, timedelta(hours=1), "outbox_worker.seen_at")
    with running(relay):
        ended = eventually(lambda: names(channel) == ["relay"])

    rest = numbers(destination.messages[300:])
    partitions = Subscriptions(channel).get("relay").partitions
    assert (killed.returncode, under_way, ended) == (-signal.SIGKILL, ["relay", NAME], True)
    assert {*first, *rest} == set(range(1, 300, 3))
    assert 0 < len(first) and len(first) + len(rest) - 100 <= ROWS * partitions
    assert Leases(channel).look(Subscriptions(channel).get("relay").partition(0)) is not None
