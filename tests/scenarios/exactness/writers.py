"""A writer: a process whose transactions do everything that makes the order of commits hard to tell.

They write elsewhere and wait before they take the lock that orders their key, set savepoints and go back to them, stay
open for seconds, and are rolled back. Run with a JSON object, the fields of `Task`.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, insert, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine
from tests.scenarios.exactness.business import Aggregate, FactRow, Scratch, change


class ChangedMindError(Exception):
    """The business changed its mind."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Send `quota` messages in transactions that commit; `long` of them stay open for `seconds`.

    Then go on at leisure until the file `enough` is there.
    """

    url: str
    number: int
    quota: int
    enough: str
    keys: int
    seed: int
    long: int = 4
    seconds: float = 2.0
    topics: tuple[str, ...] = ("orders", "mails", "stock")


class Writer:
    """Runs transactions until its quota of messages is committed."""

    def __init__(self, task: Task, engine: Engine) -> None:
        self._task = task
        self._engine = engine
        self._outbox = Outbox(engine)
        self._random = random.Random(task.seed)
        self._names = 0
        self._committed = 0

    def run(self) -> None:
        """Commit the quota, with the long transactions spread over it."""
        every = max(1, self._task.quota // (self._task.long + 1))
        long_ones = 0
        while self._committed < self._task.quota:
            is_long = self._committed // every > long_ones
            long_ones += is_long
            self.transaction(self._task.seconds if is_long else 0.0)
        while not Path(self._task.enough).exists():
            self.transaction(0.0)
            time.sleep(0.2)

    def transaction(self, seconds: float) -> None:
        """Do some business; in a long transaction, if it is to take `seconds`."""
        in_session = self._random.random() < 0.5
        try:
            with Session(self._engine) if in_session else self._engine.connect() as handle, handle.begin():
                sent = self._business(handle, seconds)
                if self._random.random() < 0.2:
                    raise ChangedMindError
        except ChangedMindError:
            return
        except (DBAPIError, sqlite3.OperationalError) as error:
            # Writers that wait for each other in a circle: the server picks one to give up. Or all of them wait for a
            # relay that was stopped while it wrote, and one waits in vain.
            if not _gave_up(getattr(error, "orig", error)):
                raise
            return
        self._committed += sent

    def _business(self, handle: Session | Connection, seconds: float) -> int:
        """Some changes; returns how many messages stay if the transaction commits."""
        early = self._random.random() < 0.3 or seconds > 0
        if early:
            handle.execute(insert(Scratch).values(note="an early transaction id"))
            time.sleep(self._random.uniform(0, 0.03) + (seconds if self._random.random() < 0.7 else 0))
        sent = 0
        for key in self._keys():
            if self._random.random() < 0.3:
                sent += self._in_savepoints(handle, key)
            else:
                sent += self._send(handle, key)
        if seconds and self._random.random() < 0.5:
            time.sleep(seconds)
        return sent

    def _keys(self) -> list[str | None]:
        """Of one transaction, in an order that cannot deadlock; None: a message without a key."""
        count = self._random.choice((1, 1, 1, 2, 3))
        keys = sorted(f"k{self._random.randrange(self._task.keys)}" for _ in range(count))
        return [None if self._random.random() < 0.15 else key for key in keys]

    def _in_savepoints(self, handle: Session | Connection, key: str | None) -> int:
        """One message in an outer savepoint, one in an inner one; either may be rolled back."""
        sent = 0
        with _savepoint(handle) as keep_outer:
            sent = self._send(handle, key)
            with _savepoint(handle) as keep_inner:
                inner = self._send(handle, key)
                if keep_inner(self._random.random() < 0.6):
                    sent += inner
            if not keep_outer(self._random.random() < 0.7):
                sent = 0
        return sent

    def _send(self, handle: Session | Connection, key: str | None) -> int:
        self._names += 1
        name, topic = f"{self._task.number}-{self._names}", self._random.choice(self._task.topics)
        if key is None:
            self._outbox.send(handle, topic, name)
            handle.execute(insert(FactRow).values(name=name, key=None, version=0))
        elif isinstance(handle, Session):
            change(self._outbox, handle, key, name, topic)
        else:
            changed = update(Aggregate).where(Aggregate.key == key).values(version=Aggregate.version + 1)
            version = handle.execute(changed.returning(Aggregate.version)).scalar_one()
            self._outbox.send(handle, topic, name, key=key)
            handle.execute(insert(FactRow).values(name=name, key=key, version=version))
        return 1


def _gave_up(error: object) -> bool:
    return getattr(error, "sqlstate", None) == "40P01" or str(error) == "database is locked"


class _Decision:
    """Whether a savepoint is released or rolled back at its end."""

    keep = True

    def __call__(self, keep: bool) -> bool:
        self.keep = keep
        return keep


@contextmanager
def _savepoint(handle: Session | Connection) -> Iterator[_Decision]:
    decision = _Decision()
    nested = handle.begin_nested()
    yield decision
    if decision.keep:
        nested.commit()
    else:
        nested.rollback()


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    Writer(task, create_engine(task.url)).run()
