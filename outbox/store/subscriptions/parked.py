"""Parked messages: copies of messages, made so that the position can move on. Only the lease holder changes them.

A unit is a key that is held, or one message. Only the first message of a unit, its head, has a state; what stands
behind it waits. So what a look costs depends on the heads, however many messages stand behind them. A pop may hand out
a head with the next ones behind it, which then have a time as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outbox.errors import DatabaseError
from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.parking import NOTHING_HELD, STATES, Held, Parking, States
from outbox.model.topics import Topics
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS, OF_SLOTS, slots_of
from outbox.store.dialects.statements import Row, Statement

#: Log ids with what each message is parked as.
Parkings = Iterable[tuple[int, Parking]]

_ENVELOPE = "message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at, expires_at"
#: Parkings as rows without nulls, which no list may hold under every setting of a server: `holds` and `timed` are 1
#: or 0.
_ROWS = {
    "parked_id": "bigint",
    "parked_as": "text",
    "holds": "bigint",
    "tries": "bigint",
    "timed": "bigint",
    "seconds": "float",
    "why": "text",
}
#: The state in a row: what is behind a head has none.
_STATE = "nullif(r.parked_as, 'behind')"
#: A key that is held already keeps its head.
_STATE_OF_NEW = f"""
    CASE WHEN r.holds = 1 AND EXISTS (
        SELECT 1 FROM {{parked}} AS e WHERE e.subscription = :subscription AND e.unit = m.key) THEN NULL
    ELSE {_STATE} END
"""
#: Behind everything that is held of the key, in the order of the log.
_PLACE = """
    coalesce((SELECT max(e.place) FROM {parked} AS e WHERE e.subscription = :subscription AND e.unit = m.key), 0)
    + row_number() OVER (PARTITION BY m.key, r.holds ORDER BY m.id)
"""
#: Messages are copied inside the database, so bodies do not travel to the worker and back.
_PARK = f"""
    {{insert_once}} {{parked}}
        (subscription, id, {_ENVELOPE}, state, unit, place, attempts, due_at, error, parked_at, dead_at)
    SELECT CAST(:subscription AS {{text}}), m.id, {_ENVELOPE}, {_STATE_OF_NEW}, CASE WHEN r.holds = 1 THEN m.key END,
           {_PLACE}, r.tries, CASE WHEN r.parked_as = 'delayed' THEN m.deliver_at WHEN r.timed = 1 THEN {{due}} END,
           nullif(r.why, ''), {{now}},
           CASE WHEN r.parked_as <> 'dead' THEN NULL WHEN {_STATE_OF_NEW} = 'dead' THEN {{now}} END
    FROM {{rows}} AS r JOIN {{message}} AS m ON m.id = r.parked_id WHERE {{condition}} {{unless_there}}
"""
#: The first message that could not be inserted: another one is parked under its id, or none. By both primary keys.
_OTHER = """
    SELECT m.id FROM {message} AS m LEFT JOIN {parked} AS p ON p.subscription = :subscription AND p.id = m.id
    WHERE {chosen} AND (p.message_id IS NULL OR p.message_id <> m.message_id) ORDER BY m.id LIMIT 1
"""
#: A message that stands for itself goes on to do so, whatever comes of it.
_CHANGED = {
    "changes": f"state = {_STATE}, unit = CASE WHEN r.holds = 1 THEN unit END, attempts = r.tries,"
    " due_at = CASE WHEN r.timed = 1 THEN {due} END, error = nullif(r.why, ''),"
    " dead_at = CASE WHEN r.parked_as = 'dead' THEN {now} END",
    # The list of ids keeps the planner on the primary key.
    "joined": "subscription = :subscription AND id = r.parked_id AND {id_in_ids}",
}
_REMOVE = "DELETE FROM {parked} WHERE subscription = :subscription AND {id_in_ids}"
#: The first message of each unit, by the index of units.
_FIRSTS = """
    SELECT (SELECT p.id FROM {parked} AS p WHERE p.subscription = :subscription AND p.unit = u.unit
            ORDER BY p.place LIMIT 1)
    FROM {units} AS u
