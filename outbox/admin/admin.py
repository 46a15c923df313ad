"""The orders and the questions of an operator, as one object: `Outbox.admin`. The command line prints its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack
from uuid import UUID

from outbox.admin import commands, decisions, half, pausing, subscriptions
from outbox.admin.backfill import backfill
from outbox.admin.borrowing import NO_WAIT, WAIT
from outbox.admin.decisions import Choice, Order
from outbox.admin.diagnosis import STALLED_SECONDS, Diagnosis
from outbox.admin.erase import erase
from outbox.admin.half import HalfVerdict, Resumed, TransactionDetail
from outbox.admin.kept import KeptConnection
from outbox.admin.keys import held, key_details
from outbox.admin.results import (
    Decided,
    Finding,
    HeldKey,
    KeyDetail,
    Look,
    ParkedCount,
    ParkedDetail,
    Removal,
    SplitResult,
    SubscriptionDetails,
    Thresholds,
    Trace,
)
from outbox.admin.split import split
from outbox.admin.subscriptions import Properties
from outbox.admin.trace import trace
from outbox.errors import SubscriptionError
from outbox.model.command import Commands
from outbox.model.decision import Decision
from outbox.model.limits import checked_key, require_flags, require_notes, require_numbers, require_wait
from outbox.model.message import Message
from outbox.model.parking import States
from outbox.model.status import History, Status, WorkerStatus
from outbox.model.subscription import Start, Subscription, require_start, subscription_of
from outbox.runtime.process import user_and_host
from outbox.store.database import Channel, Database
from outbox.store.dialects.finding import Finding as Defect
from outbox.store.failure import in_one_line
from outbox.store.half_messages.pending import HalfTransaction, HalfTransactions
from outbox.store.operations import tail
from outbox.store.operations.check import findings
from outbox.store.operations.erasure import Erased
from outbox.store.operations.half_status import transactions
from outbox.store.operations.history import history, require_steps
from outbox.store.operations.log_status import log_status
from outbox.store.operations.purge import Purge, Purged
from outbox.store.operations.status import statuses, unread
from outbox.store.operations.worker_status import workers
from outbox.store.subscriptions.decisions import listed, note, stalled
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.notices import refused_workers
from outbox.store.subscriptions.parked_messages import ParkedMessage
from outbox.store.subscriptions.subscriptions import Subscriptions

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT = Thresholds()
#: A count that takes longer is a minimum.
_PATIENCE = timedelta(seconds=3)


def awaited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the awaited form of a blocking method; the method runs in a thread."""

    @wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    call.__doc__ = f"Do as `{method.__name__}`, awaited."
    return call


