"""Commands of a person that hold the lease of a subscription for a short time and handle no message."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from shlex import quote

from outbox.admin.borrowing import LENGTH, WAIT, WorkerAliveError, borrowed, changing
from outbox.errors import LeaseLostError, SubscriptionError
from outbox.model.subscription import Subscription, compensation_of
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.refusals import taken_topics
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.parked import MOST_REQUESTS, carry_out
from outbox.worker.settle import Settlement


def carry_out_without_worker(channel: Channel, name: str) -> str | None:
    """Carry out the requests on dead letters of a subscription; if a worker is alive and will, return its name."""
    identity.verify(channel)
    incarnation = Log().now(channel).incarnation
    try:
        subscription = Subscriptions(channel).get(name)
        with borrowed(channel, [subscription]) as leases:
            for lease in leases:
                parked = Parked(channel, name, lease.partition, ordered=subscription.ordered)
                settlement = Settlement(channel, lease, incarnation)
                while requests := parked.requests(MOST_REQUESTS):
                    carry_out(requests, parked, settlement)
                    if not all(Leases(channel).renew(each, LENGTH) for each in leases):
                        raise LeaseLostError(f"{name}: a worker took the lease; it carries out the rest")
    except WorkerAliveError as error:
        return error.holder.owner
    return None


def alter(
    channel: Channel, changed: Subscription, *, before: Subscription | None = None, wait: timedelta = WAIT
) -> Subscription:
    """Store another selection, destination, policy or grace; return the subscription. The compensation follows.

    Workers go on: the worker with the lease finishes its calls, settles, and gives the lease back during the change. So
    no message is lost, sent twice or overtaken. A worker with another declaration ends from then on.

    `on_dead="continue"` also frees the messages that dead letters hold back by now. They are sent in the order of their
    key, before later ones, and the dead letters stay dead letters. `on_dead="block"` counts from the next dead letter
    on: messages have passed the earlier ones already.

    `before`: as the caller has read the subscription; None: as stored now. Only differences are stored, so that two
    commands at once do not undo each other. `wait`: for how long a worker is asked for the lease; 0: not at all.

    Raises:
        SubscriptionError: a compensation has the selection and the destination of its subscription; a check-back may
            change only grace and policy; another route of the relay has a topic; or topics or direct writers have
            changed meanwhile.
        WorkerAliveError: a worker holds the lease, and did not give it back in time; nothing was stored.
        LeaseLostError: a worker took the lease meanwhile; nothing was stored.
    """
    stored = before or Subscriptions(channel).get(changed.name)
    if changed.direct is not None and replace(stored, grace=changed.grace) != changed:
        raise SubscriptionError(f"{changed.name} follows {changed.direct}; alter that one")
    if changed.kind == "extract":
        raise SubscriptionError(
            f"{changed.name} is an extract, which has the topics of its archive; for another hold run it with other"
            f" options: outbox extract {quote(changed.destination or '')} --register {quote(changed.name)} --hold 30d"
        )
    if changed.kind == "check" and replace(stored, grace=changed.grace, on_dead=changed.on_dead) != changed:
        raise SubscriptionError(f"{changed.name} reads the transactions of its producer group; alter its grace only")
    follower = Subscriptions(channel).find(compensation_of(changed.name))
    both = [each for each in (changed, follower) if each is not None]
    with changing(channel, both, wait=wait):
        now = Subscriptions(channel).get(changed.name)
        if changed.topics not in (stored.topics, now.topics):
            _require_own_topics(channel, now, stored, changed)
        altered = _merged(now, stored, changed)
        Subscriptions(channel).alter(altered)
        follower = _follower_again(channel, changed.name, follower)
        if follower is not None:
            Subscriptions(channel).alter(replace(follower, destination=altered.destination))
        if altered.on_dead == "continue":
            Parked(channel, changed.name).unblock_dead()
    return altered


def _follower_again(channel: Channel, name: str, before: Subscription | None) -> Subscription | None:
    """Return the compensation as stored now. Refuse a new one of a direct writer: the lease is not held."""
    follower = Subscriptions(channel).find(compensation_of(name))
    if (follower is None) != (before is None):
        raise SubscriptionError(f"direct writers of {name} began or were dropped meanwhile; try again")
    return follower


def _require_own_topics(channel: Channel, now: Subscription, stored: Subscription, changed: Subscription) -> None:
    """Refuse to take back the topics of a split, from whenever `stored` was read."""
    if now.topics != stored.topics:
        raise SubscriptionError(f"the topics of {now.name} were altered meanwhile; try again")
    if taken := taken_topics(now, changed.topics, Subscriptions(channel).all()):
        raise SubscriptionError(f"the topics of {now.name} stay as they are: {taken}")


def _merged(now: Subscription, stored: Subscription, changed: Subscription) -> Subscription:
    """Return `now` with the differences between `stored` and `changed`."""
    wanted = {name: getattr(changed, name) for name in ("topics", "destination", "on_dead", "grace")}
    return replace(now, **{name: value for name, value in wanted.items() if value != getattr(stored, name)})


def drop(channel: Channel, subscription: Subscription) -> None:
    """Delete a subscription and the compensation, with progress and parked messages, while no worker is at work.

    Raises:
        SubscriptionError: direct writers began meanwhile; nothing was dropped.
        WorkerAliveError: a worker or a command holds the lease.
        LeaseLostError: a worker took the lease meanwhile; nothing was dropped.
    """
    follower = Subscriptions(channel).find(compensation_of(subscription.name))
    doomed = [each for each in (follower, subscription) if each is not None]
    with changing(channel, doomed):
        _follower_again(channel, subscription.name, follower)
        for each in doomed:
            Subscriptions(channel).drop(each.name)
