"""Parked messages: chosen by a person, looked at, and decided on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypedDict
from uuid import UUID

from outbox.admin.commands import carry_out_without_worker
from outbox.admin.results import Decided, ParkedCount, ParkedDetail
from outbox.errors import SubscriptionError
from outbox.model.decision import Verb
from outbox.model.limits import require_flags, require_notes, require_numbers
from outbox.model.parking import STATES, State, States
from outbox.model.status import Count, TroubleStatus
from outbox.model.subscription import Subscription
from outbox.runtime.clock import clock
from outbox.runtime.keywords import require_known
from outbox.runtime.process import user_and_host
from outbox.runtime.text import age, counted, without_numbers
from outbox.store.database import Channel
from outbox.store.operations import tail
from outbox.store.operations.purge import moment_before, note_dead
from outbox.store.operations.status import unread_by, unread_messages
from outbox.store.subscriptions.decisions import MOST_IDS, Decisions
from outbox.store.subscriptions.parked_messages import ParkedFilter, ParkedMessage, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions

#: The kinds of subscriptions whose unread messages are delivered, if nobody decides otherwise.
_READERS = ("relay", "consumer", "backfill")
#: The states that are meant without a state.
_MEANT: Mapping[Verb, tuple[State, ...]] = {
    "replay": (States.DEAD,),
    "discard": (States.DEAD,),
    "set_aside": (States.DELAYED, States.WAITING, States.RETRY, States.BEHIND),
}
#: A decision on more messages that no worker has read is refused, because each worker keeps their ids in memory.
MOST_UNREAD = 100_000


class Choice(TypedDict, total=False):
    """A choice of parked messages. What is left out chooses nothing.

    `name`: of the subscription. `state`: one state, or several. `topic`, `key`: of the message. `error_like`: a part of
    the error, in capitals or not. `same_error`: an error; texts that differ from it in numbers alone are meant, too.
    `before`: a moment with a zone; messages that were parked earlier.
    """

    name: str | None
    state: State | Sequence[State] | None
    topic: str | None
    key: str | None
    error_like: str | None
    same_error: str | None
    before: datetime | None


class Order(Choice, total=False):
    """A choice for a decision.

    `all`: decide on every message of the choice, in place of ids. `unread`: also on messages that no worker has read
    yet, of a discard or a set-aside. `by`: the person; None: user and host of the process. `rehearsal`: change nothing,
    and return what would be decided on.
    """

    all: bool
    unread: bool
    by: str | None
    rehearsal: bool


def parked(channel: Channel, limit: int, choice: Choice, after: tuple[str, int] | None = None) -> list[ParkedMessage]:
    """Return at most `limit` parked messages, by subscription and in the order of the log.

    `after`: subscription and log id of the last message of the page before.
    """
    require_known("parked", choice, ("limit", "after", *Choice.__annotations__))
    name, id = after or ("", -1)
    chosen, found = _filter(choice), list[ParkedMessage]()
    for each in _subscriptions(channel, choice.get("name")):
        if each.name >= name and len(found) < limit:
            messages = ParkedMessages(channel, each.name)
            found += messages.list(chosen, limit - len(found), id if each.name == name else -1)
    return found


def count(channel: Channel, choice: Choice, patience: timedelta) -> ParkedCount:
    """Count parked messages of a choice by state and error, for at most so long."""
    require_known("parked_count", choice, ("patience", *Choice.__annotations__))
    chosen, until, complete = _filter(choice), clock() + patience.total_seconds(), True
    states, errors = Counter[str](), dict[tuple[str, str], TroubleStatus]()
    for each in _subscriptions(channel, choice.get("name")):
        rows, all_seen = ParkedMessages(channel, each.name).by_error(chosen, until)
        complete &= all_seen
        for state, error, number, parked_at in rows:
            states[state] += number
            if error is not None:
                like, since = (state, without_numbers(error)), channel.database.moment(parked_at)
                known = errors.get(like) or TroubleStatus(
                    state=state, messages=0, messages_is_minimum=False, since=since, error=error
                )
                errors[like] = replace(known, messages=known.messages + number, since=min(known.since, since))
    return ParkedCount(
        messages=states.total(),
        messages_is_minimum=not complete,
        states={state: states[state] for state in STATES},
        errors=tuple(
            replace(each, messages_is_minimum=not complete)
            for each in sorted(errors.values(), key=lambda each: (-each.messages, each.since))
        ),
    )


def unread(channel: Channel, choice: Choice, ids: Sequence[int] | None = None) -> dict[str, int]:
    """Return how many messages of a choice subscriptions have still to read, by subscription; 0 left out.

    A choice by state, error or moment means parked messages, and no others.
    """
    require_known("unread", choice, ("name", "topic", "key"))
    require_notes(topic=choice.get("topic"), key=choice.get("key"))
    found: dict[str, Count] = {}
    for each in _subscriptions(channel, choice.get("name")):
        if each.kind in _READERS:
            found[each.name] = unread_by(channel, each, topic=choice.get("topic"), key=choice.get("key"), ids=ids)
    return {name: count.number for name, count in found.items() if count.number}


def in_words(unread: Mapping[str, int]) -> str:
    """Return how many messages lie unread for which subscription."""
    return " and ".join(f"{counted(number, 'message')} for {name}" for name, number in unread.items())


def detail(channel: Channel, id: int | UUID, name: str | None) -> ParkedDetail:
    """Return a parked message with its contents.

    Raises:
        SubscriptionError: no message is parked under this id, or several subscriptions have parked it.
    """
    subscriptions = _subscriptions(channel, name)
    (id,) = _log_ids(channel, (id,))
    chosen = ParkedFilter(ids=(id,))
    found = [each for known in subscriptions for each in ParkedMessages(channel, known.name).list(chosen, 1)]
    if len(found) > 1:
        names = ", ".join(each.subscription for each in found)
        raise SubscriptionError(f"message {id} is parked by {names}; say which by --name (in Python: name=…)")
    parked = ParkedMessages(channel, found[0].subscription if found else "")
    message = parked.message(id) if found else None
    if message is None:
        raise SubscriptionError(f"message {id} is not parked by {name or 'any subscription'}")
    return ParkedDetail(parked=found[0], message=message, behind=parked.behind(chosen), dead_at=parked.dead_at(id))


def decide(channel: Channel, verb: Verb, ids: Sequence[int | UUID], reason: str | None, order: Order) -> list[Decided]:
    """Write decisions on messages, and have them carried out: by the live worker, or here without a worker.

    Raises:
        SubscriptionError: neither ids nor `all`; an id is not there, or several subscriptions have parked it; or the
            verb does not fit the state or the subscription. Nothing was done.
    """
    require_known(verb, order, ("reason", *Order.__annotations__))
    flags = {"all": order.get("all", False), "unread": order.get("unread", False)}
    require_flags(**flags, rehearsal=order.get("rehearsal", False))
    require_notes(reason=reason, by=order.get("by"))
    if bool(ids) == order.get("all", False):
        raise SubscriptionError(f"{verb}: give ids, or all=True with a choice; not both")
    ids, by = _log_ids(channel, ids), order.get("by") or user_and_host()
    chosen = _filter(order, ids, default=_MEANT[verb])
    if verb == "replay" and States.BEHIND in (chosen.states or STATES):
        look = channel.database.commands.line("parked", "list")
        raise SubscriptionError(
            "state: a message behind another one goes on as soon as that one is done; decide on that one; to see its"
            f" id, run: {look}"
        )
    subscriptions = _subscriptions(channel, order.get("name"))
    if verb != "replay":
        subscriptions = _without_checks(channel, subscriptions, asked=order.get("name") is not None)
    parked = {each.name: ParkedMessages(channel, each.name) for each in subscriptions}
    found = [message for each in parked.values() for message in each.list(chosen, len(ids))] if ids else []
    unread = _unread(channel, verb, subscriptions, order, {*ids} - {each.id for each in found})
    if ids:
        holders = [(each.id, each.subscription) for each in found]
        holders += [(id, name) for name, messages in unread.items() for id in messages]
        _require_each(channel, holders, ids, chosen, list(parked))
    decided: list[Decided] = []
    for name, each in parked.items():
        number, worker, fresh = each.count(chosen), None, unread.get(name, {})
        if not number and not fresh:
            continue
        behind = each.behind(chosen) if number else 0
        if fresh and not order.get("rehearsal"):
            with channel.transaction():
                Decisions(channel, name).write(
                    verb, sorted(fresh), by=by, reason=reason, choice=chosen.words, unread=fresh
                )
        if number and not order.get("rehearsal"):
            write = partial(each.decide, chosen, verb, by, reason)
            number, worker = carry_out_without_worker(channel, name, write)
        decided.append(Decided(name=name, messages=number, behind=behind, worker=worker, unread=len(fresh)))
    return decided


def purge_dead(channel: Channel, keep: timedelta | None, *, by: str | None, rehearsal: bool = False) -> tuple[int, int]:
    """Discard the dead letters that are older than `keep`, as decisions of record; None: none.

    A transaction that was given up needs a verdict, and stays. Return how many dead letters there were, and how many
    messages behind them go on.
    """
    if not rehearsal:
        note_dead(channel, keep)
    if keep is None:
        return 0, 0
    before, number, behind = moment_before(channel, keep), 0, 0
    for each in _without_checks(channel, Subscriptions(channel).all(), asked=False):
        parked = ParkedMessages(channel, each.name)
        if not (ids := parked.dead_before(before)):
            continue
        for first in range(0, len(ids), MOST_IDS):
            behind += parked.behind(ParkedFilter(ids=ids[first : first + MOST_IDS]))
        if not rehearsal:
            reason = f"a dead letter for longer than {age(keep.total_seconds())}"
            write = partial(parked.give_up_dead, before, by, reason)
            ids = ids[: carry_out_without_worker(channel, each.name, write)[0]]
        number += len(ids)
    return number, behind


def _unread(
    channel: Channel, verb: Verb, subscriptions: Sequence[Subscription], order: Order, missing: Collection[int]
) -> dict[str, dict[int, UUID]]:
    """Return the messages to decide on that no worker has read, by subscription; `missing`: ids that are not parked."""
    # Whoever sets a message aside by its id means the message, wherever it is.
    if not order.get("unread", verb == "set_aside" and bool(missing)) or (not missing and not order.get("all")):
        return {}
    if verb == "replay":
        raise SubscriptionError("unread: what no worker has read yet is delivered without a replay; leave unread out")
    given = {name: order.get(name) for name in ("state", "error_like", "same_error", "before")}
    if some := [name for name, value in given.items() if value]:
        raise SubscriptionError(f"unread: a choice by {some[0]} means parked messages; leave {some[0]} or unread out")
    ids = sorted(missing) if missing else None
    topic, key = (order.get("topic"), order.get("key")) if ids is None else (None, None)
    found: dict[str, dict[int, UUID]] = {}
    for each in subscriptions:
        if each.kind in _READERS or (each.kind == "broadcast" and order.get("name")):
            found[each.name] = unread_messages(channel, each, MOST_UNREAD + 1, topic=topic, key=key, ids=ids)
            if len(found[each.name]) > MOST_UNREAD:
                reset = channel.database.commands.line("subscriptions", "reset", each.name, "--to", "latest")
                raise SubscriptionError(
                    f"unread: {each.name} has still to read more than {MOST_UNREAD} such messages; nothing was done;"
                    f" choose fewer, or to give up all that is unread, run: {reset}"
                )
    return {name: messages for name, messages in found.items() if messages}


def _filter(choice: Choice, ids: Sequence[int] = (), *, default: Sequence[State] | None = None) -> ParkedFilter:
    """Return a checked choice; `default`: the states that are meant without another."""
    state, before = choice.get("state") or default, choice.get("before")
    require_notes(topic=choice.get("topic"), key=choice.get("key"))
    require_notes(error_like=choice.get("error_like"), same_error=choice.get("same_error"))
    states = (state,) if isinstance(state, str) else state
    if unknown := [each for each in states or () if each not in STATES]:
        raise SubscriptionError(f"state: {', '.join(unknown)} is no state; the states are {', '.join(STATES)}")
    if before is not None and before.tzinfo is None:
        raise SubscriptionError(f"before: {before} has no time zone; pass a datetime with tzinfo")
    return ParkedFilter(
        ids=tuple(ids) or None,
        states=states,
        topic=choice.get("topic"),
        key=choice.get("key"),
        error_like=choice.get("error_like"),
        same_error=choice.get("same_error"),
        before=before,
    )


def _log_ids(channel: Channel, ids: Sequence[int | UUID]) -> list[int]:
    """Return ids in the log in place of message ids, which `send` returns."""
    found = []
    for id in ids:
        if not isinstance(id, UUID):
            require_numbers(id=id)
            found.append(id)
        elif (known := tail.id_of(channel, id)) is not None:
            found.append(known)
        else:
            raise SubscriptionError(f"no message {id} is parked or in the log; perhaps it was purged")
    return found


def _subscriptions(channel: Channel, name: str | None) -> list[Subscription]:
    return Subscriptions(channel).all() if name is None else [Subscriptions(channel).get(name)]


def _without_checks(channel: Channel, found: list[Subscription], *, asked: bool) -> list[Subscription]:
    """Leave out check subscriptions: a transaction that was given up needs a verdict, and no discard."""
    if asked and found[0].kind == "check":
        commands, group = channel.database.commands, ("--group", found[0].tags[0]) if found[0].tags else ()
        raise SubscriptionError(
            f"{found[0].name} holds transactions, which wait for a verdict; to see them, run:"
            f" {commands.line('half', 'list', *group)}; to give a verdict: {commands.line('half', 'commit', 'ID')}, or"
            f" {commands.line('half', 'rollback', 'ID')}"
        )
    return [each for each in found if each.kind != "check"]


def _require_each(
    channel: Channel, found: Sequence[tuple[int, str]], ids: Sequence[int], chosen: ParkedFilter, names: Sequence[str]
) -> None:
    """Raise if an id is not among the found messages, or several subscriptions have it; `found`: ids with names."""
    missing = sorted(set(ids) - {id for id, _ in found})
    if missing:
        states = " or ".join(chosen.states or STATES)
        shown = ", ".join(map(str, missing))
        if unseen := unread(channel, {}, missing):
            show = channel.database.commands.line("log", "show", missing[0])
            raise SubscriptionError(
                f"no {states} messages of {', '.join(names)}: {shown}; nothing was done; unread in the log, to be"
                f" delivered later: {in_words(unseen)}; to decide on them as well, add --unread (in Python:"
                f" unread=True); to see the message, run: {show}"
            )
        look = f"to see its state, run: {channel.database.commands.line('parked', 'show', missing[0])}"
        raise SubscriptionError(f"no {states} messages of {', '.join(names)}: {shown}; nothing was done; {look}")
    if len(found) > len(set(ids)):
        holders = ", ".join(sorted({name for _, name in found}))
        raise SubscriptionError(
            f"several subscriptions have parked it: {holders}; say which by --name (in Python: name=…)"
        )