class Admin:
    """Answers an operator's questions about an outbox, and carries out orders; `outbox.admin` is one.

    Each call opens a connection, and closes the connection at the end. So calls may overlap; those of `connected` share
    a connection. The results are frozen, with the fields of `--json`.

    Args:
        where: the database of an outbox; or a connection for all calls, one after the other.

    Raises:
        TypeError: `where` is something else, such as an engine.
    """

    def __init__(self, where: Database | Channel | KeptConnection) -> None:
        if not isinstance(where, Database | Channel | KeptConnection):
            raise TypeError(f"where must be the database of an outbox, not {type(where).__name__}; use Outbox(…).admin")
        self._where = where

    @contextmanager
    def connected(self, *, deadline: timedelta = timedelta(seconds=10)) -> Iterator[Admin]:
        """Yield an `Admin` whose calls share one connection, for a page that asks often.

        Calls of several threads or tasks take turns. A lost connection is opened again by the next call.

        Args:
            deadline: for so long a call waits for the calls before.

        Raises:
            ValueError: the deadline is no timedelta, or below 0.
        """
        require_wait("deadline", deadline)
        if not isinstance(self._where, Database):
            yield self
            return
        with closing(KeptConnection(self._where, deadline)) as kept:
            yield Admin(kept)

    @property
    def commands(self) -> Commands:
        """Writes commands about this outbox, for texts that advise one."""
        return self._database.commands

    def explain(self, error: Exception) -> tuple[str, bool]:
        """Return an error of a call in one line, without parameters of statements, and whether the line says enough."""
        return in_one_line(error, self.commands)

    @property
    def _database(self) -> Database:
        return self._where if isinstance(self._where, Database) else self._where.database

    # Looking

    def look(self, thresholds: Thresholds = _DEFAULT) -> Look:
        """Return statuses, findings and transactions at one moment, as `outbox status` shows them.

        Raises:
            SubscriptionError: a subscription with limits of its own is not there.
        """
        with self._channel() as channel:
            return _look(channel, thresholds)

    def statuses(self, name: str | None = None) -> tuple[Status, ...]:
        """Return the status of each subscription, sorted by name: backlog, lag, parked messages, workers, troubles.

        Args:
            name: of one subscription; of a broadcast consumer all instances are meant. None: all subscriptions.

        Raises:
            SubscriptionError: there is no subscription of this name.
        """
        with self._channel() as channel:
            meant = None if name is None else Subscriptions(channel).get_all(name)
            return tuple(statuses(channel, meant)[1])

    def diagnosis(self, thresholds: Thresholds = _DEFAULT) -> tuple[Finding, ...]:
        """Return the problems, each with its begin, evidence and the next command; empty: all is well."""
        return self.look(thresholds).findings

    def parked(
        self, *, limit: int = 100, after: tuple[str, int] | None = None, **choice: Unpack[Choice]
    ) -> tuple[ParkedMessage, ...]:
        """Return at most `limit` parked messages, without bodies, by subscription and in the order of the log.

        Args:
            limit: at most so many.
            after: `(subscription, id)` of the last message of the page before; None: from the first on.
            choice: `name` of the subscription, `state` (one or several), `topic`, `key`, `error_like` (a part of the
                error) and `before` (the moment of parking); without any all parked messages are meant.

        Raises:
            SubscriptionError: there is no such subscription or state, or a moment has no zone.
            ValueError: the limit is no whole number from 1 on.
        """
        require_numbers(limit=limit)
        with self._channel() as channel:
            return tuple(decisions.parked(channel, limit, choice, after))

    def parked_count(self, *, patience: timedelta = _PATIENCE, **choice: Unpack[Choice]) -> ParkedCount:
        """Count parked messages by state and by error.

        Args:
            patience: after this time the numbers are minimums.
            choice: as of `parked`.

        Raises:
            SubscriptionError: as from `parked`.
            ValueError: the patience is no timedelta, or below 0.
        """
        require_wait("patience", patience)
        with self._channel() as channel:
            return decisions.count(channel, choice, patience)

    def dead_letters(
        self, *, limit: int = 100, after: tuple[str, int] | None = None, **choice: Unpack[Choice]
    ) -> tuple[ParkedMessage, ...]:
        """Do as `parked`, for dead letters."""
        choice["state"] = States.DEAD
        return self.parked(limit=limit, after=after, **choice)

    def unread(self, *, name: str | None = None, topic: str | None = None, key: str | None = None) -> dict[str, int]:
        """Return how many messages subscriptions have still to read, by subscription; without any, nothing.

        These are not parked, so `discard` reaches them only with `unread=True`. Many are estimated.

        Args:
            name: of the subscription; None: all relays, consumers and backfills.
            topic, key: only messages of a topic, or with a key.

        Raises:
            SubscriptionError: there is no such subscription.
        """
        with self._channel() as channel:
            return decisions.unread(channel, {"name": name, "topic": topic, "key": key})

    def parked_message(self, id: int | UUID, *, name: str | None = None) -> ParkedDetail:
        """Return a parked message with its contents. `name`: the subscription, if several have parked the message.

        Raises:
            SubscriptionError: no message is parked under this id, or several subscriptions have parked it.
            ValueError: no message can have this id.
        """
        with self._channel() as channel:
            return decisions.detail(channel, id, name)

    def read_body(self, id: int, *, name: str | None = None, by: str | None = None) -> Message:
        """Return a message with its body, and keep who read the body, as a decision `read` of the same transaction.

        Args:
            id: in the log; also of a purged message that is still parked.
            name: of the subscription with the parked copy; None: the message of the log.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: there is no such message, or no such subscription.
            ValueError: no message can have this id.
        """
        require_numbers(id=id)
        require_notes(by=by)
        with self._channel() as channel, channel.transaction():
            found = tail.message(channel, id) if name is None else decisions.detail(channel, id, name).message
            if found is None:
                raise SubscriptionError(f"no message {id} is in the log; perhaps it was purged")
            note(channel, "read", by=by, subscription=name, choice={"message": id}, count=1)
            return found

    def held(self, *, top: int = 50, name: str | None = None) -> tuple[HeldKey, ...]:
        """Return the held keys with the most messages behind, the most first.

        Args:
            top: at most so many.
            name: of the subscription; None: all. Check-backs are left out.

        Raises:
            SubscriptionError: there is no such subscription.
            ValueError: `top` is no whole number from 1 on.
        """
        require_numbers(top=top)
        with self._channel() as channel:
            return tuple(held(channel, name, top))

    def key(self, key: str, *, name: str | None = None, limit: int = 100) -> tuple[KeyDetail, ...]:
        """Return what holds a key back, by subscription; empty: its messages flow.

        Messages that stand for themselves, such as delayed ones, hold nothing back, and are in `parked`.

        Args:
            key: of messages.
            name: of the subscription; None: all.
            limit: at most so many messages behind each head.

        Raises:
            SubscriptionError: there is no such subscription.
            InvalidMessageError: no message can have the key.
            ValueError: the limit is no whole number from 1 on.
        """
        require_numbers(limit=limit)
        with self._channel() as channel:
            return tuple(key_details(channel, checked_key(key), name, limit))

    alook = awaited(look)
    astatuses = awaited(statuses)
    adiagnosis = awaited(diagnosis)
    aparked = awaited(parked)
    aparked_count = awaited(parked_count)
    adead_letters = awaited(dead_letters)
    aunread = awaited(unread)
    aparked_message = awaited(parked_message)
    aread_body = awaited(read_body)
    aheld = awaited(held)
    akey = awaited(key)

    # Deciding

    def replay(self, *ids: int | UUID, reason: str | None = None, **order: Unpack[Order]) -> tuple[Decided, ...]:
        """Have parked messages sent now, with attempts counted from 0; without a state dead letters are meant.

        The live worker carries the decision out; without a worker the call does.

        Args:
            ids: of messages, in the log or as `send` returned them; or `all=True` for every message of a choice.
            reason: for the log.
            order: a choice as in `parked`; `by`, the person; `rehearsal=True`: change nothing, and return the number of
                messages that are meant.

        Raises:
            SubscriptionError: neither ids nor `all`; an id that is not parked, or that several subscriptions have
                parked; or a state that cannot be replayed. Nothing was done.
            InvalidMessageError: a text is too long, or no text. Nothing was done.
            ValueError: no message can have one of the ids. Nothing was done.
            LeaseLostError: a worker took the lease of a subscription meanwhile. The error says what was done there.
        """
        with self._channel() as channel:
            return tuple(decisions.decide(channel, "replay", ids, reason, order))

    def discard(self, *ids: int | UUID, reason: str, **order: Unpack[Order]) -> tuple[Decided, ...]:
        """Give parked messages up for good; messages behind them go on. Takes and raises what `replay` does.

        With `unread=True` messages that no worker has read yet are meant, too: they are discarded when they are read.
        """
        with self._channel() as channel:
            return tuple(decisions.decide(channel, "discard", ids, reason, order))

    def set_aside(self, *ids: int | UUID, reason: str, **order: Unpack[Order]) -> tuple[Decided, ...]:
        """Make dead letters of messages that are not to be tried, also of messages that no worker has read yet.

        By the policy of the subscription a dead letter holds its key. A message behind another one, or before its time,
        holds nothing. Without a state all parked messages but dead letters are meant. Takes and raises what `replay`
        does.
        """
        with self._channel() as channel:
            return tuple(decisions.decide(channel, "set_aside", ids, reason, order))

    def decisions(
        self,
        *,
        subscription: str | None = None,
        since: datetime | None = None,
        limit: int = 100,
        after: int | None = None,
    ) -> tuple[Decision, ...]:
        """Return at most `limit` decisions of people, the newest first; each is kept for 90 days.

        Args:
            subscription: only those about this subscription, which may be dropped by now.
            since: only those from this moment on, with a zone.
            limit: at most so many.
            after: the id of the last decision of the page before; None: from the newest on.

        Raises:
            SubscriptionError: the moment has no zone.
            ValueError: the limit, or the id, is no whole number from 1 on.
        """
        require_numbers(limit=limit, **({} if after is None else {"after": after}))
        if since is not None and since.tzinfo is None:
            raise SubscriptionError(f"since: {since} has no time zone; pass a datetime with tzinfo")
        with self._channel() as channel:
            return tuple(listed(channel, limit, subscription=subscription, since=since, after=after))

    adecisions = awaited(decisions)

    def half_transactions(
        self, *, group: str | None = None, given_up: bool = False, limit: int = 100, after: str | None = None
    ) -> tuple[HalfTransaction, ...]:
        """Return at most `limit` transactions without a verdict, the oldest first, in the order of their ids.

        Args:
            group: of the producer; None: all.
            given_up: only transactions that wait for a person.
            limit: at most so many.
            after: the id of the last transaction of the page before; None: from the oldest on.

        Raises:
            ValueError: the limit is no whole number from 1 on.
        """
        require_numbers(limit=limit)
        require_flags(given_up=given_up)
        with self._channel() as channel:
            return tuple(HalfTransactions(channel).pending(group=group, given_up=given_up, limit=limit, after=after))

    def half_transaction(self, id: str) -> TransactionDetail:
        """Return a transaction, its verdict, and its messages as a commit delivers them.

        Raises:
            SubscriptionError: there is no such transaction.
        """
        with self._channel() as channel:
            return half.detail(channel, id)

    def half_commit(self, id: str, *, by: str | None = None, unchecked: bool = False) -> HalfVerdict:
        """Deliver the messages of a pending transaction. The first verdict stands for ever.

        Args:
            id: of the transaction.
            by: the person; None: user and host of the process.
            unchecked: decide a transaction with `verdict="record"` without its business database, which is gone.
                Otherwise `outbox half commit` with `--business` asks that database first.

        Raises:
            SubscriptionError: there is no such transaction.
            VerdictStandsError: the opposite verdict stands.
            OutboxError: there is nothing to deliver, the business database has to be asked, or a business transaction
                is deciding right now. Nothing was done.
        """
        require_flags(unchecked=unchecked)
        with self._channel() as channel:
            return half.decide(channel, id, "commit", by=by, unchecked=unchecked)

    def half_rollback(self, id: str, *, by: str | None = None, unchecked: bool = False) -> HalfVerdict:
        """Drop the messages of a pending transaction; takes and raises what `half_commit` does."""
        require_flags(unchecked=unchecked)
        with self._channel() as channel:
            return half.decide(channel, id, "rollback", by=by, unchecked=unchecked)

    def half_resume(self, id: str, *, by: str | None = None, reason: str | None = None) -> Resumed:
        """Ask again about a transaction that was given up, with questions counted from 0.

        Raises:
            SubscriptionError: there is no such transaction.
            OutboxError: the transaction was not given up, or has a verdict.
        """
        with self._channel() as channel:
            return half.resume(channel, id, by=by, reason=reason)

    ahalf_transactions = awaited(half_transactions)
    ahalf_transaction = awaited(half_transaction)
    ahalf_commit = awaited(half_commit)
    ahalf_rollback = awaited(half_rollback)
    ahalf_resume = awaited(half_resume)
    areplay = awaited(replay)
    aset_aside = awaited(set_aside)
    adiscard = awaited(discard)

    # Subscriptions

    def subscriptions(self) -> tuple[SubscriptionDetails, ...]:
        """Return all subscriptions with their properties and workers, sorted by name."""
        with self._channel() as channel:
            return subscriptions.details(channel, Subscriptions(channel).all())

    def create(self, name: str, *, start: Start = "earliest", **properties: Unpack[Properties]) -> SubscriptionDetails:
        """Make the subscription of a relay before its first worker; or find the same subscription.

        Args:
            name: of the subscription.
            start: "earliest", "latest" or a moment.
            properties: `destination`, which is needed, and `topics`, `tags`, `filter`, `on_dead`, `grace`, `ordered`,
                `compact`, `partitions`.

        Raises:
            SubscriptionError: a subscription of this name has other properties, or a route has the topics.
        """
        with self._channel_that_reads_leases() as channel:
            return self._details(channel, subscriptions.create(channel, name, start, properties))

    def alter(
        self, name: str, *, wait: timedelta = WAIT, by: str | None = None, **properties: Unpack[Properties]
    ) -> SubscriptionDetails:
        """Give a subscription other properties, as `outbox subscriptions alter` does, while workers go on.

        Args:
            name: of the subscription.
            wait: for how long a worker is asked for its lease.
            by: the person; None: user and host of the process.
            properties: those of `create`; `partitions` is a change of its own.

        Raises:
            SubscriptionError: the change does not fit the subscription, or a worker keeps the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        with self._channel() as channel:
            return self._details(channel, subscriptions.alter(channel, name, wait, properties, by=by))

    def split(
        self,
        name: str,
        topics: Sequence[str],
        *,
        destination: str,
        as_name: str | None = None,
        wait: timedelta = WAIT,
        by: str | None = None,
    ) -> SplitResult:
        """Give topics of a subscription to a new subscription, which begins exactly at the position of the old.

        Args:
            name: of the subscription with the topics.
            topics: names and patterns.
            destination: of the new subscription, a URL.
            as_name: of the new subscription; None: the name of a route with the topics, such as `relay:orders.*`, also
                if `name` is a route.
            wait: for how long a worker is asked for its lease.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError, LeaseLostError: as `alter`.
        """
        require_notes(by=by)
        with self._channel() as channel:
            to = subscriptions.checked_destination(destination, Subscriptions(channel).get(name))
            *both, moved = split(channel, name, topics, destination=to, as_name=as_name, wait=wait, by=by)
            origin, made = subscriptions.details(channel, both)
            return SplitResult(split=origin, made=made, moved=moved)

    def backfill(
        self, name: str, topics: Sequence[str], *, start: Start = "earliest", by: str | None = None
    ) -> SubscriptionDetails:
        """Have workers handle earlier messages of topics beside a subscription, up to now; return the backfill.

        Args:
            name: of the subscription.
            topics: names and patterns.
            start: "earliest" or a moment.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: another backfill is under way, or the subscription cannot have one.
        """
        require_notes(by=by)
        with self._channel_that_reads_leases() as channel:
            return self._details(channel, backfill(channel, name, topics, start, by=by))

    def pause(
        self,
        name: str,
        *,
        key: str | None = None,
        rate: float | None = None,
        reason: str | None = None,
        by: str | None = None,
    ) -> tuple[SubscriptionDetails, ...]:
        """Let the workers of a subscription hand nothing over, or less; return all that are paused.

        Args:
            name: of the subscription; its backfill is paused as well.
            key: only messages of the key are held back.
            rate: so many messages a second go on; None: none.
            reason: why; `outbox status` shows it.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: the subscription cannot be paused, or the rate is wrong.
            InvalidMessageError: no message can have the key, or a text is too long, or no text.
        """
        with self._channel_that_reads_leases() as channel:
            found = pausing.pause(channel, name, key=key, rate=rate, by=by or user_and_host(), reason=reason)
            return subscriptions.details(channel, found)

    def resume(self, name: str, *, key: str | None = None, by: str | None = None) -> tuple[SubscriptionDetails, ...]:
        """Take a pause back, of the subscription or of one key; return all that go on.

        Args:
            name: of the subscription.
            key: only messages of the key go on.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: there is no such pause.
        """
        with self._channel_that_reads_leases() as channel:
            return subscriptions.details(channel, pausing.resume(channel, name, key=key, by=by))

    def reset(
        self,
        name: str,
        start: Start,
        *,
        wait: timedelta = NO_WAIT,
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Removal:
        """Let a subscription begin again at another position, and delete its parked messages.

        Args:
            name: of the subscription.
            start: "earliest", "latest" or a moment.
            wait: for how long a worker at work is asked for its lease; 0: not at all.
            by: the person; None: user and host of the process.
            rehearsal: change nothing, and return what would go.

        Raises:
            SubscriptionError: the kind has no such position, or a worker holds the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        require_start(start)
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            meant, parked = subscriptions.with_followers(channel, name, backfills=False)
            commands.require_resettable(meant[0], channel.database.commands)
            gone = parked if rehearsal else commands.reset(channel, name, start, wait=wait, by=by)
            return Removal(kind=meant[0].kind, names=tuple(each.name for each in meant), parked=gone)

    def drop(self, name: str, *, by: str | None = None, rehearsal: bool = False) -> Removal:
        """Forget a subscription, with its position and its parked messages, while no worker runs.

        Args:
            name: of the subscription; its backfill goes as well.
            by: the person; None: user and host of the process.
            rehearsal: change nothing, and return what would go.

        Raises:
            SubscriptionError: a worker holds the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            meant, parked = subscriptions.with_followers(channel, name)
            names = [each.name for each in meant] if rehearsal else commands.drop(channel, name, by=by)
            return Removal(kind=meant[0].kind, names=tuple(names), parked=parked)

    def workers(self, name: str | None = None) -> tuple[WorkerStatus, ...]:
        """Return the processes that work for subscriptions, and those that stand by for a share of the partitions.

        Args:
            name: of the subscription; None: all.

        Raises:
            SubscriptionError: there is no such subscription.
        """
        with self._channel() as channel:
            known = Subscriptions(channel)
            return tuple(workers(channel, known.all() if name is None else known.get_all(name)))

    def history(
        self, name: str, *, since: timedelta = timedelta(hours=1), step: timedelta = timedelta(minutes=1)
    ) -> History:
        """Return lag, messages a second and parked messages of a subscription over time, from the stored settles.

        Args:
            name: of the subscription.
            since: how long ago the first step begins, by the database's clock. Settles are kept for a day.
            step: the length of each step; at most 1 000 steps.

        Raises:
            SubscriptionError: there is no such subscription.
            ValueError: a length of time is no timedelta, or below 1 s, or there are too many steps.
        """
        require_steps(since, step)
        with self._channel() as channel:
            return history(channel, Subscriptions(channel).get(name), since, step)

    asubscriptions = awaited(subscriptions)
    ahistory = awaited(history)
    aworkers = awaited(workers)
    acreate = awaited(create)
    aalter = awaited(alter)
    asplit = awaited(split)
    abackfill = awaited(backfill)
    apause = awaited(pause)
    aresume = awaited(resume)
    areset = awaited(reset)
    adrop = awaited(drop)

    # The log and the tables

    def newest(self, *, limit: int = 20, topic: str | None = None, key: str | None = None) -> tuple[Message, ...]:
        """Return at most `limit` messages of the newest 10 000, in the order of the log, sent or not.

        Args:
            limit: at most so many.
            topic, key: only messages of a topic, or with a key.

        Raises:
            ValueError: the limit is no whole number from 1 on.
        """
        require_numbers(limit=limit)
        with self._channel() as channel:
            return tuple(tail.newest(channel, limit, topic, key))

    def message(self, id: int | UUID) -> Message | None:
        """Return a message of the log by its id there, or by the one that `send` returned; None: there is none now.

        Raises:
            ValueError: no message can have this id.
        """
        if not isinstance(id, UUID):
            require_numbers(id=id)
        with self._channel() as channel:
            found = tail.id_of(channel, id) if isinstance(id, UUID) else id
            return None if found is None else tail.message(channel, found)

    def trace(self, id: int | UUID) -> Trace | None:
        """Return when a message was written, and its way through each subscription; None: nothing of it is stored now.

        The position of a subscription tells whether the message was passed, and settles of the last day tell when.

        Args:
            id: as of `message`; also of a purged message that is still parked.

        Raises:
            ValueError: no message can have this id.
        """
        if not isinstance(id, UUID):
            require_numbers(id=id)
        with self._channel() as channel:
            found = tail.id_of(channel, id) if isinstance(id, UUID) else id
            return None if found is None else trace(channel, found)

    def purge(
        self,
        older_than: timedelta,
        *,
        keep_dead: timedelta | None = None,
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Purged:
        """Delete old messages that every subscription has passed, in small batches; see `outbox purge`.

        Args:
            older_than: the age by the database's clock.
            keep_dead: discard what has been a dead letter for longer, by a live worker or here; None: dead letters
                stay.
            by: the person; None: user and host of the process.
            rehearsal: delete nothing, and count.

        Raises:
            SubscriptionError: there is no subscription, so nobody can tell which messages are needed.
            ValueError: an age is below 0, or above 100 years.
            LeaseLostError: a worker took the lease of a subscription while its dead letters were discarded.
        """
        require_wait("older_than", older_than)
        if keep_dead is not None:
            require_wait("keep_dead", keep_dead)
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            if not rehearsal:
                with channel.transaction():
                    note(channel, "purge", by=by, choice={"older_than": older_than, "keep_dead": keep_dead})
            purged = Purge(channel).run(older_than, rehearsal=rehearsal)
            dead, behind = decisions.purge_dead(channel, keep_dead, by=by, rehearsal=rehearsal)
            return replace(purged, dead_letters=dead, behind=behind)

    def erase(
        self,
        *,
        keys: Sequence[str] = (),
        message_ids: Sequence[UUID] = (),
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Erased:
        """Delete the messages of a person that every subscription has passed, and discard their dead letters.

        Messages that are still to be delivered stay, and are counted: call again after the delivery.

        Args:
            keys: the messages with one of these keys.
            message_ids: the messages with one of these ids, as `send` returned them.
            by: the person who decides; None: user and host of the process.
            rehearsal: delete nothing, and count.

        Raises:
            SubscriptionError: there is no subscription, so nobody can tell which messages are needed.
            InvalidMessageError: no message can have a key, or `by` cannot be stored.
            TypeError: one text is given in place of a list, or an id is no UUID.
        """
        for field, given in {"keys": keys, "message_ids": message_ids}.items():
            if isinstance(given, str):
                # Its letters would be taken for keys, and the messages of others would go.
                raise TypeError(f"{field} must be a list, and not one text: {given!r:.80}; pass […]")
        for id in message_ids:
            if not isinstance(id, UUID):
                raise TypeError(f"message_ids must be UUIDs, not {id!r:.80}; pass the ids that send has returned")
        require_notes(by=by)
        require_flags(rehearsal=rehearsal)
        for key in keys:
            checked_key(key)
        with self._channel() as channel:
            by = by or user_and_host()
            return erase(channel, keys=keys, message_ids=message_ids, by=by, rehearsal=rehearsal)

    def check(self) -> tuple[Defect, ...]:
        """Return the defects of tables and server, each with its fix, as `outbox doctor` does; empty: none."""
        with self._channel() as channel:
            return tuple(findings(channel))

    anewest = awaited(newest)
    amessage = awaited(message)
    atrace = awaited(trace)
    apurge = awaited(purge)
    aerase = awaited(erase)
    acheck = awaited(check)

    @staticmethod
    def _details(channel: Channel, found: Subscription) -> SubscriptionDetails:
        (known,) = subscriptions.details(channel, [found])
        return known

    @contextmanager
    def _channel_that_reads_leases(self) -> Iterator[Channel]:
        """Do as `_channel`, for an order that takes no lease, but reads leases for its answer.

        A role without the right to read leases is refused here, and has ordered nothing.
        """
        with self._channel() as channel:
            Leases(channel).require_readable()
            yield channel

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        if isinstance(self._where, Channel):
            yield self._where
            return
        if isinstance(self._where, KeptConnection):
            with self._where.one() as channel:
                yield channel
            return
        with self._where.explained(), closing(self._where.open()) as channel:
            yield channel


def _look(channel: Channel, thresholds: Thresholds) -> Look:
    for name in thresholds.named:
        # A name that is not there is an error; a backfill ends by itself, and the limit of a monitor stays.
        Subscriptions(channel).get_all(subscription_of(name) or name)
    now, found = statuses(channel)
    diagnosis = Diagnosis(
        now=now,
        statuses=found,
        refused=refused_workers(channel),
        stalled=stalled(channel, STALLED_SECONDS),
        unread=unread(channel, found),
        log=log_status(channel, now),
        commands=channel.database.commands,
        limits=thresholds,
    )
    halves, latencies = transactions(channel, now, found)
    return Look(
        at=now,
        findings=tuple(diagnosis.findings()),
        subscriptions=tuple(found),
        transactions=halves,
        log=diagnosis.log,
        latencies=latencies,
    )
