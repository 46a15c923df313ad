"""Scripts: transactions and workers that take their turns in an order that is written down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Engine, insert, text
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.errors import LeaseLostError
from outbox.model.lease import Partition
from outbox.model.parking import Parking
from outbox.store.database import Database
from outbox.store.dialects.dialect import Dialect
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.policy import with_one_head
from outbox.worker.settle import Parkings, Settlement
from tests.scenarios.exactness.business import Scratch, change, facts
from tests.scenarios.exactness.history import Event, Fault, delivery_of, judge
from tests.support.dialects import database_of
from tests.support.readers import declared, delivered

ROWS = 2


@dataclass
class Script:
    """What is committed in which order, and when a worker looks."""

    engine: Engine
    outbox: Outbox
    dialect: Dialect | None
    history: list[Event]

    def begin(self) -> Session:
        """A transaction; it draws its id as soon as it writes."""
        return Session(self.engine)

    def begin_early(self) -> Session:
        """A transaction that has drawn its id."""
        session = self.begin()
        session.execute(insert(Scratch).values(note="early"))
        return session

    def change(self, session: Session, name: str, key: str = "k0") -> None:
        """Change the aggregate of a key in a transaction, and send."""
        change(self.outbox, session, key, name)

    def deliver(self) -> None:
        """A worker delivers everything it finds."""
        database = database_of(self.engine, self.dialect)
        self.history += [delivery_of(message) for message in delivered(database)]

    def found(self) -> set[str]:
        """What is wrong with what was delivered."""
        return set(judge(facts(self.engine), self.history, batch=ROWS).wrong)


_AGAIN = Parking(state="retry", holds=True, attempts=1, delay=timedelta(0))


class Owner:
    """A holder of the lease, who may be a former one without knowing it."""

    def __init__(self, script: Script, number: int, settlement: type[Settlement]) -> None:
        self._script, self._number = script, number
        self._channel = Database(script.engine).open()
        Subscriptions(self._channel).declare(declared())
        log = Log(Limits(rows=ROWS))
        self._leases, partition = Leases(self._channel), Partition("relay")
        former = self._leases.look(partition)
        lease = self._leases.acquire(partition, str(number), timedelta(minutes=1), former)
        assert lease is not None
        self._lease = lease
        newest = ProgressLog(self._channel).newest(partition)
        assert newest is not None
        self._settlement = settlement(self._channel, lease, log.now(self._channel).incarnation)
        self._cursor = Cursor(log, newest.progress)

    def read(self) -> None:
        """Fetch a batch; it is empty when there is nothing more."""
        self._batch = self._cursor.read(self._channel)

    def send(self) -> int:
        """Hand the batch over."""
        self._script.history += [delivery_of(message, self._number) for message in self._batch.messages]
        return self._batch.seen

    def settle(self, parkings: Parkings | None = None) -> None:
        """Store what became of it."""
        self._settlement.settle(self._batch.end, parkings or [])

    def deliver_all(self) -> None:
        """Until nothing is left of the log."""
        self.read()
        while self.send():
            self.settle()
            self.read()

    def park_all(self) -> None:
        """Say of the whole batch that it has to be tried again."""
        self.settle(with_one_head((message, _AGAIN) for message in self._batch.messages))

    def close(self) -> None:
        """Give the lease back, if it still has it, and the connection."""
        self._leases.release(self._lease)
        self._channel.close()


def woken_again(script: Script, act: Callable[[Owner], None], settlement: type[Settlement] = Settlement) -> None:
    """A relay stops with a batch in hand, another delivers all; the first goes on; then a third looks what is left."""
    zombie = Owner(script, 1, settlement)
    zombie.read()
    script.history.append(Fault("stop", 1))
    heir = Owner(script, 2, settlement)
    heir.deliver_all()
    with suppress(LeaseLostError):  # the library notices, a twin does not
        act(zombie)
    for owner in (zombie, heir):
        owner.close()
    script.deliver()


def waits_for_lock(engine: Engine) -> bool:
    """Whether somebody waits for somebody else."""
    with engine.connect() as connection:
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
        return bool(connection.execute(waiting).scalar_one())
