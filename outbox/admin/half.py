"""Pending transactions for an operator: listed, looked at, and decided on by hand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from outbox.admin.commands import carry_out_without_worker
from outbox.admin.face import Face, awaited
from outbox.errors import OutboxError, SubscriptionError, VerdictStandsError
from outbox.model.limits import require_flags, require_notes, require_numbers
from outbox.model.message import Message
from outbox.model.parking import States
from outbox.model.subscription import check_of
from outbox.runtime.process import user_and_host
from outbox.runtime.text import in_utc
from outbox.store.database import Channel, on_channel
from outbox.store.dialects.statements import run
from outbox.store.half_messages.half import is_readable, real_message
from outbox.store.half_messages.op import Op, Ops
from outbox.store.half_messages.pending import Decided, HalfTransaction, HalfTransactions
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.parked_messages import ParkedFilter, ParkedMessages

#: Seconds to wait for a business transaction that decides on the same transaction.
_PATIENCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionDetail:
    """A transaction with half messages, and the verdict.

    Attributes:
        transaction_id: of the transaction.
        transaction: since when it is pending, and how often its producers were asked; None: the half messages were
            purged.
        op: the verdict: `commit` or `rollback`; None: there is none.
        decided_by: whose verdict stands.
        decided_at: by the database's clock.
        messages: as a commit delivers them, perhaps with empty bodies.
        body_bytes: the number of bytes of each body.
    """

    transaction_id: str
    transaction: HalfTransaction | None
    op: str | None
    decided_by: str | None
    decided_at: datetime | None
    messages: tuple[Message, ...]
    body_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfVerdict:
    """The result of a commit or a rollback by hand.

    `messages`: to be delivered, or dropped; 0: the half messages were purged. `is_new`: False: the same verdict stood
    before, and nothing changed. `decided_by`: whose verdict stands.
    """

    transaction_id: str
    op: str
    messages: int
    is_new: bool
    decided_by: str | None
    decided_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A transaction whose producers are asked again. `worker`: who carries the decision out; None: it is done."""

    transaction_id: str
    group: str
    messages: int
    worker: str | None


class HalfMessages(Face):
    """Questions and orders about transactions with half messages."""

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

    def half_transaction(self, id: str, *, bodies: bool = True) -> TransactionDetail:
        """Return a transaction, its verdict, and its messages as a commit delivers them.

        Args:
            id: of the transaction.
            bodies: False: the messages have empty bodies, and the database tells the sizes alone.

        Raises:
            SubscriptionError: there is no such transaction.
        """
        require_flags(bodies=bodies)
        with self._channel() as channel:
            transaction, decided = found(channel, id)
            halves = HalfTransactions(channel)
            rows = [(row, len(row.body)) for row in halves.messages(id)] if bodies else halves.sizes(id)
            return TransactionDetail(
                transaction_id=id,
                transaction=transaction,
                op=None if decided is None else decided.op,
                decided_by=None if decided is None else decided.decided_by,
                decided_at=None if decided is None else decided.decided_at,
                # One that no producer wrote is shown as it is stored.
                messages=tuple(real_message(row) if is_readable(row) else row for row, _ in rows),
                body_bytes=tuple(size for _, size in rows),
            )

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
            return decide(channel, id, "commit", by=by, unchecked=unchecked)

    def half_rollback(self, id: str, *, by: str | None = None, unchecked: bool = False) -> HalfVerdict:
        """Drop the messages of a pending transaction; takes and raises what `half_commit` does."""
        require_flags(unchecked=unchecked)
        with self._channel() as channel:
            return decide(channel, id, "rollback", by=by, unchecked=unchecked)

    def half_resume(self, id: str, *, by: str | None = None, reason: str | None = None) -> Resumed:
        """Ask again about a transaction that was given up, with questions counted from 0.

        Raises:
            SubscriptionError: there is no such transaction.
            OutboxError: the transaction was not given up, or has a verdict.
        """
        require_notes(by=by, reason=reason)
        with self._channel() as channel:
            transaction, decided = found(channel, id)
            if transaction is None or decided is not None:
                raise OutboxError(f"transaction {id} {was(decided)}; nobody has to be asked")
            if not transaction.given_up:
                due = transaction.next_check_at
                when = "" if due is None else f", the next one at {in_utc(due)}"
                raise OutboxError(f"transaction {id} was not given up; its checks go on{when}")
            name = check_of(transaction.group)
            chosen = ParkedFilter(ids=transaction.given_up_ids, states=(States.DEAD,))
            write = partial(ParkedMessages(channel, name).decide, chosen, "replay", by or user_and_host(), reason)
            _, worker = carry_out_without_worker(channel, name, write)
            return Resumed(transaction_id=id, group=transaction.group, messages=transaction.messages, worker=worker)

    ahalf_transactions = awaited(half_transactions)
    ahalf_transaction = awaited(half_transaction)
    ahalf_commit = awaited(half_commit)
    ahalf_rollback = awaited(half_rollback)
    ahalf_resume = awaited(half_resume)


