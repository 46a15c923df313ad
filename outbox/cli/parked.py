"""`outbox parked`: messages set aside, and a person's decisions on them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from dataclasses import replace as changed
from datetime import datetime
from typing import TYPE_CHECKING

import click

from outbox.cli.groups import Group
from outbox.cli.options import (
    ID,
    KEY,
    MOMENT,
    NAMES,
    Target,
    about_a_database,
    as_json,
    as_value,
    at_most,
    by_whom,
    confirmed,
    option,
    together,
)
from outbox.cli.output import counted, fail, moment, printable, say, say_the_end, show_json, show_table
from outbox.cli.statuses import say_pauses
from outbox.cli.tables import Alarm
from outbox.model.parking import States
from outbox.model.status import Count

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.admin.decisions import Choice
    from outbox.admin.results import Decided, HeldKey, KeyDetail
    from outbox.model.decision import Verb
    from outbox.store.subscriptions.parked_messages import ParkedMessage

_HEADERS = (
    "SUBSCRIPTION", "ID", "STATE", "TOPIC", "KEY", "BEHIND", "ATTEMPTS", "SINCE (UTC)", "DUE (UTC)", "DECISION",
    "ERROR",
)  # fmt: skip

_KEYS = ("SUBSCRIPTION", "KEY", "BEHIND", "HEAD", "STATE", "ATTEMPTS", "SINCE (UTC)", "ERROR")

_name = option("--name", help="The subscription; otherwise all.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The options that choose parked messages."""

    name: str | None
    state: tuple[str, ...] | None
    topic: str | None
    key: str | None
    error_like: str | None
    before: datetime | None

    def choice(self) -> Choice:
        """Return the given options."""
        return {name: value for name, value in asdict(self).items() if value is not None}  # type: ignore[return-value]


_filtered = together(
    _name,
    option("--state", type=NAMES, help="Only of these states: waiting,retry,behind,delayed,dead."),
    option("--topic", help="Only of a topic."),
    option("--key", type=KEY, help="Only with a key."),
    option("--error-like", metavar="TEXT", help="Only with this text in the error, in capitals or not."),
    option("--before", type=MOMENT, help="Only parked before this time."),
    as_value("chosen", Filter),
)


@click.group(cls=Group, no_args_is_help=True)
def parked() -> None:
    """Look at messages set aside, and decide on them.

    A message in the state waiting waits for a destination that is away; retry: for the next try; behind: for an
    earlier message of the key. A delayed message waits for a time, a dead letter for a person.
    """


@parked.command("list")
@about_a_database
@_filtered
@at_most
@option("--after", type=click.IntRange(0, 2**63 - 1), metavar="ID", help="Begin behind this id; with --name.")
@as_json
def list_(*, target: Target, chosen: Filter, limit: int, after: int | None, json: bool) -> None:
    """List parked messages, in the order of the log; for a message behind another one also that one."""
    from outbox.admin.admin import Admin

    if after is not None and chosen.name is None:
        raise click.UsageError("--after: each subscription has messages of its own; say which by --name")
    place = None if after is None or chosen.name is None else (chosen.name, after)
    with target.open_outbox() as channel:
        found = Admin(channel).parked(limit=limit + 1, after=place, **chosen.choice())
        # A pause of their key may be why they wait.
        names = {each.subscription for each in found if each.key is not None}
        paused = [each for each in Admin(channel).subscriptions() if each.name in names] if names else []
    if json:
        show_json({"parked": found[:limit]}, more=len(found) > limit)
        return
    if found:
        show_table(_HEADERS, map(_row, found[:limit]), numbers=("ID", "BEHIND", "ATTEMPTS"))
        say_pauses(paused, target.commands)
    say_the_end(found, limit, "no parked messages", "--name, --state, --topic or --key")


def _row(message: ParkedMessage) -> tuple[object, ...]:
    since, due = (None if each is None else moment(each, zone=False) for each in (message.parked_at, message.due_at))
    state = message.state if message.withdrawn_at is None else "withdrawn"
    return (
        message.subscription,
        message.id,
        Alarm(message.state) if message.state == States.DEAD else state,
        message.topic,
        message.key,
        message.head,
        message.tries,
        since,
        due,
        message.decision,
        message.error,
    )


