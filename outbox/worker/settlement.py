"""Settling: everything that a lease holder writes, in short transactions that its epoch fences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from outbox.errors import LeaseLostError
from outbox.faults import crash_point
from outbox.message import Message
from outbox.position import Progress
from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.lease import Lease, Leases
from outbox.store.parked import Aside, Parked
from outbox.store.progress import ProgressLog

Fates = list[tuple[Message, Aside]]


class Settlement:
    """The writes of one lease, on the server incarnation that it read from."""

    def __init__(self, database: Database, channel: Channel, lease: Lease, incarnation: str) -> None:
        self._channel = channel
        self._lease = lease
        self._incarnation = incarnation
        self._leases = Leases(database)
        self._progress = ProgressLog(database)
        self._parked = Parked(database, lease.partition.subscription)
        self._n = 0

    def settle(self, end: Progress, fates: Fates) -> None:
        """Park what was not done and append the progress; all or nothing.

        Raises:
            LeaseLostError: the partition has another owner, or the server was restarted; nothing was written.
        """
        crash_point("worker.before_settle")
        self._n += 1
        if fates:
            with self.held():
                self._parked.park(self._channel, by_fate(fates))
                crash_point("worker.after_park")
                self._append(end)
        else:
            self._append(end)
        crash_point("worker.after_settle")

    @contextmanager
    def held(self) -> Iterator[None]:
        """A transaction that nobody can take the lease away from."""
        with self._channel.transaction():
            if not self._leases.hold(self._channel, self._lease, self._incarnation):
                raise _lost(self._lease)
            yield

    def prune(self) -> None:
        """Delete progress that no longer counts."""
        self._progress.prune(self._channel, self._lease.partition)

    def _append(self, end: Progress) -> None:
        # One statement locks the lease row, checks epoch and incarnation, and writes.
        if not self._progress.settle(self._channel, self._lease, self._n, end, self._incarnation):
            raise _lost(self._lease)


def by_fate(fates: Iterable[tuple[Message, Aside]]) -> dict[Aside, list[int]]:
    """Messages with the same fate together: one statement each."""
    grouped: dict[Aside, list[int]] = defaultdict(list)
    for message, fate in fates:
        grouped[fate].append(message.id or 0)
    return grouped


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"{lease.partition.subscription}: another worker owns it now, or the server was restarted; nothing was settled"
    )
