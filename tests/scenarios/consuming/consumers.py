"""A consumer process of a storm: fails now and then, hangs sometimes. Run with a JSON object, the fields of `Task`."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool
from tenacity import wait_random

import outbox
from outbox import Limits, Message, Outbox, Reject, RetryPolicy, Verdict
from outbox.telemetry.events import Event, LeaseLost
from outbox.worker.settings import Settings
from tests.scenarios.consuming import twins
from tests.scenarios.consuming.journal import Entry, Journal, What

#: One message of so many can never be handled.
_POISON = 400
DEADLINE, HANG_SECONDS = timedelta(seconds=1), 1.8


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to consume and how. `inbox`: effects are rows, once each. `twin`: a broken variant by name."""

    url: str
    journal: str
    seed: int
    inbox: bool
    partitions: int
    concurrency: int
    rows: int
    lease: float
    fails: float
    hangs: float
    twin: str | None = None


class Handling:
    """The work of a handler, and what it notes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._journal = Journal(Path(task.journal))
        self._random = random.Random(task.seed)
        self._engine = create_engine(task.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._local = threading.local()

    def told(self, event: Event) -> None:
        """Note a lost lease: what its calls do until they end may overlap."""
        if isinstance(event, LeaseLost) and event.error is not None:
            self._note("lost")

    def handle(self, message: Message, effect: Any = None) -> Verdict | None:
        """Work on the message. What is noted encloses the lock, so that nobody has the lock without a call."""
        self._note("begin", message)
        try:
            with self._key_of(message):
                verdict = self._work(message, effect)
        except ValueError:
            self._note("failed", message)
            raise
        self._note("failed" if verdict else "done", message)
        return verdict

    def _work(self, message: Message, effect: Any) -> Verdict | None:
        """Take a moment; fail now and then; hang sometimes."""
        roll = self._random.random()
        if zlib.crc32(message.body) % _POISON == 0:
            return Reject("poison")
        time.sleep(self._random.uniform(0.001, 0.005))
        if effect is not None:
            effect()
        if roll < self._task.fails:
            raise ValueError("one of twenty")
        if roll > 1 - self._task.hangs:
            self._note("hang", message)
            time.sleep(HANG_SECONDS)
        return None

    @contextmanager
    def _key_of(self, message: Message) -> Iterator[None]:
        """Hold the lock of the key, and note when another hand has it."""
        if not self._task.url.startswith("postgresql"):
            yield
            return
        connection: Connection = getattr(self._local, "connection", None) or self._engine.connect()
        self._local.connection = connection
        key = {"key": message.key}
        if not connection.scalar(text("SELECT pg_try_advisory_lock(hashtext(:key))"), key):
            self._note("locked", message)
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(hashtext(:key))"), key)

    def _note(self, what: What, message: Message | None = None) -> None:
        name, key = ("", "") if message is None else (message.body.decode(), message.key or "")
        self._journal.write(Entry(what, os.getpid(), name, key))


def main(task: Task) -> None:
    """Consume until a signal says otherwise."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    twins.install(task.twin)
    box = Outbox(outbox.create_engine(task.url))
    handling = Handling(task)
    box.listen(handling.told)
    consumer = box.consumer(
        "billing",
        topics=["orders"],
        partitions=task.partitions,
        concurrency=task.concurrency,
        inbox=task.inbox,
        deadline=DEADLINE,
        retry=RetryPolicy(attempts=12, wait=wait_random(0.02, 0.3)),
        settings=Settings(
            limits=Limits(rows=task.rows),
            poll=(timedelta(milliseconds=20), timedelta(milliseconds=200)),
            lease=timedelta(seconds=task.lease),
            renew_every=timedelta(seconds=task.lease / 5),
        ),
    )
    if task.inbox:

        @consumer.on("orders")
        def booked(session: Any, message: Message) -> Verdict | None:
            name = {"name": message.body.decode()}
            insert = text("INSERT INTO effect (name) VALUES (:name)")
            return handling.handle(message, lambda: session.execute(insert, name))
    else:
        consumer.on("orders")(handling.handle)
    consumer.run()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
