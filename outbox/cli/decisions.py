"""`outbox dead` and `outbox half`: messages and transactions that wait for a person, and the person's decisions."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.check import check
from outbox.cli.groups import Group
from outbox.cli.options import (
    Target,
    a_business_database,
    about_a_database,
    as_json,
    as_value,
    by_whom,
    confirmed,
    me,
    option,
    together,
)
from outbox.cli.output import age, counted, moment, printable, say, show_json, show_table, tell, warn
from outbox.cli.tables import Alarm
from outbox.errors import InvalidMessageError

if TYPE_CHECKING:
    from outbox.model.message import Message
    from outbox.store.database import Channel, Database
    from outbox.store.half_messages.half import Way
    from outbox.store.half_messages.op import Op
    from outbox.store.half_messages.pending import Decided, HalfTransaction
    from outbox.store.subscriptions.dead_letters import DeadLetter, Verb

_LETTERS = ("SUBSCRIPTION", "ID", "TOPIC", "KEY", "ATTEMPTS", "DEAD SINCE (UTC)", "REQUEST", "ERROR")
_TRANSACTIONS = (
    "TRANSACTION", "GROUP", "TOPICS", "MESSAGES", "AGE", "VERDICT BY", "CHECKS", "NEXT CHECK", "LAST ANSWER",
)  # fmt: skip
_WHICH = "give ids, or --all (with --topic or --key for a part); not both"
#: Characters of a body that a terminal gets.
_SHOWN_BODY = 2_000
#: Seconds to wait for a business transaction that decides on the same transaction.
_PATIENCE_SECONDS = 2.0
_BEING_DECIDED = "a business transaction is deciding on transaction {id} right now; nothing was done, try again"

_limit = option("--limit", type=click.IntRange(1), default=100, help="Show at most so many.")
_name = option("--name", help="The subscription; otherwise all.")
_topic = option("--topic", help="Only of a topic.")
_key = option("--key", help="Only with a key.")
_ids = click.argument("ids", nargs=-1, type=click.IntRange(1), metavar="[ID]…")
_all = option("--all", is_flag=True, help="All dead letters, of --name, --topic and --key if given.")
_yes = option("--yes", is_flag=True, help="Do not ask.")
_id = click.argument("id", metavar="TRANSACTION")
_unchecked = option(
    "--unchecked", is_flag=True, help="Decide without the business database, because the database is gone."
)
_verdict = together(about_a_database, _id, a_business_database, _unchecked, by_whom, as_json)


@click.group(cls=Group, no_args_is_help=True)
def dead() -> None:
    """Look at dead letters, and decide on each."""


@click.group(cls=Group, no_args_is_help=True)
def half() -> None:
    """Look at pending transactions, and decide on them.

    A transaction is pending while its half messages have no verdict. After a number of questions without an answer the
    transaction is given up: nobody is asked any more, until a person decides by commit, rollback or resume.
    """


half.add_command(check)


# Listing


@dead.command("list")
@about_a_database
@_name
@_topic
@_key
@_limit
@as_json
def list_letters(
    *, target: Target, name: str | None, topic: str | None, key: str | None, limit: int, json: bool
) -> None:
    """List dead letters, in the order of the log."""
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    chosen = DeadLetterFilter(topic=topic, key=key)
    found: list[DeadLetter] = []
    with target.open_outbox() as channel:
        for each in _names(channel, name):
            found += DeadLetters(channel, each).list(chosen, limit + 1 - len(found))
            if len(found) > limit:
                break
    if json:
        show_json({"dead_letters": [asdict(each) for each in found[:limit]]}, more=len(found) > limit)
        return
    if found:
        show_table(_LETTERS, map(_letter_row, found[:limit]), numbers=("ID", "ATTEMPTS"))
    _say_the_end(found, limit, "no dead letters", "--name, --topic or --key")


@half.command("list")
@about_a_database
@option("--group", help="Only of a producer group.")
@option("--given-up", is_flag=True, help="Only transactions that were given up and wait for a person.")
@_limit
@as_json
def list_transactions(*, target: Target, group: str | None, given_up: bool, limit: int, json: bool) -> None:
    """List pending transactions, the oldest first.

    Transactions that were given up are shown under TRANS_CHECK_MAX_TIME_TOPIC, as in RocketMQ. CHECKS is the number of
    questions to a listener, NEXT CHECK the time until the next question.
    """
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        found = HalfTransactions(channel).pending(group=group, given_up=given_up, limit=limit + 1)
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
    _say_the_end(found, limit, none, "--group or --given-up")
    for warning in warnings:
        warn(warning)


def _say_the_end(found: Sequence[object], limit: int, none: str, options: str) -> None:
    if not found:
        say(none)
    if len(found) > limit:
        say(f"there are more; choose by {options}, or raise --limit above {limit}")


def _letter_row(letter: DeadLetter) -> tuple[object, ...]:
    since = None if letter.parked_at is None else moment(letter.parked_at, zone=False)
    about = (letter.subscription, letter.id, letter.topic, letter.key, letter.attempts)
    return (*about, since, letter.request, letter.error)


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
    warnings: list[str] = []
    for group in sorted({each.group for each in transactions if not each.given_up}):
        stored = known.get(check_of(group))
        holder = None if stored is None else Leases(channel).look(stored.partition(0))
        if stored is None:
            warnings.append(
                f"the subscription {check_of(group)} was dropped: nobody finds the pending transactions of group"
                f" {group} any more; decide them by outbox half commit or rollback"
            )
        elif holder is None or not holder.live:
            ways = {each.verdict for each in transactions if each.group == group}
            warnings.append(f"nobody checks back on group {group}: {_who_could_ask(channel.database, group, ways)}")
    return warnings


def _who_could_ask(database: Database, group: str, ways: Iterable[Way]) -> str:
    """Return in words how to ask about transactions of a group with the given ways to a verdict."""
    options = f" --schema {database.schema}" if database.schema else ""
    options += f" --group {quote(group)}"
    options += " --listener MODULE:OBJECT" if "listener" in ways else ""
    options += " --business URL" if "record" in ways else ""
    return f"start a producer of the group, or run: outbox half check{options}"


# Showing


@dead.command("show")
@about_a_database
@click.argument("id", type=click.IntRange(1))
@_name
@as_json
def show_letter(*, target: Target, id: int, name: str | None, json: bool) -> None:
    """Show a parked message, dead or not, with headers and body."""
    from outbox.store.subscriptions.dead_letters import DeadLetters

    with target.open_outbox() as channel:
        parked = [DeadLetters(channel, each).find(id) for each in _names(channel, name)]
    found = [each for each in parked if each is not None]
    if not found:
        raise click.ClickException(f"message {id} is not parked{'' if name is None else f' by {name}'}")
    if len(found) > 1:
        names = ", ".join(letter.subscription for letter, _ in found)
        raise click.UsageError(f"message {id} is parked by {names}; say which by --name")
    ((letter, message),) = found
    if json:
        show_json({**asdict(letter), **_contents(message)})
    else:
        _show_fields(asdict(letter))
        _show_contents(message)


@half.command("show")
@about_a_database
@_id
@as_json
def show_transaction(*, target: Target, id: str, json: bool) -> None:
    """Show a transaction, its verdict, and its messages as a commit would deliver them."""
    from outbox.store.half_messages.half import CHECK_TIMES, delay_of, real_message
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        transaction, decided = _found(channel, id)
        rows = HalfTransactions(channel).messages(id)
    messages = [(real_message(row), delay_of(row)) for row in rows]
    about: dict[str, object] = (
        {"transaction_id": id} if transaction is None else _transaction_json(transaction, decided)
    )
    about |= {"op": None, "decided_by": None, "decided_at": None} if decided is None else asdict(decided)
    if json:
        carried = [
            {**_fields(message), "delay_seconds": delay, **_contents(message, without=CHECK_TIMES)}
            for message, delay in messages
        ]
        show_json({**about, "contents": carried})
        return
    _show_fields(about)
    for message, delay in messages:
        click.echo()
        _show_fields({**_fields(message), "delay": None if delay is None else age(delay.total_seconds())})
        _show_contents(message, without=CHECK_TIMES)
    if not messages:
        say("the half messages were purged")


def _fields(message: Message) -> dict[str, object]:
    return {"id": message.id, "message_id": message.message_id, "topic": message.topic, "key": message.key}


def _contents(message: Message, *, without: str = "") -> dict[str, object]:
    """Return the contents of a message, except the header `without`; a body that is no text as base64."""
    carried: dict[str, object] = {
        "tags": message.tags,
        "headers": _headers(message, without),
        "content_type": message.content_type,
        "deliver_at": message.deliver_at,
        "expires_at": message.expires_at,
    }
    try:
        return {**carried, "body": message.body.decode()}
    except UnicodeDecodeError:
        return {**carried, "body_base64": base64.b64encode(message.body).decode()}


def _headers(message: Message, without: str) -> dict[str, str] | str | None:
    """Return the headers by name; or the stored text, if a row holds no headers there."""
    from outbox.senders.headers import own_headers

    try:
        return {name: value for name, value in own_headers(message).items() if name != without}
    except InvalidMessageError:
        return message.headers_json


def _show_fields(fields: Mapping[str, object]) -> None:
    """Write a field a line; leave out fields without a value."""
    for name, value in fields.items():
        if value is not None:
            shown = moment(value) if isinstance(value, datetime) else value
            shown = ", ".join(shown) if isinstance(shown, tuple) else shown
            click.echo(f"{name.replace('_', ' '):12} {printable(shown)}")


def _show_contents(message: Message, *, without: str = "") -> None:
    """Write the contents of a message, a field a line, and the beginning of the body."""
    carried = _contents(message, without=without)
    body = str(carried.pop("body", None) or carried.pop("body_base64", ""))
    headers = carried["headers"]
    if isinstance(headers, dict):
        del carried["headers"]
    _show_fields(carried)
    for name, value in headers.items() if isinstance(headers, dict) else ():
        click.echo(f"{'header':12} {printable(name)}: {printable(value)}")
    cut = "" if len(body) <= _SHOWN_BODY else f" (the first {_SHOWN_BODY} characters; --json shows all)"
    click.echo(f"{'body':12} {counted(len(message.body), 'byte')}{cut}")
    click.echo("\n".join(map(printable, body[:_SHOWN_BODY].split("\n"))))


def _transaction_json(transaction: HalfTransaction, decided: Decided | None = None) -> dict[str, object]:
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


# Deciding on dead letters


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options that choose dead letters."""

    ids: tuple[int, ...]
    name: str | None
    all: bool
    topic: str | None
    key: str | None


