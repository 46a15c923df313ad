"""`outbox dead`: dead letters, and a person's decisions on them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from outbox.cli.contents import contents, show_contents, show_fields
from outbox.cli.decisions import carry_out
from outbox.cli.groups import Group
from outbox.cli.options import Target, about_a_database, as_json, by_whom, confirmed, me, option, together
from outbox.cli.output import counted, moment, say, show_json, show_table

if TYPE_CHECKING:
    from outbox.model.message import Message
    from outbox.store.database import Channel
    from outbox.store.subscriptions.dead_letters import DeadLetter, DeadLetterFilter, Verb

_HEADERS = ("SUBSCRIPTION", "ID", "TOPIC", "KEY", "ATTEMPTS", "DEAD SINCE (UTC)", "REQUEST", "ERROR")
_WHICH = "give ids, or --all (with --topic or --key for a part); not both"

_name = option("--name", help="The subscription; otherwise all.")
_topic = option("--topic", help="Only of this topic.")
_key = option("--key", help="Only with this key.")
_all = option("--all", is_flag=True, help="All dead letters, of --name, --topic and --key if given.")
_yes = option("--yes", is_flag=True, help="Do not ask.")
_ids = click.argument("ids", nargs=-1, type=click.IntRange(1), metavar="[ID]…")
_chosen = together(about_a_database, _ids, _name, _all, _topic, _key, by_whom)


@click.group(cls=Group, no_args_is_help=True)
def dead() -> None:
    """Look at dead letters, and decide on them."""


@dead.command("list")
@about_a_database
@_name
@_topic
@_key
@option("--limit", type=click.IntRange(1), default=100, help="Show at most so many.")
@as_json
def list_(*, target: Target, name: str | None, topic: str | None, key: str | None, limit: int, json: bool) -> None:
    """List dead letters, in the order of the log."""
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter

    with target.open_outbox() as channel:
        found = _listed(channel, name, DeadLetterFilter(topic=topic, key=key), limit + 1)
    if json:
        show_json({"dead_letters": [asdict(letter) for letter in found[:limit]]}, more=len(found) > limit)
        return
    if found:
        show_table(_HEADERS, [_row(letter) for letter in found[:limit]], numbers=("ID", "ATTEMPTS"))
    else:
        say("no dead letters")
    if len(found) > limit:
        say(f"there are more; choose by --name, --topic or --key, or raise --limit above {limit}")


@dead.command()
@about_a_database
@click.argument("id", type=click.IntRange(1))
@_name
@as_json
def show(*, target: Target, id: int, name: str | None, json: bool) -> None:
    """Show one message that was parked, dead or not, with its headers and its body."""
    with target.open_outbox() as channel:
        letter, message = _found(channel, name, id)
    if json:
        show_json({**asdict(letter), **contents(message)})
    else:
        _show_letter(letter, message)


@dead.command()
@_chosen
@option("--reason", help="Why, for the log.")
@_yes
@as_json
def replay(*, target: Target, **wanted: Any) -> None:
    """Send dead letters again; their attempts are counted from 0 again."""
    _decide(target, "replay", **wanted)


@dead.command()
@_chosen
@option("--reason", help="Why, for the log; needed, and asked for at a terminal.")
@_yes
@as_json
def discard(*, target: Target, **wanted: Any) -> None:
    """Give dead letters up for good; messages of their keys that wait behind them go on."""
    if bool(wanted["ids"]) == wanted["all"]:
        raise click.UsageError(_WHICH)
    reason = wanted.pop("reason") or _asked_for_a_reason()
    _decide(target, "discard", reason=reason, **wanted)


def _asked_for_a_reason() -> str:
    if not sys.stdin.isatty():
        raise click.UsageError("say why these dead letters are given up: --reason TEXT")
    return str(click.prompt("Why are they given up?", err=True))


def _decide(
    target: Target,
    verb: Verb,
    *,
    ids: tuple[int, ...],
    name: str | None,
    all: bool,
    topic: str | None,
    key: str | None,
    by: str | None,
    reason: str | None,
    yes: bool,
    json: bool,
) -> None:
    """Write the request, and have it carried out: by the worker, or here if there is none."""
    from outbox.store.subscriptions.dead_letters import DeadLetterFilter, DeadLetters

    if bool(ids) == all:
        raise click.UsageError(_WHICH)
    with target.open_outbox() as channel:
        names = _names(channel, name)
        if verb == "discard":
            names = _without_checks(channel, names, asked=name is not None)
        chosen = DeadLetterFilter(ids=ids or None, topic=topic, key=key)
        letters = {each: DeadLetters(channel, each) for each in names}
        counts = {each: count for each in names if (count := letters[each].count(chosen))}
        if ids:
            found = [letter for each in counts for letter in letters[each].list(chosen, len(ids))]
            _require_each(found, ids, names)
        if counts and not ids:
            shown = " and ".join(f"{counted(count, 'dead letter')} of {each}" for each, count in counts.items())
            confirmed(f"{verb} {shown}?", yes=yes)
        done: list[_Done] = []
        for each in counts:
            requested = letters[each].request(chosen, verb, by or me(), reason)
            done.append(_Done(each, requested, carry_out(channel, each)))
    if json:
        show_json({"decision": verb, "subscriptions": [each.as_json() for each in done]})
        return
    for one in done:
        say(one.describe(verb))
    if not done:
        say(f"no dead letters of {', '.join(names) or 'any subscription'} match")


@dataclass(frozen=True, slots=True)
class _Done:
    """Dead letters of one subscription that were decided on; `worker`: it carries that out, if it is not done yet."""

    subscription: str
    number: int
    worker: str | None

    def describe(self, verb: Verb) -> str:
        if self.worker is not None:
            return f"{verb} of {self.number} asked for; worker {self.worker} carries it out"
        done = "will be sent by the next worker" if verb == "replay" else "discarded"
        return f"{counted(self.number, 'dead letter')} of {self.subscription}: {done}"

    def as_json(self) -> dict[str, object]:
        done = {"carried_out": self.worker is None, "worker": self.worker}
        return {"name": self.subscription, "dead_letters": self.number, **done}


def _listed(channel: Channel, name: str | None, chosen: DeadLetterFilter, limit: int) -> list[DeadLetter]:
    from outbox.store.subscriptions.dead_letters import DeadLetters

    found: list[DeadLetter] = []
    for each in _names(channel, name):
        found += DeadLetters(channel, each).list(chosen, limit - len(found))
        if len(found) >= limit:
            break
    return found


def _found(channel: Channel, name: str | None, id: int) -> tuple[DeadLetter, Message]:
    from outbox.store.subscriptions.dead_letters import DeadLetters

    places = [DeadLetters(channel, each).find(id) for each in _names(channel, name)]
    found = [place for place in places if place is not None]
    if not found:
        raise click.ClickException(f"message {id} is not parked{'' if name is None else f' by {name}'}")
    if len(found) > 1:
        names = ", ".join(letter.subscription for letter, _ in found)
        raise click.UsageError(f"message {id} is parked by {names}; say which by --name")
    return found[0]


def _names(channel: Channel, name: str | None) -> list[str]:
    from outbox.store.subscriptions.subscriptions import Subscriptions

    subscriptions = Subscriptions(channel)
    return [each.name for each in subscriptions.all()] if name is None else [subscriptions.get(name).name]


def _without_checks(channel: Channel, names: list[str], *, asked: bool) -> list[str]:
    """Leave out check subscriptions: the transactions that they have given up need a verdict, and no discard."""
    from outbox.store.subscriptions.subscriptions import Subscriptions

    checks = {each.name for each in Subscriptions(channel).all() if each.kind == "check"}
    if asked and checks.intersection(names):
        raise click.UsageError(
            f"{names[0]} holds transactions, which wait for a verdict: outbox half list, then outbox half commit or"
            " rollback"
        )
    return [name for name in names if name not in checks]


def _require_each(found: list[DeadLetter], ids: tuple[int, ...], names: list[str]) -> None:
    """Raise if an id is no dead letter, or is one of several subscriptions, so that it is not clear which is meant."""
    missing = set(ids) - {letter.id for letter in found}
    if missing:
        shown = ", ".join(map(str, sorted(missing)))
        raise click.ClickException(f"no dead letters of {', '.join(names)}: {shown}; nothing was done")
    if len(found) > len(set(ids)):
        holders = ", ".join(sorted({letter.subscription for letter in found}))
        raise click.UsageError(f"say whose dead letters by --name; there are: {holders}")


def _row(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.subscription,
        letter.id,
        letter.topic,
        letter.key,
        letter.attempts,
        None if letter.parked_at is None else moment(letter.parked_at, zone=False),
        letter.request,
        letter.error,
    )


def _show_letter(letter: DeadLetter, message: Message) -> None:
    show_fields(asdict(letter))
    show_contents(message)
