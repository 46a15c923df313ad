"""Settling: all writes of a lease holder, in short transactions that fail when its epoch is no longer the newest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from outbox.errors import LeaseLostError
from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.model.position import Progress
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.idempotency.withdrawals import Recalled, Withdrawals
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.worker.policy import with_one_head

Parkings = list[tuple[Message, Parking]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedChanges:
    """The changes of parked messages that a settle makes, by log id.

    `keys`: of what goes or changes; behind it another message may be the first.
    """

    parked: Sequence[tuple[int, Parking]] = ()
    removed: Sequence[int] = ()
    changed: Sequence[tuple[int, Parking]] = ()
    keys: Collection[str] = ()

    @property
    def alone(self) -> ParkedChanges:
        """The same changes of messages that hold no key: somebody else may have given a key another head meanwhile."""
        return replace(self, parked=_alone(self.parked), changed=_alone(self.changed))


class Decided(Protocol):
    """The decisions of people on messages of the log."""

    def meet(self, messages: Sequence[Message]) -> None:
        """Carry out decisions on messages that are parked now, in the open transaction."""


class Unsettled:
    """The changes that could not be written after messages were handled, over all leases of a worker.

    Reads may still work where writes fail: on a full disk, or without a privilege. A forgetful worker would send the
    same batch again with each new connection.
    """

    def __init__(self) -> None:
        self.changes: ParkedChanges | None = None
        self._error: Exception | None = None

    def __bool__(self) -> bool:
        return self.changes is not None

    def explains(self, error: Exception) -> bool:
        """Return whether an error is why the changes could not be written."""
        return error is self._error

    @contextmanager
    def unless_written(self, changes: ParkedChanges) -> Iterator[None]:
        """Remember changes that cannot be written; not after a lost lease, because another worker takes over."""
        self.changes = changes
        try:
            yield
        except LeaseLostError:
            self.changes = self._error = None
            raise
        except Exception as error:
            self._error = error
            raise
        self.changes = self._error = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Remember the error if the changes still cannot be written; the changes stay remembered in any case."""
        try:
            yield
        except Exception as error:
            self._error = error
            raise


class Settlement:
    """The writes of one lease, on the server incarnation of its reads."""

    def __init__(
        self,
        channel: Channel,
        lease: Lease,
        incarnation: str,
        unsettled: Unsettled | None = None,
        *,
        parked: Parked | None = None,
        decisions: Decided | None = None,
    ) -> None:
        """`parked`: with the rules of the subscription; None: keys have an order, and every message counts.
        `decisions`: of people, also on messages that are only met now; None: there are none.
        """
        self._unsettled = Unsettled() if unsettled is None else unsettled
        self._channel = channel
        self._check_now = channel.database.dialect.locks.check_now
        self.lease = lease
        self._incarnation = incarnation
        self._leases = Leases(channel)
        self._progress = ProgressLog(channel)
        self._parked = parked or Parked(channel, lease.partition.subscription)
        self._falling_due = FallingDue(channel, lease.partition.subscription, lease.partition)
        self._withdrawals = Withdrawals(channel)
        self._decisions = decisions
        self._n = 0
        #: No message with a higher id was read. None: not known, and each settle looks at the end of the log.
        self.highest: int | None = None

    @property
    def unsettled(self) -> bool:
        """True while changes of an earlier settle could not be written."""
        return bool(self._unsettled)

    @property
    def only_begun(self) -> bool:
        """True when nothing was settled but the beginning."""
        return self._n == 1

    def settle(self, end: Progress, parkings: Parkings) -> None:
        """Park messages and append the progress; all or nothing. Decisions on these messages are carried out.

        Raises:
            LeaseLostError: the partition has another owner, or the server was restarted; nothing was written.
            DatabaseError: ids were given out again since the last settle; nothing was written.
        """
        crash_point("worker.before_settle")
        heads = with_one_head(sorted(parkings, key=lambda each: each[0].id or 0))
        changes = ParkedChanges(parked=by_id(heads), keys=_keys(parkings))
        with self._unsettled.unless_written(changes):
            if parkings:
                with self.held():
                    self._write(changes)
                    if self._decisions is not None:
                        self._decisions.meet([message for message, _ in parkings])
                    crash_point("worker.after_park")
                    self._append(end)
            else:
                self._append(end)
        crash_point("worker.after_settle")

    def settle_parked(self, done: Mapping[int, str | None], parkings: Parkings) -> None:
        """Remove parked messages that are done, by log id with their keys, and give others their new parking.

        Errors as in `settle`.
        """
        keys = {key for key in done.values() if key is not None} | _keys(parkings)
        changes = ParkedChanges(removed=list(done), changed=by_id(parkings), keys=keys)
        with self._unsettled.unless_written(changes), self.held():
            self._write(changes)

    def let_fall_due(self, most: int) -> set[str]:
        """Let at most so many delayed messages that are due join the units of their keys; return the keys."""
        due = self._falling_due.due(most)
        keys = {*due.values()}
        if due:
            with self.held():
                self._falling_due.join(due)
                self._parked.advance(keys)
        return keys

    def recalled(self, messages: list[Message], *, in_order: bool = False) -> Recalled:
        """Return which messages may be handed over, as far as their writers have not taken them back."""
        return self._withdrawals.of(messages, in_order=in_order)

    def rehearse(self, stored: Progress) -> None:
        """Raise if a settle would not work, before any message is handled.

        Changes that could not be written the last time are written and rolled back. Then the stored progress is
        settled again.
        """
        with self._unsettled.still():
            if self._unsettled.changes is not None:
                with suppress(_TakenBack), self.held():
                    self._write(self._unsettled.changes.alone)
                    if self._check_now is not None:
                        self._channel.run(self._check_now)
                    raise _TakenBack
            self._append(stored)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin a transaction during which no other worker can take the lease; errors as in `settle`."""
        with self._channel.transaction():
            if not self._leases.hold(self.lease, self._incarnation):
                raise _lost(self.lease)
            yield

    def _write(self, changes: ParkedChanges) -> None:
        self._parked.park(changes.parked)
        self._parked.remove(changes.removed)
        if changes.removed or changes.changed:
            crash_point("worker.in_parked")
        self._parked.change(changes.changed)
        self._parked.advance(changes.keys)

    def _append(self, end: Progress) -> None:
        # One statement locks the lease row, checks epoch, incarnation and the last message, and writes.
        self._n += 1
        if not self._progress.settle(self.lease, self._n, end, self._incarnation, self.highest):
            self._progress.require_same_ids(self.lease.partition.subscription)
            raise _lost(self.lease)


class _TakenBack(Exception):  # noqa: N818 - it is no error, it ends a transaction that is not to be committed
    pass


def by_id(parkings: Iterable[tuple[Message, Parking]]) -> list[tuple[int, Parking]]:
    """Return parkings by log id."""
    return [(message.id or 0, parking) for message, parking in parkings]


def _alone(parkings: Sequence[tuple[int, Parking]]) -> list[tuple[int, Parking]]:
    heads = ((id, replace(each, state=States.RETRY) if each.state == States.BEHIND else each) for id, each in parkings)
    return [(id, replace(each, holds=False)) for id, each in heads]


def _keys(parkings: Iterable[tuple[Message, Parking]]) -> set[str]:
    return {message.key for message, _ in parkings if message.key is not None}


def _lost(lease: Lease) -> LeaseLostError:
    return LeaseLostError(
        f"{lease.partition.subscription}: another worker owns it now, or the server was restarted; nothing was settled"
    )
