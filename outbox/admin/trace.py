"""The trace of a message: the moment of writing, and the way through each subscription."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from outbox.admin.face import Face, awaited
from outbox.admin.results import Passage, PassageState, Trace
from outbox.model.decision import Decision
from outbox.model.filter.sql92 import Filter
from outbox.model.limits import require_numbers
from outbox.model.message import Message
from outbox.model.parking import HANDED_OUT, States
from outbox.model.subscription import Subscription
from outbox.model.topics import Topics
from outbox.runtime.text import counted, in_utc
from outbox.store.database import Channel
from outbox.store.idempotency.withdrawals import withdrawn_at
from outbox.store.operations import tail
from outbox.store.operations.passing import Passing, logged, passing
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.parked_messages import ParkedMessage, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions

T = TypeVar("T")


class Messages(Face):
    """Questions about messages of the log."""

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
        return self._found(id, tail.message)

    def trace(self, id: int | UUID) -> Trace | None:
        """Return when a message was written, and its way through each subscription; None: nothing of it is stored now.

        The position of a subscription tells whether the message was passed, and settles of the last day tell when.

        Args:
            id: as of `message`; also of a purged message that is still parked.

        Raises:
            ValueError: no message can have this id.
        """
        return self._found(id, trace)

    def _found(self, id: int | UUID, find: Callable[[Channel, int], T | None]) -> T | None:
        """Return what `find` knows by the id in the log; None: the log has no such message."""
        if not isinstance(id, UUID):
            require_numbers(id=id)
        with self._channel() as channel:
            known = tail.id_of(channel, id) if isinstance(id, UUID) else id
            return None if known is None else find(channel, known)

    anewest = awaited(newest)
    amessage = awaited(message)
    atrace = awaited(trace)


def trace(channel: Channel, id: int) -> Trace | None:
    """Return the trace of a message of the log, or of the parked copies of a purged one; None: there is neither."""
    readers = [each for each in Subscriptions(channel).all() if each.kind != "check"]
    found = logged(channel, id)
    # Before the parked copies are read, because a message that a worker parks in between is found there.
    passings = {} if found is None else {each.name: passing(channel, each, found) for each in readers}
    copies = {each.name: ParkedMessages(channel, each.name).find(id) for each in readers}
    message = _copied(channel, copies) if found is None else found.message
    if message is None:
        return None
    withdrawn = None if message.deliver_at is None else withdrawn_at(channel, message.message_id)
    decisions = {each.name: _decisions(channel, each.name, message) for each in readers}
    resets = {each.name: _skipped_by(channel, each, message) for each in readers}
    waiting = {each.name: _waiting(channel, each.name, id) for each in readers}
    return Trace(
        id=id,
        message_id=message.message_id,
        topic=message.topic,
        key=message.key,
        tags=message.tags,
        created_at=message.created_at,
        deliver_at=message.deliver_at,
        expires_at=message.expires_at,
        in_log=found is not None,
        subscriptions=tuple(
            _passage(
                each,
                message,
                passings.get(each.name),
                copies[each.name],
                decisions[each.name],
                waiting[each.name],
                resets[each.name],
            )
            if withdrawn is None or each.kind == "extract"
            else _of_withdrawn(each, withdrawn, copies[each.name])
            for each in readers
        ),
    )


def _of_withdrawn(subscription: Subscription, at: datetime, copy: ParkedMessage | None) -> Passage:
    """Return that the writer has taken a message back, whether or not a copy still waits until it is due."""
    what = f"taken back by its writer {in_utc(at)}"
    return Passage(subscription=subscription.name, kind=subscription.kind, state="withdrawn", what=what, copy=copy)


def _copied(channel: Channel, copies: dict[str, ParkedMessage | None]) -> Message | None:
    """Return a purged message from one of its parked copies."""
    parked = next((each for each in copies.values() if each is not None), None)
    return None if parked is None else ParkedMessages(channel, parked.subscription).message(parked.id)


def _decisions(channel: Channel, name: str, message: Message) -> tuple[Decision, ...]:
    if message.id is None or message.created_at is None:
        return ()
    return tuple(Decisions(channel, name).about(message.id, message.created_at))


def _skipped_by(channel: Channel, subscription: Subscription, message: Message) -> str:
    """Return by which reset a subscription may have skipped a message, in words; empty: by none.

    Of an earlier generation nothing else is kept; it ended with another number of partitions, or with a reset.
    """
    ends = subscription.generation - 1
    known = Decisions(channel, subscription.name).of_generations(subscription.created_at) if ends else []
    after = [each for each in known if message.created_at is None or each.at >= message.created_at]
    if reset := next((each for each in reversed(after) if each.choice.get("start", "earliest") != "earliest"), None):
        return f", or skipped by the {_of_decision(reset)},"
    # What ended before decisions were kept, or is forgotten by now, may have been a reset.
    return ", or skipped by a reset," if len(known) < ends else ""


def _waiting(channel: Channel, name: str, id: int) -> list[Decision]:
    found = Decisions(channel, name).of_messages().get(id)
    return [] if found is None else [found]


def _passage(
    subscription: Subscription,
    message: Message,
    passing: Passing | None,
    copy: ParkedMessage | None,
    decisions: tuple[Decision, ...],
    waiting: Sequence[Decision] = (),
    skipped: str = "",
) -> Passage:
    """Return the way of a message through a subscription; `passing`: None of a message that is not in the log.

    `waiting`: decisions that are not carried out yet. `skipped`: by which reset the message may have been skipped.
    """
    lacking = _lacking(subscription, message)
    state: PassageState
    if copy is not None:
        state, what = copy.state, in_words(copy) + _held_back(subscription, message)
    elif _discards(decisions):
        state, what = "discarded", ""
    elif lacking is not None:
        state, what = "unselected", f"not for it, by its {lacking} of now"
    elif passing is None:
        state, what = _of_purged(subscription, message)
    elif passing.passed:
        state, what = _of_passed(subscription, message, passing, skipped)
    else:
        state, what = _of_unread(subscription, message, passing)
        what += "".join(f"; {_of_decision(each)}, not carried out yet" for each in waiting)
    found = Passage(
        subscription=subscription.name,
        kind=subscription.kind,
        state=state,
        what="; ".join([*([what] if what else []), *map(_of_decision, decisions)]),
        copy=copy,
        decisions=decisions,
    )
    if passing is None or state not in ("passed", "discarded", "unread"):
        return found
    return replace(found, passed_at=passing.at, passed_at_is_latest=passing.at_is_latest, worker=passing.worker)


def _discards(decisions: tuple[Decision, ...]) -> bool:
    """Return whether the last decision gave the message up: whatever else was chosen with it was there, too."""
    return (
        bool(decisions) and decisions[-1].verb == "discard" and decisions[-1].count == len(decisions[-1].choice["ids"])
    )


def _of_decision(decision: Decision) -> str:
    reason = "" if decision.reason is None else f" ({decision.reason})"
    return f"{decision.verb.replace('_', ' ')} by {decision.by} {in_utc(decision.at)}{reason}"


def in_words(copy: ParkedMessage) -> str:
    """Return the state of a parked message in words."""
    failed = f", attempt {copy.tries} failed" if copy.attempts else ""
    after = f" after {counted(copy.attempts, 'failed attempt')}" if copy.attempts else ""
    due = "" if copy.due_at is None else f", due {in_utc(copy.due_at)}"
    out = _handed_out(copy)
    said = {
        States.DELAYED: f"delayed{due}",
        States.WAITING: f"waiting for its destination{failed}{due}",
        States.RETRY: f"waiting for the next try{failed}{due}" if out is None else out,
        States.DEAD: f"dead letter{after}",
        States.BEHIND: f"behind message {copy.head} of its key",
    }[copy.state]
    said += "" if copy.parked_at is None else f", set aside {in_utc(copy.parked_at)}"
    said += "" if copy.error is None else f": {copy.error}"
    if copy.decision is not None and copy.decided_at is not None:
        said += f"; {copy.decision} by {copy.decided_by} {in_utc(copy.decided_at)}, not carried out yet"
    return said


def _handed_out(copy: ParkedMessage) -> str | None:
    if copy.due_at is None or not (copy.error or "").startswith(HANDED_OUT):
        return None
    often = "once" if copy.attempts == 1 else f"{copy.attempts} times"
    return f"handed out {often}, the last time until {in_utc(copy.due_at)}"


def _of_unread(subscription: Subscription, message: Message, passing: Passing) -> tuple[PassageState, str]:
    if passing.after_end:
        return "unselected", "not for it, which ends before"
    held = _held_back(subscription, message)
    nobody = passing.worker is None and subscription.kind != "extract" and not held
    return "unread", f"not yet{held}{': no worker runs' if nobody else ''}"


def _of_passed(
    subscription: Subscription, message: Message, passing: Passing, skipped: str
) -> tuple[PassageState, str]:
    if passing.at_begin:
        return "before", "not for it, which began behind the message"
    if passing.at is None:
        return "passed", "passed"
    if not passing.at_is_latest:
        return "passed", f"passed {in_utc(passing.at)}"
    if _is_younger(subscription, message):
        return "unknown", "unknown: the message is older than the subscription, which may have begun behind it"
    return "passed", f"passed{skipped} before {in_utc(passing.at)}"


def _of_purged(subscription: Subscription, message: Message) -> tuple[PassageState, str]:
    """Return the state of a message that is not in the log. A purge waits until all subscriptions have passed it."""
    if subscription.kind == "extract" or _is_younger(subscription, message):
        return "unknown", "unknown: the message is purged"
    return "passed", "passed, because the message is purged"


def _is_younger(subscription: Subscription, message: Message) -> bool:
    return message.created_at is None or message.created_at <= subscription.created_at


def _lacking(subscription: Subscription, message: Message) -> str | None:
    """Return the part of the selection that leaves a message out; None: the message is selected."""
    if not Topics.of(subscription.topics).matches(message.topic):
        return "topics"
    if subscription.tags is not None and message.tags not in subscription.tags:
        return "tags"
    if subscription.filter is not None and not Filter.of(subscription.filter).matches(message):
        return "filter"
    return None


def _held_back(subscription: Subscription, message: Message) -> str:
    """Return by whom and why a message is held back, if a person holds it back."""
    pauses = (each for each in subscription.pauses if each.rate is None and each.key in (None, message.key))
    return "".join(f"; {each.in_words()}" for each in pauses)