"""
#: Messages for which a newer one of their topic and unit stands; one that may expire, or be taken back, stands for no
#: other. An older message that a person replays is behind, and not newer.
_REPLACED = """
    SELECT o.id, o.unit, o.state, {seconds}, o.error FROM {units} AS u CROSS JOIN {parked} AS o
    WHERE o.subscription = :subscription AND o.unit = u.unit AND EXISTS (
        SELECT 1 FROM {parked} AS n
        WHERE n.subscription = :subscription AND n.unit = o.unit AND n.place > o.place AND n.topic = o.topic
          AND n.id > o.id AND n.expires_at IS NULL AND n.deliver_at IS NULL)
"""
#: The first message of a unit is tried now. One that a pop has handed out with the head before it keeps its time.
_ADVANCE = """
    UPDATE {parked} SET state = 'retry', attempts = CASE WHEN due_at IS NULL THEN 0 ELSE attempts END,
           error = CASE WHEN due_at IS NOT NULL THEN error END, due_at = coalesce(due_at, {now})
    WHERE subscription = :subscription AND state IS NULL AND {firsts}
"""
#: Of all units without a head; to find these reads all that stands behind.
_ALL_FIRSTS = """
    id IN (
        SELECT p.id FROM {parked} AS p
        WHERE p.subscription = :subscription AND p.unit IS NOT NULL AND p.state IS NULL AND NOT EXISTS (
            SELECT 1 FROM {parked} AS e
            WHERE e.subscription = :subscription AND e.unit = p.unit AND (e.state IS NOT NULL OR e.place < p.place)))
"""
#: The held keys, by the index of heads: each has one.
_UNITS = """
    SELECT unit FROM {parked}
    WHERE subscription = :subscription AND unit IS NOT NULL AND state IS NOT NULL {of_slots} LIMIT :limit
"""
#: A scalar sub-select, because any other form may be answered by reading all that is parked.
_HELD_AMONG = """
    SELECT u.unit FROM {units} AS u
    WHERE (SELECT h.id FROM {parked} AS h
           WHERE h.subscription = :subscription AND h.unit = u.unit AND h.unit IS NOT NULL AND h.state IS NOT NULL
           LIMIT 1 {lock}) IS NOT NULL
"""
#: Heads that are due, with the length of each body; `begins`: the head did not fail. By the index on due_at.
_HEADS = """
    SELECT p.id, p.unit, p.topic, length(p.body), CASE WHEN p.state = 'retry' AND p.attempts = 0 THEN 1 ELSE 0 END
    FROM {parked} AS p
    WHERE p.subscription = :subscription AND p.state IN ('delayed', 'waiting', 'retry') AND p.due_at <= {now}
      {of_slots} AND {of_state} AND NOT {untried}
    ORDER BY p.due_at, p.id LIMIT :limit
"""
#: What stands behind heads, up to `:run` messages each. By the index of units. SQLite keeps the order of a cross join.
_RUNS = """
    SELECT b.unit, b.id, length(b.body) FROM {parked} AS h CROSS JOIN {parked} AS b
    WHERE h.subscription = :subscription AND {chosen} AND b.subscription = h.subscription AND b.unit = h.unit
      AND b.place > h.place AND b.place < h.place + :run
    ORDER BY b.unit, b.place
