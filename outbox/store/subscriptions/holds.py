"""Holds: until when a reader outside of the database holds retention back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.progress import ProgressLog


@dataclass(frozen=True, slots=True)
class Hold:
    """The time for which a reader holds retention back, from the last progress on. `released`: the time is over."""

    since: datetime
    until: datetime
    released: bool


def hold_of(channel: Channel, subscription: Subscription) -> Hold | None:
    """Return until when a reader holds retention back, by the database's clock; None: it is no such reader."""
    if subscription.hold is None:
        return None
    settled = ProgressLog(channel).newest(subscription.partition(0))
    since = subscription.created_at if settled is None else settled.settled_at
    until = since + subscription.hold
    return Hold(since, until, released=until <= channel.now())
