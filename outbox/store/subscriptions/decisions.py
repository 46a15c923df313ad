"""Decisions of people: written when they decide, and stamped by the lease holder that carries them out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.model.decision import Decision, Verb
from outbox.model.lease import Partition
from outbox.model.message import stored_uuid
from outbox.model.position import Progress
from outbox.runtime.process import user_and_host
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Row

#: A decision is kept for so long after it was carried out.
RETENTION = timedelta(days=90)
#: So many old decisions are deleted at once.
PRUNED_AT_ONCE = 1_000
#: A decision on more messages is stored as several, because its list of ids is written after each transaction.
MOST_IDS = 10_000

#: The reason of the discards by an erase.
ERASED = "outbox erase"
#: The parts of a choice that may be about somebody.
_TEXTS = ("key", "error_like", "same_error")

_COLUMNS = "id, at, by, verb, subscription, choice, reason, count, done_at"
_WRITE = """
    INSERT INTO {decision} (at, by, verb, subscription, choice, reason)
    VALUES ({now}, :by, :verb, :subscription, :choice, :reason)
"""
_NOTE = """
    INSERT INTO {decision} (at, by, verb, subscription, choice, reason, count, done_at)
    VALUES ({now}, :by, :verb, :subscription, :choice, :reason, :count, {now})
"""
#: By primary key, the newest first.
_LIST = f"""
    SELECT {_COLUMNS} FROM {{decision}}
    WHERE (:every = 1 OR subscription = :subscription) AND {{since}} AND {{page}} ORDER BY id DESC LIMIT :limit
"""
_ALL = f"SELECT {_COLUMNS} FROM {{decision}} WHERE id > :after ORDER BY id LIMIT :limit"
_FORGET = "UPDATE {decision} SET choice = :choice, reason = :reason WHERE id = :id"
#: By the partial index of open decisions.
_OPEN = "SELECT id, count FROM {decision} WHERE subscription = :subscription AND done_at IS NULL ORDER BY id"
_OPEN_ROWS = f"SELECT {_COLUMNS} FROM {{decision}} WHERE subscription = :subscription AND done_at IS NULL ORDER BY id"
#: Carried out since the message was written, by the index on done_at; the text of the choice holds the id and others.
_ABOUT = f"""
    SELECT {_COLUMNS} FROM {{decision}}
    WHERE subscription = :subscription AND done_at >= :since AND choice LIKE :some_id ORDER BY id
"""
#: What began another generation of a subscription. Decisions are few; without an index.
_GENERATIONS = f"""
    SELECT {_COLUMNS} FROM {{decision}}
    WHERE subscription = :subscription AND verb IN ('reset', 'partitions') AND at >= :since ORDER BY id
"""
#: Open for longer than a worker needs; those on unread messages wait for a worker to meet the messages.
_STALLED = """
    SELECT subscription, count(*), min(at) FROM {decision}
    WHERE done_at IS NULL AND at < {later} AND choice NOT LIKE '%"message_ids"%'
    GROUP BY subscription ORDER BY subscription
"""
#: One that the holder of another partition carries out meanwhile is left for later.
_TAKE = f"SELECT {_COLUMNS} FROM {{decision}} WHERE id = :id AND done_at IS NULL {{skip_locked}}"
#: Waits until a lease holder has carried out a part, or all.
_LOCK = "UPDATE {decision} SET count = count WHERE id = :id AND done_at IS NULL"
#: By primary key: messages of the log, each with the number that tells whether a position sees the message.
_IN_LOG = "SELECT id, {number}, message_id, slot FROM {message} WHERE {id_in_ids}"
_STORE = """
    UPDATE {decision} SET choice = :choice, count = coalesce(count, 0) + :carried,
           done_at = CASE WHEN :left = 0 THEN {now} END
    WHERE id = :id
"""
_CLOSE = """
    UPDATE {decision} SET count = coalesce(count, 0), done_at = {now}
    WHERE subscription = :subscription AND done_at IS NULL
"""
_GIVE = """
    INSERT INTO {decision} (at, by, verb, subscription, choice, reason)
    SELECT at, by, verb, CAST(:other AS {text}), choice, reason FROM {decision}
    WHERE subscription = :subscription AND done_at IS NULL
