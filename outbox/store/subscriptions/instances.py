"""Instances of broadcast consumers: each has a subscription, which goes when the instance has not come for long."""

from __future__ import annotations

from outbox.store.database import Channel
from outbox.store.subscriptions.subscriptions import Subscriptions

#: An instance that was not seen for so many seconds is dropped: 7 days, as long as an inbox remembers messages.
_KEPT_SECONDS = 604_800.0

#: Instances of a consumer that were made, held a lease, and stored progress only longer ago. By the primary keys.
_GONE = """
    SELECT s.name FROM {subscription} AS s
    WHERE s.kind = 'broadcast' AND substr(s.name, 1, :length) = :prefix AND s.created_at < {later}
      AND NOT EXISTS (SELECT 1 FROM {lease} AS l WHERE l.subscription = s.name AND l.lease_until >= {later})
      AND NOT EXISTS (SELECT 1 FROM {progress} AS p WHERE p.subscription = s.name AND p.settled_at >= {later})
    ORDER BY s.name
"""


def drop_gone(channel: Channel, prefix: str) -> int:
    """Drop the unpaused instances, named `prefix` and more, that were not seen for 7 days; return their number."""
    looked = {"prefix": prefix, "length": len(prefix), "seconds": -_KEPT_SECONDS}
    if not channel.rows(_GONE, **looked):
        return 0
    subscriptions = Subscriptions(channel)
    with subscriptions.changing():
        # Looked again, because an instance may have come back before the lock was taken.
        gone = [name for (name,) in channel.rows(_GONE, **looked) if not subscriptions.get(name).is_paused]
        for name in gone:
            subscriptions.drop(name)
    return len(gone)