def found(channel: Channel, id: str) -> tuple[HalfTransaction | None, Decided | None]:
    """Return a transaction and its verdict, one of which is there.

    Raises:
        SubscriptionError: there is neither.
    """
    transaction, decided = HalfTransactions(channel).find(id)
    if transaction is None and decided is None:
        look = channel.database.commands.line("half", "list")
        raise SubscriptionError(f"there is no transaction {id}; for the pending ones run: {look}")
    return transaction, decided


def decide(channel: Channel, id: str, op: Op, *, by: str | None, unchecked: bool) -> HalfVerdict:
    """Write a verdict by hand, unless it stands; the decision of the person is kept in the same transaction.

    Raises:
        SubscriptionError: there is no such transaction.
        VerdictStandsError: the opposite verdict stands.
        OutboxError: there is no message to deliver, the record of another database has to agree first, or a business
            transaction is deciding.
    """
    require_notes(by=by)
    pending, stands = found(channel, id)
    if pending is not None and stands is None:
        _require_decidable(channel, pending, op, unchecked=unchecked)
    database, group = channel.database, None if pending is None else pending.group
    ops = Ops(database)
    write = ops.commit if op == "commit" else ops.roll_back
    try:
        with channel.transaction(patience=_PATIENCE_SECONDS):
            decision = run(on_channel(channel), write(id, by=f"admin {by or user_and_host()}"))
            if decision.first and group is not None:
                note(channel, op, by=by, subscription=check_of(group), choice={"transaction_id": id})
            if decision.unrestored:
                run(on_channel(channel), ops.restore(id))
    except Exception as error:
        if not database.locked(error):
            raise
        raise OutboxError(
            f"a business transaction is deciding on transaction {id} right now; nothing was done, try again"
        ) from None
    if decision.op != op:
        raise VerdictStandsError(id, decision.op or "rollback", op, decision.by)
    if database.dialect.driving.notifies and (decision.restored or decision.unrestored):
        channel.notify()
    transaction, decided = found(channel, id)
    return HalfVerdict(
        transaction_id=id,
        op=op,
        messages=0 if transaction is None else transaction.messages,
        is_new=decision.first,
        decided_by=None if decided is None else decided.decided_by,
        decided_at=None if decided is None else decided.decided_at,
    )


def _require_decidable(channel: Channel, pending: HalfTransaction, op: Op, *, unchecked: bool) -> None:
    id, commands = pending.transaction_id, channel.database.commands
    if op == "commit" and not pending.real_topics:
        raise OutboxError(
            f"transaction {id} has no message to deliver: no producer wrote its half rows; run:"
            f" {commands.line('half', 'rollback', id)}"
        )
    if pending.verdict == "record" and not unchecked:
        raise OutboxError(
            f"transaction {id} is decided by a record in the business database, which has to agree first: run"
            f" {commands.line('half', op, id, '--business', 'URL')}; or, if the database is gone for good, decide"
            " unchecked"
        )


def was(decided: Decided | None) -> str:
    """Return in words which verdict stands, by whom and since when."""
    if decided is None:
        return "has no messages any more"
    done = {"commit": "was committed", "rollback": "was rolled back"}[decided.op]
    return f"{done} by {decided.decided_by} at {in_utc(decided.decided_at)}"