@parked.command()
@about_a_database
@_filtered
@as_json
def count(*, target: Target, chosen: Filter, json: bool) -> None:
    """Count parked messages by state and by error; beyond 3 s of counting the numbers are minimums."""
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).parked_count(**chosen.choice())
    if json:
        show_json({each.name: getattr(found, each.name) for each in fields(found)})
        return
    least = "at least " if found.messages_is_minimum else ""
    states = ", ".join(f"{number} {state}" for state, number in found.states.items() if number)
    say(f"{least}{counted(found.messages, 'parked message')}{states and f': {states}'}")
    if found.errors:
        rows = ((each.state, each.messages, moment(each.since, zone=False), each.error) for each in found.errors)
        show_table(("STATE", "MESSAGES", "SINCE (UTC)", "ERROR"), rows, numbers=("MESSAGES",))


@parked.command()
@about_a_database
@click.argument("id", type=ID)
@_name
@as_json
def show(*, target: Target, id: int | UUID, name: str | None, json: bool) -> None:
    """Show a parked message with headers and body, and how many messages wait behind."""
    from outbox.admin.admin import Admin
    from outbox.cli.contents import contents_of, show_contents, show_fields

    with target.open_outbox() as channel:
        found = Admin(channel).parked_message(id, name=name)
    about = {**asdict(found.parked), "dead_at": found.dead_at, "behind": found.behind}
    if json:
        show_json({**about, **contents_of(found.message)})
    else:
        show_fields(about)
        show_contents(found.message)


@parked.command()
@about_a_database
@_name
@option("--limit", type=click.IntRange(1, 10_000), default=50, help="Show at most so many keys.")
@as_json
def held(*, target: Target, name: str | None, limit: int, json: bool) -> None:
    """List the held keys with the most messages behind an earlier message, and that message with its error."""
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).held(top=limit + 1, name=name)
    if json:
        show_json({"keys": found[:limit]}, more=len(found) > limit)
        return
    if found:
        show_table(_KEYS, map(_of_key, found[:limit]), numbers=("BEHIND", "HEAD", "ATTEMPTS"))
    say_the_end(found, limit, "no key is held", "--name")


def _of_key(held: HeldKey) -> tuple[object, ...]:
    head = held.head
    if head is None:
        return (held.subscription, held.key, *[None] * 6)
    since = None if head.parked_at is None else moment(head.parked_at, zone=False)
    state = Alarm(head.state) if head.state == States.DEAD else head.state
    behind = Count(held.behind, about=held.behind_is_minimum)
    return (held.subscription, held.key, behind, head.id, state, head.tries, since, head.error)


@parked.command()
@about_a_database
@click.argument("key", type=KEY)
@_name
@at_most
@as_json
def key(*, target: Target, key: str, name: str | None, limit: int, json: bool) -> None:
    """Show what holds a key back, the messages behind in order, and how many a decision on the head lets go on."""
    from outbox.admin.admin import Admin

    with target.open_outbox() as channel:
        found = Admin(channel).key(key, name=name, limit=limit)
    if json:
        show_json({"keys": found}, more=any(each.behind > len(each.messages) for each in found))
        return
    for each in found:
        _show_key(each)
    if not found:
        say(f"no subscription holds key {key} back")


