"""`outbox half`: transactions whose half messages wait for a verdict, and a person's decisions on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.check import check
from outbox.cli.groups import Group
from outbox.cli.options import (
    Target,
    a_business_database,
    about_a_database,
    as_json,
    at_most,
    by_whom,
    option,
    together,
)
from outbox.cli.output import age, counted, say, say_the_end, show_json, show_table, tell, warn
from outbox.cli.tables import Alarm

if TYPE_CHECKING:
    from outbox.model.message import Message
    from outbox.store.database import Channel, Database
    from outbox.store.half_messages.half import Way
    from outbox.store.half_messages.op import Op
    from outbox.store.half_messages.pending import Decided, HalfTransaction

_TRANSACTIONS = (
    "TRANSACTION", "GROUP", "TOPICS", "MESSAGES", "AGE", "VERDICT BY", "CHECKS", "NEXT CHECK", "LAST ANSWER",
)  # fmt: skip
#: Seconds to wait for a business transaction that decides on the same transaction.
_PATIENCE_SECONDS = 2.0
_BEING_DECIDED = "a business transaction is deciding on transaction {id} right now; nothing was done, try again"

_id = click.argument("id", metavar="TRANSACTION")
_verdict = together(
    about_a_database,
    _id,
    a_business_database,
    option("--unchecked", is_flag=True, help="Decide without the business database, because the database is gone."),
    by_whom,
    as_json,
)


@click.group(cls=Group, no_args_is_help=True)
def half() -> None:
    """Look at pending transactions, and decide on them.

    A transaction is pending while its half messages have no verdict. After a number of questions without an answer the
    transaction is given up: nobody is asked any more, until a person decides by commit, rollback or resume.
    """


half.add_command(check)


@half.command("list")
@about_a_database
@option("--group", help="Only of a producer group.")
@option("--given-up", is_flag=True, help="Only transactions that were given up and wait for a person.")
@at_most
@option("--after", metavar="TRANSACTION", help="Begin behind this transaction.")
@as_json
def list_transactions(
    *, target: Target, group: str | None, given_up: bool, limit: int, after: str | None, json: bool
) -> None:
    """List pending transactions, the oldest first.

    Transactions that were given up are shown under TRANS_CHECK_MAX_TIME_TOPIC, as in RocketMQ. CHECKS is the number of
    questions to a listener, NEXT CHECK the time until the next question.
    """
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        found = HalfTransactions(channel).pending(group=group, given_up=given_up, limit=limit + 1, after=after)
        shown = found[:limit]
        if json:
            show_json({"transactions": [_transaction_json(each) for each in shown]}, more=len(found) > limit)
            return
        warnings = _unattended(channel, shown)
    for number, topic in enumerate(sorted({each.topic for each in shown})):
        click.echo(f"\n{topic}:" if number else f"{topic}:")
        rows = [_transaction_row(each) for each in shown if each.topic == topic]
        show_table(_TRANSACTIONS, rows, numbers=("MESSAGES", "CHECKS"))
    none = f"no transactions are {'given up' if given_up else 'pending'}"
    say_the_end(found, limit, none, "--group or --given-up, go on by --after")
    for warning in warnings:
        warn(warning)


def _transaction_row(transaction: HalfTransaction) -> tuple[object, ...]:
    id = transaction.transaction_id
    return (
        Alarm(id) if transaction.given_up else id,
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
    """Return the time until the next question; a time of day would need its zone, and more width."""
    if transaction.next_check_at is None:
        return "-"
    left = (transaction.next_check_at - transaction.created_at).total_seconds() - transaction.age
    return f"in {age(left)}" if left > 0 else "due"


def _unattended(channel: Channel, transactions: Sequence[HalfTransaction]) -> list[str]:
    """Return a warning for each group of these transactions without a worker that checks back."""
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.leases import Leases
    from outbox.store.subscriptions.subscriptions import Subscriptions

    known = {each.name: each for each in Subscriptions(channel).all()}
    commands, warnings = channel.database.commands, list[str]()
    for group in sorted({each.group for each in transactions if not each.given_up}):
        stored = known.get(check_of(group))
        holder = None if stored is None else Leases(channel).look(stored.partition(0))
        if stored is None:
            warnings.append(
                f"the subscription {check_of(group)} was dropped: nobody finds the pending transactions of group"
                f" {group} any more; decide them by {commands.line('half', 'commit', 'ID')}, or"
                f" {commands.line('half', 'rollback', 'ID')}"
            )
        elif holder is None or not holder.live:
            ways = {each.verdict for each in transactions if each.group == group}
            warnings.append(f"nobody checks back on group {group}: {_who_could_ask(channel.database, group, ways)}")
    return warnings


def _who_could_ask(database: Database, group: str, ways: Iterable[Way]) -> str:
    """Return in words how to ask about transactions of a group with the given ways to a verdict."""
    options = ["--group", group]
    options += ["--listener", "MODULE:OBJECT"] if "listener" in ways else []
    options += ["--business", "URL"] if "record" in ways else []
    return f"start a producer of the group, or run: {database.commands.line('half', 'check', *options)}"


@half.command("show")
@about_a_database
@_id
@as_json
def show_transaction(*, target: Target, id: str, json: bool) -> None:
    """Show a transaction, its verdict, and its messages as a commit would deliver them."""
    from outbox.admin.half import found
    from outbox.cli.contents import LISTED_BYTES, contents_of, show_contents, show_fields
    from outbox.store.half_messages.half import CHECK_TIMES, delay_of, is_readable, real_message
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        transaction, decided = found(channel, id)
        rows = HalfTransactions(channel).messages(id)
    # One that no producer wrote is shown as it is stored.
    messages = [(real_message(row), delay_of(row)) if is_readable(row) else (row, None) for row in rows]
    about: dict[str, object] = (
        {"transaction_id": id} if transaction is None else _transaction_json(transaction, decided)
    )
    about |= {"op": None, "decided_by": None, "decided_at": None} if decided is None else asdict(decided)
    if json:
        carried = [
            {**_fields(message), "delay_seconds": delay} | contents_of(message, without=CHECK_TIMES, most=LISTED_BYTES)
            for message, delay in messages
        ]
        show_json({**about, "contents": carried})
        return
    show_fields(about)
    for message, delay in messages:
        click.echo()
        show_fields({**_fields(message), "delay": None if delay is None else age(delay.total_seconds())})
        show_contents(message, without=CHECK_TIMES)
    if not messages:
        say("the half messages were purged")


def _fields(message: Message) -> dict[str, object]:
    return {"id": message.id, "message_id": message.message_id, "topic": message.topic, "key": message.key}


def _transaction_json(transaction: HalfTransaction, decided: Decided | None = None) -> dict[str, object]:
    shown = asdict(transaction)
    del shown["given_up_ids"]
    shown |= {"topic": transaction.topic, "age_seconds": round(shown.pop("age"), 3)}
    if decided is not None:
        shown["next_check_at"] = None
    return {**shown, "given_up": transaction.given_up and decided is None}


@half.command()
@_verdict
def commit(*, target: Target, id: str, **how: Any) -> None:
    """Deliver the messages of a pending transaction.

    The first verdict stands for ever, also a verdict by hand. With verdict="join" the business transaction decides by
    its commit; the command waits briefly for a transaction under way. With verdict="record" the record of the commit
    has to be in the business database.
    """
    _end(target, id, "commit", **how)


@half.command()
@_verdict
def rollback(*, target: Target, id: str, **how: Any) -> None:
    """Drop the messages of a pending transaction.

    The first verdict stands for ever, also a verdict by hand. A later commit of the business transaction is refused;
    the command waits briefly for a transaction under way. With verdict="record" a record in the business database
    refuses the commit.
    """
    _end(target, id, "rollback", **how)


def _end(target: Target, id: str, op: Op, *, by: str | None, business: str | None, unchecked: bool, json: bool) -> None:
    """Write a verdict by hand, if none stands."""
    from outbox.admin.half import decide, found, was
    from outbox.model.limits import require_notes
    from outbox.store.half_messages.half import half_of
    from outbox.store.half_messages.pending import HalfTransactions

    require_notes(by=by)
    with target.open_outbox() as channel:
        pending, stands = found(channel, id)
        if pending is not None and stands is None and pending.verdict == "record" and not unchecked:
            rows = HalfTransactions(channel).messages(id)
            if pending.real_topics or op == "rollback":
                _require_record(channel.database, id, op, business, half_of(rows[0]).recorded_in)
        verdict = decide(channel, id, op, by=by, unchecked=True)
        _, decided = found(channel, id)
    messages = counted(verdict.messages, "message")
    done = f"committed; {messages} to be delivered" if op == "commit" else f"rolled back; {messages} dropped"
    tell(
        f"transaction {id}: {done}" if verdict.is_new else f"transaction {id} {was(decided)}; nothing changed",
        {
            "decision": op,
            "transaction_id": id,
            "messages": verdict.messages,
            "is_new": verdict.is_new,
            "decided_by": verdict.decided_by,
            "decided_at": verdict.decided_at,
        },
        json=json,
    )


def _require_record(database: Database, id: str, op: Op, business: str | None, recorded_in: str | None) -> None:
    """Raise unless the business database agrees with a verdict; before a rollback it is made to forbid the commit."""
    from outbox.cli.business import business_of

    if business is None:
        raise click.UsageError(
            f"transaction {id} is decided by a record in the business database: name the database by --business (a"
            " rollback is recorded there first); or, if the database is gone for good, decide with --unchecked"
        )
    with business_of(business) as records:
        records.require_other_than(database)
        try:
            records.require(id, op, recorded_in)
        except Exception as error:
            if not records.database.locked(error):
                raise
            raise click.ClickException(_BEING_DECIDED.format(id=id)) from None


@half.command()
@about_a_database
@_id
@by_whom
@option("--reason", help="Why, for the log.")
@as_json
def resume(*, target: Target, id: str, by: str | None, reason: str | None, json: bool) -> None:
    """Ask again about a transaction that was given up, with questions counted from 0.

    A transaction older than the age limit of the check service (72 h by default) is given up again at once. Decide by
    commit or rollback, or run the check service with a longer --age-limit.
    """
    from outbox.admin.half import HalfMessages, found

    with target.open_outbox() as channel:
        transaction, _ = found(channel, id)
        done = HalfMessages(channel).half_resume(id, by=by, reason=reason)
        ways = [transaction.verdict] if transaction is not None else []
        who = _who_could_ask(channel.database, done.group, ways)
    tell(
        f"transaction {id} will be asked about again when somebody checks back on group {done.group}: {who}"
        if done.worker is None
        else f"transaction {id}: worker {done.worker} will ask about it again",
        {
            "decision": "resume",
            "transaction_id": id,
            "group": done.group,
            "messages": done.messages,
            "carried_out": done.worker is None,
            "worker": done.worker,
        },
        json=json,
    )
