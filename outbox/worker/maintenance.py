"""The maintenance by a lease holder: deletes rows that are no longer needed, a portion at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outbox.errors import LeaseLostError
from outbox.model.lease import Partition
from outbox.model.position import Position
from outbox.store.database import Channel, Database
from outbox.store.failure import in_one_line
from outbox.store.idempotency import dedup, inbox
from outbox.store.subscriptions import decisions
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.workers import LiveWorkers
from outbox.telemetry.events import Teller, UpkeepRefused
from outbox.worker import upkeep


@dataclass(slots=True)
class Task:
    """A task: done at `at`, then `every` so many seconds, or soon again when `do` returns True.

    `waits`: not done while messages of the log wait for the next read. `begun`: there is more to do.
    """

    name: str
    every: float
    at: float
    do: Callable[[Position], bool]
    waits: bool = False
    begun: bool = False


def pause_after(seconds: float) -> float:
    """Return the seconds between two portions: a task that has more to do takes at most a fifth of the time."""
    return max(upkeep.PRUNE_AGAIN, 4 * seconds)


def tasks_of(channel: Channel, partition: Partition, *, brief: bool) -> list[Task]:
    """Return the tasks of every lease holder. `brief`: the lease ends before a task could be due a second time."""
    progress, workers, now = ProgressLog(channel), LiveWorkers(channel, partition.subscription), time.monotonic()
    expired_at = now + (0.0 if brief else upkeep.PRUNE_EXPIRED)

    def settled(_base: Position) -> bool:
        progress.prune(partition)
        workers.prune()
        return False

    def expired(_base: Position) -> bool:
        handled, deduplicated = inbox.prune(channel), dedup.prune(channel)
        return handled >= inbox.PRUNED_AT_ONCE or deduplicated >= dedup.PRUNED_AT_ONCE

    def old(_base: Position) -> bool:
        return decisions.prune(channel) >= decisions.PRUNED_AT_ONCE

    return [
        Task("old progress", upkeep.PRUNE_PROGRESS, now + (0.0 if brief else upkeep.PRUNE_PROGRESS), settled),
        Task("expired rows of inbox and dedup", upkeep.PRUNE_EXPIRED, expired_at, expired),
        Task("old decisions", upkeep.PRUNE_EXPIRED, expired_at, old),
    ]


class Maintenance:
    """Runs the tasks of one lease. A step without a due task costs little."""

    def __init__(self, database: Database, tasks: Iterable[Task], teller: Teller) -> None:
        self._database = database
        self._tasks = list(tasks)
        self._teller = teller

    @property
    def due_in(self) -> float:
        """Seconds until a task goes on that was begun; infinite without any."""
        return max(0.0, min((task.at for task in self._tasks if task.begun), default=math.inf) - time.monotonic())

    def step(self, stored_base: Position, *, behind: bool = False) -> None:
        """Do the tasks that are due; `stored_base`: the base in the database. `behind`: more than one batch waits."""
        for task in self._tasks:
            began = time.monotonic()
            if began >= task.at and not (behind and task.waits):
                task.begun = self._done(task, stored_base)
                now = time.monotonic()
                task.at = now + (pause_after(now - began) if task.begun else task.every)

    def go_on(self, stored_base: Position) -> bool:
        """Do a portion of each task that was begun; return whether there is more to do."""
        for task in self._tasks:
            task.begun = task.begun and self._done(task, stored_base)
        return any(task.begun for task in self._tasks)

    def _done(self, task: Task, stored_base: Position) -> bool:
        """Do a task; return whether there is more to do. When a task is refused, messages are sent all the same."""
        try:
            return task.do(stored_base)
        except LeaseLostError:
            raise
        except Exception as error:
            # A lost connection is noticed by the next read.
            if not self._database.transient(error):
                self._teller.tell(UpkeepRefused, what=task.name, error=in_one_line(error, self._database.commands)[0])
            return False
