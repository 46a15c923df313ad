"""A worker of several partitions: it waits for none of them alone, and what goes wrong with one stays with that one."""

from __future__ import annotations

import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Unavailable
from outbox.admin import borrowing
from outbox.admin.repartition import repartition
from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.position import Progress
from outbox.model.subscription import Subscription
from outbox.model.verdict import DONE, Verdict
from outbox.store.database import Channel
from outbox.store.log.log import Limits
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings
from tests.support.deadlines import OverdueCaller
from tests.support.destination import LONG_LEASE, Destination, expected, fill, relay_to
from tests.support.leases import step_clock
from tests.support.programs import Program
from tests.support.readers import Collector, Worker, at_work, declared, job, send, texts
from tests.support.waiting import eventually

#: Of a worker that is dead.
ENDS = timedelta(seconds=1)
BRISK = Settings(
    limits=Limits(rows=50),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=LONG_LEASE,
    renew_every=timedelta(milliseconds=500),
)


class Gated(Collector):
    """A handler whose calls wait until they are let through, or that answers what it is told to."""

    def __init__(self, verdict: Verdict = DONE) -> None:
        super().__init__()
        self.verdict = verdict
        self.called, self.gate = threading.Event(), threading.Event()

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Keep the messages when the gate is open."""
        self.called.set()
        assert self.gate.wait(120)
        return super().__call__(messages) if self.verdict is DONE else [self.verdict for _ in messages]


def both(outbox: Outbox, *handlers: Collector, **rules: Any) -> Worker:
    """A worker of the subscriptions `first` and `second`."""
    names = ("first", "second")
    jobs = [job(declared(name), each, **rules) for name, each in zip(names, handlers, strict=True)]
    return Worker(outbox.database, jobs, BRISK)


def holders(channel: Channel, subscription: Subscription) -> list[tuple[int, bool]]:
    """The epoch of each of its leases, and whether somebody has it."""
    found = Leases(channel).look_all(subscription.all_partitions())
    return [(found[each].epoch, found[each].owner is not None) for each in subscription.all_partitions()]


def of_partitions(channel: Channel, number: int) -> Subscription:
    """The subscription `relay`, with so many partitions."""
    Subscriptions(channel).declare(declared(destination="test"))
    return repartition(channel, "relay", number)


# Two subscriptions


def test_a_call_that_takes_long_holds_back_no_other_subscription(engine):
    outbox, slow, quick = Outbox(engine), Gated(), Collector()
    send(outbox, "1")
    with at_work(both(outbox, slow, quick)):
        assert slow.called.wait(60)
        send(outbox, "2")
        meanwhile = eventually(lambda: texts(quick.messages) == ["1", "2"])
        before = texts(slow.messages)
        slow.gate.set()
        arrived = eventually(lambda: texts(slow.messages) == ["1", "2"])

    assert (meanwhile, before, arrived) == (True, [], True)


def test_a_call_that_hangs_holds_back_no_other_subscription(engine):
    outbox, hangs, well = Outbox(engine), Gated(), Collector()
    send(outbox, "1")
    caller = OverdueCaller(lambda _messages: not hangs.gate.is_set())
    jobs = [job(declared("first"), hangs, caller=caller), job(declared("second"), well)]
    with at_work(Worker(outbox.database, jobs, BRISK)):
        assert eventually(lambda: caller.overdue)
        send(outbox, "2")
        meanwhile = eventually(lambda: texts(well.messages) == ["1", "2"])
        hangs.gate.set()
        arrived = eventually(lambda: sorted(texts(hangs.messages)) == ["1", "2"])

    assert (meanwhile, arrived) == (True, True)


def test_a_destination_that_is_away_holds_back_no_other_subscription(engine):
    outbox, away, well = Outbox(engine), Gated(Unavailable("down", everything=True)), Collector()
    away.gate.set()
    send(outbox, "1")
    with at_work(both(outbox, away, well)):
        assert away.called.wait(60)
        send(outbox, "2")
        meanwhile = eventually(lambda: texts(well.messages) == ["1", "2"])
        away.verdict = DONE
        arrived = eventually(lambda: texts(away.messages) == ["1", "2"])

    assert (meanwhile, arrived) == (True, True)


def test_a_lease_that_another_has_holds_back_no_other_subscription(engine, channel):
    outbox, waits, well = Outbox(engine), Collector(), Collector()
    Subscriptions(channel).declare(declared("first"))
    other = Leases(channel).acquire(Partition("first"), "other", timedelta(minutes=5))
    assert other is not None
    send(outbox, "1")
    with at_work(both(outbox, waits, well)):
        meanwhile = eventually(lambda: texts(well.messages) == ["1"])
        before = texts(waits.messages)
        Leases(channel).release(other)
        arrived = eventually(lambda: texts(waits.messages) == ["1"])

    assert (meanwhile, before, arrived) == (True, [], True)


def test_a_lease_that_is_lost_takes_no_other_along(engine, channel):
    """The worker takes it again, and sends what it could not settle."""
    outbox, loses, well, leases = Outbox(engine), Collector(), Collector(), Leases(channel)

    def epochs() -> list[int]:
        looked = [leases.look(Partition(name)) for name in ("first", "second")]
        return [0 if holder is None else holder.epoch for holder in looked]

    send(outbox, "1")
    with at_work(both(outbox, loses, well)):
        assert eventually(lambda: (texts(loses.messages), texts(well.messages)) == (["1"], ["1"]))
        taken = leases.acquire(Partition("first"), "other", LONG_LEASE, leases.look(Partition("first")))
        assert taken is not None
        leases.release(taken)
        again = eventually(lambda: epochs() == [3, 1])
        send(outbox, "2")
        arrived = eventually(lambda: (texts(loses.messages)[-1], texts(well.messages)) == ("2", ["1", "2"]))

    assert (again, arrived) == (True, True)


def test_a_command_has_the_lease_of_one_subscription_while_the_other_goes_on(engine, channel):
    outbox, lent, well = Outbox(engine), Collector(), Collector()
    send(outbox, "1")
    with at_work(both(outbox, lent, well)):
        assert eventually(lambda: (texts(lent.messages), texts(well.messages)) == (["1"], ["1"]))
        first = Subscriptions(channel).get("first")
        with borrowing.borrowed(channel, [first], wait=timedelta(seconds=60)):
            send(outbox, "2")
            meanwhile = eventually(lambda: texts(well.messages) == ["1", "2"])
            before = texts(lent.messages)
        arrived = eventually(lambda: texts(lent.messages) == ["1", "2"])
        epochs = [
            epoch for name in ("first", "second") for epoch, _ in holders(channel, Subscriptions(channel).get(name))
        ]

    assert (meanwhile, before, arrived, epochs) == (True, ["1"], True, [3, 1])


def test_a_settle_that_fails_holds_back_no_other_subscription(engine, monkeypatch):
    """What was sent of the one that fails is not sent again with each try."""
    outbox, failing, well, settle = Outbox(engine), Collector(), Collector(), ProgressLog.settle
    fails, refusals = [True], list[Lease]()

    def refused(self: ProgressLog, lease: Lease, n: int, progress: Progress, incarnation: str, highest=None) -> bool:
        if fails and lease.partition.subscription == "first":
            refusals.append(lease)
            raise PermissionError("refused")
        return settle(self, lease, n, progress, incarnation, highest)

    with at_work(both(outbox, failing, well)):
        send(outbox, "1")
        assert eventually(lambda: (texts(failing.messages), texts(well.messages)) == (["1"], ["1"]))
        monkeypatch.setattr(ProgressLog, "settle", refused)
        send(outbox, "2")
        assert eventually(lambda: texts(well.messages) == ["1", "2"])
        assert eventually(lambda: len(refusals) >= 3)
        send(outbox, "3")
        meanwhile = eventually(lambda: texts(well.messages) == ["1", "2", "3"])
        before = texts(failing.messages)
        fails.clear()
        arrived = eventually(lambda: texts(failing.messages) == ["1", "2", "3"])

    assert (meanwhile, before, arrived) == (True, ["1", "2"], True)


def test_a_lost_connection_begins_all_subscriptions_again(pg_engine):
    outbox, handlers = Outbox(pg_engine), (Collector(), Collector())
    send(outbox, "1")
    with at_work(both(outbox, *handlers)):
        assert eventually(lambda: all(texts(each.messages) == ["1"] for each in handlers))
        with pg_engine.begin() as connection:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            )
        pg_engine.dispose()
        send(outbox, "2")
        arrived = eventually(lambda: all(texts(each.messages) == ["1", "2"] for each in handlers))

    assert arrived


@pytest.mark.parametrize("work", ["until_empty", "once"])
def test_who_works_until_nothing_is_left_works_for_all_subscriptions(engine, work):
    outbox, handlers = Outbox(engine), (Collector(), Collector())
    send(outbox, "1", "2")

    getattr(both(outbox, *handlers), work)()

    assert [texts(each.messages) for each in handlers] == [["1", "2"], ["1", "2"]]


# Several partitions of one subscription


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_worker_has_the_leases_of_all_partitions_that_nobody_has(engine, channel, number):
    """It renews them on one thread, hands each message over once, and gives all leases back."""
    outbox, destination = Outbox(engine), Destination()
    stored = of_partitions(channel, number)
    relay = relay_to(destination, outbox, settings=BRISK)
    relay.start()
    taken = eventually(lambda: all(owned for _, owned in holders(channel, stored)))
    fill(outbox, 200)
    arrived = eventually(lambda: len(destination.messages) >= 200)
    renewing = [thread for thread in threading.enumerate() if thread.name == "outbox-lease"]
    renewed = eventually(
        lambda: all(each.renewals > 1 for each in Leases(channel).look_all(stored.all_partitions()).values())
    )
    relay.stop()
    relay.join(60)

    assert (taken, arrived, renewed, len(renewing)) == (True, True, True, 1)
    assert holders(channel, stored) == [(1, False)] * number
    assert Counter(destination.bodies) == Counter(body for key in range(20) for body in expected(key, 200))
    assert all(destination.of_key(f"k{key}") == expected(key, 200) for key in range(20))


AT_WORK = """
import sys
from datetime import timedelta
from outbox import Outbox, create_engine
from tests.support.destination import Destination, relay_to
from tests.worker.test_partitions import BRISK

