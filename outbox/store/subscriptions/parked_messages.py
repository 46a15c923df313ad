"""Parked messages for people: chosen, counted, looked at, and decided on."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from outbox.model.decision import Decision, Verb
from outbox.model.message import Message, stored_uuid
from outbox.model.parking import State, States
from outbox.runtime.clock import clock
from outbox.runtime.process import user_and_host
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS
from outbox.store.dialects.statements import Row
from outbox.store.idempotency.withdrawals import withdrawals_among
from outbox.store.subscriptions.decisions import MOST_IDS, Decisions
from outbox.store.subscriptions.leases import Leases

#: Messages behind others are counted up to this number.
MOST_BEHIND = 10_000
#: A statement that counts looks at so many rows; errors are compared by so many characters.
_COUNTED_AT_ONCE, _MOST_CHARACTERS = 20_000, 500
_DIGITS = re.compile("[0-9]+")
#: The error of the row `p` without digits; a pattern of LIKE would mean errors with other words, too.
_WITHOUT_DIGITS = functools.reduce(
    lambda text, digit: f"replace({text}, '{digit}', '')", "0123456789", f"substr(p.error, 1, {_MOST_CHARACTERS})"
)
#: So many messages of all held keys of a subscription are counted, in the order of the keys.
MOST_HELD = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedFilter:
    """A choice of parked messages; None: any.

    `error_like`: a part of the error. `same_error`: an error that may differ in numbers. `before`: the moment of
    parking.
    """

    ids: Sequence[int] | None = None
    states: Sequence[State] | None = None
    topic: str | None = None
    key: str | None = None
    error_like: str | None = None
    same_error: str | None = None
    before: datetime | None = None

    @property
    def words(self) -> dict[str, Any]:
        """The choice as values of JSON, without ids."""
        given = {name: value for name, value in asdict(self).items() if name != "ids" and value is not None}
        return {name: value.isoformat() if name == "before" else value for name, value in given.items()}


DEAD = ParkedFilter(states=(States.DEAD,))


def of_state(state: State, column: str = "state") -> str:
    """Return the condition that a row has the state `:state`, by the index of states: what is behind has none."""
    return f"{column} IS NULL" if state == States.BEHIND else f"{column} = :state"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedMessage:
    """A parked message without the body, and the open decision of a person.

    Attributes:
        subscription: each subscription parks copies of its own.
        id: of the message in the log, for `parked show`, `replay` and `discard`.
        state: `delayed`, `waiting` for the destination, `retry`, `dead`, or `behind` an earlier message of its key.
        head: the id of the message that a message behind it waits for; None: it is one itself.
        attempts: so many tries have failed.
        attempts_in_all: so many failures the workers allow; None: no worker is at work, or they differ.
        error: of the last try.
        created_at: when the message was written, by the database's clock.
        due_at: the next try.
        withdrawn_at: when the writer took a delayed message back, which goes without a delivery when it is due.
        decision: a `replay`, `discard` or `set_aside` that is not carried out yet.
        decided_by: the person.
    """

    subscription: str
    id: int
    message_id: uuid.UUID
    topic: str
    key: str | None
    state: State
    head: int | None
    attempts: int
    error: str | None
    created_at: datetime | None
    parked_at: datetime | None
    due_at: datetime | None
    withdrawn_at: datetime | None = None
    decision: str | None = None
    decided_by: str | None = None
    decision_reason: str | None = None
    decided_at: datetime | None = None
    attempts_in_all: int | None = None

    @property
    def tries(self) -> str:
        """The failed tries, such as `3 of 10`; without the end where none is known, or none comes."""
        comes = self.state in (States.RETRY, States.WAITING) and self.attempts
        known = comes and self.attempts_in_all is not None and self.attempts <= self.attempts_in_all
        return f"{self.attempts} of {self.attempts_in_all}" if known else f"{self.attempts}"


_NAMES = tuple(each.name for each in fields(ParkedMessage) if each.default is MISSING)
_MOMENTS = ("created_at", "parked_at", "due_at")
#: By the index of heads, of which a key has one.
_HEAD = """
    CASE WHEN state IS NULL THEN (
        SELECT h.id FROM {parked} AS h
        WHERE h.subscription = p.subscription AND h.unit = p.unit AND h.unit IS NOT NULL AND h.state IS NOT NULL) END
