"""Changing the number of partitions of a subscription, while its workers go on."""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.admin.borrowing import WAIT, borrowed, changing
from outbox.errors import SubscriptionError
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.refusals import require_partitions
from outbox.store.subscriptions.subscriptions import Subscriptions

_LOOK_SECONDS = 0.2
#: Workers take leases that were given back within this time.
_IDLE_SECONDS = 3.0


def repartition(channel: Channel, name: str, partitions: int, *, wait: timedelta = WAIT) -> Subscription:
    """Give a subscription another number of partitions; return the subscription as it is stored afterwards.

    Workers finish their calls, settle, and give their leases back. Where all partitions stand at the same progress, as
    one partition always does, the new ones begin there. Otherwise the workers handle each partition up to the position
    to which the first one has come, and no further; when all have met there, the new ones begin. Until then the
    returned subscription has `next_partitions`. The change then needs this command no longer: the workers carry it
    out.

    The number that the subscription has takes back a change that is under way.

    Args:
        channel: to the database of the outbox.
        name: of a relay.
        partitions: how many it shall have, at most as many as there are slots.
        wait: for how long workers are asked for their leases, and then waited for until all partitions have met.

    Raises:
        SubscriptionError: it is no relay; or the number is out of range.
        WorkerAliveError: a worker holds a lease, and did not give it back in time; nothing was changed.
        LeaseLostError: a worker took a lease meanwhile; nothing was changed.
        SubscriptionError: a worker has taken the change back, because one of its calls hangs.
    """
    subscriptions = Subscriptions(channel)
    stored = subscriptions.get(name)
    require_partitions(stored.name, stored.kind, partitions, channel.database.slots)
    if partitions == stored.partitions and stored.next_partitions is None:
        return stored
    incarnation = Log().now(channel).incarnation
    with borrowed(channel, [stored], wait=wait) as leases:
        crash_point("command.before_alter")
        with changing(channel, leases, incarnation):
            subscriptions.repartition(name, partitions)
        crash_point("command.after_alter")
    found = _met(channel, name, wait)
    if found.next_partitions is None and found.partitions != partitions:
        raise SubscriptionError(
            f"{name} keeps its {counted(found.partitions, 'partition')}, because a call of a relay hangs, and its lease"
            " cannot be given back meanwhile; order the change again when the destination answers"
        )
    return found


def _met(channel: Channel, name: str, wait: timedelta) -> Subscription:
    """Wait until the partitions have met, or nobody works; return the subscription as it is then."""
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
