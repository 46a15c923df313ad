"""What a lease holder keeps in order: rows that are not needed any more are deleted, a portion at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.model.position import Position
from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel
from outbox.store.idempotency import dedup, inbox
from outbox.worker.failure_log import FailureLog
from outbox.worker.finished import Finished
from outbox.worker.settle import Settlement

_PROGRESS_SECONDS = 600.0
_EXPIRED_SECONDS = 600.0
_ACKS_SECONDS = 10.0
#: A short while, so that a long list does not come between the messages.
_AGAIN_SECONDS = 0.1


@dataclass(slots=True)
class _Chore:
    """Done every so many seconds from `at` on, and soon again when it says that there is more."""

    name: str
    every: float
    at: float
    do: Callable[[Position], bool]


class Maintenance:
    """Works as long as one lease. A step in which nothing is due costs little."""

    def __init__(
        self,
        database: Database,
        channel: Channel,
        lease: Lease,
        settlement: Settlement,
        finished: Finished | None,
        failure_log: FailureLog | None = None,
    ) -> None:
        """`finished`: knows what of the subscription's messages is done already, if anybody does."""
        now = time.monotonic()
        self._database = database
        self._failure_log = failure_log

        def settled(_base: Position) -> bool:
            settlement.prune()
            return False

        def expired(_base: Position) -> bool:
            handled, deduplicated = inbox.prune(database, channel), dedup.prune(database, channel)
            return handled >= inbox.PRUNED_AT_ONCE or deduplicated >= dedup.PRUNED_AT_ONCE

        self._chores = [
            _Chore("old progress", _PROGRESS_SECONDS, now + _PROGRESS_SECONDS, settled),
            _Chore("expired rows of inbox and dedup", _EXPIRED_SECONDS, now + _EXPIRED_SECONDS, expired),
        ]
        if finished is not None:
            self._chores.append(
                _Chore("what is done already", _ACKS_SECONDS, now, lambda base: finished.prune(channel, lease, base))
            )

    def step(self, stored_base: Position) -> None:
        """Do what is due; `stored_base` is as it stands in the database."""
        now = time.monotonic()
        for chore in self._chores:
            if now >= chore.at:
                more = self._done(chore, stored_base)
                chore.at = time.monotonic() + (_AGAIN_SECONDS if more else chore.every)

    def _done(self, chore: _Chore, stored_base: Position) -> bool:
        """Do a chore; return whether there is more of it. One that is refused is no reason to send nothing."""
        try:
            return chore.do(stored_base)
        except LeaseLostError:
            raise
        except Exception as error:
            # A connection that is lost shows in the next read.
            if self._failure_log is not None and not self._database.transient(error):
                self._failure_log.chore_refused(chore.name, error)
            return False
