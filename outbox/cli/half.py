"""`outbox half`: transactions whose messages wait for a verdict, and a person's verdicts on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING

import click

from outbox.cli.contents import contents, show_contents, show_fields
from outbox.cli.decisions import carry_out, tell
from outbox.cli.groups import Group
from outbox.cli.options import Target, a_business_database, about_a_database, as_json, by_whom, me, option, together
from outbox.cli.output import age, counted, moment, say, show_json, show_table

if TYPE_CHECKING:
    from outbox.model.message import Message
    from outbox.store.database import Channel, Database
    from outbox.store.half_messages.half import Way
    from outbox.store.half_messages.op import Op
    from outbox.store.half_messages.pending import Decided, HalfTransaction

_HEADERS = ("TRANSACTION", "GROUP", "TOPICS", "MESSAGES", "AGE", "VERDICT BY", "CHECKS", "NEXT CHECK", "LAST ANSWER")
_NUMBERS = ("MESSAGES", "CHECKS")
#: Seconds to wait for a business transaction that is deciding on the same transaction.
_PATIENCE_SECONDS = 2.0
_BEING_DECIDED = "transaction {id} is being decided by another one that is not over yet; nothing was done, try again"

_id = click.argument("id", metavar="TRANSACTION")
_unchecked_record = option(
    "--unchecked", is_flag=True, help="Decide without a look at the business database, because it is gone."
)
_verdict = together(about_a_database, _id, a_business_database, _unchecked_record, by_whom, as_json)


@click.group(cls=Group, no_args_is_help=True)
def half() -> None:
    """Look at pending transactions, and decide on them.

    A transaction is pending while its half messages have no verdict. After a number of questions without an answer it
    is given up: nobody is asked any more, and it waits for commit, rollback or resume.
    """


@half.command("list")
@about_a_database
@option("--group", help="Only of this producer group.")
@option("--given-up", is_flag=True, help="Only those that were given up and wait for a person.")
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many.")
@as_json
def list_(*, target: Target, group: str | None, given_up: bool, limit: int, json: bool) -> None:
    """List pending transactions, the oldest first.

    Those that were given up are shown under TRANS_CHECK_MAX_TIME_TOPIC, where RocketMQ puts them. CHECKS says how often
    a listener was asked, NEXT CHECK in what time it may be asked again.
    """
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        found = HalfTransactions(channel).pending(group=group, given_up=given_up, limit=limit + 1)
        shown = found[:limit]
        if json:
            show_json({"transactions": [_as_json(each) for each in shown]}, more=len(found) > limit)
            return
        warnings = _unchecked(channel, shown)
    _show(shown, "given up" if given_up else "pending")
    if len(found) > limit:
        say(f"there are more; choose by --group or --given-up, or raise --limit above {limit}")
    for warning in warnings:
        say(f"warning: {warning}")


@half.command()
@about_a_database
@_id
@as_json
def show(*, target: Target, id: str, json: bool) -> None:
    """Show one transaction, its verdict if it has one, and its messages as they would be delivered."""
    from outbox.store.half_messages.half import CHECK_TIMES, delay_of, real_message
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        transaction, decided = _found(channel, id)
        rows = HalfTransactions(channel).messages(id)
    messages = [(real_message(row), delay_of(row)) for row in rows]
    if json:
        about = {"transaction_id": id} if transaction is None else _as_json(transaction, decided)
        verdict = {"op": None, "decided_by": None, "decided_at": None} if decided is None else asdict(decided)
        carried = [
            {**_fields(message), "delay_seconds": delay, **contents(message, without=CHECK_TIMES)}
            for message, delay in messages
        ]
        show_json({**about, **verdict, "contents": carried})
        return
    show_fields({"transaction": id} if transaction is None else _described(transaction, decided))
    show_fields({} if decided is None else asdict(decided))
    for message, delay in messages:
        click.echo()
        show_fields({**_fields(message), "delay": None if delay is None else age(delay.total_seconds())})
        show_contents(message, without=CHECK_TIMES)
    if not messages:
        say("its half messages were purged")


@half.command()
@_verdict
def commit(*, target: Target, id: str, business: str | None, unchecked: bool, by: str | None, json: bool) -> None:
    """Deliver the messages of a pending transaction.

    The first verdict stands for ever: this one too, if none was before it. With verdict="join" the business transaction
    itself decides when it commits; one that is under way is waited for, briefly. With verdict="record" the record of
    the commit has to be in the business database.
    """
    tell(_ended(target, id, "commit", by, business, unchecked=unchecked), json=json)


@half.command()
@_verdict
def rollback(*, target: Target, id: str, business: str | None, unchecked: bool, by: str | None, json: bool) -> None:
    """Drop the messages of a pending transaction.

    The first verdict stands for ever: this one too, if none was before it. A business transaction that decides later is
    refused from then on, and one that is deciding is waited for, briefly; with verdict="record" by a record in the
    business database.
    """
    tell(_ended(target, id, "rollback", by, business, unchecked=unchecked), json=json)


@half.command()
@about_a_database
@_id
@by_whom
@option("--reason", help="Why, for the log.")
@as_json
def resume(*, target: Target, id: str, by: str | None, reason: str | None, json: bool) -> None:
    """Ask again about a transaction that was given up; its questions are counted from 0 again.

    One that is older than the age limit of its check service (72 h by default) is given up again at once. Decide it by
    commit or rollback, or run the check service with a longer --age-limit.
    """
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    with target.open_outbox() as channel:
        transaction, decided = _found(channel, id)
        if transaction is None or decided is not None:
            raise click.ClickException(f"transaction {id} {_was(decided)}; nobody has to be asked")
        if not transaction.given_up:
            raise click.ClickException(f"transaction {id} was not given up; its checks go on{_when(transaction)}")
        check = check_of(transaction.group)
        chosen = DeadLetterFilter(ids=transaction.given_up_ids)
        DeadLetters(channel, check).request(chosen, "replay", by or me(), reason)
        resumed = _Resumed(transaction, carry_out(channel, check), channel.database)
    tell(resumed, json=json)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A transaction on which a person gave a verdict. `is_new` is False if the same verdict stood before."""

    id: str
    op: Op
    messages: int
    decided: Decided | None
    is_new: bool

    def describe(self) -> str:
        if not self.is_new:
            return f"transaction {self.id} {_was(self.decided)}; nothing changed"
        messages = counted(self.messages, "message")
        done = {"commit": f"committed; {messages} to be delivered", "rollback": f"rolled back; {messages} dropped"}
        return f"transaction {self.id}: {done[self.op]}"

    def as_json(self) -> dict[str, object]:
        return {
            "decision": self.op,
            "transaction_id": self.id,
            "messages": self.messages,
            "is_new": self.is_new,
            "decided_by": None if self.decided is None else self.decided.decided_by,
            "decided_at": None if self.decided is None else self.decided.decided_at,
        }


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A transaction that is asked about again: by `worker`, or by the next one of its group."""

    transaction: HalfTransaction
    worker: str | None
    database: Database

    def describe(self) -> str:
        id, group = self.transaction.transaction_id, self.transaction.group
        if self.worker is not None:
            return f"transaction {id}: worker {self.worker} will ask about it again"
        who = _checks_back(self.database, group, [self.transaction.verdict])
        return f"transaction {id} will be asked about again when somebody checks back on group {group}: {who}"

    def as_json(self) -> dict[str, object]:
        return {
            "decision": "resume",
            "transaction_id": self.transaction.transaction_id,
            "group": self.transaction.group,
            "messages": self.transaction.messages,
            "carried_out": self.worker is None,
            "worker": self.worker,
        }


def _ended(target: Target, id: str, op: Op, by: str | None, business: str | None, *, unchecked: bool) -> _Ended:
    """Write a verdict by hand, if none stands."""
    from outbox.outbox import Outbox
    from outbox.rocketmq.broker import Broker
    from outbox.store.half_messages.half import half_of
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        pending, stands = _found(channel, id)
        if pending is not None and stands is None and pending.verdict == "record" and not unchecked:
            rows = HalfTransactions(channel).messages(id)
            _require_record(channel.database, id, op, business, half_of(rows[0]).recorded_in)
        outbox = Outbox(channel.database.engine, schema=channel.database.schema, slots=channel.database.slots)
        broker = Broker(outbox, connections=1)
        try:
            is_new = broker.end(id, op, by=f"admin {by or me()}", patience=_PATIENCE_SECONDS)
        except Exception as error:
            if not channel.database.locked(error):
                raise
            raise click.ClickException(_BEING_DECIDED.format(id=id)) from None
        finally:
            broker.close()
            outbox.close()
        if is_new and op == "commit" and channel.database.dialect.driving.notifies:
            # Notify by this connection, because that of the outbox is closed before its notifier's thread comes to it.
            channel.notify()
        transaction, decided = _found(channel, id)
    return _Ended(id, op, 0 if transaction is None else transaction.messages, decided, is_new)


def _require_record(database: Database, id: str, op: Op, business: str | None, recorded_in: str | None) -> None:
    """Raise unless the business database agrees with a verdict; before a rollback it is made to forbid the commit."""
    from outbox.cli.connection import business_of

    if business is None:
        raise click.UsageError(
            f"transaction {id} is decided by its record in the business database: name that by --business (a rollback"
            " is recorded there first); or, if it is gone for good, decide with --unchecked"
        )
    with business_of(business) as records:
        records.require_other_than(database)
        try:
            records.require(id, op, recorded_in)
        except Exception as error:
            if not records.database.locked(error):
                raise
            raise click.ClickException(_BEING_DECIDED.format(id=id)) from None


def _found(channel: Channel, id: str) -> tuple[HalfTransaction | None, Decided | None]:
    from outbox.store.half_messages.pending import HalfTransactions

    found, decided = HalfTransactions(channel).find(id)
    if found is None and decided is None:
        raise click.ClickException(
            f"there is no transaction {id}; to see those that are pending, run: outbox half list"
        )
    return found, decided


def _unchecked(channel: Channel, transactions: Sequence[HalfTransaction]) -> list[str]:
    """Return a warning for each group on whose transactions nobody checks back."""
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.subscriptions import Subscriptions

    known = {each.name: each for each in Subscriptions(channel).all()}
    warnings: list[str] = []
    for group in sorted({each.group for each in transactions if not each.given_up}):
        check = known.get(check_of(group))
        holder = None if check is None else Leases(channel).look(check.partition(0))
        if check is None:
            warnings.append(
                f"the subscription {check_of(group)} was dropped: nobody finds the pending transactions of group"
                f" {group} any more; decide them by outbox half commit or rollback"
            )
        elif holder is None or not holder.live:
            ways = {each.verdict for each in transactions if each.group == group}
            warnings.append(f"nobody checks back on group {group}: {_checks_back(channel.database, group, ways)}")
    return warnings


def _checks_back(database: Database, group: str, ways: Iterable[Way]) -> str:
    """Return in words who could ask about transactions of a group that have these ways to a verdict."""
    options = [f" --schema {database.schema}" if database.schema else "", f" --group {quote(group)}"]
    options += [
        " --listener MODULE:OBJECT" if "listener" in ways else "",
        " --business URL" if "record" in ways else "",
    ]
    return f"start a producer of it, or run: outbox check{''.join(options)}"


def _show(found: Sequence[HalfTransaction], what: str) -> None:
    """Write one table for each topic under which RocketMQ would show them."""
    if not found:
        say(f"no transactions are {what}")
    for number, topic in enumerate(sorted({each.topic for each in found})):
        rows = [_row(each) for each in found if each.topic == topic]
        click.echo(f"\n{topic}:" if number else f"{topic}:")
        show_table(_HEADERS, rows, numbers=_NUMBERS, whole=("TRANSACTION",))


def _row(transaction: HalfTransaction) -> tuple[object, ...]:
    return (
        transaction.transaction_id,
        transaction.group,
        ",".join(transaction.real_topics),
        transaction.messages,
        age(transaction.age),
        transaction.verdict,
        transaction.checks,
        _next_check(transaction),
        transaction.last_answer,
    )


def _next_check(transaction: HalfTransaction) -> str:
    """Return in what time it may be asked about again; a time of day would need its zone, and more width."""
    if transaction.next_check_at is None:
        return "-"
    left = (transaction.next_check_at - transaction.created_at).total_seconds() - transaction.age
    return f"in {age(left)}" if left > 0 else "due"


def _as_json(transaction: HalfTransaction, decided: Decided | None = None) -> dict[str, object]:
    return {
        "transaction_id": transaction.transaction_id,
        "group": transaction.group,
        "topic": transaction.topic,
        "real_topics": transaction.real_topics,
        "messages": transaction.messages,
        "verdict": transaction.verdict,
        "created_at": transaction.created_at,
        "age_seconds": round(transaction.age, 3),
        "checks": transaction.checks,
        "last_answer": transaction.last_answer,
        "next_check_at": None if decided is not None else transaction.next_check_at,
        "given_up": transaction.given_up and decided is None,
    }


def _described(transaction: HalfTransaction, decided: Decided | None) -> dict[str, object]:
    """Return the fields that people see; those of its checks only while it has no verdict."""
    fields: dict[str, object] = {
        "transaction": transaction.transaction_id,
        "group": transaction.group,
        "topics": ", ".join(transaction.real_topics),
        "messages": transaction.messages,
        "verdict by": transaction.verdict,
        "created at": transaction.created_at,
        "age": age(transaction.age),
    }
    if decided is not None:
        return fields
    return {
        **fields,
        "checks": transaction.checks,
        "last answer": transaction.last_answer,
        "next check": transaction.next_check_at,
        "given up": "yes" if transaction.given_up else None,
    }


def _fields(message: Message) -> dict[str, object]:
    return {"id": message.id, "message_id": message.message_id, "topic": message.topic, "key": message.key}


def _was(decided: Decided | None) -> str:
    if decided is None:
        return "has no messages any more"
    done = {"commit": "was committed", "rollback": "was rolled back"}[decided.op]
    return f"{done} by {decided.decided_by} at {moment(decided.decided_at)}"


def _when(transaction: HalfTransaction) -> str:
    due = transaction.next_check_at
    return "" if due is None else f", the next one at {moment(due)}"
