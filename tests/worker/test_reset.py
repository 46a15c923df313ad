"""A subscription begins again: everything comes once more, in order, and nothing of before is settled over it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import Outbox, Relay, RetryPolicy, SubscriptionError, create_engine
from outbox.admin import borrowing
from outbox.admin.borrowing import LeaseHeldError
from outbox.admin.commands import reset
from outbox.admin.repartition import repartition
from outbox.model.message import Message
from outbox.model.position import EARLIEST, Progress
from outbox.model.subscription import Declaration, Kind
from outbox.model.verdict import DONE, Reject, Retry
from outbox.runtime import failpoints
from outbox.store.database import Channel
from outbox.store.log.log import Limits
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.deadlines import overdue
from tests.support.destination import Destination, Lines, expected, failing, fill, relay_to, running
from tests.support.faults import arm_stop
from tests.support.leases import end_lease
from tests.support.parked import decide, decisions, states
from tests.support.partitions import apart
from tests.support.programs import Program, run
from tests.support.readers import next_moment
from tests.support.waiting import eventually

KEYS = 20
#: Longer than any lease of these tests.
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox of which nothing was sent yet."""
    return Outbox(engine)


@contextmanager
def when(point: str, act: Any) -> Iterator[None]:
    """Call a function each time this process comes to a crash point."""
    failpoints.arm(lambda name: act() if name == point else None)
    try:
        yield
    finally:
        failpoints.arm(None)


def standing(channel: Channel) -> list[Progress]:
    """How far the partitions are settled."""
    return ProgressLog(channel).standing(Subscriptions(channel).get("relay"))


def by_key(bodies: list[tuple[str | None, bytes]], key: str) -> list[bytes]:
    """What arrived of a key."""
    return [body for each, body in bodies if each == key]


@pytest.mark.storm
@pytest.mark.parametrize("partitions", [1, 4])
def test_after_a_forced_reset_under_load_everything_comes_again_once_and_in_order(engine, outbox, channel, partitions):
    """Writers write on, some messages fail and are tried again, and two relays share the partitions."""
    failures = iter(range(10_000_000))
    destination = Destination(lambda _message: Retry("now and then") if next(failures) % 7 == 0 else DONE)
    retry = RetryPolicy(attempts=100, wait=wait_fixed(0.05))
    relays = [relay_to(destination, outbox, partitions=partitions, retry=retry) for _ in range(2)]
    before: list[int] = []
    fill(outbox, 1_000)

    def write_on() -> None:
        for first in range(1_000, 3_000, 50):
            fill(outbox, 50, first=first)

    writer = threading.Thread(target=write_on)
    with running(*relays):
        assert eventually(lambda: len(destination.messages) > 500)
        writer.start()
        with when("command.before_alter", lambda: before.append(len(destination.messages))):
            reset(channel, "relay", "earliest", wait=PATIENCE)
        writer.join()
        complete = eventually(lambda: len(destination.messages) - before[0] >= 3_000 and not states(engine), 240)

    again = [(message.key, message.body) for message in destination.messages[before[0] :]]
    assert complete
    assert {key: by_key(again, f"k{key}") for key in range(KEYS)} == {key: expected(key, 3_000) for key in range(KEYS)}


def test_a_worker_with_a_lease_is_in_the_way_of_a_reset_that_asks_nobody(outbox, channel):
    destination = Destination()
    fill(outbox, 10)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: len(destination.messages) == 10)
        with pytest.raises(LeaseHeldError, match="holds the lease of relay"):
            reset(channel, "relay", "earliest")
        fill(outbox, 10, first=10)
        assert eventually(lambda: len(destination.messages) == 20)

    assert destination.bodies == [str(n).encode() for n in range(20)]


@pytest.mark.storm
def test_a_worker_whose_call_hangs_keeps_its_lease_also_from_a_forced_reset(engine, outbox, channel):
    """What hangs may still arrive; nothing is changed."""
    destination, release = Destination(), threading.Event()
    destination.hanging = lambda _messages: not release.is_set()
    fill(outbox, 10)
    with overdue(destination.hanging), running(relay_to(destination, outbox)):
        assert eventually(lambda: states(engine))
        with pytest.raises(LeaseHeldError, match="has not given it back"):
            reset(channel, "relay", "earliest", wait=timedelta(seconds=1))
        release.set()
        assert eventually(lambda: len(destination.messages) >= 10 and not states(engine))

    assert sorted(destination.bodies) == sorted(str(n).encode() for n in range(10))


