"""Parked messages: copies of messages, made so that the position can move on. Only the lease holder changes them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from outbox.errors import DatabaseError
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.parking import NOTHING_HELD, STATES, Held, Parking, State
from outbox.model.topics import Topics
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS, OF_SLOTS, slots_of
from outbox.store.dialects.statements import Row


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a person on a parked message."""

    id: int
    key: str | None
    verb: Literal["replay", "discard"]
    by: str | None
    reason: str | None


_ENVELOPE = "message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at, expires_at"

#: The number of places between two neighbours of the log, for messages that fall due between them.
_BETWEEN = 1 << 20

#: Behind every place.
EVERYWHERE = (1 << 63) - 1

#: When more than so many are due, only those that have been due for longest are looked at.
CROWD = 2_000

#: Messages are copied inside the database, so bodies do not travel to the worker and back.
_PARK = f"""
    {{insert_once}} {{parked}}
        (subscription, id, {_ENVELOPE}, state, blocks, place, attempts, due_at, error, parked_at)
    SELECT CAST(:subscription AS {{text}}), id, {_ENVELOPE}, CAST(:state AS {{text}}), {{blocks}} AND key IS NOT NULL,
           id * {_BETWEEN}, :attempts, {{due}}, :error, {{now}}
    FROM {{message}} WHERE {{id_in_ids}} {{unless_there}}
"""
#: The first message that could not be inserted because another one is parked under its id. By both primary keys.
_OTHER = """
    SELECT p.id FROM {parked} AS p JOIN {message} AS m ON m.id = p.id
    WHERE p.subscription = :subscription AND {chosen} AND p.message_id <> m.message_id ORDER BY p.id LIMIT 1
"""
_CHANGE = """
    UPDATE {parked} SET state = :state, blocks = {blocks} AND key IS NOT NULL, attempts = :attempts, due_at = {due},
           error = :error
    WHERE subscription = :subscription AND {id_in_ids}
"""
_REMOVE = "DELETE FROM {parked} WHERE subscription = :subscription AND {id_in_ids}"
#: The request is compared again inside the transaction, because the last request counts.
_DISCARDED = "FROM {parked} WHERE subscription = :subscription AND {id_in_ids} AND request = 'discard'"
_DISCARD = f"DELETE {_DISCARDED}"
#: Else the next message with the dedup key would not be written. No index has the message ids: people discard rarely,
#: and writers would have to pay for the index.
_KEYS_OF_DISCARDED = """
    SELECT p.id, d.dedup_key FROM {parked} AS p JOIN {dedup} AS d ON d.message_id = p.message_id
    WHERE p.subscription = :subscription AND {chosen} AND p.request = 'discard'
"""
#: By primary key. A key that was claimed anew meanwhile is that of another message, and stays.
_THEIRS = "FROM {dedup} WHERE {among_keys} AND message_id IN (SELECT message_id {discarded})"
_FREE_KEYS = "DELETE FROM {dedup} WHERE dedup_key IN (SELECT dedup_key {theirs} {skip})"
_KEPT = "SELECT dedup_key {theirs}"
#: Messages stop blocking, which releases those behind them; by the partial index of rows that block others.
_UNBLOCK = "UPDATE {parked} SET blocks = FALSE WHERE subscription = :subscription AND blocks AND state {in_states}"
#: Keys with a message that blocks others and is not blocked itself; a key may come more than once. The limit bounds
#: this with any plan; a DISTINCT would read all of them before it returns the first.
_KEYS = """
    SELECT key FROM {parked}
    WHERE subscription = :subscription AND blocks AND state <> 'blocked' {of_slots} LIMIT :limit
"""
_BLOCKED_AMONG = """
    SELECT DISTINCT key FROM {parked} WHERE subscription = :subscription AND blocks AND {chosen}
"""
#: Keys with blocked messages that nothing holds back. This is read once, when a lease is taken; after that the lease
#: holder keeps the list in memory. By the partial index of rows that block others and are not blocked themselves.
_RELEASED = """
    SELECT d.key FROM (
        SELECT key, min(place) AS place FROM {parked}
        WHERE subscription = :subscription AND state = 'blocked' AND key IS NOT NULL {of_slots} GROUP BY key) AS d
    WHERE NOT EXISTS (
        SELECT 1 FROM {parked} AS e
        WHERE e.subscription = :subscription AND e.key = d.key AND e.blocks AND e.state <> 'blocked'
          AND (e.state = 'dead' OR e.due_at > {now}) AND e.place < d.place)
"""
#: Messages that are due, and blocked ones of keys that nothing holds back, with the length of each body. By the partial
#: indexes on due_at and place.
_CANDIDATES = """
    SELECT p.id, p.key, p.place, length(p.body), {moment} FROM {parked} AS p
    WHERE p.subscription = :subscription {of_slots} AND NOT {untried_p} AND (p.place, p.id) > (:place, :id)
      AND ((p.state IN {due_states} AND p.due_at <= {moment})
           OR (p.state = 'blocked' AND (p.key IS NULL OR {released})))
      AND NOT {stopped}
    ORDER BY p.place, p.id LIMIT :limit
"""
#: Place and id of the first message of each key for which later ones wait: it waits for a moment or a person, or is not
#: tried now. If the key is not released, a blocked message is one, too: a due one behind it was replayed after it had
#: let later ones pass. Looked up once for a key, because a key may have very many messages.
_STOP = """
    SELECT e.{column} FROM {parked} AS e
    WHERE e.subscription = :subscription AND e.key = k.key AND e.blocks AND e.place <= :place
      AND (e.state = 'dead' OR e.due_at > :moment OR (e.state = 'blocked' AND {unreleased}) OR {untried_e})
    ORDER BY e.place, e.id LIMIT 1
"""
_STOPS = "SELECT k.key, ({place}), ({id}) FROM {parked} AS k WHERE k.subscription = :subscription AND {chosen}"
_READY = f"""
    SELECT {COLUMNS.format(body="body")}, attempts + 1, state,
           CASE WHEN expires_at <= {{now}} THEN 1 ELSE 0 END, place
    FROM {{parked}} WHERE subscription = :subscription AND {{id_in_ids}} ORDER BY place, id
"""
#: A row if so many are due that sorting them would take long. By the partial index on due_at, as the next statement.
_CROWDED = """
    SELECT 1 FROM {parked}
    WHERE subscription = :subscription AND state IN ('delayed', 'waiting', 'retry') AND due_at <= {now} {of_slots}
    ORDER BY due_at LIMIT 1 OFFSET :crowd
"""
#: The moment up to which due messages are looked at first: `:limit` have been due for longer than that. Some of them
#: may stand behind others of their keys.
_HORIZON = """
    SELECT p.due_at FROM {parked} AS p
    WHERE p.subscription = :subscription AND p.state IN ('delayed', 'waiting', 'retry') {undelayed}
      AND p.due_at <= {now} {of_slots} AND NOT {untried_p}
    ORDER BY p.due_at LIMIT 1 OFFSET :limit
"""
#: Delayed messages that are due take a place in their key's order, in the order in which they fell due. They come
#: after all messages of the key that are held back now, and before those that come later.
_PLACED = """
    (SELECT d.id AS due_id, row_number() OVER (PARTITION BY d.key ORDER BY d.due_at, d.id) + coalesce(
         (SELECT max(e.place) FROM {parked} AS e
          WHERE e.subscription = :subscription AND e.key = d.key AND e.blocks),
         min(d.place) OVER (PARTITION BY d.key) - 1) AS due_place
     FROM {parked} AS d WHERE d.subscription = :subscription AND {chosen}) AS placed
"""
_FALLEN_DUE = {
    "changes": "state = 'blocked', blocks = key IS NOT NULL, due_at = NULL, place = due_place",
    "joined": "subscription = :subscription AND id = due_id",
}
_DUE = """
    SELECT id, key FROM {parked}
    WHERE subscription = :subscription AND state = 'delayed' AND due_at <= {now} {of_slots}
    ORDER BY due_at, id LIMIT :limit
"""
_SOME_FELL_DUE = """
    SELECT 1 FROM {parked}
    WHERE subscription = :subscription AND state = 'delayed' AND due_at <= {now} {of_slots} LIMIT 1
"""
#: Only the next one that is not due yet, because those that are due were looked at before this. A partition searches
#: the next `:few` for one of its slots, because it could read all others; it looks again soon if none is among them.
_NEXT_DUE = """
    SELECT {seconds} FROM (
        SELECT due_at, slot FROM {parked}
        WHERE subscription = :subscription AND state IN ('delayed', 'waiting', 'retry') AND due_at > {now}
        ORDER BY due_at LIMIT :few) AS n
    WHERE TRUE {of_slots} ORDER BY due_at LIMIT 1
"""
_FEW = 500
#: One behind a message that does not wait for another try has to wait for more than that: perhaps for a person.
_SOME_RETRY = """
    SELECT 1 FROM {parked} AS p
    WHERE p.subscription = :subscription AND p.state = 'retry' {of_slots_p} AND NOT {paused}
      AND NOT EXISTS (
        SELECT 1 FROM {parked} AS e
        WHERE e.subscription = p.subscription AND e.key = p.key AND e.blocks AND (e.place, e.id) < (p.place, p.id)
          AND e.state <> 'retry') LIMIT 1
"""
_WAITING = """
    SELECT count(*) FROM (
        SELECT 1 FROM {parked} WHERE subscription = :subscription AND state = 'waiting' {of_slots} LIMIT :limit) AS w
"""
#: `id + 0` keeps the planner off the primary key, on which there may be a million others.
_REQUESTS = """
    SELECT id, key, request, requested_by, request_reason FROM {parked}
    WHERE subscription = :subscription AND request IS NOT NULL {of_slots} ORDER BY id + 0 LIMIT :limit
"""
#: A replayed message does not expire any more, because a person wants it delivered.
_REPLAY = """
    UPDATE {parked} SET state = 'retry', attempts = 0, due_at = {now}, blocks = {blocks}, expires_at = NULL,
           request = NULL, requested_by = NULL, request_reason = NULL, requested_at = NULL
    WHERE subscription = :subscription AND {id_in_ids} AND request = 'replay'
"""
#: By the index of the states. Only what differs is written, so that a worker may store the error it begins with.
_WITH_ANOTHER_ERROR = """
    SELECT id FROM {parked}
    WHERE subscription = :subscription AND state = 'waiting' AND topic = :topic AND error <> :error {of_slots}
    ORDER BY id LIMIT :limit
"""
_RENEW_ERROR = "UPDATE {parked} SET error = :error WHERE subscription = :subscription AND {id_in_ids}"
_SOME = "SELECT 1 FROM {parked} WHERE subscription = :subscription {of_slots} LIMIT 1"
_CLEAR = "DELETE FROM {parked} WHERE subscription = :subscription AND state = :state"
#: The messages of some topics, with the requests on them, become those of another subscription.
_GIVE = "UPDATE {parked} SET subscription = :other WHERE subscription = :subscription AND {of_topics}"


