"""Commands of a person that hold the lease of a subscription for a short time and handle no message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tenacity.wait import wait_random

from outbox.admin.borrowing import LENGTH, NO_WAIT, WAIT, LeaseHeldError, borrowed, changing, lease_logger
from outbox.errors import LeaseLostError, SubscriptionError
from outbox.model.command import Commands
from outbox.model.lease import Partition
from outbox.model.parking import STATES
from outbox.model.retry import seconds_to_wait
from outbox.model.subscription import Start, Subscription, backfill_of
from outbox.runtime.clock import clock
from outbox.store import identity
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.refusals import taken_topics
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.decisions import OpenDecisions, log_carried_out
from outbox.worker.settle import Settlement

#: A decision waits so long for another command. A command that has died counts as alive until its lease has run out.
_PATIENCE = LENGTH + WAIT
#: Between two tries. At random, because two commands may have kept each other from their leases.
_PAUSE = wait_random(0.1, 0.3)


def carry_out_without_worker(channel: Channel, name: str, decide: Callable[[], int]) -> tuple[int, str | None]:
    """Write a decision on parked messages of a subscription, and carry it out; or leave that to a live worker.

    Without a worker the decision and the first messages are one transaction, so that an error changes nothing. The
    other messages follow in small transactions, which writers and other commands do not wait for. Return what `decide`
    returns, the number of messages, and the name of the worker. Another command that has the lease is waited for.

    Raises:
        LeaseHeldError: another command keeps the lease for a minute; nothing was decided.
    """
    identity.verify(channel)
    until, waits = clock() + _PATIENCE.total_seconds(), False
    while True:
        try:
            return _carry_out_here(channel, Subscriptions(channel).get(name), decide), None
        except LeaseHeldError as error:
            if not error.holder.is_command:
                with channel.transaction():
                    return decide(), error.holder.owner
            if clock() >= until:
                raise
            if not waits:
                lease_logger.info("%s: another command has the lease; waiting for its end", name)
                waits = True
        # The other command looks at no decision that is written from now on.
        time.sleep(seconds_to_wait(_PAUSE, 1))


def _carry_out_here(channel: Channel, subscription: Subscription, decide: Callable[[], int]) -> int:
    name, incarnation = subscription.name, Log().now(channel).incarnation
    with borrowed(channel, [subscription]) as leases:
        work = [(lease, _open_decisions(channel, subscription, lease.partition)) for lease in leases]
        with channel.transaction():
            if not all(Leases(channel).hold(lease, incarnation) for lease in leases):
                raise LeaseLostError(f"{name}: a worker took the lease meanwhile; nothing was done there")
            number = decide()
            first = [decisions.carry_out(decisions.open()) for _, decisions in work]
        for carried_out in first:
            log_carried_out(carried_out)
        for lease, decisions in work:
            settlement = Settlement(channel, lease, incarnation)
            while open := decisions.open():
                if not all(Leases(channel).renew(other, LENGTH) for other in leases):
                    raise LeaseLostError(f"{name}: a worker took the lease; it carries out the rest")
                with settlement.held():
                    carried_out = decisions.carry_out(open)
                log_carried_out(carried_out)
                if not carried_out:
                    break
    return number


def _open_decisions(channel: Channel, subscription: Subscription, partition: Partition) -> OpenDecisions:
    parked = Parked(channel, subscription.name, partition, ordered=subscription.ordered)
    blocks = subscription.ordered and subscription.on_dead != "continue"
    return OpenDecisions(channel, parked, partition, blocks=blocks)


def alter(
    channel: Channel,
    changed: Subscription,
    *,
    before: Subscription | None = None,
    wait: timedelta = WAIT,
    by: str | None = None,
) -> Subscription:
    """Store another selection, destination, policy or grace; return the subscription. Its backfill follows.

    Workers go on: the worker with the lease finishes its calls, settles, and gives the lease back during the change. So
    no message is lost, sent twice or overtaken. A worker with another declaration ends from then on.

    `on_dead="continue"` also frees the messages that dead letters hold back by now. They are sent in the order of their
    key, before later ones, and the dead letters stay dead letters. `on_dead="block"` counts from the next dead letter
    on: messages have passed the earlier ones already. The same goes for order: without it no failed message holds back
    others any more, and with it the next failed message does.

    `before`: as the caller has read the subscription; None: as stored now. Only differences are stored, so that two
    commands at once do not undo each other.
    """
    stored = before or Subscriptions(channel).get(changed.name)
    if changed.follows is not None:
        raise SubscriptionError(f"{changed.name} follows {changed.follows}; alter that one")
    if changed.kind == "extract":
        extract = _commands(channel).line(
            "extract", changed.destination or "", "--register", changed.name, "--hold", "30d"
        )
        raise SubscriptionError(
            f"{changed.name} is an extract, which has the topics of its archive; for another hold run it with other"
            f" options: {extract}"
        )
    if changed.kind in ("consumer", "broadcast") and changed.destination is not None:
        raise SubscriptionError(f"{changed.name} is a consumer, which has no destination; leave --to out")
    if changed.kind == "check" and replace(stored, grace=changed.grace, on_dead=changed.on_dead) != changed:
        raise SubscriptionError(f"{changed.name} reads the transactions of its producer group; alter its grace only")
    with _changing(channel, [stored], wait=wait) as backfills:
        now = Subscriptions(channel).get(changed.name)
        if changed.topics not in (stored.topics, now.topics):
            _require_own_topics(channel, now, stored, changed)
        altered = _merged(now, stored, changed)
        Subscriptions(channel).alter(altered)
        for each in backfills:
            Subscriptions(channel).alter(replace(each, destination=altered.destination))
        if altered.on_dead == "continue" or not altered.ordered:
            Parked(channel, changed.name).let_go(dead=altered.ordered)
        note(channel, "alter", by=by, subscription=altered.name, choice=_differences(now, altered))
    return altered


def _commands(channel: Channel) -> Commands:
    return channel.database.commands


@contextmanager
def _changing(
    channel: Channel, subscriptions: Sequence[Subscription], *, wait: timedelta = NO_WAIT
) -> Iterator[list[Subscription]]:
    """Do as `changing`, for subscriptions and their backfills; yield the backfills.

    Raises:
        SubscriptionError: a backfill was created or dropped meanwhile, so not all leases are held.
    """
    before = backfills_of(channel, subscriptions)
    with changing(channel, [*before, *subscriptions], wait=wait):
        backfills = backfills_of(channel, subscriptions)
        if [each.name for each in backfills] != [each.name for each in before]:
            names = ", ".join(each.name for each in subscriptions)
            raise SubscriptionError(f"a backfill of {names} began or ended meanwhile; try again")
        yield backfills


def backfills_of(channel: Channel, subscriptions: Sequence[Subscription]) -> list[Subscription]:
    """Return the backfills of these subscriptions, as far as there are any."""
    found = (Subscriptions(channel).find(backfill_of(each.name)) for each in subscriptions)
    return [each for each in found if each is not None]


def _require_own_topics(channel: Channel, now: Subscription, stored: Subscription, changed: Subscription) -> None:
    """Refuse to take back the topics of a split, from whenever `stored` was read."""
    if now.topics != stored.topics:
        raise SubscriptionError(f"the topics of {now.name} were altered meanwhile; try again")
    if taken := taken_topics(now, changed.topics, Subscriptions(channel).all(), _commands(channel)):
        raise SubscriptionError(f"the topics of {now.name} stay as they are: {taken}")


def _merged(now: Subscription, stored: Subscription, changed: Subscription) -> Subscription:
    """Return `now` with the differences between `stored` and `changed`."""
    return replace(now, **_differences(stored, changed))


_PROPERTIES = ("topics", "tags", "filter", "destination", "on_dead", "grace", "ordered", "compact")


def _differences(now: Subscription, changed: Subscription) -> dict[str, Any]:
    """Return the properties in which a subscription differs from `now`."""
    wanted = {name: getattr(changed, name) for name in _PROPERTIES}
    return {name: value for name, value in wanted.items() if value != getattr(now, name)}


def reset(
    channel: Channel, name: str, start: Start, *, wait: timedelta = NO_WAIT, by: str | None = None
) -> Mapping[str, int]:
    """Let a subscription begin again at `start`; return how many parked messages were deleted, by state.

    In a single transaction all partitions get the position, the parked messages go, and open decisions on these are
    closed. Workers go on from the position. A worker that was frozen or killed cannot settle the messages of before any
    more. An ordered number of partitions counts from then on.

    The inbox of a consumer stays, and the listener is not called again for remembered messages. A backfill goes on. Of
    a broadcast consumer all instances begin again.
    """
    meant = Subscriptions(channel).get_all(name)
    require_resettable(meant[0], _commands(channel))
    parked = Counter[str]()
    with changing(channel, meant, wait=wait) as now:
        progress = Subscriptions(channel).first_progress(start, now)
        for each in meant:
            parked.update(Subscriptions(channel).restart(each.name, progress))
        note(channel, "reset", by=by, subscription=name, choice={"start": start}, count=sum(parked.values()))
    return {state: parked[state] for state in STATES if parked[state]}


def require_resettable(subscription: Subscription, commands: Commands) -> None:
    """Refuse to let a subscription begin again that is a backfill, or follows the verdicts or an archive."""
    name = subscription.name
    why = {
        "backfill": "ends by itself; drop it, and begin another one",
        "check": "asks about transactions, and a verdict stands for ever; those that were given up are asked about"
        f" again by: {commands.line('half', 'resume', 'ID')}",
        "extract": "has the position of its archive; for an archive that begins again, run:"
        f" {commands.line('extract', 'PATH', '--register', 'NAME')}",
    }.get(subscription.kind)
    if why is not None:
        raise SubscriptionError(f"{name} {why}")


def drop(channel: Channel, name: str, *, by: str | None = None) -> list[str]:
    """Delete a subscription with progress and parked messages, while no worker is at work; return what was deleted.

    The backfill goes, too; of a broadcast consumer all instances go. A backfill alone may be deleted while its worker
    is at work: the worker is asked for the lease.
    """
    meant = Subscriptions(channel).get_all(name)
    with _changing(channel, meant, wait=WAIT if meant[0].kind == "backfill" else NO_WAIT) as backfills:
        dropped = [each.name for each in (*meant, *backfills)]
        for each in dropped:
            Subscriptions(channel).drop(each)
        note(channel, "drop", by=by, subscription=name, choice={"dropped": dropped})
    return dropped
