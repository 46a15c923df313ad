"""What tests read out of an outbox: the rows of its log, and what a worker makes of them."""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.model.message import Message
from outbox.model.subscription import Declaration, Selection, Start
from outbox.model.verdict import DONE, Verdict
from outbox.runtime.stop import Stop
from outbox.store.database import Channel, Database
from outbox.worker.calls import Caller, Handler
from outbox.worker.job import Job
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings, Until
from outbox.worker.worker import Worker as LibraryWorker
from tests.support.waiting import eventually

#: The worker notices soon when another one asks for its lease, and loses it only to a statement: see `end_lease`.
QUICK = Settings(lease=timedelta(minutes=5), renew_every=timedelta(milliseconds=200))


def bodies(engine: Engine) -> list[bytes]:
    """The bodies of the log, in its order, as a reader sees them who waits for no writer."""
    question = "SELECT body FROM outbox_message ORDER BY id"
    if engine.dialect.name == "sqlite":
        with closing(sqlite3.connect(str(engine.url.database))) as file:
            return [body for (body,) in file.execute(question)]
    with engine.connect() as connection:
        return [bytes(row[0]) for row in connection.execute(text(question))]


def next_moment(channel: Channel) -> datetime:
    """A moment by the clock of the database that is later than all before; it may know milliseconds only."""
    before: datetime = channel.now()
    assert eventually(lambda: channel.now() > before)
    return channel.now()


def in_utc(moment: datetime | None) -> datetime | None:
    """A moment as SQLAlchemy reads it from a table: SQLite keeps no zone, because it is UTC."""
    return moment if moment is None else moment.replace(tzinfo=moment.tzinfo or UTC)


def waiting(engine: Engine) -> int:
    """How many connections wait for a lock."""
    statement = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with engine.connect() as connection:
        return int(connection.execute(statement).scalar_one())


def send(outbox: Outbox, *bodies: str) -> None:
    """One transaction."""
    with outbox.begin() as session:
        for body in bodies:
            outbox.send(session, "orders", body)


def texts(messages: list[Message]) -> list[str]:
    """What the messages say."""
    return [message.body.decode() for message in messages]


def selection_of(topics: Sequence[str] | None) -> Selection:
    """These topics, or all."""
    return Selection(topics=None if topics is None else tuple(topics))


class Collector:
    """A handler that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[Message]] = []

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, all of them."""
        self.batches.append(list(messages))
        return [DONE] * len(messages)

    @property
    def messages(self) -> list[Message]:
        """Everything that came, in order."""
        return [message for batch in self.batches for message in batch]

    @property
    def bodies(self) -> list[bytes]:
        """Their bodies."""
        return [message.body for message in self.messages]


def declared(name: str = "relay", **differing: Any) -> Declaration:
    """The subscription that these tests' workers work for."""
    return Declaration(**{"name": name, "destination": "callable:tests", **differing})


def job(declared: Declaration, handler: Handler, **differing: Any) -> Job:
    """What a worker is to do with this handler."""
    return Job(declared=declared, handler=handler, **differing)


class Worker(LibraryWorker):
    """A worker that can be told to stop."""

    def __init__(self, *given: Any, stop: Stop | None = None, **options: Any) -> None:
        self._own_stop = Stop(stop)
        super().__init__(*given, stop=self._own_stop, **options)

    @property
    def stopping(self) -> bool:
        """From when a stop is asked until it has stopped."""
        return self._own_stop.asked

    def run(self) -> None:
        """Work until `stop` is called."""
        self._work("stopped")

    def until_empty(self) -> None:
        """Handle everything that was committed before now."""
        self._work("empty")

    def once(self) -> None:
        """Handle one batch of each partition."""
        self._work("once")

    def stop(self) -> None:
        """Finish what is under way, and return."""
        self._own_stop.ask()

    def _work(self, until: Until) -> None:
        try:
            self.work(until)
        finally:
            self._own_stop.withdraw()


def worker(
    database: Database,
    handler: Handler,
    *,
    settings: Settings | None = None,
    policy: HandlerPolicy | None = None,
    start: Start = "earliest",
    caller: Caller | None = None,
    **differing: Any,
) -> Worker:
    """A worker that hands over to `handler`."""
    only = job(declared(**differing), handler, policy=policy or HandlerPolicy(), start=start, caller=caller or Caller())
    return Worker(database, [only], settings)


def delivered(database: Database, **differing: Any) -> list[Message]:
    """What a worker delivers now, that none of its name has delivered before."""
    handler = Collector()
    worker(database, handler, **differing).until_empty()
    return handler.messages


@contextmanager
def at_work(worker: Worker) -> Iterator[None]:
    """The worker runs in a thread meanwhile."""
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(120)
