"""`outbox dead`: dead letters, and a person's decisions on them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import (
    Target,
    about_a_database,
    as_json,
    as_value,
    at_most,
    by_whom,
    confirmed,
    me,
    option,
    together,
)
from outbox.cli.output import counted, moment, say, say_the_end, show_json, show_table

if TYPE_CHECKING:
    from outbox.model.subscription import Subscription
    from outbox.store.database import Channel
    from outbox.store.subscriptions.dead_letters import DeadLetter, Verb

_LETTERS = ("SUBSCRIPTION", "ID", "TOPIC", "KEY", "ATTEMPTS", "DEAD SINCE (UTC)", "REQUEST", "ERROR")

_name = option("--name", help="The subscription; otherwise all.")
_topic = option("--topic", help="Only of a topic.")
_key = option("--key", help="Only with a key.")


@click.group(cls=Group, no_args_is_help=True)
def dead() -> None:
    """Look at dead letters, and decide on each."""


@dead.command("list")
@about_a_database
@_name
@_topic
@_key
@at_most
@as_json
def list_letters(
    *, target: Target, name: str | None, topic: str | None, key: str | None, limit: int, json: bool
) -> None:
    """List dead letters, in the order of the log."""
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    chosen = DeadLetterFilter(topic=topic, key=key)
    found: list[DeadLetter] = []
    with target.open_outbox() as channel:
        for each in _subscriptions(channel, name):
            found += DeadLetters(channel, each.name).list(chosen, limit + 1 - len(found))
            if len(found) > limit:
                break
    if json:
        show_json({"dead_letters": [asdict(each) for each in found[:limit]]}, more=len(found) > limit)
        return
    if found:
        show_table(_LETTERS, map(_letter_row, found[:limit]), numbers=("ID", "ATTEMPTS"))
    say_the_end(found, limit, "no dead letters", "--name, --topic or --key")


def _letter_row(letter: DeadLetter) -> tuple[object, ...]:
    since = None if letter.parked_at is None else moment(letter.parked_at, zone=False)
    about = (letter.subscription, letter.id, letter.topic, letter.key, letter.attempts)
    return (*about, since, letter.request, letter.error)


@dead.command("show")
@about_a_database
@click.argument("id", type=click.IntRange(1))
@_name
@as_json
def show_letter(*, target: Target, id: int, name: str | None, json: bool) -> None:
    """Show a parked message, dead or not, with headers and body."""
    from outbox.cli.contents import contents_of, show_contents, show_fields
    from outbox.store.subscriptions.dead_letters import DeadLetters

    with target.open_outbox() as channel:
        parked = [DeadLetters(channel, each.name).find(id) for each in _subscriptions(channel, name)]
    found = [each for each in parked if each is not None]
    if not found:
        raise click.ClickException(f"message {id} is not parked{'' if name is None else f' by {name}'}")
    if len(found) > 1:
        names = ", ".join(letter.subscription for letter, _ in found)
        raise click.UsageError(f"message {id} is parked by {names}; say which by --name")
    ((letter, message),) = found
    if json:
        show_json({**asdict(letter), **contents_of(message)})
    else:
        show_fields(asdict(letter))
        show_contents(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options that choose dead letters."""

    ids: tuple[int, ...]
    name: str | None
    all: bool
    topic: str | None
    key: str | None

    def __post_init__(self) -> None:
        if bool(self.ids) == self.all:
            raise click.UsageError("give ids, or --all (with --topic or --key for a part); not both")


_chosen = together(
    about_a_database,
    click.argument("ids", nargs=-1, type=click.IntRange(1), metavar="[ID]…"),
    _name,
    option("--all", is_flag=True, help="All dead letters, of --name, --topic and --key if given."),
    _topic,
    _key,
    by_whom,
    option("--yes", is_flag=True, help="Do not ask."),
    as_json,
    as_value("choice", Choice),
)


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
    if not reason:
        if not sys.stdin.isatty():
            raise click.UsageError("say why these dead letters are given up: --reason TEXT")
        reason = click.prompt("Why are they given up?", err=True)
    _decide(target, "discard", choice, by=by, reason=reason, yes=yes, json=json)


def _decide(
    target: Target, verb: Verb, choice: Choice, *, by: str | None, reason: str | None, yes: bool, json: bool
) -> None:
    """Write the request, and have it carried out: by the worker, or here if there is none."""
    from outbox.admin.commands import carry_out_without_worker
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    told: list[str] = []
    done: list[dict[str, object]] = []
    with target.open_outbox() as channel:
        subscriptions = _subscriptions(channel, choice.name)
        if verb == "discard":
            subscriptions = _without_checks(subscriptions, asked=choice.name is not None)
        names = [each.name for each in subscriptions]
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
            worker = carry_out_without_worker(channel, each)
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


def _subscriptions(channel: Channel, name: str | None) -> list[Subscription]:
    from outbox.store.subscriptions.subscriptions import Subscriptions

    return Subscriptions(channel).all() if name is None else [Subscriptions(channel).get(name)]


def _without_checks(found: list[Subscription], *, asked: bool) -> list[Subscription]:
    """Leave out check subscriptions: a transaction that was given up needs a verdict, and no discard."""
    if asked and found[0].kind == "check":
        raise click.UsageError(
            f"{found[0].name} holds transactions, which wait for a verdict: outbox half list, then outbox half commit"
            " or rollback"
        )
    return [each for each in found if each.kind != "check"]


def _require_each(found: list[DeadLetter], ids: tuple[int, ...], names: list[str]) -> None:
    """Raise if an id is no dead letter, or is a dead letter of several subscriptions."""
    missing = set(ids) - {letter.id for letter in found}
    if missing:
        shown = ", ".join(map(str, sorted(missing)))
        raise click.ClickException(f"no dead letters of {', '.join(names)}: {shown}; nothing was done")
    if len(found) > len(set(ids)):
        holders = ", ".join(sorted({letter.subscription for letter in found}))
        raise click.UsageError(f"say whose dead letters by --name; there are: {holders}")