def _show_key(held: KeyDetail) -> None:
    from outbox.admin.trace import in_words

    head, name = held.head, held.subscription
    if held.pause is not None:
        click.echo(printable(f"{name}: {held.pause.in_words()}"))
    if head is None:
        return
    click.echo(printable(f"{name}: held by message {head.id} of topic {head.topic}: {in_words(head)}"))
    if not held.behind:
        return
    behind = counted(Count(held.behind, about=held.behind_is_minimum), "message")
    topics = ", ".join(f"{number} of {topic}" for topic, number in held.topics.items())
    click.echo(printable(f"{name}: a decision on message {head.id} lets {behind} go on: {topics}"))
    rows = ((each.id, each.topic, each.created_at and moment(each.created_at, zone=False)) for each in held.messages)
    show_table(("BEHIND", "TOPIC", "CREATED (UTC)"), rows, numbers=("BEHIND",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """The options of a decision."""

    ids: tuple[int | UUID, ...]
    all: bool
    by: str | None
    yes: bool
    json: bool

    def __post_init__(self) -> None:
        if bool(self.ids) == self.all:
            raise click.UsageError("give ids, or --all (with --state, --topic, --key, … for a part); not both")


_decision = together(
    about_a_database,
    click.argument("ids", nargs=-1, type=ID, metavar="[ID]…"),
    option("--all", is_flag=True, help="All messages of the other options; without --state the dead letters."),
    _filtered,
    by_whom,
    option("--yes", is_flag=True, help="Do not ask."),
    as_json,
    as_value("decided", Deciding),
)


@parked.command()
@_decision
@option("--reason", help="Why, for the log.")
def replay(*, target: Target, chosen: Filter, decided: Deciding, reason: str | None) -> None:
    """Send parked messages now, with attempts counted from 0; without --state dead letters are meant."""
    _decide(target, "replay", chosen, decided, reason)


_reason_needed = option("--reason", help="Why, for the log; needed, and asked for at a terminal.")
_unread = option("--unread", is_flag=True, help="Also messages that no worker has read yet, when they are read.")


@parked.command()
@_decision
@_unread
@_reason_needed
def discard(*, target: Target, chosen: Filter, decided: Deciding, unread: bool, reason: str | None) -> None:
    """Give parked messages up for good; the messages behind them, of the same keys, go on.

    Without --state dead letters are meant. Without --unread, messages of the --topic or --key that nobody has read yet
    are delivered later: the command says how many there are, and ends with exit code 1.
    """
    reason = _asked_for(reason, "say why these messages are given up: --reason TEXT", "Why are they given up?")
    _decide(target, "discard", chosen, decided, reason, unread=unread)


@parked.command("set-aside")
@_decision
@_unread
@_reason_needed
def set_aside(*, target: Target, chosen: Filter, decided: Deciding, unread: bool, reason: str | None) -> None:
    """Make dead letters of messages that are not to be tried: parked ones, or by ID also unread ones.

    Without --state all parked messages but dead letters are meant. A dead letter holds its key, or goes into a unit of
    its own, by --on-dead of the subscription.
    """
    reason = _asked_for(reason, "say why these messages are set aside: --reason TEXT", "Why are they set aside?")
    _decide(target, "set_aside", chosen, decided, reason, unread=unread)


def _asked_for(reason: str | None, missing: str, question: str) -> str:
    if reason:
        return reason
    if not sys.stdin.isatty():
        raise click.UsageError(missing)
    return str(click.prompt(question, err=True))


def _decide(
    target: Target, verb: Verb, chosen: Filter, decided: Deciding, reason: str | None, *, unread: bool = False
) -> None:
    """Write the decision, and have it carried out: by the worker, or here if there is none."""
    from outbox.admin.admin import Admin

    # Whoever gives all messages of a topic or a key up means those that nobody has read yet, too.
    by_message, words = chosen.topic is not None or chosen.key is not None, verb.replace("_", " ")
    parked_only = (chosen.state, chosen.error_like, chosen.before) != (None,) * 3
    left_out = verb == "discard" and not unread and by_message and not parked_only
    with target.open_outbox() as channel:
        order = getattr(Admin(channel), verb)
        what = {"reason": reason, "by": decided.by, "all": decided.all, **chosen.choice()}
        what |= {"unread": True} if unread else {}
        if decided.all and (meant := order(rehearsal=True, **what)):
            confirmed(f"{words} {' and '.join(map(_counted, meant))}?", yes=decided.yes)
        done: tuple[Decided, ...] = order(*decided.ids, **what)
        left = Admin(channel).unread(name=chosen.name, topic=chosen.topic, key=chosen.key) if left_out else {}
    if decided.json:
        show_json({"decision": verb, "subscriptions": done, "unread": left})
        click.get_current_context().exit(1 if left else 0)
    here = {"replay": "will be sent by the next worker", "discard": "discarded", "set_aside": "set aside"}[verb]
    for each in done:
        if each.messages:
            asked = f"{words} of {each.messages} asked for; worker {each.worker} carries it out"
            say(f"{_counted(changed(each, unread=0))}: {here}" if each.worker is None else asked)
        if each.unread:
            number = counted(each.unread, "unread message")
            say(f"{words} of {number} of {each.name} asked for; carried out when a worker reads them")
    if not done:
        states = " or ".join(chosen.state or (States.DEAD,)) if verb != "set_aside" else "such"
        say(f"no {states} messages of {chosen.name or 'any subscription'} match")
    if left:
        from outbox.admin.decisions import in_words

        unseen = f"not discarded, because unread in the log, and to be delivered later: {in_words(left)}"
        fail(f"{unseen}; to discard them when they are read, add --unread")
        click.get_current_context().exit(1)


def _counted(decision: Decided) -> str:
    behind = "" if not decision.behind else f", with {counted(decision.behind, 'message')} behind"
    unread = "" if not decision.unread else f", and {counted(decision.unread, 'unread message')}"
    return f"{counted(decision.messages, 'message')} of {decision.name}{behind}{unread}"
