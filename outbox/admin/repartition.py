"""Changing the number of partitions of a subscription, while its workers go on."""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.admin.borrowing import WAIT, changing
from outbox.errors import SubscriptionError
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.refusals import require_partitions
from outbox.store.subscriptions.subscriptions import Subscriptions

_LOOK_SECONDS = 0.2
#: Workers take leases that were given back within this time.
_IDLE_SECONDS = 3.0


def repartition(
    channel: Channel, name: str, partitions: int, *, wait: timedelta = WAIT, by: str | None = None
) -> Subscription:
    """Give a subscription another number of partitions; return the subscription as stored afterwards.

    Workers finish their calls, settle, and give their leases back. Where all partitions stand at the same progress, as
    a single partition always does, the new ones begin there. Otherwise the workers handle each partition up to the
    position of the first, and no further; when all have met there, the new ones begin. Until then the returned
    subscription has `next_partitions`, and the workers carry the change out without the command.

    The present number takes back a change under way. A worker takes the change back if a call hangs.

    `wait`: for how long workers are asked for their leases, and then waited for until all partitions have met.
    """
    subscriptions = Subscriptions(channel)
    stored = subscriptions.get(name)
    require_partitions(stored.name, stored.kind, partitions, channel.database.slots)
    if partitions == stored.partitions and stored.next_partitions is None:
        return stored
    with changing(channel, [stored], wait=wait):
        subscriptions.repartition(name, partitions)
        note(channel, "partitions", by=by, subscription=name, choice={"partitions": partitions})
    found = _met(channel, name, wait)
    if found.next_partitions is None and found.partitions != partitions:
        raise SubscriptionError(
            f"{name} has {counted(found.partitions, 'partition')}, and not {partitions}: (1) another command has"
            " changed the number meanwhile, or (2) a call of a relay hangs, which cannot give its lease back; to see"
            f" which, run: {channel.database.commands.line('status')}; then order the change again"
        )
    return found


def _met(channel: Channel, name: str, wait: timedelta) -> Subscription:
    """Wait until the partitions have met, or no worker works; return the subscription as stored then."""
    subscriptions, leases = Subscriptions(channel), Leases(channel)
    begun = seen = clock()
    while (stored := subscriptions.get(name)).next_partitions is not None:
        if subscriptions.begin_next_generation(name):
            continue
        now = clock()
        if any((holder := leases.look(each)) is not None and holder.live for each in stored.all_partitions()):
            seen = now
        if now - begun >= wait.total_seconds() or now - seen >= _IDLE_SECONDS:
            break
        time.sleep(_LOOK_SECONDS)
    return stored