@dataclass(frozen=True, slots=True)
class Ready:
    """A parked message whose turn has come; of a key those with lower places go first."""

    message: Message
    state: State
    expired: bool
    place: int


class Parked:
    """The parked messages of one subscription.

    With a partition, turns and requests are looked for in its slots only. Ids and keys are taken as given: they are the
    partition's.
    """

    def __init__(
        self, channel: Channel, subscription: str, partition: Partition | None = None, *, ordered: bool = True
    ) -> None:
        """`partition`: the partition whose lease the caller holds; None: all of them. `ordered`: a message waits for
        earlier messages of its key.
        """
        self.subscription = subscription
        self.ordered = ordered
        self._channel = channel
        self._database = channel.database
        slots = slots_of(partition)
        self._common: dict[str, Any] = {"subscription": subscription, **slots}
        self._of_slots = f"AND {OF_SLOTS}" if slots else ""
        self._of_slots_p = f"AND p.{OF_SLOTS}" if slots else ""

    def park(self, parkings: dict[Parking, list[int]]) -> None:
        """Copy messages out of the log, inside the transaction of a settle; a message parked already stays as it is.

        Raises:
            DatabaseError: another message is parked under one of these ids.
        """
        for parking, ids in parkings.items():
            if self._place(_PARK, parking, ids) < len(ids):
                self._require_same(ids)

    def change(self, parkings: dict[Parking, list[int]]) -> None:
        """Give parked messages another state."""
        for parking, ids in parkings.items():
            self._place(_CHANGE, parking, ids)

    def remove(self, ids: Collection[int]) -> None:
        """Delete parked messages that are done."""
        self._run(_REMOVE, ids)

    def keys(self, limit: int) -> set[str] | None:
        """Return the keys that a parked message blocks without being blocked; None: perhaps more than `limit`.

        Keys with only blocked messages are left out; see `released_keys`.
        """
        rows = self._rows(_KEYS, limit=limit + 1)
        return {row[0] for row in rows} if len(rows) <= limit else None

    def held_among(self, keys: Collection[str]) -> set[str]:
        """Return the keys that are held back, of these."""
        statement = self._database.sql(_BLOCKED_AMONG, chosen=self._database.among("key", texts="keys"))
        return {row[0] for row in self._channel.rows(statement, **self._common, keys=self._database.bind(keys))}

    def released_keys(self) -> set[str]:
        """Return the keys with blocked messages that nothing holds back."""
        return {row[0] for row in self._rows(_RELEASED)}

    def ready(
        self,
        released: Collection[str],
        refused: Mapping[str, int],
        rows: int,
        bytes: int,
        *,
        held: Held = NOTHING_HELD,
        retries: bool = False,
    ) -> tuple[list[Ready], bool]:
        """Return messages whose turn has come, in the order of their keys, at most `rows`, and `bytes` of bodies; and
        whether there may be more.

        `released`: keys whose blocked messages may be tried. `refused`: of these topics no message is tried up to a
        place, and `held`: of which messages none is. `retries`: only messages that failed.
        """
        bound = {**self._common, **self._untried(refused, held)}
        found: list[Row] = []
        # What a refused topic is tried with goes from place to place, and must not begin again with those due longest.
        from_place = any(0 < place < EVERYWHERE for place in refused.values())
        if not (retries or from_place) and self._rows(_CROWDED, crowd=CROWD):
            found = self._in_turn_at_horizon(bound, released, rows)
        is_part = bool(found)
        # Nothing may be ready at the horizon, because the first message of each key may have fallen due after it.
        found = found or self._in_turn(bound, released, rows, retries=retries)
        sizes = accumulate(row[3] for row in found)
        ids = [row[0] for nth, (row, size) in enumerate(zip(found, sizes, strict=True)) if size <= bytes or nth == 0]
        copies = self._rows(_READY, ids=self._database.bind(ids)) if ids else []
        messages = self._database.dialect.reads.messages([row[:12] for row in copies])
        ready = [Ready(message, row[12], bool(row[13]), row[14]) for message, row in zip(messages, copies, strict=True)]
        return ready, is_part or len(found) == rows or len(ids) < len(found)

    def _in_turn_at_horizon(self, bound: dict[str, Any], released: Collection[str], rows: int) -> list[Row]:
        """Return the messages that were ready at the horizon, when fewer were due.

        Of each key they come before the others that are ready now.
        """
        # A second list of states would have a table without statistics read by another index, that of keys.
        undelayed = "AND p.state <> 'delayed'" if self.ordered else ""
        parts = {"untried_p": self._is_untried("p"), "of_slots": self._of_slots_p, "undelayed": undelayed}
        limit = rows
        while horizon := self._channel.rows(self._database.sql(_HORIZON, **parts), **bound, limit=limit):
            found = self._in_turn(bound, released, rows, self._bound_moment(horizon[0][0]))
            if not found or 2 * len(found) >= rows:
                return found
            # Most of what is due for longest is stopped: each batch would have the few others.
            limit *= 4
        return []

    def _in_turn(
        self, bound: dict[str, Any], released: Collection[str], rows: int, moment: Any = None, *, retries: bool = False
    ) -> list[Row]:
        """Return the first messages of `_CANDIDATES` behind no other for which they wait; `moment`: None is now."""
        found: list[Row] = []
        stopped = set[str]()
        place, id, limit = -1, -1, rows
        among, bind = self._database.dialect.values.among_many, self._database.bind
        while True:
            bound |= {"released": bind(released), "stopped": bind(stopped)}
            statement = self._database.sql(
                _CANDIDATES,
                untried_p=self._is_untried("p"),
                released=among.format(value="p.key", list=":released"),
                stopped=among.format(value="coalesce(p.key, '')", list=":stopped"),  # no key is empty
                of_slots=self._of_slots_p + (" AND p.state = 'retry'" if retries else ""),
                due_states=self._due_states,
                moment=self._database.dialect.clock.now if moment is None else ":moment",
            )
            page = self._channel.rows(statement, **bound, place=place, id=id, limit=limit, moment=moment)
            if page:
                # The same moment for all: else one that falls due meanwhile would be overtaken.
                moment = self._bound_moment(page[0][4]) if moment is None else moment
                id, place = page[-1][0], page[-1][2]
                firsts = {row[1]: row[0] for row in reversed(page) if row[1] is not None}
                stops = self._stops(bound, firsts, released, place, moment)
                found += [row for row in page if row[1] not in stops or (row[2], row[0]) < stops[row[1]]]
                stopped.update(stops)
            if len(page) < limit or len(found) >= rows:
                return found[:rows]
            # Of the stopped keys no other is in turn. Most messages wait for others: few further pages bring all.
            limit *= 4

    def _stops(
        self, bound: dict[str, Any], firsts: Mapping[str, int], released: Collection[str], place: int, moment: Any
    ) -> dict[str, tuple[int, int]]:
        """Return place and id of the first message for which later ones wait, of keys that have one up to `place`.

        `firsts`: a message of each key.
        """
        if not firsts:
            return {}
        among = self._database.among
        parts = {"unreleased": among("k.key", texts="unreleased"), "untried_e": self._is_untried("e")}
        statement = self._database.sql(
            _STOPS,
            place=self._database.sql(_STOP, column="place", **parts),
            id=self._database.sql(_STOP, column="id", **parts),
            chosen=among("k.id", numbers="ids"),
        )
        lists = {"ids": firsts.values(), "unreleased": firsts.keys() - released}
        bound_lists = {name: self._database.bind(values) for name, values in lists.items()}
        rows = self._channel.rows(statement, **bound, **bound_lists, place=place, moment=moment)
        return {row[0]: (row[1], row[2]) for row in rows if row[2] is not None}

    def _bound_moment(self, moment: Any) -> Any:
        return self._database.dialect.clock.bind(self._database.moment(moment))

    @property
    def _due_states(self) -> str:
        """The states in which a message that is due is ready, if nothing holds it back."""
        return "('waiting', 'retry')" if self.ordered else "('waiting', 'retry', 'delayed')"

    def _is_untried(self, row: str) -> str:
        among = self._database.among
        key, id = f"coalesce({row}.key, '')", f"{row}.id"  # no key is empty
        refused = self._database.dialect.values.number_of.format(value=f"{row}.topic", numbers=":refused")
        held = f"{among(key, texts='held_keys')} AND NOT {among(id, numbers='held_but')}"
        return f"({row}.place <= coalesce({refused}, -1) OR {among(id, numbers='held_ids')} OR ({held}))"

    def _untried(self, refused: Mapping[str, int], held: Held) -> dict[str, Any]:
        bind = self._database.bind
        return {
            "refused": json.dumps(dict(refused)),
            "held_ids": bind(held.ids),
            "held_keys": bind(held.keys),
            "held_but": bind(held.but),
        }

    def some_fell_due(self) -> bool:
        """Return whether `fall_due` has any message to write."""
        return bool(self._rows(_SOME_FELL_DUE))

    def fall_due(self, limit: int) -> list[str | None]:
        """Let at most `limit` delayed messages that are due take a place in their keys' order; return the keys."""
        due = self._rows(_DUE, limit=limit)
        placed = self._database.sql(_PLACED, chosen=self._database.among("d.id", numbers="ids"))
        parts = {"table": self._database.names["parked"], "source": placed, **_FALLEN_DUE}
        statement = self._database.sql(self._database.dialect.writes.update_from, **parts)
        self._channel.run(statement, **self._common, ids=self._database.bind(id for id, _ in due))
        return [key for _, key in due]

    def next_due(self) -> float | None:
        """Return the seconds until the next parked message falls due; None without any."""
        seconds = self._database.seconds(since=self._database.dialect.clock.now, until="due_at")
        statement = self._database.sql(_NEXT_DUE, seconds=seconds, of_slots=self._of_slots)
        rows = self._channel.rows(statement, few=_FEW if self._of_slots else 1, **self._common)
        return rows[0][0] if rows else None

    def some_retry(self, paused: Collection[str] = ()) -> bool:
        """Return whether a message waits only for another try; `paused`: keys whose messages wait for a person."""
        among = self._database.among("coalesce(p.key, '')", texts="paused")  # no key is empty
        statement = self._database.sql(_SOME_RETRY, of_slots_p=self._of_slots_p, paused=among)
        return bool(self._channel.rows(statement, **self._common, paused=self._database.bind(paused)))

    def waiting(self, limit: int) -> int:
        """Return how many messages wait for their destination, counted up to `limit`."""
        return int(self._rows(_WAITING, limit=limit)[0][0])

    def requests(self, limit: int) -> list[Request]:
        """Return at most `limit` requests of people."""
        return [Request(*row) for row in self._rows(_REQUESTS, limit=limit)]

    def discard(self, ids: Collection[int], *, waits: bool = True) -> set[int]:
        """Delete messages whose discard a person has requested, and free their dedup keys.

        A transaction that sends with such a key again has a lock on the key until it ends. `waits`: wait for the end;
        else leave the message for later. Return the ids of the messages that are left.
        """
        left = self._free_keys(ids, waits=waits) if ids else set[int]()
        self._run(_DISCARD, [id for id in ids if id not in left])
        return left

    def _free_keys(self, ids: Collection[int], *, waits: bool) -> set[int]:
        """Free the dedup keys of messages to discard; return the ids of the messages whose keys are locked."""
        database = self._database
        chosen = database.among("p.id", numbers="ids")
        bound = {**self._common, "ids": database.bind(ids)}
        found = self._channel.rows(database.sql(_KEYS_OF_DISCARDED, chosen=chosen), **bound)
        if not found:
            return set()
        bound["keys"] = database.bind(key for _, key in found)
        among_keys, discarded = database.among("dedup_key", texts="keys"), database.sql(_DISCARDED)
        theirs = database.sql(_THEIRS, among_keys=among_keys, discarded=discarded)
        skip = "" if waits else database.dialect.locks.skip_locked
        self._channel.run(database.sql(_FREE_KEYS, theirs=theirs, skip=skip), **bound)
        kept = {key for (key,) in self._channel.rows(database.sql(_KEPT, theirs=theirs), **bound)}
        return {id for id, key in found if key in kept}

    def replay(self, ids: Collection[int]) -> None:
        """Make messages due now whose replay a person has requested; attempts begin at 0 again."""
        self._run(self._database.sql(_REPLAY, blocks="key IS NOT NULL" if self.ordered else "FALSE"), ids)

    def renew_error(self, topic: str, error: str, limit: int) -> int:
        """Give waiting messages of a topic this error, `limit` at most; return how many had another error."""
        statement = self._database.sql(_WITH_ANOTHER_ERROR, of_slots=self._of_slots)
        found = self._channel.rows(statement, **self._common, topic=topic, error=error, limit=limit)
        self._run(_RENEW_ERROR, [id for (id,) in found], error=error)
        return len(found)

    def unblock(self, *, dead: bool) -> None:
        """Let messages no longer hold back keys; `dead`: only dead letters.

        For use inside the transaction that alters the policy.
        """
        states = "= 'dead'" if dead else "<> 'blocked'"
        self._channel.run(self._database.sql(_UNBLOCK, in_states=states), **self._common)

    def some(self) -> bool:
        """Return whether any message is parked."""
        return bool(self._rows(_SOME))

    def clear(self) -> dict[str, int]:
        """Delete all messages, with the requests on them; return how many there were, by state.

        For use inside the transaction in which the subscription begins again.
        """
        return {state: self._channel.run(_CLEAR, **self._common, state=state) for state in STATES}

    def give(self, other: str, topics: Topics) -> int:
        """Move the messages of these topics to another subscription; return the number of messages.

        For use inside the transaction that gives the topics away. Messages behind others of their key are tried as soon
        as none of these is left in the same subscription.
        """
        statement = self._database.sql(_GIVE, of_topics=self._database.dialect.values.of_topics)
        parameters = self._database.dialect.values.bind_topics(topics)
        return self._channel.run(statement, **self._common, other=other, **parameters)

    def _require_same(self, ids: Collection[int]) -> None:
        """Refuse to settle if another message is parked under one of these ids: the new one would be lost."""
        statement = self._database.sql(_OTHER, chosen=self._database.among("p.id", numbers="ids"))
        found = self._channel.rows(statement, **self._common, ids=self._database.bind(ids))
        if found:
            name, id, commands = self._common["subscription"], found[0][0], self._database.commands
            raise DatabaseError(
                f"{name}: message {id} of the log cannot be parked, because another message is parked under this id;"
                " nothing was settled. Ids are given out again when the log was truncated or its sequence restored:"
                f" run {commands.line('doctor')}, which says how to mend the log. Then replay or discard the parked"
                f" message ({commands.line('parked', 'show', id, '--name', name)}); the worker goes on when it is gone"
            )

    def _rows(self, statement: str, **parameters: Any) -> list[Row]:
        return self._channel.rows(self._database.sql(statement, of_slots=self._of_slots), **self._common, **parameters)

    def _run(self, statement: str, ids: Collection[int], **more: Any) -> None:
        if ids:
            self._channel.run(statement, **self._common, **more, ids=self._database.bind(ids))

    def _place(self, statement: str, parking: Parking, ids: Sequence[int]) -> int:
        seconds = None if parking.delay is None else parking.delay.total_seconds()
        moment = "NULL" if seconds is None else self._database.later(":seconds")
        due = "deliver_at" if parking.state == "delayed" else moment
        parameters = {
            **self._common,
            "ids": self._database.bind(ids),
            "state": parking.state,
            "attempts": parking.attempts,
            "error": parking.error,
            "seconds": seconds,
        }
        blocks = "TRUE" if parking.blocks else "FALSE"
        return self._channel.run(self._database.sql(statement, blocks=blocks, due=due), **parameters)
