"""A walk through the model of a relay, on a real PostgreSQL: real transactions, and the library's own leases, reads and
settles, step by step.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from datetime import timedelta
from uuid import uuid4

import psycopg
from sqlalchemy import Engine

from outbox.model.lease import Lease, Partition
from outbox.model.position import EARLIEST, Progress
from outbox.model.subscription import Declaration
from outbox.store.database import Database
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.leases import Leases, LeaseWatch
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.model.relaying import Relaying, State
from tests.model.server import Row

LENGTH = timedelta(minutes=10)
_INSERT = """
    INSERT INTO outbox_message (message_id, topic, key, slot, body) VALUES (gen_random_uuid(), 'orders', %s, 0, %s)
"""


class RealWorker:
    """A worker's connection, its watch of the lease, and what it keeps in memory."""

    def __init__(self, database: Database, partition: Partition, clock: list[float], stack: ExitStack) -> None:
        self._channel = stack.enter_context(closing(database.open()))
        self._owner, self._partition, self._clock = uuid4().hex, partition, clock
        self._leases, self._progress_log = Leases(self._channel), ProgressLog(self._channel)
        self._incarnation = Log().now(self._channel).incarnation
        self._watch = LeaseWatch(LENGTH, now=lambda: clock[0])
        self._lease: Lease | None = None
        self._progress, self._end = Progress(EARLIEST), Progress(EARLIEST)
        self._n = 0

    def look(self) -> None:
        """Look at the lease, as one does that stands by."""
        holder = self._leases.look(self._partition)
        assert holder is not None
        self._watch.look(holder)

    def take(self) -> int:
        """Take the lease; return its epoch, or 0 where it may not be taken."""
        holder = self._leases.look(self._partition)
        assert holder is not None
        self._lease = self._leases.acquire(self._partition, self._owner, LENGTH, self._watch.look(holder))
        settled = self._progress_log.newest(self._partition)
        assert settled is not None
        self._progress = self._end = settled.progress
        self._n = 0
        return 0 if self._lease is None else self._lease.epoch

    def renew(self) -> bool:
        """Renew the lease."""
        assert self._lease is not None
        return self._leases.renew(self._lease, LENGTH)

    def read(self) -> str:
        """Read on; return what came."""
        batch = Cursor(Log(Limits(rows=Relaying.rows)), self._end).read(self._channel)
        self._end = batch.end
        return said([message.body.decode() for message in batch.messages])

    def settle(self) -> bool:
        """Settle what was read."""
        assert self._lease is not None
        self._n += 1
        return self._progress_log.settle(self._lease, self._n, self._end, self._incarnation)


class RelayReplay:
    """Writers and workers of a walk, on one log; its subscription begins behind all earlier walks."""

    def __init__(self, engine: Engine, start: State, stack: ExitStack) -> None:
        database = Database(engine)
        name = f"relay-{uuid4().hex}"
        with closing(database.open()) as channel:
            Subscriptions(channel).declare(Declaration(name=name, destination="test"), "latest")
        url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._writers = [stack.enter_context(closing(psycopg.connect(url))) for _ in start.writers]
        self._clock = [0.0]
        self._workers = [RealWorker(database, Partition(name), self._clock, stack) for _ in start.workers]

    def step(self, step: str, before: State, after: State) -> None:
        """Do what the step says, and compare what came of it."""
        if step.startswith(("the lease of ", "nobody renews ")):
            # Nobody renews it while a whole length passes, which others see.
            for worker in self._workers:
                worker.look()
            self._clock[0] += 2 * LENGTH.total_seconds()
            return
        who, number, what = step.split(" ", 2)
        place = int(number) - 1
        if who == "writer":
            self._write(self._writers[place], what, before, after)
        else:
            self._work(self._workers[place], what, after)

    def _write(self, connection: psycopg.Connection, what: str, before: State, after: State) -> None:
        verb = what.split(" ", 1)[0]
        if verb == "begins":
            connection.execute("SELECT pg_current_xact_id()")
        elif verb == "locks":
            row = _inserted(before, after)
            connection.execute(_INSERT, (row.key, f"{row.key}{row.nth}"))
        elif verb == "commits":
            connection.commit()
        else:
            connection.rollback()

    def _work(self, worker: RealWorker, what: str, after: State) -> None:
        match what.split(" ", 1)[0]:
            case "takes":
                assert worker.take() == after.lease.epoch
            case "renews":
                assert worker.renew()
            case "reads":
                assert f"reads {worker.read()}" == what
            case "settles" | "settles,":
                assert worker.settle()
            case "cannot":
                assert not worker.settle()


def said(messages: list[str]) -> str:
    """Return messages as the model writes them."""
    return ", ".join(messages) or "a page without messages"


def _inserted(before: State, after: State) -> Row:
    """Return the row that a step has inserted."""
    rows = {row for each in before.server.open for row in each.rows}
    return next(row for each in after.server.open for row in each.rows if row not in rows)
