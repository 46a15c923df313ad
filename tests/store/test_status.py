"""Status costs the same at any size of the log, and tells what is counted from what is estimated."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any, cast

import pytest
from sqlalchemy import Engine, text

from outbox import Done, Outbox, Reject, Relay
from outbox.model.lease import Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST, Progress
from outbox.model.status import Count, Status
from outbox.model.subscription import Declaration
from outbox.store.database import Channel, Database
from outbox.store.log.log import Limits, Log
from outbox.store.operations.status import statuses
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.settings import Settings

INSERT = {
    "postgresql": """
        INSERT INTO outbox_message (message_id, topic, slot, body, created_at)
        SELECT gen_random_uuid(), CASE WHEN n % :rare = 0 THEN 'rare' ELSE 'common' END, 0, '', statement_timestamp()
        FROM generate_series(1, :rows) AS n""",
    "sqlite": """
        WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :rows)
        INSERT INTO outbox_message (message_id, topic, slot, body, created_at)
        SELECT lower(hex(randomblob(16))), CASE WHEN n % :rare = 0 THEN 'rare' ELSE 'common' END, 0, x'',
               strftime('%Y-%m-%d %H:%M:%f', 'now') FROM s""",
}


def fill(engine: Engine, rows: int, rare: int = 1_000) -> None:
    with engine.begin() as connection:
        connection.execute(text(INSERT[engine.dialect.name]), {"rows": rows, "rare": rare})


@contextmanager
def looking(engine: Engine) -> Iterator[Channel]:
    channel = Database(engine).open()
    try:
        yield channel
    finally:
        channel.close()


def status_of(engine: Engine, name: str = "relay") -> Status:
    with looking(engine) as channel:
        _, found = statuses(channel)
    return next(each for each in found if each.name == name)


def subscribe(engine: Engine, name: str, *topics: str) -> None:
    with looking(engine) as channel:
        declared = Declaration(name=name, destination="callable:test", topics=topics or None)
        Subscriptions(channel).declare(declared)


def settle(engine: Engine, progress: Progress, name: str = "relay") -> None:
    """Store progress as a worker does."""
    with looking(engine) as channel:
        leases = Leases(channel)
        lease = leases.acquire(Partition(name), "test", timedelta(seconds=10))
        assert lease is not None
        incarnation = Log().now(channel).incarnation
        assert ProgressLog(channel).settle(lease, 1, progress, incarnation)
        leases.release(lease)


def now(engine: Engine):
    with looking(engine) as channel:
        return Log().now(channel).position


class Sink:
    """Rejects one topic."""

    destination = "callable:test"

    def send(self, messages):
        """Accept the rest."""
        return [Reject("never") if message.topic == "bad" else Done() for message in messages]

    def close(self):
        """Nothing is open."""


def test_a_small_backlog_is_counted_by_what_each_subscription_selects(engine):
    subscribe(engine, "picky", "rare")

    fill(engine, 3_000)

    assert (status_of(engine).unsettled, status_of(engine, "picky").unsettled) == (Count(3_000), Count(3))


def test_a_backlog_is_counted_by_patterns_and_exceptions(engine):
    """Half messages are in none of them."""
    subscribe(engine, "some", "r*")
    subscribe(engine, "others", "!r*")
    subscribe(engine, "halves", "RMQ_*")
    fill(engine, 3_000)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_message SET topic = '{HALF_TOPIC}' WHERE id % 2 = 1"))

    found = {name: status_of(engine, name).backlog for name in ("some", "others", "halves", "relay")}

    # Each rare one has an even id.
    assert found == {"some": 3, "others": 1_497, "halves": 0, "relay": 1_500}


def test_an_empty_log_has_neither_backlog_nor_lag(engine):
    found = status_of(engine)

    assert (found.unsettled, found.lag_seconds, found.lag_is_estimate) == (Count(0), 0.0, False)


def test_the_lag_is_the_age_of_the_oldest_message_that_is_not_settled(engine):
    fill(engine, 10)
    settle(engine, Progress(now(engine)))
    fill(engine, 1)
    time.sleep(1.1)
    fill(engine, 1)

    lag = status_of(engine).lag_seconds

    assert 1.1 <= lag < 100


def test_what_is_left_of_a_window_that_is_half_done_is_counted(engine):
    """Its rows up to the id that it came to are settled, those behind it and beyond its end are not."""
    fill(engine, 500)
    target = now(engine)
    fill(engine, 7)

    settle(engine, Progress(EARLIEST, target, 400))

    assert status_of(engine).unsettled == Count(107)


def test_a_transaction_that_was_open_at_the_position_counts_when_it_commits(pg_engine):
    with pg_engine.connect() as late:
        late.execute(text(INSERT["postgresql"]), {"rows": 3, "rare": 10})
        fill(pg_engine, 5)
        settle(pg_engine, Progress(now(pg_engine)))
        assert status_of(pg_engine).unsettled == Count(0)

        late.commit()

    assert status_of(pg_engine).unsettled == Count(3)


@pytest.mark.storm
def test_a_large_backlog_is_estimated(engine):
    """Of 120 000 messages half are settled; one in 200 is rare."""
    subscribe(engine, "picky", "rare")
    fill(engine, 60_000, rare=200)
    settled = now(engine)
    fill(engine, 60_000, rare=200)

    settle(engine, Progress(settled))
    half, picky = status_of(engine), status_of(engine, "picky")

    assert half.backlog_is_estimate and half.backlog == pytest.approx(60_000, rel=0.1)
    assert picky.backlog_is_estimate and picky.backlog == pytest.approx(600, rel=0.4)


def test_the_lag_of_a_topic_that_is_nowhere_near_is_an_upper_bound(engine):
    subscribe(engine, "picky", "nowhere")
    fill(engine, 20_000)

    found = status_of(engine, "picky")

    assert (found.lag_is_estimate, found.lag_seconds > 0) == (True, True)


@pytest.mark.storm
def test_an_estimate_is_not_misled_by_ids_that_are_gone(pg_engine):
    """Rollbacks and purges leave holes: 200 000 ids that nobody has, between two lots of 15 000 rows."""
    fill(pg_engine, 15_000)
    with pg_engine.connect() as connection:
        connection.execute(text(INSERT["postgresql"]), {"rows": 200_000, "rare": 10})
        connection.rollback()
    fill(pg_engine, 15_000)

    found = status_of(pg_engine).unsettled

    assert found.about and found.number == pytest.approx(30_000, rel=0.35)


def test_it_tells_what_is_set_aside_and_who_works(engine):
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "bad", b"1", key="k")
        outbox.send(session, "good", b"2", key="k")
        outbox.send(session, "good", b"3", delay=timedelta(hours=1))
    Relay(outbox, Sink()).until_empty()

    idle = status_of(engine)
    relay = outbox.start(Sink(), settings=Settings(limits=Limits(rows=10)))
    deadline = time.monotonic() + 20
    while not status_of(engine).live and time.monotonic() < deadline:
        time.sleep(0.05)
    running = status_of(engine)
    outbox.stop()

    assert idle.parked == {"delayed": 1, "waiting": 0, "retry": 0, "behind": 1, "dead": 1, "inflight": 0}
    assert (idle.live, running.live, running.worker) == (False, True, relay._worker.owner)


class Explained:
    """A channel that explains every statement before it runs it."""

    def __init__(self, channel):
        self._channel = channel
        self.database = channel.database
        self.plans = []

    def rows(self, statement, /, **parameters):
        """What it returns, once it is explained."""
        (plan,) = self._channel.rows(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", **parameters)[0]
        self.plans.append((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"])
        return self._channel.rows(statement, **parameters)

    now = Channel.now

    def nodes(self):
        """All nodes of all plans."""
        pending = list(self.plans)
        while pending:
            node = pending.pop()
            pending += node.get("Plans", [])
            yield node


@pytest.mark.storm
def test_no_statement_reads_more_than_its_bound(pg_engine):
    """300 000 rows, nothing settled, one subscription in the middle of a window, one that selects a rare topic."""
    subscribe(pg_engine, "picky", "rare")
    subscribe(pg_engine, "halfway")
    with pg_engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox_message SET (autovacuum_enabled = off)"))
    fill(pg_engine, 300_000)
    settle(pg_engine, Progress(EARLIEST, now(pg_engine), 150_000), "halfway")
    for analysed, plans in product([False, True], ["force_custom_plan", "force_generic_plan"]):
        if analysed:
            with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("ANALYZE"))
        with looking(pg_engine) as channel:
            channel.run(f"SET plan_cache_mode = {plans}")
            explained = Explained(channel)

            _, found = statuses(cast("Any", explained))

        most = max(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in explained.nodes()
        )
        scans = {node["Node Type"] for node in explained.nodes() if node.get("Relation Name") == "outbox_message"}
        assert (most <= 10_001, "Seq Scan" in scans) == (True, False), (analysed, plans)
        assert [each.backlog_is_estimate for each in found] == [True, True, True]


@pytest.mark.alone
@pytest.mark.full
def test_ten_million_rows_take_no_longer_than_the_eye_notices(pg_engine):
    """Measured; at each scale the plans above say what is read."""
    for _ in range(10):
        fill(pg_engine, 1_000_000)
    subscribe(pg_engine, "picky", "rare")
    with looking(pg_engine) as channel:
        statuses(channel)
        took = []
        for _ in range(5):
            started = time.perf_counter()
            statuses(channel)
            took.append(time.perf_counter() - started)

    assert sorted(took)[2] <= 0.2
