"""Acks: which messages their writer has sent by itself right after its commit; one row a batch, insert-only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Position
from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel

#: First and last id of a row are no further apart, so that looking up a page reads few rows that are not about it.
SPAN = 10_000
_PRUNED = 1_000

_INSERT = """
    INSERT INTO {ack} (subscription, writer, first_id, last_id, ids, acked_at)
    VALUES (:subscription, :writer, :first, :last, :ids, {now})
"""
#: Carried by (subscription, last_id), at both ends.
_AMONG = f"""
    SELECT ids, {{acked}} FROM {{ack}}
    WHERE subscription = :subscription AND last_id >= :first AND last_id < :last + {SPAN} AND first_id <= :last
"""
#: By primary key.
_WRITTEN = "SELECT id, {written} FROM {message} WHERE {chosen}"
#: An ack is written after its messages were committed, so a position that sees it sees them, too. The ORDER BY keeps it
#: on (subscription, last_id), where the oldest come first.
_PASSED = """
    SELECT id FROM {ack} WHERE subscription = :direct AND {passed} ORDER BY last_id LIMIT :limit
"""
_PRUNE = """
    DELETE FROM {ack} WHERE {chosen} AND EXISTS (
        SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation
          AND partition = :partition AND epoch = :epoch)
"""
_FORGET = "DELETE FROM {ack} WHERE subscription = :subscription"


class Acks:
    """The acks of one subscription's direct writers."""

    def __init__(self, database: Database, subscription: str) -> None:
        self._database = database
        self._subscription = subscription
        numbered = "xact_id" in database.tables.ack.columns
        self._number = "xact_id" if numbered else "last_id"
        # What tells whether a message was there before an ack: a later transaction has a higher number; where there are
        # no numbers, the clock.
        acked, written = ("xact_id", "xact_id") if numbered else ("acked_at", "created_at")
        self._among = database.sql(_AMONG, acked=acked)
        self._written = database.sql(_WRITTEN, written=written, chosen=database.among("id", numbers="ids"))

    def insert(self, channel: Channel, writer: str, ids: Sequence[int]) -> None:
        """Say that `writer` has sent these messages: one row, unless they lie far apart in the log."""
        for part in _parts(sorted(ids)):
            values = {
                "subscription": self._subscription,
                "writer": writer,
                "first": part[0],
                "last": part[-1],
                "ids": json.dumps(part, separators=(",", ":")),
            }
            channel.run(self._database.sql(_INSERT), values)

    def finished(self, channel: Channel, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of those among these messages that their writers have sent."""
        return self.among(channel, [message.id or 0 for message in messages])

    def among(self, channel: Channel, ids: Sequence[int]) -> set[int]:
        """Which of these messages their writers have sent.

        An ack from before its ids were given out again, because somebody truncated the log or restored its sequence,
        says nothing: the first of the messages that it would be about was written after it.
        """
        page = set(ids)
        bounds = {"subscription": self._subscription, "first": min(ids), "last": max(ids)}
        acks = [(page.intersection(json.loads(listed)), acked) for listed, acked in channel.rows(self._among, bounds)]
        about = [(min(sent), sent, acked) for sent, acked in acks if sent]
        if not about:
            return set()
        firsts = channel.rows(self._written, {"ids": self._database.bind([first for first, _, _ in about])})
        written = {id: at for id, at in firsts}  # noqa: C416 - rows are tuples of any length
        return set().union(*(sent for first, sent, acked in about if written.get(first, acked) <= acked))

    def prune(self, channel: Channel, lease: Lease, stored_base: Position) -> bool:
        """Delete acks that the stored base of the compensation has seen; True when there may be more of them.

        `stored_base`: as it is in the database. A base in memory may have to be read on from an older one again.
        """
        passed = f"{self._number} < :head AND NOT {self._database.among(self._number, numbers='open')}"
        bounds = {
            "direct": self._subscription,
            "head": stored_base.head,
            "open": self._database.bind(stored_base.open),
            "limit": _PRUNED,
        }
        found = [row[0] for row in channel.rows(self._database.sql(_PASSED, passed=passed), bounds)]
        if found:
            statement = self._database.sql(_PRUNE, chosen=self._database.among("id", numbers="ids"))
            channel.run(statement, {**lease.parameters, "ids": self._database.bind(found)})
        return len(found) == _PRUNED

    def dead(self, channel: Channel, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return none: what became a dead letter of the compensation is not its writer's any more."""
        return []

    def forget(self, channel: Channel) -> None:
        """Delete them all."""
        channel.run(self._database.sql(_FORGET), {"subscription": self._subscription})


def _parts(ids: list[int]) -> Iterator[list[int]]:
    """Cut rising ids where they lie too far apart."""
    part: list[int] = []
    for id in ids:
        if part and id - part[0] >= SPAN:
            yield part
            part = []
        part.append(id)
    if part:
        yield part