def test_a_call_that_hung_before_does_not_count_after(engine, outbox, channel):
    """Its relay was stopped, and its lease has run out. Its keys are held until it comes back, then all is sent."""
    destination, release, caught = Destination(), threading.Event(), list[bytes]()

    def hangs(messages: Sequence[Message]) -> bool:
        if not caught:
            caught.extend(message.body for message in messages)
        return not release.is_set()

    destination.hanging = hangs
    fill(outbox, 10, keys=1)
    with overdue(destination.hanging):
        with running(relay_to(destination, outbox)):
            assert eventually(lambda: caught and states(engine))
        end_lease(engine)
        reset(channel, "relay", "earliest", wait=PATIENCE)
        reset_to = states(engine)
        with running(relay_to(destination, outbox)):
            assert eventually(lambda: states(engine))
            release.set()
            assert eventually(lambda: len(destination.messages) >= len(caught) + 10 and not states(engine))

    assert reset_to == {}
    assert destination.bodies == [*caught, *(str(n).encode() for n in range(10))]


def test_what_is_parked_goes_and_is_counted_with_the_requests_on_it(engine, outbox, channel):
    """A relay at work forgets which keys were held, and tries the dead letter again."""
    destination = Destination(failing({b"0"}, Reject("never")))
    fill(outbox, 60)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: states(engine) == {"behind": 2, "dead": 1} and len(destination.messages) == 57)
        destination.answer = lambda _message: DONE
        gone = reset(channel, "relay", "earliest", wait=PATIENCE)
        assert eventually(lambda: len(destination.messages) == 117)

    assert (gone, states(engine)) == ({"behind": 2, "dead": 1}, {})
    assert destination.of_key("k0") == expected(0, 60)


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_a_decision_of_a_person_does_not_outlive_a_reset(engine, outbox, channel, verb):
    destination = Destination(failing({b"0"}, Reject("never")))
    fill(outbox, 3)
    relay = relay_to(destination, outbox)
    relay.until_empty()
    decide(engine, verb)

    gone = reset(channel, "relay", "latest")
    relay.until_empty()

    assert (gone, destination.bodies, states(engine)) == ({"dead": 1}, [b"1", b"2"], {})
    assert [each[-2:] for each in decisions(engine) if each[1] == verb] == [(0, True)]


def test_reset_to_latest_leaves_out_what_waits(outbox, channel):
    destination = Destination()
    fill(outbox, 10)
    relay_to(destination, outbox).once()
    fill(outbox, 10, first=10)
    reset(channel, "relay", "latest")
    fill(outbox, 10, first=20)
    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [str(n).encode() for n in (*range(10), *range(20, 30))]


@pytest.mark.parametrize("partitions", [1, 3])
def test_reset_to_a_moment_begins_with_what_was_created_then(engine, outbox, channel, partitions):
    destination = Destination()
    fill(outbox, 20)
    moment = next_moment(channel)
    next_moment(channel)
    fill(outbox, 20, first=20)
    relay = relay_to(destination, outbox, partitions=partitions)
    relay.until_empty()
    came = len(destination.messages)

    reset(channel, "relay", moment)
    relay.until_empty()

    assert sorted(map(int, destination.bodies[came:])) == list(range(20, 40))


def test_an_ordered_number_of_partitions_counts_from_the_reset_on(shop, channel):
    """Partitions that stood apart begin at the same position, so nobody has to meet."""
    Subscriptions(channel).declare(Declaration(name="relay", destination="test"))
    apart(shop, channel)
    repartition(channel, "relay", 3, wait=timedelta(0))

    reset(channel, "relay", "earliest")

    found = Subscriptions(channel).get("relay")
    assert (found.partitions, found.next_partitions, found.stop_at) == (3, None, None)
    assert standing(channel) == [Progress(EARLIEST)] * 3


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("check:g", "check", "asks about transactions"),
        ("archive", "extract", "has the position of its archive"),
    ],
)
def test_some_kinds_do_not_begin_again_by_a_command(channel, name, kind: Kind, why):
    Subscriptions(channel).declare(Declaration(name=name, destination=None, kind=kind))

    with pytest.raises(SubscriptionError, match=why):
        reset(channel, name, "earliest")


