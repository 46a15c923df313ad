"""The lag of messages: from when they could be sent until now, by the clock of the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from outbox.model.message import Message
from outbox.runtime.clock import clock as monotonic


class Lag:
    """Measures lags by the clock of one database, as of the last batch; before the first batch, by the own clock."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        #: The time of the database when the clock was 0.
        self._zero = datetime.now(UTC) - timedelta(seconds=clock())

    def read(self, now: datetime) -> None:
        """Note the time of the database."""
        self._zero = now - timedelta(seconds=self._clock())

    def of(self, messages: Sequence[Message]) -> float | None:
        """Return the lag in seconds of the first or the last message, the greater one; None if not known."""
        written = [each for each in (_since(messages[0]), _since(messages[-1])) if each is not None]
        if not written:
            return None
        return (self._zero + timedelta(seconds=self._clock()) - min(written)).total_seconds()


def _since(message: Message) -> datetime | None:
    """Return the moment from which a message could be sent."""
    created = message.created_at
    return created if created is None or message.deliver_at is None else max(created, message.deliver_at)
