"""A message of the log beside the positions of subscriptions: which has passed the message, and when."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog, Settled

#: By primary key, and without the body.
_ONE = f"""
    SELECT {COLUMNS.format(body="NULL")}, {{number}}, slot FROM {{message}} WHERE id = :id AND topic <> :half
"""


@dataclass(frozen=True, slots=True)
class Logged:
    """A message of the log without its body. `number`: by which positions tell what is settled."""

    message: Message
    number: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """The position of a subscription beside a message.

    Attributes:
        passed: the position sees the message.
        at: the settle since when, as far as settles are kept; None: not passed, or not known.
        at_is_latest: the message may have been passed earlier.
        at_begin: the subscription began behind the message.
        after_end: a backfill ends before the message.
        worker: of the partition of an unread message.
    """

    passed: bool
    at: datetime | None = None
    at_is_latest: bool = False
    at_begin: bool = False
    after_end: bool = False
    worker: str | None = None


def logged(channel: Channel, id: int) -> Logged | None:
    """Return a message of the log; None: there is none under this id now, or a half message."""
    rows = channel.rows(_ONE, id=id, half=HALF_TOPIC)
    (message,) = channel.database.dialect.reads.messages([row[:11] for row in rows]) or (None,)
    return None if message is None else Logged(message, int(rows[0][11]), rows[0][12])


def passing(channel: Channel, subscription: Subscription, found: Logged) -> Passing:
    """Return whether a subscription has passed a message, and since when."""
    partition = subscription.partition(found.slot % subscription.partitions)
    stored, id = ProgressLog(channel), found.message.id
    assert id is not None, "a stored message has its id"

    def passes(settled: Settled) -> bool:
        return settled.progress.passes(found.number, id)

    newest = stored.newest(partition)
    if newest is None or not passes(newest):
        stop = subscription.stop_at if subscription.kind == "backfill" else None
        holder = Leases(channel).look(partition)
        return Passing(
            passed=False,
            after_end=stop is not None and not stop.sees(found.number),
            worker=holder.owner if holder is not None and holder.live else None,
        )
    if subscription.kind == "extract":
        # The position of an archive that was restored from a backup went back.
        return Passing(passed=True)
    first, before = stored.first(newest, partition, passes)
    begins = (first.epoch, first.n) == (0, 0) and (subscription.generation == 1 or subscription.kind == "backfill")
    return Passing(passed=True, at=first.settled_at, at_is_latest=before is None, at_begin=begins)