def test_all_instances_of_a_broadcast_consumer_begin_again_or_one(channel):
    for name in ("news@a", "news@b", "newsletter@a"):
        declared = Declaration(name=name, destination=None, kind="broadcast")
        Subscriptions(channel).declare(declared, "latest")

    reset(channel, "news@a", "earliest")
    one = [each.generation for each in Subscriptions(channel).all()]
    reset(channel, "news", "earliest")
    all = [each.generation for each in Subscriptions(channel).all()]

    # news@a, news@b, newsletter@a, relay
    assert (one, all) == ([2, 1, 1, 1], [3, 2, 1, 1])


# Processes


CHILD = ["-c", "import sys; from tests.worker.test_reset import child; child(sys.argv[1])"]
LENGTH = timedelta(seconds=2)
SETTINGS = Settings(limits=Limits(rows=10), lease=LENGTH, renew_every=timedelta(milliseconds=200))


def child(argument: str) -> None:
    """A relay that stops at the second time that it has sent a batch; or a reset that dies at a point."""
    task = json.loads(argument)
    outbox = Outbox(create_engine(task["url"]))
    if "path" in task:
        arm_stop("relay.after_send", hit=2)
        Relay(outbox, Lines(Path(task["path"])), settings=SETTINGS).run()
        return
    borrowing.LENGTH = LENGTH
    failpoints.arm(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == task["point"] else None)
    with closing(outbox.database.open()) as channel:
        reset(channel, "relay", "earliest", wait=PATIENCE)


@pytest.mark.storm
def test_a_worker_that_was_frozen_across_a_reset_settles_nothing_of_before(engine, outbox, channel, tmp_path):
    """It has sent its second batch when it freezes; the lease is watched, and taken when nobody renews it."""
    path = tmp_path / "lines"
    fill(outbox, 40)
    url = engine.url.render_as_string(hide_password=False)
    with Program([*CHILD, json.dumps({"url": url, "path": str(path)})]) as program:
        try:
            assert eventually(lambda: psutil.Process(program.pid).status() == psutil.STATUS_STOPPED)
            before = path.read_text().split()
            reset(channel, "relay", "earliest", wait=PATIENCE)
            frozen = standing(channel)
            program.send_signal(signal.SIGCONT)
            again = eventually(lambda: len(path.read_text().split()) >= len(before) + 40)
        finally:
            program.kill()

    assert (frozen, again) == ([Progress(EARLIEST)], True)
    assert path.read_text().split() == [*before, *map(str, range(40))]
    assert 0 < len(before) < 40


@pytest.mark.storm
@pytest.mark.parametrize(
    ("engine", "point", "copies"),
    [
        ("postgresql", "command.after_ask", 1),
        ("postgresql", "command.before_alter", 1),
        ("postgresql", "command.after_alter", 2),
        ("sqlite", "command.before_alter", 1),
        ("sqlite", "command.after_alter", 2),
    ],
    indirect=["engine"],
)
def test_a_reset_that_is_killed_is_done_or_not_and_the_worker_goes_on(engine, outbox, channel, point, copies):
    destination = Destination(failing({b"7"}, Reject("never")))
    fill(outbox, 100)
    url = engine.url.render_as_string(hide_password=False)
    with running(relay_to(destination, outbox)):
        assert eventually(lambda: len(destination.messages) == 95)
        destination.answer = lambda _message: DONE
        killed = run([*CHILD, json.dumps({"url": url, "point": point})], timeout=240)
        fill(outbox, 100, first=100)
        # The blocked ones of a key stay where they are, unless it began again.
        count = 190 if copies == 1 else 95 + 200
        came = eventually(lambda: len(destination.messages) >= count)

    with engine.connect() as connection:
        generation = connection.execute(text("SELECT generation FROM outbox_subscription")).scalar_one()
    assert (killed.returncode, came, generation, len(destination.messages)) == (-9, True, copies, count)
    assert destination.of_key("k3") == expected(3, 100) * (copies - 1) + expected(3, 200)
    assert Leases(channel).look(Subscriptions(channel).get("relay").partition(0)) is not None