"""
_READY = f"""
    SELECT {COLUMNS.format(body="body")}, attempts + 1, CASE WHEN expires_at <= {{now}} THEN 1 ELSE 0 END, error
    FROM {{parked}} WHERE subscription = :subscription AND {{id_in_ids}}
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
#: A head whose turn has only come has not failed.
_FAILED = "p.error IS NOT NULL"
#: How many, up to a limit.
_COUNT = """
    SELECT count(*) FROM (
        SELECT 1 FROM {parked} AS p WHERE p.subscription = :subscription AND {chosen} {of_slots} LIMIT :limit) AS n
"""
#: By primary key: the messages that are parked still, and whether each is in a slot of the partition.
_STILL_PARKED = """
    SELECT id, key, CASE WHEN {in_slots} THEN 1 ELSE 0 END FROM {parked}
    WHERE subscription = :subscription AND {id_in_ids}
"""
#: A replayed message does not expire any more, because a person wants it delivered. One that stands for itself falls
#: due, and joins the unit of its key; one that has joined it meanwhile stays in its place.
_REPLAY = """
    UPDATE {parked} SET state = CASE WHEN {joins} THEN 'delayed' WHEN state IS NOT NULL THEN 'retry' END, attempts = 0,
           due_at = CASE WHEN state IS NOT NULL THEN {now} END, expires_at = NULL, dead_at = NULL
    WHERE subscription = :subscription AND {id_in_ids}
"""
#: The head of a key may go on to hold the key. What stood behind the head, or for itself, holds nothing.
_SET_ASIDE = """
    UPDATE {parked} SET state = 'dead', due_at = NULL, error = :error, dead_at = {now},
           unit = CASE WHEN state IS NOT NULL AND :holds = 1 THEN unit END
    WHERE subscription = :subscription AND {id_in_ids} AND coalesce(state, 'behind') <> 'dead'
"""
#: By the index of the states. Only what differs is written, so that a worker may store the error it begins with.
_WITH_ANOTHER_ERROR = """
    SELECT id FROM {parked}
    WHERE subscription = :subscription AND state = 'waiting' AND topic = :topic AND error <> :error {of_slots}
    ORDER BY id LIMIT :limit
"""
_RENEW_ERROR = "UPDATE {parked} SET error = :error WHERE subscription = :subscription AND {id_in_ids}"
_CLEAR = "DELETE FROM {parked} WHERE subscription = :subscription AND coalesce(state, 'behind') = :state"
#: Dead letters, or all messages, hold no key any more.
_ALONE = """
    UPDATE {parked} SET unit = NULL, state = coalesce(state, 'retry'),
           due_at = CASE WHEN state IS NULL THEN coalesce(due_at, {now}) ELSE due_at END
    WHERE subscription = :subscription AND unit IS NOT NULL AND {chosen}
"""
#: The messages of some topics become those of another subscription.
_GIVE = "UPDATE {parked} SET subscription = :other WHERE subscription = :subscription AND {of_topics}"


@dataclass(frozen=True, slots=True)
class Ready:
    """A parked message whose turn has come. `error`: why it is parked, where that is known."""

    message: Message
    expired: bool
    error: str | None = None


