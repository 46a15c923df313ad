"""Leases in the hands of a command: asked for, borrowed during a change, and given back."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

from outbox.errors import LeaseLostError, SubscriptionError
from outbox.model.lease import COMMAND, Holder, Lease, Partition
from outbox.model.position import Position
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import BID_SECONDS, Leases, LeaseWatch
from outbox.store.subscriptions.subscriptions import Subscriptions

lease_logger = logging.getLogger("outbox.lease")

#: Long enough for one short transaction on a busy database; renewed before each.
LENGTH = timedelta(seconds=30)
NO_WAIT = timedelta(0)
#: For so long a command asks a worker for its lease, unless it is told otherwise. The worker notices it with its next
#: renewal, and finishes its calls.
WAIT = timedelta(seconds=30)

_LOOK_SECONDS = 0.2
_ASK_SECONDS = BID_SECONDS / 5


class LeaseHeldError(SubscriptionError):
    """Raised when a worker holds the lease, or another command; `holder` says until when.

    `waited`: for how long the command has asked for the lease.
    """

    def __init__(self, subscription: str, holder: Holder, waited: timedelta = NO_WAIT) -> None:
        until = "" if holder.lease_until is None else f" until {holder.lease_until:%H:%M:%S} UTC"
        held = f"holds the lease of {subscription}{until}"
        if waited:
            held += f", and has not given it back within {waited.total_seconds():g} s"
        if holder.is_command:
            super().__init__(f"another command ({holder.owner}) {held}; try again when that command has ended")
        else:
            if waited:
                held += f" ({holder.notice})" if holder.notice else ""
                held += ": a call of its handler takes longer or hangs, or it has died, or is of an earlier version"
            super().__init__(f"worker {holder.owner} {held}; stop it first")
        self.holder = holder


@contextmanager
def borrowed(
    channel: Channel, subscriptions: Sequence[Subscription], *, wait: timedelta = NO_WAIT
) -> Iterator[list[Lease]]:
    """Take the leases of all partitions of some subscriptions; give them back at the end.

    A worker is asked for its lease: the worker finishes its calls, settles, and gives the lease back. An expired lease
    that was not given back belongs to a dead worker, or to a healthy worker after a step of the database's clock. So
    the lease is watched for its whole length, whatever `wait` is, and taken without a renewal.

    Args:
        channel: a connection without another use meanwhile.
        subscriptions: whose leases are taken.
        wait: for how long workers are asked; 0: not at all.

    Raises:
        LeaseHeldError: a worker still holds a lease, or, where no worker does, another command.
        SubscriptionError: a lease is not there, because another command has changed the partitions meanwhile.
    """
    borrowing = _Borrowing(channel, subscriptions)
    try:
        try:
            borrowing.take(wait)
        finally:
            borrowing.take_back_bids()
        yield borrowing.leases
    finally:
        borrowing.give_back()


@contextmanager
def changing(
    channel: Channel, subscriptions: Sequence[Subscription], *, wait: timedelta = NO_WAIT
) -> Iterator[Position]:
    """Borrow leases as `borrowed` does, and begin a transaction in which subscriptions and leases are ours alone.

    Yields the position of a moment when no worker had a lease any more.

    Raises:
        LeaseLostError: a worker has a lease, or the server was restarted; nothing was changed.
    """
    incarnation = Log().now(channel).incarnation
    with borrowed(channel, subscriptions, wait=wait) as leases:
        crash_point("command.before_alter")
        # Captured before the transaction, because a transaction that locks leases cannot capture.
        now = Log().now(channel).position
        with Subscriptions(channel).changing():
            for lease in leases:
                if not Leases(channel).hold(lease, incarnation):
                    lost = "a worker took the lease meanwhile, or the server was restarted; nothing was changed"
                    raise LeaseLostError(f"{lease.partition.subscription}: {lost}")
            yield now
        crash_point("command.after_alter")


class _Borrowing:
    """The leases of one command."""

    def __init__(self, channel: Channel, subscriptions: Sequence[Subscription]) -> None:
        self._database = channel.database
        self._leases = Leases(channel)
        self._command = f"{COMMAND}{secrets.token_hex(4)}"
        wanted = [partition for each in subscriptions for partition in each.all_partitions()]
        self._watches = {partition: LeaseWatch(LENGTH) for partition in wanted}
        self._taken: dict[Partition, Lease] = {}
        self._said: set[str] = set()
        self._asked = False

    @property
    def leases(self) -> list[Lease]:
        """The leases, in the order of the subscriptions and of their partitions."""
        return [self._taken[each] for each in self._watches]

    def take(self, wait: timedelta) -> None:
        """Take all leases; ask workers for theirs, again and again, until `wait` is over."""
        until, ask_at = clock() + wait.total_seconds(), 0.0
        while missing := self._try_each():
            alive = [each for each in missing if each[1].live]
            if alive and clock() >= until:
                # The error names a worker, if a worker holds one of the leases.
                raise LeaseHeldError(*min(alive, key=lambda each: each[1].is_command), wait)
            self._say_what_is_watched(missing)
            if clock() >= ask_at:
                self._keep()
                if clock() < until:
                    self._ask()
                ask_at = clock() + _ASK_SECONDS
            time.sleep(_LOOK_SECONDS)

    def _try_each(self) -> list[tuple[str, Holder]]:
        """Take the free leases; return name and holder of all others."""
        missing: list[tuple[str, Holder]] = []
        for partition, watch in self._watches.items():
            if partition in self._taken:
                continue
            holder = self._leases.look(partition)
            if holder is None:
                changed = f"the partitions of {partition.subscription} were changed meanwhile, or it was dropped"
                doctor = self._database.commands.line("doctor")
                raise SubscriptionError(f"{changed}; try again, and if that does not help run: {doctor}")
            lease = self._leases.acquire(partition, self._command, LENGTH, watch.look(holder))
            if lease is None:
                missing.append((partition.subscription, holder))
            else:
                self._taken[partition] = lease
        return missing

    def _say_what_is_watched(self, missing: Sequence[tuple[str, Holder]]) -> None:
        """Log once for each expired lease for how long it is watched."""
        for name, holder in missing:
            if not holder.live and name not in self._said:
                self._said.add(name)
                lease_logger.info(
                    "%s: the lease of worker %s has run out and was not given back; it is taken when nobody has renewed"
                    " it for %g s",
                    name,
                    holder.owner,
                    (holder.length or LENGTH).total_seconds(),
                )

    def _keep(self) -> None:
        """Renew the taken leases, while others are waited for."""
        for partition, lease in list(self._taken.items()):
            if not self._leases.renew(lease, LENGTH):
                del self._taken[partition]

    def _ask(self) -> None:
        """Ask for the missing leases."""
        self._asked = True
        for partition in self._watches:
            if partition not in self._taken:
                self._leases.ask(partition, self._command)
        crash_point("command.after_ask")

    def take_back_bids(self) -> None:
        """Want no lease any longer: the taken ones are ours, and the rest is not waited for."""
        if self._asked:
            for partition in self._watches:
                with suppress(Exception):
                    self._leases.take_back(partition, self._command)

    def give_back(self) -> None:
        """Give back all leases; on a new connection if the command has lost its own, or workers would wait for long."""
        try:
            for lease in self._taken.values():
                self._leases.release(lease)
        except Exception:
            with suppress(Exception), closing(self._database.open()) as channel:
                for lease in self._taken.values():
                    Leases(channel).release(lease)
