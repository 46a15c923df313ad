"""The workers of subscriptions: processes with their partitions, and since when each has settled."""

import asyncio
from contextlib import closing
from datetime import datetime, timedelta
from importlib.metadata import version

import pytest

from outbox import Outbox, SubscriptionError
from outbox.model.position import Position, Progress
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.store.subscriptions.workers import LiveWorkers
from tests.support.command_line import outbox as run

MINUTE = timedelta(minutes=1)


@pytest.fixture
def working(engine, channel) -> Outbox:
    """Three partitions: one worker holds two of them and has settled in one, another one stands by."""
    outbox = Outbox(engine)
    outbox.admin.create("other", destination="nats://h:4222", partitions=3)
    stored, leases = Subscriptions(channel).get("other"), Leases(channel)
    first, _ = (leases.acquire(stored.partition(n), "web-1:4711:ab12", MINUTE) for n in (0, 2))
    assert first is not None
    incarnation = Log().now(channel).incarnation
    ProgressLog(channel).settle(first, 1, Progress(Position(1)), incarnation, 0)
    for name in ("web-1:4711:ab12", "web-2:99:cd34"):
        LiveWorkers(channel, "other").seen(name)
    return outbox


def test_a_worker_is_shown_with_its_process_its_partitions_and_its_last_settle(working, channel):
    holder, waiting = working.admin.workers("other")

    settled = ProgressLog(channel).newest(Subscriptions(channel).get("other").partition(0))
    assert settled is not None
    assert (holder.host, holder.process, holder.partitions, holder.partitions_in_all) == ("web-1", 4711, (0, 2), 3)
    assert holder.last_settle_at == settled.settled_at
    assert holder.lease_until is not None
    assert (holder.version, holder.since is not None) == (version("outbox-log"), True)
    assert (waiting.host, waiting.process, waiting.partitions, waiting.lease_until, waiting.last_settle_at) == (
        "web-2", 99, (), None, None,
    )  # fmt: skip
    assert (waiting.version, waiting.since) == (None, None)


def test_a_worker_that_takes_its_lease_back_goes_on_since_then_and_one_after_it_begins_anew(working, channel):
    leases, partition = Leases(channel), Subscriptions(channel).get("other").partition(0)

    def since() -> datetime | None:
        found = leases.look(partition)
        return None if found is None else found.since

    first = since()
    again = leases.acquire(partition, "web-1:4711:ab12", MINUTE)
    assert again is not None
    kept = since()
    leases.release(again)
    free = leases.look(partition)
    leases.acquire(partition, "web-2:99:cd34", MINUTE)

    after = since()
    assert free is not None
    assert (kept, free.version, free.since) == (first, None, None)
    assert first is not None
    assert after is not None
    assert after > first


def test_the_attempts_of_workers_are_known_while_all_of_them_allow_the_same(working, channel):
    stored, leases = Subscriptions(channel).get("other"), Leases(channel)

    def allowed(*attempts: int | None, length: timedelta = MINUTE) -> int | None:
        for number, each in enumerate(attempts):
            holder = leases.look(stored.partition(number))
            leases.acquire(stored.partition(number), f"web-{number}:1:a", length, holder, attempts=each)
        return leases.attempts("other")

    assert [allowed(10, 10), allowed(10, None), allowed(10, 5), allowed(7, length=-MINUTE)] == [10, 10, None, 5]


def test_a_worker_that_has_not_settled_under_its_lease_has_no_last_settle(working, channel):
    leases, partition = Leases(channel), Subscriptions(channel).get("other").partition(0)
    holder = leases.look(partition)
    leases.acquire(partition, "web-1:4711:ab12", MINUTE, holder)

    assert working.admin.workers("other")[0].last_settle_at is None


def test_a_command_that_borrows_a_lease_and_a_worker_that_ended_are_no_workers(engine, channel):
    leases, relay = Leases(channel), Subscriptions(channel).get("relay").partition(0)
    leases.acquire(relay, "command-ab12", MINUTE)
    assert Outbox(engine).admin.workers() == ()
    holder = leases.look(relay)
    leases.acquire(relay, "web-1:1:a", -MINUTE, holder)

    assert Outbox(engine).admin.workers() == ()


def test_the_awaited_form_and_the_command_line_show_the_same(working, engine):
    assert asyncio.run(working.admin.aworkers()) == working.admin.workers()
    lines = [line.split() for line in run(engine, "workers").out.splitlines()[1:]]
    assert lines[0][:4] == ["other", "web-1", "4711", version("outbox-log")]
    assert lines[0][6:10] == ["2", "of", "3:", "0,2"]
    assert lines[1] == ["other", "web-2", "99", "0", "of", "3"]


def test_without_a_worker_the_command_says_so_and_a_wrong_name_is_an_error(engine):
    assert run(engine, "workers").err == "no worker runs\n"
    with closing(Outbox(engine).database.open()), pytest.raises(SubscriptionError, match="nope"):
        Outbox(engine).admin.workers("nope")