class Parked:
    """The parked messages of one subscription.

    With a partition, turns are looked for in its slots only. Ids and keys are taken as given: they are the partition's.
    """

    def __init__(
        self,
        channel: Channel,
        subscription: str,
        partition: Partition | None = None,
        *,
        ordered: bool = True,
        compact: bool = False,
    ) -> None:
        """`partition`: the partition whose lease the caller holds; None: all of them. `ordered`: a message waits for
        earlier messages of its key. `compact`: of each topic and held key only the newest message stays.
        """
        self.subscription = subscription
        self.ordered = ordered
        self._compact = compact
        self._channel = channel
        self._database = channel.database
        slots = slots_of(partition)
        self._common: dict[str, Any] = {"subscription": subscription, **slots}
        self._of_slots = f"AND {OF_SLOTS}" if slots else ""

    def park(self, parkings: Parkings) -> None:
        """Copy messages out of the log, inside the transaction of a settle; a message parked already stays as it is.

        Raises:
            DatabaseError: another message is parked under one of these ids.
        """
        rows = [*parkings]
        park = self.parking(rows)
        if rows and self._channel.run(park.sql, **park.bound) < len(rows):
            self.require_same([id for id, _ in rows])

    def parking(self, parkings: Parkings, condition: str = "TRUE") -> Statement:
        """Return the statement of `park`, which writes where a condition is true; the rest is up to the caller."""
        rows = [_row(id, parking) for id, parking in parkings]
        statement = self._database.sql(_PARK, **self._parts, condition=condition)
        return Statement(statement, {**self._common, **self._database.bind_records("rows", rows, **_ROWS)})

    def change(self, parkings: Parkings) -> None:
        """Give parked messages another state."""
        rows = [_row(id, parking) for id, parking in parkings]
        if rows:
            now, joined = self._database.dialect.clock.now, _CHANGED["joined"]
            changes = _CHANGED["changes"].format(due=self._parts["due"], now=now)
            source = f"{self._parts['rows']} AS r"
            joined = joined.format(id_in_ids=self._database.names["id_in_ids"])
            parts = {"table": self._database.names["parked"], "source": source, "changes": changes, "joined": joined}
            statement = self._database.sql(self._database.dialect.writes.update_from, **parts)
            # First what lets a key go, because each row has to find its key without another head.
            for holds in (0, 1):
                if some := [row for row in rows if row[2] == holds]:
                    self._run_rows(statement, some)

    def remove(self, ids: Collection[int]) -> None:
        """Delete parked messages that are done, or that a person gives up."""
        self._run(_REMOVE, ids)

    def advance(self, keys: Collection[str]) -> None:
        """Let the first message of each of these keys be tried now, if what stood before it is gone.

        Inside the transaction that removes, changes or parks messages of these keys. A receipt may remove a head at the
        same time: the later of the two transactions makes the new head.
        """
        if self._compact and keys:
            self._let_newer_take_the_place(keys)
        headless = set(keys) - self._held(keys, self._database.dialect.locks.keep) if keys else set[str]()
        if headless:
            firsts = self._of_units(_FIRSTS, headless)
            advance = self._database.sql(_ADVANCE, firsts=self._database.names["id_in_ids"])
            self._run(advance, [id for (id,) in firsts if id is not None])

    def _advance_all(self) -> None:
        """Let the first message of each unit without a head be tried now."""
        self._channel.run(self._database.sql(_ADVANCE, firsts=self._database.sql(_ALL_FIRSTS)), **self._common)

    def _let_newer_take_the_place(self, keys: Collection[str]) -> None:
        """Delete messages for which a newer one stands. The newer one waits as long as a failed head has to."""
        seconds = self._database.seconds(since=self._database.dialect.clock.now, until="o.due_at")
        replaced = self._of_units(_REPLACED, keys, seconds=seconds)
        self.remove([id for id, *_ in replaced])
        heads = {unit: rest for _, unit, *rest in replaced if rest[0] in (States.WAITING, States.RETRY)}
        places = list[tuple[int, Parking]]()
        for unit, (state, due_in, error) in heads.items():
            ((first,),) = self._of_units(_FIRSTS, [unit])
            why = error if state == States.WAITING else None
            places.append((first, Parking(state=state, holds=True, error=why, delay=timedelta(seconds=due_in))))
        self.change(places)

    def keys(self, limit: int) -> set[str] | None:
        """Return the keys that are held; None: there are more than `limit`."""
        rows = self._rows(_UNITS, limit=limit + 1)
        return {row[0] for row in rows} if len(rows) <= limit else None

    def held_among(self, keys: Collection[str]) -> set[str]:
        """Return the keys that are held, of these."""
        return self._held(keys)

    def _held(self, keys: Collection[str], lock: str = "") -> set[str]:
        return {row[0] for row in self._of_units(_HELD_AMONG, keys, lock=lock)}

    def _of_units(self, statement: str, keys: Collection[str], **parts: str) -> list[Row]:
        """Return the rows of a statement about keys, which has them as `{units}`."""
        columns = {"unit": "text"}
        filled = self._database.sql(statement, units=self._database.records("units", **columns), **parts)
        bound = self._database.bind_records("units", [(key,) for key in keys], **columns)
        return self._channel.rows(filled, **self._common, **bound)

    def ready(
        self,
        refused: Collection[str],
        rows: int,
        bytes: int,
        *,
        probed: Collection[str] = (),
        held: Held = NOTHING_HELD,
        retries: bool = False,
    ) -> list[Ready]:
        """Return messages whose turn has come, each key's in order, at most `rows`, and `bytes` of bodies.

        `refused`: of these topics no message is tried, and of those that are `probed` one. `held`: messages that are
        not tried. `retries`: only messages that failed, and what stood behind them.
        """
        found = self._with_runs(self._heads(refused, rows, probed, held, retries=retries), rows)
        chosen, size = list[int](), 0
        for id, length in found:
            size += length
            if chosen and size > bytes:
                break
            chosen.append(id)
        copies = self._rows(_READY, ids=self._database.bind(chosen)) if chosen else []
        messages = self._database.dialect.reads.messages([row[:12] for row in copies])
        by_id = {row[0]: Ready(each, bool(row[12]), row[13]) for each, row in zip(messages, copies, strict=True)}
        # Another worker may have taken the lease since the choice, and removed some.
        return [by_id[id] for id in chosen if id in by_id]

    def _heads(
        self, refused: Collection[str], rows: int, probed: Collection[str], held: Held, *, retries: bool
    ) -> list[Row]:
        """Return the heads of `_HEADS`: one of each topic that is probed."""
        # A delayed message of a key joins the unit of its key before it is tried.
        of_state = "(p.state <> 'delayed' OR p.key IS NULL)" if self.ordered else "TRUE"
        if retries:
            of_state = f"p.state = 'retry' AND {_FAILED}"
        among = self._database.among
        # A held key holds all its messages, also those that stand for themselves. No key is empty.
        of_keys = among("coalesce(p.key, '')", texts="held_keys")
        of_refused = self._database.dialect.values.among_many.format(value="p.topic", list=":refused")
        untried = f"({of_refused} OR {among('p.id', numbers='held_ids')} OR {of_keys})"
        lists = {"refused": refused, "held_ids": held.ids, "held_keys": held.keys}
        bound = {name: self._database.bind(values) for name, values in lists.items()}
        statement = self._database.sql(_HEADS, of_slots=self._of_slots, of_state=of_state, untried=untried)
        met = set[str]()
        heads = []
        for head in self._channel.rows(statement, **self._common, **bound, limit=rows):
            if head[2] not in met:
                heads.append(head)
            if head[2] in probed:
                met.add(head[2])
        return heads

    def _with_runs(self, heads: list[Row], rows: int) -> list[tuple[int, int]]:
        """Return ids and lengths of heads, with what stands behind those that did not fail, as far as there is room."""
        begin = {unit: id for id, unit, _, _, begins in heads if begins and unit is not None}
        run = 1 + (rows - len(heads)) // len(begin) if begin else 1
        behind: dict[str, list[tuple[int, int]]] = {}
        if run > 1:
            statement = self._database.sql(_RUNS, chosen=self._database.among("h.id", numbers="ids"))
            ids = self._database.bind(begin.values())
            for unit, id, length in self._channel.rows(statement, **self._common, ids=ids, run=run):
                behind.setdefault(unit, []).append((id, length))
        return [each for id, unit, _, length, _ in heads for each in ((id, length), *behind.get(unit, ()))]

    def next_due(self) -> float | None:
        """Return the seconds until the next parked message falls due; None without any."""
        seconds = self._database.seconds(since=self._database.dialect.clock.now, until="due_at")
        statement = self._database.sql(_NEXT_DUE, seconds=seconds, of_slots=self._of_slots)
        rows = self._channel.rows(statement, few=_FEW if self._of_slots else 1, **self._common)
        return rows[0][0] if rows else None

    def some_retry(self, paused: Collection[str] = ()) -> bool:
        """Return whether a message waits for another try; `paused`: keys whose messages wait for a person."""
        among = self._database.among("coalesce(p.key, '')", texts="paused")  # no key is empty
        return bool(
            self._count(f"p.state = 'retry' AND {_FAILED} AND NOT {among}", 1, paused=self._database.bind(paused))
        )

    def waiting(self, limit: int) -> int:
        """Return how many messages wait for their destination, counted up to `limit`."""
        return self._count("p.state = 'waiting'", limit)

    def still(self, ids: Collection[int]) -> dict[int, tuple[str | None, bool]]:
        """Return those of these messages that are parked still: the key, and whether the partition owns the slot."""
        in_slots = OF_SLOTS if self._of_slots else "TRUE"
        statement = self._database.sql(_STILL_PARKED, in_slots=in_slots)
        rows = self._channel.rows(statement, **self._common, ids=self._database.bind(ids)) if ids else ()
        return {id: (key, bool(ours)) for id, key, ours in rows}

    def replay(self, ids: Collection[int]) -> None:
        """Make messages due now that a person wants sent; attempts begin at 0 again.

        Call `FallingDue.join` for them afterwards, and `advance` for their keys.
        """
        joins = "unit IS NULL AND key IS NOT NULL" if self.ordered else "FALSE"
        self._run(self._database.sql(_REPLAY, joins=joins), ids)

    def set_aside(self, ids: Collection[int], error: str, *, holds: bool) -> None:
        """Make messages dead letters, because a person decided so; `holds`: the head of a key goes on to hold the key.

        Call `advance` for their keys afterwards.
        """
        self._run(_SET_ASIDE, ids, error=error, holds=int(holds))

    def renew_error(self, topic: str, error: str, limit: int) -> int:
        """Give waiting messages of a topic this error, `limit` at most; return how many had another error."""
        statement = self._database.sql(_WITH_ANOTHER_ERROR, of_slots=self._of_slots)
        found = self._channel.rows(statement, **self._common, topic=topic, error=error, limit=limit)
        self._run(_RENEW_ERROR, [id for (id,) in found], error=error)
        return len(found)

    def let_go(self, *, dead: bool) -> None:
        """Let messages no longer hold their keys; `dead`: only dead letters.

        For use inside the transaction that alters the policy.
        """
        self._channel.run(self._database.sql(_ALONE, chosen="state = 'dead'" if dead else "TRUE"), **self._common)
        self._advance_all()

    def some(self) -> bool:
        """Return whether any message is parked."""
        return bool(self._count("TRUE", 1))

    def _count(self, chosen: str, limit: int, **bound: Any) -> int:
        """Return how many messages there are of a choice, up to `limit`."""
        statement = self._database.sql(_COUNT, chosen=chosen, of_slots=self._of_slots)
        return int(self._channel.rows(statement, **self._common, **bound, limit=limit)[0][0])

    def clear(self) -> dict[str, int]:
        """Delete all messages; return how many there were, by state.

        For use inside the transaction in which the subscription begins again.
        """
        return {state: self._channel.run(_CLEAR, **self._common, state=state) for state in STATES}

    def give(self, other: str, topics: Topics) -> int:
        """Move the messages of these topics to another subscription; return the number of messages.

        For use inside the transaction that gives the topics away. What stood behind a message of its key that is in the
        other subscription now, is tried.
        """
        statement = self._database.sql(_GIVE, of_topics=self._database.dialect.values.of_topics)
        parameters = self._database.dialect.values.bind_topics(topics)
        number = self._channel.run(statement, **self._common, other=other, **parameters)
        self._advance_all()
        Parked(self._channel, other)._advance_all()
        return number

    def require_same(self, ids: Collection[int]) -> None:
        """Refuse to settle if another message is parked under one of these ids: the new one would be lost."""
        statement = self._database.sql(_OTHER, chosen=self._database.among("m.id", numbers="ids"))
        found = self._channel.rows(statement, **self._common, ids=self._database.bind(ids))
        if found:
            name, id, commands = self._common["subscription"], found[0][0], self._database.commands
            raise DatabaseError(
                f"{name}: message {id} of the log cannot be parked, because another message is parked under this id;"
                " nothing was settled. Ids are given out again when the log was truncated or its sequence restored:"
                f" run {commands.line('doctor')}, which says how to mend the log. Then replay or discard the parked"
                f" message ({commands.line('parked', 'show', id, '--name', name)}); the worker goes on when it is gone"
            )

    @property
    def _parts(self) -> dict[str, str]:
        """The parts of statements about parkings."""
        return {"rows": self._database.records("rows", **_ROWS), "due": self._database.later("r.seconds")}

    def _rows(self, statement: str, **parameters: Any) -> list[Row]:
        return self._channel.rows(self._database.sql(statement, of_slots=self._of_slots), **self._common, **parameters)

    def _run(self, statement: str, ids: Collection[int], **more: Any) -> None:
        if ids:
            self._channel.run(statement, **self._common, **more, ids=self._database.bind(ids))

    def _run_rows(self, statement: str, rows: list[Row]) -> int:
        bound = self._database.bind_records("rows", rows, **_ROWS)
        return self._channel.run(statement, **self._common, **bound, ids=self._database.bind(row[0] for row in rows))


def _row(id: int, parking: Parking) -> Row:
    seconds = 0.0 if parking.delay is None else parking.delay.total_seconds()
    timed, error = int(parking.delay is not None), parking.error or ""
    return id, parking.state, int(parking.holds), parking.attempts, timed, seconds, error