"""
#: What is behind a head has no state of its own.
_SHOWN = {"state": "coalesce(state, 'behind')", "head": _HEAD}
_FIELDS = ", ".join(_SHOWN.get(name, name) for name in _NAMES)
#: By (subscription, state, id), or by primary key for any state; at most `limit` rows, in the order of the log.
_LIST = f"""
    SELECT {_FIELDS} FROM {{parked}} AS p
    WHERE subscription = :subscription AND id > :after AND {{chosen}} ORDER BY id LIMIT :limit
"""
#: As `_LIST`.
_IDS = """
    SELECT id FROM {parked} AS p
    WHERE subscription = :subscription AND id > :after AND {chosen} ORDER BY id LIMIT :limit
"""
_COUNT = "SELECT count(*) FROM {parked} AS p WHERE subscription = :subscription AND {chosen}"
#: By primary key. SQLite reads through the body, so only of one message.
_DEAD_AT = "SELECT dead_at FROM {parked} WHERE subscription = :subscription AND id = :id"
#: From the index of dead letters alone, the first that died first.
_DEAD_BEFORE = """
    SELECT dead_at, id FROM {parked}
    WHERE subscription = :subscription AND dead_at IS NOT NULL AND dead_at < :before AND (dead_at, id) > (:at, :id)
    ORDER BY dead_at, id LIMIT :limit
"""
#: A portion of the rows of `_LIST`, chosen or not, so that each statement has an end: its last id, and how many rows.
_PORTION = """
    SELECT max(id), count(*) FROM (
        SELECT id FROM {parked} AS p WHERE subscription = :subscription AND id > :after AND {of_states}
        ORDER BY id LIMIT :limit) AS r
"""
_BY_ERROR = """
    SELECT coalesce(p.state, 'behind'), substr(p.error, 1, :characters), count(*), min(p.parked_at) FROM {parked} AS p
    WHERE p.subscription = :subscription AND p.id > :after AND p.id <= :upto AND {chosen}
    GROUP BY coalesce(p.state, 'behind'), substr(p.error, 1, :characters)
"""
#: Messages behind chosen heads; the heads by their index. The list does not depend on the row, so that a key with many
#: thousands of messages costs no more than this.
_BEHIND = """
    SELECT count(*) FROM (
        SELECT 1 FROM {parked} AS p
        WHERE p.subscription = :subscription AND p.state IS NULL AND p.unit IS NOT NULL AND ({chosen}) IS NOT TRUE
          AND p.unit IN (SELECT p.unit FROM {parked} AS p
                         WHERE p.subscription = :subscription AND p.unit IS NOT NULL AND p.state IS NOT NULL
                           AND {chosen})
        LIMIT :limit) AS n
"""
#: The keys with the most messages: all held messages, from the index of units alone, up to a limit.
_MOST_HELD = """
    SELECT unit, count(*), sum(count(*)) OVER () FROM (
        SELECT unit FROM {parked} WHERE subscription = :subscription AND unit IS NOT NULL
        ORDER BY unit, place LIMIT :limit) AS u
    GROUP BY unit ORDER BY count(*) DESC, unit LIMIT :top
"""
#: By the index of heads.
_HEADS = f"""
    SELECT {_FIELDS} FROM {{parked}} AS p
    WHERE subscription = :subscription AND unit IS NOT NULL AND state IS NOT NULL AND {{of_units}}
"""
#: By the index of units, in its order.
_OF_UNIT = "subscription = :subscription AND unit IS NOT NULL AND unit = :unit ORDER BY place LIMIT :limit"
_UNIT = f"SELECT {_FIELDS} FROM {{parked}} AS p WHERE {_OF_UNIT}"
_TOPICS_OF_UNIT = f"""
    SELECT topic, count(*) FROM (SELECT topic, state FROM {{parked}} WHERE {_OF_UNIT}) AS u
    WHERE state IS NULL GROUP BY topic ORDER BY count(*) DESC, topic
"""
#: By primary key. (A list of one id would be walked to by SQLite, without statistics.)
_ONE = f"SELECT {_FIELDS} FROM {{parked}} AS p WHERE subscription = :subscription AND id = :id"
_MESSAGE = f"""
    SELECT {COLUMNS.format(body="body")}, attempts + 1
    FROM {{parked}} WHERE subscription = :subscription AND id = :id
