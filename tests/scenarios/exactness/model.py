"""What an outbox is, in plain values: the model that the state machine compares the real one with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from outbox.model.lease import Lease
from outbox.model.parking import Parking
from outbox.model.position import EARLIEST, Progress
from outbox.store.log.cursor import Batch
from outbox.worker.settle import Parkings
from tests.model import rules
from tests.scenarios.exactness.history import Fact

ROWS = 3
LEASE = timedelta(seconds=10)
RETRY = timedelta(seconds=7)


@dataclass(frozen=True)
class Sent:
    """A message of a transaction."""

    id: int
    name: str
    key: str | None
    topic: str


@dataclass(frozen=True)
class Place:
    """How far a reader is: the ids that it has passed, and in a window those that are left before it stands at
    `target`.
    """

    passed: frozenset[int] = frozenset()
    left: tuple[int, ...] | None = None
    target: frozenset[int] = frozenset()


@dataclass
class Model:
    """Everything that is committed."""

    topics: list[str] | None
    messages: dict[int, Sent] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(EARLIEST))
    place: Place = Place()
    parked: rules.Parked = frozenset()
    decided: set[int] = field(default_factory=set)
    epoch: int = 0
    lease_until: datetime | None = None

    def commit(self, sent: Iterable[Sent]) -> None:
        """A transaction's messages are there, as the next changes of their keys."""
        for message in sent:
            self.messages[message.id] = message
            if self.chosen(message.id):
                self.facts.append(Fact(message.name, message.key, len(self.facts)))

    def chosen(self, id: int) -> bool:
        """Whether the selection takes it."""
        return self.topics is None or self.messages[id].topic in self.topics

    def read(self, place: Place, batch: Batch) -> tuple[Place, Place]:
        """Check what a reader was given; returns where it stands with the batch unsettled, and settled."""
        opened = place
        if place.left is None:
            todo = sorted(self.messages.keys() - place.passed)
            opened = Place(place.passed, tuple(filter(self.chosen, todo)), frozenset(self.messages) | place.passed)
            assert len(todo) > ROWS or batch.end.target is None, "what fits is read at once"
        assert opened.left is not None
        ids = [message.id or 0 for message in batch.messages]
        assert tuple(ids) == opened.left[: len(ids)]
        assert len(ids) <= ROWS
        if batch.end.target is not None:
            return opened, upto(opened, ids[-1] if ids else 0)
        assert tuple(ids) == opened.left
        return opened, Place(opened.target)

    def may_take_lease(self, now: datetime) -> bool:
        """Whether nobody holds it, or too long."""
        return self.lease_until is None or self.lease_until <= now

    def take_lease(self, now: datetime) -> None:
        """Under the next epoch."""
        self.epoch += 1
        self.lease_until = now + LEASE

    def holds(self, lease: Lease) -> bool:
        """Whether nobody has taken it since."""
        return lease.epoch == self.epoch

    def settle(self, progress: Progress, place: Place, parkings: Parkings, now: datetime) -> None:
        """A lease holder stored its progress, and what it parked."""
        self.progress, self.place = progress, place
        for message, parking in sorted(parkings, key=lambda each: each[0].id or 0):
            deliver_at = None if message.deliver_at is None else _seconds(message.deliver_at)
            row = rules.LogRow(message.id or 0, message.key, deliver_at)
            self.parked = rules.parked(self.parked, [row], parking, _seconds(now))
        keys = {message.key for message, _ in parkings if message.key is not None}
        self.parked = rules.advanced(self.parked, keys, _seconds(now))

    def decide(self, id: int) -> None:
        """Somebody wants a dead letter to be tried again."""
        self.decided.add(id)

    def carry_out(self, now: datetime) -> None:
        """What people decided comes true."""
        asked = {row.id: row.key for row in self.parked if row.id in self.decided}
        self.decided.clear()
        replayed = rules.replayed(self.parked, asked, _seconds(now))
        self.parked = rules.advanced(replayed, {key for key in asked.values() if key is not None}, _seconds(now))

    def fall_due(self, now: datetime) -> None:
        """What was delayed falls due."""
        self.parked, _ = rules.fallen_due(self.parked, _seconds(now), ROWS)

    def tried(self, ids: Sequence[int], failing: int | None, now: datetime) -> None:
        """These were handed over again; all are done but the one in place `failing` and what stands behind it."""
        rows = {row.id: row for row in self.parked if row.id in ids}
        failed, rest = (ids[failing : failing + 1], ids[failing + 1 :]) if failing is not None else ([], [])
        left = {id for id in rest if rows[id].key is not None and rows[id].key == rows[failed[0]].key}
        self.parked = rules.removed(self.parked, rows.keys() - left.union(failed))
        for id in failed:
            again = Parking(state="retry", holds=True, attempts=rows[id].attempts + 1, delay=RETRY)
            self.parked = rules.changed(self.parked, [id], again, _seconds(now))
        keys = {row.key for row in rows.values() if row.key is not None}
        self.parked = rules.advanced(self.parked, keys, _seconds(now))

    def ready(self, now: datetime) -> list[int]:
        """What is parked and may be tried now."""
        return [row.id for row in rules.ready(self.parked, _seconds(now), ROWS)]

    @property
    def stored(self) -> set[rules.ParkedRow]:
        """The parked messages, as far as the table is looked at: a place counts within a key that is held."""
        return {shown(row.id, row.key, row.state, row.unit, row.place, row.attempts) for row in self.parked}


def shown(*columns: Any) -> rules.ParkedRow:
    """A parked message as it is compared: from its id to its attempts, in the order of the fields."""
    row = rules.ParkedRow(*columns)
    return row if row.unit is not None else row._replace(place=0)


def headless(rows: Iterable[rules.ParkedRow]) -> set[str]:
    """Held keys whose first message has no state, or another one has."""
    units: dict[str, list[rules.ParkedRow]] = {}
    for row in sorted(rows, key=lambda row: row.place):
        if row.unit is not None:
            units.setdefault(row.unit, []).append(row)
    return {unit for unit, (head, *rest) in units.items() if not head.state or any(row.state for row in rest)}


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def upto(place: Place, id: int) -> Place:
    """In the window of `place`, behind `id`."""
    assert place.left is not None
    return replace(place, left=tuple(each for each in place.left if each > id))
