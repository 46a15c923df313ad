"""The status of a subscription's parked messages: how many, since when, and why. It costs the same at any number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from outbox.model.parking import HANDED_OUT, STATES, State, States
from outbox.model.status import INFLIGHT, MOST_COUNTED, UNSENT, Count, TroubleStatus
from outbox.model.subscription import Subscription
from outbox.runtime.text import without_numbers
from outbox.store.database import Channel
from outbox.store.subscriptions.parked_messages import of_state

#: The states whose messages have an error, in the order in which a person has to know about them.
_FAILED: tuple[State, ...] = (States.WAITING, States.RETRY, States.DEAD)
#: The most errors of one state that are listed, the most that are looked at, and the most characters of each.
_MOST_TROUBLES, _MOST_ERRORS, _MOST_CHARACTERS = 5, 1_000, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedStatus:
    """The status of the parked messages of a subscription.

    `counts`: numbers by state, and `inflight`: what is in the hands of clients counts there instead. `unsent_since`:
    the moment from which on the oldest unsent message could have been sent: the creation, the due moment, or the end of
    the time of what was handed out. Dead letters do not count, nor messages that are not due yet. `troubles`: messages
    that wait for the destination, failed messages, dead letters, by error. `some_free`: some message is tried again or
    has fallen due, and no person has paused its key.
    """

    counts: dict[str, Count]
    unsent_since: datetime | None
    troubles: tuple[TroubleStatus, ...]
    some_free: bool


#: No verdict. A scalar sub-select, because any other form may be answered by reading all verdicts.
UNDECIDED = "(SELECT o.op FROM {op} AS o WHERE o.transaction_id = r.key) IS NULL"
#: True of what a client has, or had: nobody else gets it before `due_at`.
_OUT = "due_at IS NOT NULL AND error LIKE :handed_out"
_IN_HANDS = f"CASE WHEN {_OUT} AND due_at > {{now}} THEN 1 ELSE 0 END"
_LIKE_HANDED_OUT = {"handed_out": f"{HANDED_OUT}%"}
#: The ORDER BY keeps it on (subscription, state, id).
_LOOK = f"""
    SELECT count(CASE WHEN {{meant}} THEN 1 END), count(*), min(CASE WHEN {{meant}} THEN due END),
           sum(CASE WHEN {{meant}} THEN in_hands END)
    FROM (SELECT key, {_IN_HANDS} AS in_hands, CASE WHEN {_OUT} THEN due_at WHEN deliver_at > created_at THEN deliver_at
                           ELSE created_at END AS due
          FROM {{parked}} WHERE subscription = :subscription AND {{of_state}} ORDER BY id LIMIT :limit) AS r
"""
#: Delayed messages that are due and that the worker has not taken up yet, by the partial index on due_at.
_OVERDUE = """
    SELECT min(CASE WHEN state = 'delayed' THEN due_at END)
    FROM (SELECT state, due_at FROM {parked}
          WHERE subscription = :subscription AND state IN ('delayed', 'waiting', 'retry') AND due_at <= {now}
          ORDER BY due_at LIMIT :limit) AS d
"""
#: A head that is tried again, and that no person has paused; by the index on due_at.
_FREE = """
    SELECT 1 FROM {parked} AS p
    WHERE p.subscription = :subscription AND p.state IN ('delayed', 'waiting', 'retry') AND p.state <> 'delayed'
      AND NOT {paused} LIMIT 1
"""
#: Without the heads whose turn has only come, and without what is in hands: they have not failed. What was handed out
#: fails when its time is over.
_BY_ERROR = f"""
    SELECT error, count(*), min(since)
    FROM (SELECT key, CASE WHEN {_OUT} THEN :overdue ELSE substr(error, 1, :characters) END AS error, attempts,
                 CASE WHEN {_OUT} THEN due_at ELSE parked_at END AS since,
                 {_IN_HANDS} AS in_hands
          FROM {{parked}} WHERE subscription = :subscription AND state = :state ORDER BY id LIMIT :limit) AS r
    WHERE {{meant}} AND in_hands = 0 AND (attempts > 0 OR error IS NOT NULL)
    GROUP BY error ORDER BY count(*) DESC, min(since), error LIMIT :errors