def _chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a decision its options, and hand over the choice of dead letters as `choice`."""
    return together(
        about_a_database, _ids, _name, _all, _topic, _key, by_whom, _yes, as_json, as_value("choice", Choice)
    )(function)


@dead.command()
@_chosen
@option("--reason", help="Why, for the log.")
def replay(*, target: Target, choice: Choice, by: str | None, reason: str | None, yes: bool, json: bool) -> None:
    """Send dead letters again, with attempts counted from 0."""
    _decide(target, "replay", choice, by=by, reason=reason, yes=yes, json=json)


@dead.command()
@_chosen
@option("--reason", help="Why, for the log; needed, and asked for at a terminal.")
def discard(*, target: Target, choice: Choice, by: str | None, reason: str | None, yes: bool, json: bool) -> None:
    """Give dead letters up for good; the messages behind them, of the same keys, go on."""
    _require_clear(choice)
    if not reason:
        if not sys.stdin.isatty():
            raise click.UsageError("say why these dead letters are given up: --reason TEXT")
        reason = click.prompt("Why are they given up?", err=True)
    _decide(target, "discard", choice, by=by, reason=reason, yes=yes, json=json)


def _decide(
    target: Target, verb: Verb, choice: Choice, *, by: str | None, reason: str | None, yes: bool, json: bool
) -> None:
    """Write the request, and have it carried out: by the worker, or here if there is none."""
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    _require_clear(choice)
    told: list[str] = []
    done: list[dict[str, object]] = []
    with target.open_outbox() as channel:
        names = _names(channel, choice.name)
        if verb == "discard":
            names = _without_checks(channel, names, asked=choice.name is not None)
        chosen = DeadLetterFilter(ids=choice.ids or None, topic=choice.topic, key=choice.key)
        letters = {each: DeadLetters(channel, each) for each in names}
        counts = {each: count for each in names if (count := letters[each].count(chosen))}
        if choice.ids:
            found = [letter for each in counts for letter in letters[each].list(chosen, len(choice.ids))]
            _require_each(found, choice.ids, names)
        elif counts:
            shown = " and ".join(f"{counted(count, 'dead letter')} of {each}" for each, count in counts.items())
            confirmed(f"{verb} {shown}?", yes=yes)
        for each in counts:
            number = letters[each].request(chosen, verb, by or me(), reason)
            worker = _carry_out(channel, each)
            done.append({"name": each, "dead_letters": number, "carried_out": worker is None, "worker": worker})
            here = "will be sent by the next worker" if verb == "replay" else "discarded"
            told.append(
                f"{counted(number, 'dead letter')} of {each}: {here}"
                if worker is None
                else f"{verb} of {number} asked for; worker {worker} carries it out"
            )
    if json:
        show_json({"decision": verb, "subscriptions": done})
        return
    for line in told or [f"no dead letters of {', '.join(names) or 'any subscription'} match"]:
        say(line)


def _require_clear(choice: Choice) -> None:
    if bool(choice.ids) == choice.all:
        raise click.UsageError(_WHICH)


def _names(channel: Channel, name: str | None) -> list[str]:
    from outbox.store.subscriptions.subscriptions import Subscriptions

    subscriptions = Subscriptions(channel)
    return [each.name for each in subscriptions.all()] if name is None else [subscriptions.get(name).name]


def _without_checks(channel: Channel, names: list[str], *, asked: bool) -> list[str]:
    """Leave out check subscriptions: a transaction that was given up needs a verdict, and no discard."""
    from outbox.store.subscriptions.subscriptions import Subscriptions

    checks = {each.name for each in Subscriptions(channel).all() if each.kind == "check"}
    if asked and checks.intersection(names):
        raise click.UsageError(
            f"{names[0]} holds transactions, which wait for a verdict: outbox half list, then outbox half commit or"
            " rollback"
        )
    return [name for name in names if name not in checks]


def _require_each(found: list[DeadLetter], ids: tuple[int, ...], names: list[str]) -> None:
    """Raise if an id is no dead letter, or is a dead letter of several subscriptions."""
    missing = set(ids) - {letter.id for letter in found}
    if missing:
        shown = ", ".join(map(str, sorted(missing)))
        raise click.ClickException(f"no dead letters of {', '.join(names)}: {shown}; nothing was done")
    if len(found) > len(set(ids)):
        holders = ", ".join(sorted({letter.subscription for letter in found}))
        raise click.UsageError(f"say whose dead letters by --name; there are: {holders}")


def _carry_out(channel: Channel, subscription: str) -> str | None:
    """Carry out the requests about a subscription; if a worker is alive and will do so, return its name."""
    from outbox.admin.borrowing import WorkerAliveError
    from outbox.admin.commands import carry_out_without_worker
    from outbox.store.subscriptions.subscriptions import Subscriptions

    try:
        carry_out_without_worker(channel, Subscriptions(channel).get(subscription))
    except WorkerAliveError as error:
        return error.holder.owner
    return None


# Deciding on transactions


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
    from outbox.store.half_messages.half import half_of
    from outbox.store.half_messages.pending import HalfTransactions

    with target.open_outbox() as channel:
        pending, stands = _found(channel, id)
        if pending is not None and stands is None and pending.verdict == "record" and not unchecked:
            rows = HalfTransactions(channel).messages(id)
            _require_record(channel.database, id, op, business, half_of(rows[0]).recorded_in)
        is_new = _write_verdict(channel, id, op, f"admin {by or me()}")
        transaction, decided = _found(channel, id)
    number = 0 if transaction is None else transaction.messages
    messages = counted(number, "message")
    done = f"committed; {messages} to be delivered" if op == "commit" else f"rolled back; {messages} dropped"
    tell(
        f"transaction {id}: {done}" if is_new else f"transaction {id} {_was(decided)}; nothing changed",
        {
            "decision": op,
            "transaction_id": id,
            "messages": number,
            "is_new": is_new,
            "decided_by": None if decided is None else decided.decided_by,
            "decided_at": None if decided is None else decided.decided_at,
        },
        json=json,
    )


def _write_verdict(channel: Channel, id: str, op: Op, by: str) -> bool:
    from outbox.rocketmq.broker import Broker
    from outbox.writing.bare import BareOutbox

    database = channel.database
    outbox = BareOutbox(database)
    broker = Broker(outbox, connections=1)
    try:
        is_new = broker.end(id, op, by=by, patience=_PATIENCE_SECONDS)
    except Exception as error:
        if not database.locked(error):
            raise
        raise click.ClickException(_BEING_DECIDED.format(id=id)) from None
    finally:
        broker.close()
        outbox.notifier.close()
    if is_new and op == "commit" and database.dialect.driving.notifies:
        # Notify by this connection, because that of the outbox is closed before its notifier's thread comes to it.
        channel.notify()
    return is_new


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
    from outbox.model.subscription import check_of
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    with target.open_outbox() as channel:
        transaction, decided = _found(channel, id)
        if transaction is None or decided is not None:
            raise click.ClickException(f"transaction {id} {_was(decided)}; nobody has to be asked")
        if not transaction.given_up:
            due = transaction.next_check_at
            when = "" if due is None else f", the next one at {moment(due)}"
            raise click.ClickException(f"transaction {id} was not given up; its checks go on{when}")
        group, chosen = transaction.group, DeadLetterFilter(ids=transaction.given_up_ids)
        DeadLetters(channel, check_of(group)).request(chosen, "replay", by or me(), reason)
        worker = _carry_out(channel, check_of(group))
        who = _who_could_ask(channel.database, group, [transaction.verdict])
    tell(
        f"transaction {id} will be asked about again when somebody checks back on group {group}: {who}"
        if worker is None
        else f"transaction {id}: worker {worker} will ask about it again",
        {
            "decision": "resume",
            "transaction_id": id,
            "group": group,
            "messages": transaction.messages,
            "carried_out": worker is None,
            "worker": worker,
        },
        json=json,
    )


def _found(channel: Channel, id: str) -> tuple[HalfTransaction | None, Decided | None]:
    from outbox.store.half_messages.pending import HalfTransactions

    found, decided = HalfTransactions(channel).find(id)
    if found is None and decided is None:
        raise click.ClickException(f"there is no transaction {id}; for the pending ones run: outbox half list")
    return found, decided


def _was(decided: Decided | None) -> str:
    if decided is None:
        return "has no messages any more"
    done = {"commit": "was committed", "rollback": "was rolled back"}[decided.op]
    return f"{done} by {decided.decided_by} at {moment(decided.decided_at)}"
