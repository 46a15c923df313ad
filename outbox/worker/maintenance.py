"""The maintenance by a lease holder: deletes rows that are not needed any more, a portion at a time."""

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
from outbox.worker.done_already import Finished
from outbox.worker.failure_log import FailureLog
from outbox.worker.settle import Settlement

_PROGRESS_SECONDS = 600.0
_EXPIRED_SECONDS = 600.0
_ACKS_SECONDS = 10.0
#: After a portion when there is more to delete, so that messages are handled between the portions.
_AGAIN_SECONDS = 0.1


@dataclass(slots=True)
class _Chore:
    """A task: done at `at`, then `every` so many seconds, or soon again when `do` returns that there is more."""

    name: str
    every: float
    at: float
    do: Callable[[Position], bool]


class Maintenance:
    """Runs the chores of one lease. A step in which nothing is due costs little."""

    def __init__(
        self,
        database: Database,
        channel: Channel,
        lease: Lease,
        settlement: Settlement,
        finished: Finished | None,
        failure_log: FailureLog | None = None,
    ) -> None:
        """`finished`: knows which messages of the subscription are done already; None: nobody else does them."""
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
        """Do the chores that are due; `stored_base` is the base that the database has."""
        now = time.monotonic()
        for chore in self._chores:
            if now >= chore.at:
                more = self._done(chore, stored_base)
                chore.at = time.monotonic() + (_AGAIN_SECONDS if more else chore.every)

    def _done(self, chore: _Chore, stored_base: Position) -> bool:
        """Do a chore; return whether there is more of it. When it is refused, messages are sent all the same."""
        try:
            return chore.do(stored_base)
        except LeaseLostError:
            raise
        except Exception as error:
            # A lost connection is noticed by the next read.
            if self._failure_log is not None and not self._database.transient(error):
                self._failure_log.chore_refused(chore.name, error)
            return False
