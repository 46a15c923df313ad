"""Parked messages: chosen by a person, looked at, and decided on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TypedDict, Unpack
from uuid import UUID

from outbox.admin.commands import carry_out_without_worker
from outbox.admin.face import Face, awaited
from outbox.admin.results import Decided, ParkedCount, ParkedDetail
from outbox.errors import SubscriptionError
from outbox.model.decision import Decision, Verb
from outbox.model.limits import require_flags, require_notes, require_numbers, require_wait
from outbox.model.message import Message
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
from outbox.store.subscriptions.decisions import MOST_IDS, Decisions, listed, note
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
#: A count that takes longer is a minimum.
_PATIENCE = timedelta(seconds=3)
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


class Deciding(Face):
    """Questions about parked messages, and decisions on messages."""

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
        require_known("parked", choice, ("limit", "after", *Choice.__annotations__))
        with self._channel() as channel:
            first, last = after or ("", -1)
            chosen, found = _filter(choice), list[ParkedMessage]()
            for each in _subscriptions(channel, choice.get("name")):
                if each.name >= first and len(found) < limit:
                    messages = ParkedMessages(channel, each.name)
                    found += messages.list(chosen, limit - len(found), last if each.name == first else -1)
            return tuple(found)

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
        require_known("parked_count", choice, ("patience", *Choice.__annotations__))
        with self._channel() as channel:
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
            return unread(channel, {"name": name, "topic": topic, "key": key})

    def parked_message(self, id: int | UUID, *, name: str | None = None) -> ParkedDetail:
        """Return a parked message with its contents. `name`: the subscription, if several have parked the message.

        Raises:
            SubscriptionError: no message is parked under this id, or several subscriptions have parked it.
            ValueError: no message can have this id.
        """
        with self._channel() as channel:
            return _detail(channel, id, name)

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
            found = tail.message(channel, id) if name is None else _detail(channel, id, name).message
            if found is None:
                raise SubscriptionError(f"no message {id} is in the log; perhaps it was purged")
            note(channel, "read", by=by, subscription=name, choice={"message": id}, count=1)
            return found

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
            return tuple(_decide(channel, "replay", ids, reason, order))

    def discard(self, *ids: int | UUID, reason: str, **order: Unpack[Order]) -> tuple[Decided, ...]:
        """Give parked messages up for good; messages behind them go on. Takes and raises what `replay` does.

        With `unread=True` messages that no worker has read yet are meant, too: they are discarded when they are read.
        """
        with self._channel() as channel:
            return tuple(_decide(channel, "discard", ids, reason, order))

    def set_aside(self, *ids: int | UUID, reason: str, **order: Unpack[Order]) -> tuple[Decided, ...]:
        """Make dead letters of messages that are not to be tried, also of messages that no worker has read yet.

        By the policy of the subscription a dead letter holds its key. A message behind another one, or before its time,
        holds nothing. Without a state all parked messages but dead letters are meant. Takes and raises what `replay`
        does.
        """
        with self._channel() as channel:
            return tuple(_decide(channel, "set_aside", ids, reason, order))

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

    aparked = awaited(parked)
    aparked_count = awaited(parked_count)
    adead_letters = awaited(dead_letters)
    aunread = awaited(unread)
    aparked_message = awaited(parked_message)
    aread_body = awaited(read_body)
    areplay = awaited(replay)
    adiscard = awaited(discard)
    aset_aside = awaited(set_aside)
    adecisions = awaited(decisions)


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


def _detail(channel: Channel, id: int | UUID, name: str | None) -> ParkedDetail:
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


def _decide(channel: Channel, verb: Verb, ids: Sequence[int | UUID], reason: str | None, order: Order) -> list[Decided]:
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
