"""Acks: rows that name the messages which a writer sent right after the commit; one per batch, insert-only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from outbox.model.lease import Lease
from outbox.model.message import Message
from outbox.model.position import Position
from outbox.store.database import Channel

#: The ids of one ack span fewer than so many, so that the look-up for a page reads few acks that are not about it.
SPAN = 10_000
PRUNED_AT_ONCE = 1_000

_INSERT = """
    INSERT INTO {ack} (subscription, writer, first_id, last_id, ids, acked_at)
    VALUES (:subscription, :writer, :first, :last, :ids, {now})
"""
#: By the index on (subscription, last_id), which bounds the range at both ends.
_AMONG = f"""
    SELECT ids, {{acked}} FROM {{ack}}
    WHERE subscription = :subscription AND last_id >= :first AND last_id < :last + {SPAN} AND first_id <= :last
"""
#: By primary key.
_WRITTEN = "SELECT id, {written} FROM {message} WHERE {id_in_ids}"
#: An ack is written after its messages were committed, so a position that sees it sees them, too. The ORDER BY keeps it
#: on (subscription, last_id), where the oldest come first.
_PASSED = """
    SELECT id FROM {ack} WHERE subscription = :direct AND {passed} ORDER BY last_id LIMIT :limit
"""
_PRUNE = """
    DELETE FROM {ack} WHERE {id_in_ids} AND EXISTS (
        SELECT 1 FROM {lease} WHERE subscription = :subscription AND generation = :generation
          AND partition = :partition AND epoch = :epoch AND owner = :owner)
"""
_FORGET = "DELETE FROM {ack} WHERE subscription = :subscription"


class Acks:
    """The acks of one subscription's direct writers."""

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._database = channel.database
        self._subscription = subscription
        numbered = self._database.dialect.reads.transaction_ids
        self._number = "xact_id" if numbered else "last_id"
        # These columns tell whether a message was written before an ack: a later transaction has a higher number. On a
        # database without such numbers the clock tells it.
        acked, written = ("xact_id", "xact_id") if numbered else ("acked_at", "created_at")
        self._among = self._database.sql(_AMONG, acked=acked)
        self._written = self._database.sql(_WRITTEN, written=written)

    def insert(self, writer: str, ids: Sequence[int]) -> None:
        """Note that `writer` has sent these messages: in one row, unless they lie far apart in the log."""
        for part in _parts(sorted(ids)):
            values = {
                "subscription": self._subscription,
                "writer": writer,
                "first": part[0],
                "last": part[-1],
                "ids": json.dumps(part, separators=(",", ":")),
            }
            self._channel.run(_INSERT, **values)

    def finished(self, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of the messages that writers have sent."""
        return self.among([message.id or 0 for message in messages])

    def among(self, ids: Sequence[int]) -> set[int]:
        """Return the ids of the messages that writers have sent.

        After a TRUNCATE or with a restored sequence, ids are given out again. An ack that is older than the first
        message which now has one of its ids does not count.
        """
        page = set(ids)
        bounds = {"subscription": self._subscription, "first": min(ids), "last": max(ids)}
        acks = [
            (page.intersection(json.loads(listed)), acked)
            for listed, acked in self._channel.rows(self._among, **bounds)
        ]
        about = [(min(sent), sent, acked) for sent, acked in acks if sent]
        if not about:
            return set()
        firsts = self._channel.rows(self._written, ids=self._database.bind([first for first, _, _ in about]))
        written = {id: at for id, at in firsts}  # noqa: C416 - rows are tuples of any length
        return set().union(*(sent for first, sent, acked in about if written.get(first, acked) <= acked))

    def prune(self, lease: Lease, stored_base: Position) -> bool:
        """Delete acks that the stored base of the compensation has seen; return True when there may be more.

        `stored_base`: the base in the database, because a base in memory may be lost, and reading then begins earlier.
        """
        passed = f"{self._number} < :head AND NOT {self._database.among(self._number, numbers='open')}"
        bounds = {
            "direct": self._subscription,
            "head": stored_base.head,
            "open": self._database.bind(stored_base.open),
            "limit": PRUNED_AT_ONCE,
        }
        found = [row[0] for row in self._channel.rows(self._database.sql(_PASSED, passed=passed), **bounds)]
        if found:
            self._channel.run(_PRUNE, **lease.parameters, ids=self._database.bind(found))
        return len(found) == PRUNED_AT_ONCE

    def dead(self, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return an empty list, because the writer does not send what became a dead letter of the compensation."""
        return []

    def forget(self) -> None:
        """Delete all acks of the subscription."""
        self._channel.run(_FORGET, subscription=self._subscription)


def _parts(ids: list[int]) -> Iterator[list[int]]:
    """Cut rising ids into parts that each span fewer than `SPAN`."""
    part: list[int] = []
    for id in ids:
        if part and id - part[0] >= SPAN:
            yield part
            part = []
        part.append(id)
    if part:
        yield part