relay_to(Destination(), Outbox(create_engine(sys.argv[1])), settings=BRISK).run()
"""


@contextmanager
def another_process(engine: Engine) -> Iterator[Program]:
    """A relay in a process of its own."""
    url = engine.url.render_as_string(hide_password=False)
    process = Program(["-c", AT_WORK, url])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def renewed_by_the_dead(engine: Engine, length: timedelta) -> None:
    """As if the last renewal of the leases had been for so long, and nobody had seen the worker since."""
    renew = text("UPDATE outbox_lease SET renewals = renewals + 1, length_ms = :ms WHERE partition >= 0")
    with engine.begin() as connection:
        connection.execute(renew, {"ms": length // timedelta(milliseconds=1)})
    step_clock(engine, timedelta(minutes=10), "outbox_worker.seen_at")


@pytest.mark.storm
@pytest.mark.parametrize("number", [1, 4])
def test_the_partitions_of_a_killed_worker_are_taken_when_their_leases_end(pg_engine, number, caplog):
    caplog.set_level(logging.INFO, "outbox.lease")
    engine = pg_engine
    outbox, destination = Outbox(engine), Destination()
    with closing(outbox.database.open()) as channel:
        stored = of_partitions(channel, number)
        relay = relay_to(destination, outbox, settings=BRISK)
        with another_process(engine) as first:
            assert eventually(lambda: all(owned for _, owned in holders(channel, stored)))
            relay.start()
            assert eventually(lambda: "standing by" in caplog.text)
            first.send_signal(signal.SIGKILL)
            first.wait()
            renewed_by_the_dead(engine, ENDS)
            fill(outbox, 100)
            arrived = eventually(lambda: len(destination.messages) >= 100)
            taken = holders(channel, stored)
            relay.stop()
            relay.join(60)

    assert (arrived, taken) == (True, [(2, True)] * number)
    assert all(destination.of_key(f"k{key}") == expected(key, 100) for key in range(20))