"""


class ParkedMessages:
    """The parked messages of one subscription, for people."""

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._database = channel.database
        self._common = {"subscription": subscription}
        self._decisions, self._leases = Decisions(channel, subscription), Leases(channel)

    def list(self, chosen: ParkedFilter, limit: int, after: int = -1) -> list[ParkedMessage]:
        """Return at most `limit` parked messages with ids above `after`, in the order of the log."""
        return [*self._decided([self._of(row) for row in self._rows(_LIST, chosen, after=after, limit=limit)])]

    def find(self, id: int) -> ParkedMessage | None:
        """Return a parked message; None: no message is parked under this id."""
        rows = self._channel.rows(_ONE, **self._common, id=id)
        return next(iter(self._decided([self._of(row) for row in rows])), None)

    def most_held(self, top: int) -> tuple[dict[str, int], bool]:
        """Return the held keys with the most messages, with how many, and whether more than `MOST_HELD` are held."""
        rows = self._channel.rows(_MOST_HELD, **self._common, limit=MOST_HELD + 1, top=top)
        return {unit: int(number) for unit, number, _ in rows}, bool(rows) and rows[0][2] > MOST_HELD

    def heads(self, keys: Sequence[str]) -> dict[str, ParkedMessage]:
        """Return the messages that hold these keys, by key."""
        text = self._database.sql(_HEADS, of_units=self._database.among("unit", texts="units"))
        rows = self._channel.rows(text, **self._common, units=self._database.bind(keys))
        return {str(each.key): each for each in self._decided([self._of(row) for row in rows])}

    def of_key(self, key: str, limit: int) -> Sequence[ParkedMessage]:
        """Return the first messages of a key that is held: the head, and what is behind it in order."""
        rows = self._channel.rows(_UNIT, **self._common, unit=key, limit=limit)
        return self._decided([self._of(row) for row in rows])

    def topics_behind(self, key: str) -> dict[str, int]:
        """Return how many messages are behind the head of a key, by topic, counted up to `MOST_BEHIND` together."""
        rows = self._channel.rows(_TOPICS_OF_UNIT, **self._common, unit=key, limit=MOST_BEHIND + 1)
        return {topic: int(number) for topic, number in rows}

    def _decided(self, found: Sequence[ParkedMessage]) -> Sequence[ParkedMessage]:
        """Return messages with the open decisions on them, those of their writers, and the tries that workers allow."""
        decided = self._decisions.of_messages() if found else {}
        delayed = [each.message_id for each in found if each.state == States.DELAYED]
        taken_back = withdrawals_among(self._channel, delayed) if delayed else {}
        attempts = self._leases.attempts(self._common["subscription"]) if found else None
        told = (replace(each, withdrawn_at=taken_back.get(each.message_id), attempts_in_all=attempts) for each in found)
        return [_with(each, decided[each.id]) if each.id in decided else each for each in told]

    def count(self, chosen: ParkedFilter) -> int:
        """Return how many of the chosen messages there are."""
        return int(self._rows(_COUNT, chosen)[0][0])

    def by_error(self, chosen: ParkedFilter, until: float) -> tuple[Sequence[Row], bool]:
        """Count the chosen messages by state and error: rows of state, error, number, and the moment of the first.

        Return also whether all were counted until `until`, by the clock of this process; one portion is counted anyway.
        """
        of_states = replace(ParkedFilter(), states=chosen.states)
        condition, parameters = self._condition(of_states)
        portion, found, after = self._database.sql(_PORTION, of_states=condition), list[Row](), -1
        while True:
            bound = {**self._common, **parameters, "after": after, "limit": _COUNTED_AT_ONCE}
            upto, number = self._channel.rows(portion, **bound)[0]
            if upto is not None:
                found += self._rows(_BY_ERROR, chosen, after=after, upto=upto, characters=_MOST_CHARACTERS)
                after = upto
            if number < _COUNTED_AT_ONCE or clock() >= until:
                return found, number < _COUNTED_AT_ONCE

    def behind(self, chosen: ParkedFilter) -> int:
        """Return how many messages behind them go on when the chosen messages are gone, counted up to `MOST_BEHIND`."""
        return int(self._rows(_BEHIND, chosen, limit=MOST_BEHIND)[0][0])

    def message(self, id: int) -> Message | None:
        """Return a parked message with its body and headers; None: no message is parked under this id."""
        rows = self._channel.rows(_MESSAGE, **self._common, id=id)
        return next(iter(self._database.dialect.reads.messages(rows)), None)

    def decide(self, chosen: ParkedFilter, verb: Verb, by: str, reason: str | None) -> int:
        """Write a decision on messages, inside a transaction; return on how many."""
        ids = list[int]()
        while page := self._rows(_IDS, chosen, after=ids[-1] if ids else -1, limit=MOST_IDS):
            ids += [id for (id,) in page]
        if ids:
            self._decisions.write(verb, ids, by=by, reason=reason, choice=chosen.words)
        return len(ids)

    def dead_at(self, id: int) -> datetime | None:
        """Return since when a parked message is a dead letter; None: it is none, or is not parked."""
        rows = self._channel.rows(_DEAD_AT, **self._common, id=id)
        return self._database.dialect.clock.read(rows[0][0]) if rows else None

    def dead_before(self, moment: datetime) -> Sequence[int]:
        """Return the log ids of what has been a dead letter since before a moment, and has no open decision."""
        clock, decided = self._database.dialect.clock, self._decisions.of_messages()
        at, id, found = clock.bind(datetime.fromtimestamp(0, UTC)), -1, list[int]()
        bound = {**self._common, "before": clock.bind(moment), "limit": MOST_IDS}
        while page := self._channel.rows(_DEAD_BEFORE, **bound, at=at, id=id):
            at, id = clock.bind(self._database.moment(page[-1][0])), page[-1][1]
            found += [each for _, each in page if each not in decided]
        return sorted(found)

    def give_up_dead(self, moment: datetime, by: str | None, reason: str) -> int:
        """Write the decision to discard what `dead_before` returns, inside a transaction; return on how many."""
        ids, choice = self.dead_before(moment), {"dead_before": moment.isoformat()}
        if ids:
            self._decisions.write("discard", ids, by=by or user_and_host(), reason=reason, choice=choice)
        return len(ids)

    def _rows(self, statement: str, chosen: ParkedFilter, **more: Any) -> Sequence[Row]:
        condition, parameters = self._condition(chosen)
        text = self._database.sql(statement, chosen=condition)
        return self._channel.rows(text, **self._common, **parameters, **more)

    def _condition(self, chosen: ParkedFilter) -> tuple[str, dict[str, Any]]:
        """Return the condition on the row `p`, and its parameters."""
        parts: dict[str, dict[str, Any]] = {}
        if chosen.ids is not None:
            parts[self._database.among("p.id", numbers="ids")] = {"ids": self._database.bind(chosen.ids)}
        if chosen.states is not None and len(chosen.states) == 1:
            # In the order of the index, however many messages are in other states.
            parts[of_state(chosen.states[0], "p.state")] = {"state": chosen.states[0]}
        elif chosen.states is not None:
            of_states = self._database.among("coalesce(p.state, 'behind')", texts="states")
            parts[of_states] = {"states": self._database.bind(chosen.states)}
        if chosen.topic is not None:
            parts["p.topic = :topic"] = {"topic": chosen.topic}
        if chosen.key is not None:
            parts["p.key = :key"] = {"key": chosen.key}
        if chosen.error_like is not None:
            escaped = chosen.error_like.lower().replace("!", "!!").replace("%", "!%").replace("_", "!_")
            parts["lower(p.error) LIKE :error_like ESCAPE '!'"] = {"error_like": f"%{escaped}%"}
        if chosen.same_error is not None:
            parts[f"{_WITHOUT_DIGITS} = :same_error"] = {
                "same_error": _DIGITS.sub("", chosen.same_error[:_MOST_CHARACTERS])
            }
        if chosen.before is not None:
            parts["p.parked_at < :before"] = {"before": self._database.dialect.clock.bind(chosen.before)}
        bound = {name: value for each in parts.values() for name, value in each.items()}
        return " AND ".join(parts) or "TRUE", bound

    def _of(self, row: Row) -> ParkedMessage:
        values = dict(zip(_NAMES, row, strict=True))
        moments = {name: self._database.dialect.clock.read(values[name]) for name in _MOMENTS}
        return ParkedMessage(**{**values, **moments, "message_id": stored_uuid(values["message_id"])})


def _with(message: ParkedMessage, decision: Decision) -> ParkedMessage:
    return replace(
        message,
        decision=decision.verb,
        decided_by=decision.by,
        decision_reason=decision.reason,
        decided_at=decision.at,
    )
