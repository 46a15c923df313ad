"""Live workers, which share the partitions of a subscription. Each writes its row again and again."""

from __future__ import annotations

from datetime import timedelta

from outbox.store.database import Channel

#: Rows of workers that were not seen for so many seconds are deleted.
_KEPT_SECONDS = 3_600.0

_SEEN = "UPDATE {worker} SET seen_at = {now} WHERE subscription = :subscription AND id = :id"
_NEW = """
    {insert_once} {worker} (subscription, id, seen_at) VALUES (:subscription, :id, {now}) {unless_there}
"""
#: Not those that were seen later than now either: the clock of the database has stepped back since.
_LIVE = """
    SELECT id FROM {worker} WHERE subscription = :subscription AND seen_at > {earlier} AND seen_at < {later}
"""
_GONE = "DELETE FROM {worker} WHERE subscription = :subscription AND id = :id"
_PRUNE = "DELETE FROM {worker} WHERE subscription = :subscription AND seen_at < {later}"


class LiveWorkers:
    """The live workers of one subscription."""

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription
        earlier = channel.database.later("-:seconds")
        self._live = channel.database.sql(_LIVE, earlier=earlier)

    def seen(self, worker: str) -> None:
        """Note that a worker is alive."""
        if not self._channel.run(_SEEN, subscription=self._subscription, id=worker):
            self._channel.run(_NEW, subscription=self._subscription, id=worker)

    def gone(self, worker: str) -> None:
        """Note that a worker has stopped."""
        self._channel.run(_GONE, subscription=self._subscription, id=worker)

    def live(self, within: timedelta) -> set[str]:
        """Return the workers that were seen within this time."""
        rows = self._channel.rows(self._live, subscription=self._subscription, seconds=within.total_seconds())
        return {worker for (worker,) in rows}

    def prune(self) -> None:
        """Delete the rows of workers that ended long ago."""
        self._channel.run(_PRUNE, subscription=self._subscription, seconds=-_KEPT_SECONDS)