"""
#: The error of what was handed out, without the number of its receipt.
_OVERDUE_ERROR = "handed out, and not acknowledged in time"


def status_of_parked(channel: Channel, subscription: Subscription) -> ParkedStatus:
    """Return the status of what a subscription has parked, from looks at all states.

    Of a check-back half messages with a verdict are left out, also before a worker has cleared them.
    """
    name = subscription.name
    meant = channel.database.sql(UNDECIDED) if subscription.kind == "check" else "TRUE"
    looks = {state: _look(channel, name, state, meant) for state in STATES}
    some = {state for state, look in looks.items() if look.all.number}
    unsent, overdue = [looks[state].due for state in UNSENT], None
    if States.DELAYED in some:
        found = channel.rows(_OVERDUE, subscription=name, limit=MOST_COUNTED + 1)[0][0]
        overdue = channel.database.dialect.clock.read(found)
    return ParkedStatus(
        counts={
            **{state: replace(look.all, number=look.all.number - look.in_hands) for state, look in looks.items()},
            INFLIGHT: Count(sum(look.in_hands for look in looks.values())),
        },
        unsent_since=min((each for each in (*unsent, overdue) if each is not None), default=None),
        troubles=tuple(each for state in _FAILED if state in some for each in _by_error(channel, name, state, meant)),
        some_free=overdue is not None
        or (bool(some & {States.WAITING, States.RETRY}) and _some_are_free(channel, subscription)),
    )


def parked_counts(channel: Channel, subscription: str) -> dict[str, Count]:
    """Count what a subscription has parked, by state."""
    return {state: _look(channel, subscription, state).all for state in STATES}


class _Look(NamedTuple):
    """The messages in a state: their number, how many are in hands, and when the first could have been sent."""

    all: Count
    in_hands: int
    due: datetime | None


def _look(channel: Channel, subscription: str, state: State, meant: str = "TRUE") -> _Look:
    look = channel.database.sql(_LOOK, meant=meant, of_state=of_state(state))
    bound = {"subscription": subscription, "state": state, "limit": MOST_COUNTED + 1, **_LIKE_HANDED_OUT}
    number, read, due, in_hands = channel.rows(look, **bound)[0]
    return _Look(Count.upto(int(number), int(read)), int(in_hands or 0), channel.database.dialect.clock.read(due))


def _some_are_free(channel: Channel, subscription: Subscription) -> bool:
    database, keys = channel.database, [each.key for each in subscription.pauses if each.key is not None]
    # No key is empty.
    free = database.sql(_FREE, paused=database.among("coalesce(p.key, '')", texts="keys"))
    return bool(channel.rows(free, subscription=subscription.name, keys=database.bind(keys)))


def _by_error(channel: Channel, subscription: str, state: State, meant: str) -> list[TroubleStatus]:
    """Return the messages of a state by their error, the most frequent first."""
    by_error = channel.database.sql(_BY_ERROR, meant=meant)
    words = {**_LIKE_HANDED_OUT, "overdue": _OVERDUE_ERROR}
    limits = {"limit": MOST_COUNTED + 1, "characters": _MOST_CHARACTERS, "errors": _MOST_ERRORS}
    found: dict[str, tuple[str | None, int, datetime]] = {}
    for error, number, parked in channel.rows(by_error, subscription=subscription, state=state, **limits, **words):
        since = channel.database.moment(parked)
        like = without_numbers(error)
        first, known, oldest = found.get(like, (error, 0, since))
        found[like] = (first, known + int(number), min(oldest, since))
    most = sorted(found.values(), key=lambda each: -each[1])[:_MOST_TROUBLES]
    return [_trouble(state, Count.upto(number), since, error) for error, number, since in most]


def _trouble(state: str, count: Count, since: datetime, error: str | None) -> TroubleStatus:
    return TroubleStatus(state=state, messages=count.number, messages_is_minimum=count.about, since=since, error=error)
