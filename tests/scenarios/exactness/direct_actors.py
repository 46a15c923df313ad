"""Writers that send by themselves, and relays beside them, as processes. Run with a JSON object, the fields of `Task`.

An order is one transaction with three messages: one of its key, and two without.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from sqlalchemy import insert
from sqlalchemy.exc import OperationalError

from outbox import Done, Message, Outbox, Relay, create_engine
from outbox.direct import delivery
from outbox.direct import sends as rounds
from tests.scenarios.exactness.business import FactRow, change
from tests.scenarios.exactness.relays import HistorySender, settings
from tests.support.directly import in_brief, promises
from tests.support.faults import arm_kill
from tests.support.waiting import eventually


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do. `writer`: its number, else it is a relay; `kill_at`: the crash point at which to die."""

    url: str
    history: str
    calls: str
    enough: str
    rows: int
    writer: int | None = None
    keys: int = 20
    lease: float = 2.0
    pause: float = 0.002
    deadline: float = 5.0
    grace: float | None = None
    kill_at: str | None = None
    #: How many orders; None: until `enough` is there.
    orders: int | None = None


class CallingSender(HistorySender):
    """Writes down how many messages each call held, before any of them leaves."""

    def __init__(self, task: Task) -> None:
        super().__init__(Path(task.history), task.pause)
        self.deadline = timedelta(seconds=task.deadline)
        self._calls = os.open(task.calls, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def send(self, messages: Sequence[Message]) -> list[Done]:
        """As told."""
        os.write(self._calls, b"%d %d\n" % (os.getpid(), len(messages)))
        return super().send(messages)

    def close(self) -> None:
        """Give the files back."""
        os.close(self._calls)
        super().close()


def order(outbox: Outbox, key: str, name: str) -> None:
    """A change of an aggregate, and three facts about it."""
    with outbox.begin() as session:
        change(outbox, session, key, f"{name}-keyed")
        for topic in ("mails", "stock"):
            outbox.send(session, topic, f"{name}-{topic}")
            session.execute(insert(FactRow).values(name=f"{name}-{topic}", key=None, version=0))


def write(task: Task) -> None:
    """Order until it is enough."""
    outbox = Outbox(create_engine(task.url), sender=CallingSender(task), direct="relay")
    if task.orders is not None:
        assert eventually(lambda: promises(outbox))
    number = 0
    while number != task.orders and not Path(task.enough).exists():
        number += 1
        with suppress(OperationalError):  # two writers of two keys waited for each other, or the file was busy
            order(outbox, f"k{random.randrange(task.keys)}", f"{task.writer}-{number}")
        time.sleep(random.uniform(0, 0.03))


def relay(task: Task) -> None:
    """Send until a signal says otherwise."""
    Relay(Outbox(create_engine(task.url)), CallingSender(task), settings=settings(task.rows, task.lease)).run()


def main(task: Task) -> None:
    """Do it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    for module in (delivery, rounds):
        setattr(module, "MOST_AT_ONCE", task.rows)  # noqa: B010  # each has its own
    if task.grace is not None:
        in_brief(setattr, task.grace, task.grace / 2)
    if task.kill_at is not None:
        arm_kill(task.kill_at)
    if task.writer is None:
        relay(task)
    else:
        write(task)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
