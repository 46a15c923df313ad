"""Chores of a lease holder: what has had its day is deleted, a portion at a time, beside the work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outbox.position import Position
from outbox.store import dedup, inbox
from outbox.store.ack import Acks
from outbox.store.database import Database
from outbox.store.dialect import Channel
from outbox.store.lease import Lease
from outbox.worker.settlement import Settlement

_PROGRESS_SECONDS = 600.0
_EXPIRED_SECONDS = 600.0
_ACKS_SECONDS = 10.0
#: A short while, so that a long list does not come between the messages.
_AGAIN_SECONDS = 0.1


@dataclass(slots=True)
class _Chore:
    """Done every so many seconds from `at` on, and soon again when it says that there is more."""

    every: float
    at: float
    do: Callable[[Position], bool]


class Chores:
    """Of one tenure. Cheap to be asked for when nothing is due."""

    def __init__(
        self, database: Database, channel: Channel, lease: Lease, settlement: Settlement, acks: Acks | None
    ) -> None:
        """`acks`: of the direct writers that this subscription follows, if it is a compensation."""
        now = time.monotonic()

        def settled(_base: Position) -> bool:
            settlement.prune()
            return False

        def expired(_base: Position) -> bool:
            handled, deduplicated = inbox.prune(database, channel), dedup.prune(database, channel)
            return handled >= inbox.PRUNED_AT_ONCE or deduplicated >= dedup.PRUNED_AT_ONCE

        self._chores = [
            _Chore(_PROGRESS_SECONDS, now + _PROGRESS_SECONDS, settled),
            _Chore(_EXPIRED_SECONDS, now + _EXPIRED_SECONDS, expired),
        ]
        if acks is not None:
            self._chores.append(_Chore(_ACKS_SECONDS, now, lambda base: acks.prune(channel, lease, base)))

    def step(self, stored_base: Position) -> None:
        """Do what is due; `stored_base` is as it stands in the database."""
        now = time.monotonic()
        for chore in self._chores:
            if now >= chore.at:
                more = chore.do(stored_base)
                chore.at = time.monotonic() + (_AGAIN_SECONDS if more else chore.every)