"""
#: Found by the index on done_at. Rows that another worker is deleting are skipped, because two workers that lock in
#: different orders could wait for each other.
_PRUNE = """
    DELETE FROM {decision} WHERE id IN (SELECT id FROM (
        SELECT id FROM {decision} WHERE done_at <= {later} ORDER BY done_at LIMIT :limit {skip_locked}) AS d)
"""


class Decisions:
    """The decisions of people on messages of one subscription."""

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription

    def write(
        self,
        verb: Verb,
        ids: Sequence[int],
        *,
        by: str,
        reason: str | None,
        choice: Mapping[str, Any] | None = None,
        unread: Mapping[int, UUID] | None = None,
    ) -> None:
        """Write a decision on messages, inside a transaction. The last decision on a message counts.

        `choice`: how the person chose the messages. `unread`: the message ids by log id, if no worker has read the
        messages; the decision waits until a worker does.
        """
        chosen = {*ids}
        for id in self.open():
            earlier = self.take(id, waits=True)
            if earlier is not None and not chosen.isdisjoint(earlier.left):
                self.store(earlier, [each for each in earlier.left if each not in chosen])
        words = {"by": by, "verb": verb, "reason": reason, "subscription": self._subscription}
        for first in range(0, len(ids), MOST_IDS):
            stored = {**(choice or {}), "ids": list(ids[first : first + MOST_IDS])}
            if unread:
                stored["message_ids"] = [unread[id].hex for id in stored["ids"]]
            self._channel.run(_WRITE, **words, choice=json.dumps(stored))

    def open(self) -> list[int]:
        """Return the ids of the decisions that are not carried out yet."""
        return [*self.counts()]

    def counts(self) -> dict[int, int]:
        """Return the ids of the open decisions, with on how many messages each was carried out."""
        return {id: count or 0 for id, count in self._channel.rows(_OPEN, subscription=self._subscription)}

    def of_messages(self) -> dict[int, Decision]:
        """Return the open decisions by the log ids of their messages."""
        return {id: each for each in self._read(_OPEN_ROWS, subscription=self._subscription) for id in each.left}

    def about(self, id: int, since: datetime) -> list[Decision]:
        """Return the decisions on a message that were carried out, in their order; `since`: when it was written."""
        bound = {"since": self._channel.database.dialect.clock.bind(since), "some_id": f"%{id}%"}
        found = self._read(_ABOUT, subscription=self._subscription, **bound)
        return [each.shown for each in found if id in each.choice.get("ids", ())]

    def of_generations(self, since: datetime) -> list[Decision]:
        """Return the resets and the changes of the number of partitions from a moment on, in their order."""
        bound = {"since": self._channel.database.dialect.clock.bind(since)}
        return self._read(_GENERATIONS, subscription=self._subscription, **bound)

    def take(self, id: int, *, waits: bool = False) -> Decision | None:
        """Return an open decision, and lock it until the transaction ends; None: it is closed, or another has it.

        `waits`: wait for the other one, whose transaction is short.
        """
        if waits:
            self._channel.run(_LOCK, id=id)
        return next(iter(self._read(_TAKE, id=id)), None)

    def store(self, decision: Decision, left: Sequence[int], *, carried_out: int = 0) -> None:
        """Write on which messages a decision is left to be carried out; without any the decision is done.

        `carried_out`: on so many messages more.
        """
        # Nobody needs the message ids of a decision that is done.
        stored = json.dumps({**decision.choice, "left": left} if left else dict(decision.shown.choice))
        self._channel.run(_STORE, id=decision.id, choice=stored, carried=carried_out, left=len(left))

    def unread(self, decision: Decision, progress: Progress | None, partition: Partition) -> set[int]:
        """Return the ids of messages that their worker has still to read.

        `progress`: of the partition, in whose slots messages may have been passed by now; None: unknown. Ask before
        looking for parked messages: a message that was passed before is parked then, or done.
        """
        wanted, found = decision.message_ids, set[int]()
        if not wanted:
            return found
        for id, number, message_id, slot in self._channel.rows(_IN_LOG, ids=self._channel.database.bind(decision.left)):
            passed = progress is not None and partition.owns(slot) and progress.passes(number, id)
            # The ids of a log that was truncated are given out again.
            if not passed and stored_uuid(message_id) == wanted.get(id):
                found.add(id)
        return found

    def close(self) -> None:
        """Close the open decisions of a subscription whose messages go, in the same transaction."""
        self._channel.run(_CLOSE, subscription=self._subscription)

    def give(self, other: str) -> None:
        """Let open decisions count in another subscription, too, inside the transaction that moves messages there."""
        self._channel.run(_GIVE, subscription=self._subscription, other=other)

    def _read(self, statement: str, **parameters: Any) -> list[Decision]:
        return [_of(row, self._channel.database) for row in self._channel.rows(statement, **parameters)]


def note(
    channel: Channel,
    verb: str,
    *,
    by: str | None,
    subscription: str | None = None,
    choice: Mapping[str, Any] | None = None,
    reason: str | None = None,
    count: int | None = None,
) -> None:
    """Write a decision that the open transaction carries out; `by`: the person; None: user and host of the process."""
    given = {name: value for name, value in (choice or {}).items() if value is not None}
    words = {"verb": verb, "by": by or user_and_host(), "subscription": subscription, "reason": reason}
    channel.run(_NOTE, **words, choice=json.dumps(given, default=_plain), count=count)


def listed(
    channel: Channel,
    limit: int,
    *,
    subscription: str | None = None,
    since: datetime | None = None,
    after: int | None = None,
) -> list[Decision]:
    """Return at most `limit` decisions, the newest first; `after`: the id of the last one of the page before."""
    database, bound = channel.database, {"every": int(subscription is None), "subscription": subscription or ""}
    if since is not None:
        bound["since"] = database.dialect.clock.bind(since)
    if after is not None:
        bound["after"] = after
    page, begin = "TRUE" if after is None else "id < :after", "TRUE" if since is None else "at >= :since"
    statement = database.sql(_LIST, since=begin, page=page)
    found = (_of(row, database) for row in channel.rows(statement, **bound, limit=limit))
    return [each.shown for each in found]


@dataclass(frozen=True, slots=True)
class Stalled:
    """A subscription with decisions that nobody carries out: how many, and since when."""

    name: str
    number: int
    since: datetime


def stalled(channel: Channel, seconds: float) -> list[Stalled]:
    """Return the subscriptions with decisions that are open for so many seconds, sorted by name."""
    rows = channel.rows(_STALLED, seconds=-seconds)
    return [Stalled(name, int(number), channel.database.moment(since)) for name, number, since in rows]


def forget(channel: Channel, keys: Collection[str], message_ids: Collection[UUID], ids: Collection[int]) -> int:
    """Clear the texts of decisions about the messages of a person; return how many decisions were changed.

    The texts are keys, reasons, and parts of errors. Ids in the log stay. `ids`: of the messages, as far as known.
    """
    changed, after, texts = 0, 0, {*keys, *map(str, message_ids)}
    about = re.compile("|".join(rf"(?<!\w){re.escape(text)}(?!\w)" for text in sorted(texts)) or "(?!)")
    while rows := channel.rows(_ALL, after=after, limit=PRUNED_AT_ONCE):
        for decision in (_of(row, channel.database) for row in rows):
            after = decision.id
            kept = {name: value for name, value in decision.choice.items() if name not in _TEXTS}
            said = [decision.reason, *(decision.choice.get(name) for name in _TEXTS)]
            if not any(said) or decision.reason == ERASED:
                continue
            if any(each and about.search(each) for each in said) or not {*ids}.isdisjoint(kept.get("ids", ())):
                channel.run(_FORGET, id=decision.id, choice=json.dumps(kept), reason=None)
                changed += 1
    return changed


def prune(channel: Channel) -> int:
    """Delete one portion of the decisions that were carried out long ago; return how many."""
    with channel.transaction():
        return channel.run(_PRUNE, seconds=-RETENTION.total_seconds(), limit=PRUNED_AT_ONCE)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else list(value)


def _of(row: Row, database: Database) -> Decision:
    id, at, by, verb, subscription, choice, reason, count, done_at = row
    return Decision(
        id=id,
        at=database.moment(at),
        by=by,
        verb=verb,
        subscription=subscription,
        choice=json.loads(choice),
        reason=reason,
        count=count,
        done_at=database.dialect.clock.read(done_at),
    )
