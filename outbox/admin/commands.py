"""Commands of a person that need the lease of a subscription: they hold it for a short time and handle no message."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

from outbox.errors import LeaseLostError, SubscriptionError
from outbox.model.lease import Holder, Lease, Partition
from outbox.model.subscription import Subscription, compensation_of
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.parked import carry_out_requests
from outbox.worker.settle import Settlement

#: Long enough for one short transaction on a busy database; renewed before each.
_LENGTH = timedelta(seconds=30)


class WorkerAliveError(SubscriptionError):
    """Raised when a worker holds the lease; `holder` says which, and until when."""

    def __init__(self, subscription: str, holder: Holder) -> None:
        until = "" if holder.lease_until is None else f" until {holder.lease_until:%H:%M:%S} UTC"
        super().__init__(f"worker {holder.owner} holds the lease of {subscription}{until}; stop it first")
        self.holder = holder


def carry_out_without_worker(channel: Channel, subscription: Subscription) -> int:
    """Carry out the requests on dead letters, in place of a worker; return how many.

    Raises:
        WorkerAliveError: a worker holds the lease, and will carry out the requests.
    """
    identity.verify(channel)
    incarnation = Log().now(channel).incarnation
    parked = Parked(channel, subscription.name)
    granted = 0
    with borrowed(channel, subscription) as lease:
        settlement = Settlement(channel, lease, incarnation)
        while done := carry_out_requests(parked, settlement):
            granted += len(done)
            if not Leases(channel).renew(lease, _LENGTH):
                raise LeaseLostError(f"{subscription.name}: a worker took the lease; it carries out the rest")
    return granted


def alter(channel: Channel, changed: Subscription) -> None:
    """Store another selection, destination, policy or grace while no worker is at work; its compensation follows.

    `on_dead="continue"` also frees the messages that dead letters hold back by now. They are sent in the order of their
    key, before later ones, and the dead letters stay dead letters. `on_dead="block"` counts from the next dead letter
    on: earlier ones hold nothing back, because messages of their keys have passed them already.

    Raises:
        SubscriptionError: it is a compensation, which has the selection and the destination of its subscription; or
            it checks back on transactions, and more than its grace or its policy would change.
        WorkerAliveError: somebody holds the lease.
        LeaseLostError: a worker took the lease meanwhile; nothing was stored.
    """
    stored = Subscriptions(channel).get(changed.name)
    if changed.direct is not None and replace(stored, grace=changed.grace) != changed:
        raise SubscriptionError(f"{changed.name} follows {changed.direct}; alter that one")
    if changed.kind == "extract":
        raise SubscriptionError(
            f"{changed.name} is an extract, which has the topics of its archive; for another hold run it with other"
            f" options: outbox extract {changed.destination} --register {changed.name} --hold 30d"
        )
    if changed.kind == "check" and replace(stored, grace=changed.grace, on_dead=changed.on_dead) != changed:
        raise SubscriptionError(f"{changed.name} reads the transactions of its producer group; alter its grace only")
    follower = Subscriptions(channel).find(compensation_of(changed.name))
    incarnation = Log().now(channel).incarnation
    with ExitStack() as leases:
        lease = leases.enter_context(borrowed(channel, changed))
        if follower is not None:
            leases.enter_context(borrowed(channel, follower))
        with Settlement(channel, lease, incarnation).held():
            Subscriptions(channel).alter(changed)
            if follower is not None:
                Subscriptions(channel).alter(replace(follower, destination=changed.destination))
            if changed.on_dead == "continue":
                Parked(channel, changed.name).unblock_dead()


def drop(channel: Channel, subscription: Subscription) -> None:
    """Delete a subscription and its compensation, with progress and parked messages, while no worker is at work.

    Raises:
        WorkerAliveError: somebody holds the lease.
    """
    follower = Subscriptions(channel).find(compensation_of(subscription.name))
    with ExitStack() as leases:
        doomed = [each for each in (follower, subscription) if each is not None]
        for each in doomed:
            leases.enter_context(borrowed(channel, each))
        for each in doomed:
            Subscriptions(channel).drop(each.name)


@contextmanager
def borrowed(channel: Channel, subscription: Subscription) -> Iterator[Lease]:
    """Take the lease of a subscription that no worker is at work on; give it back at the end.

    Raises:
        WorkerAliveError: a worker holds the lease.
        SubscriptionError: the subscription has no lease row.
    """
    leases = Leases(channel)
    partition = Partition(subscription.name, subscription.generation)
    lease = leases.acquire(partition, f"command-{secrets.token_hex(4)}", _LENGTH)
    if lease is None:
        holder = leases.look(partition)
        if holder is None:
            raise SubscriptionError(f"subscription {subscription.name!r} has no lease row; run: outbox db check")
        raise WorkerAliveError(subscription.name, holder)
    try:
        yield lease
    finally:
        with suppress(Exception):
            leases.release(lease)
