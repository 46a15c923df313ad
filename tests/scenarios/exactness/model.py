"""What an outbox is, in plain dicts: the model that the state machine compares the real one with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from outbox.model.lease import Lease
from outbox.model.position import EARLIEST, Progress
from outbox.store.log.cursor import Batch
from outbox.worker.settle import Parkings
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


@dataclass(frozen=True)
class Set:
    """A parked message."""

    key: str | None
    state: str
    attempts: int
    due: datetime | None
    blocks: bool
    #: Where it stands among the others: at its id, or where it fell due and as the how many-th.
    place: tuple[int, int]
    request: bool = False

    @property
    def stored(self) -> tuple[str | None, str, int, bool]:
        """As the table shows it."""
        return self.key, self.state, self.attempts, self.blocks


@dataclass
class Model:
    """Everything that is committed."""

    topics: list[str] | None
    messages: dict[int, Sent] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(EARLIEST))
    stored: Place = Place()
    parked: dict[int, Set] = field(default_factory=dict)
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
        self.progress, self.stored = progress, place
        for message, parking in parkings:
            due = (
                message.deliver_at
                if parking.state == "delayed"
                else None
                if parking.delay is None
                else now + parking.delay
            )
            blocks = parking.blocks and message.key is not None
            self.parked[message.id or 0] = Set(
                message.key, parking.state, parking.attempts, due, blocks, (message.id or 0, 0)
            )

    def grant(self, now: datetime) -> set[str]:
        """What people requested for comes true, and what was delayed falls due; returns the keys of the former."""
        keys = {each.key for each in self.parked.values() if each.request and each.key is not None}
        for id, message in self.parked.items():
            if message.request:
                blocks = message.key is not None
                self.parked[id] = replace(message, state="retry", attempts=0, due=now, blocks=blocks, request=False)
        delayed = [(m.due, id) for id, m in self.parked.items() if m.state == "delayed" and m.due and m.due <= now]
        falling = [id for _, id in sorted(delayed)[:ROWS]]
        for nth, id in enumerate(falling):
            self.parked[id] = replace(self.parked[id], state="blocked", due=None, place=(min(falling), nth))
        return keys

    def request(self, id: int) -> None:
        """Somebody wants a dead letter to be tried again."""
        self.parked[id] = replace(self.parked[id], request=True)

    def tried(self, ids: Sequence[int], failing: int | None, now: datetime) -> None:
        """These were handed over again; all are done but the one in place `failing` and what stands behind it."""
        behind = set[str | None]()
        for place, id in enumerate(ids):
            message = self.parked[id]
            if message.key is not None and message.key in behind:
                continue
            if place == failing:
                due, blocks = now + RETRY, message.key is not None
                self.parked[id] = replace(message, state="retry", attempts=message.attempts + 1, due=due, blocks=blocks)
                behind.add(message.key)
            else:
                del self.parked[id]

    def ready(self, released: Collection[str], now: datetime) -> list[int]:
        """What is parked and may be tried now."""

        def due(message: Set) -> bool:
            if message.state == "blocked":
                return message.key is None or message.key in released
            return message.state in ("waiting", "retry") and message.due is not None and message.due <= now

        def holds_back(message: Set) -> bool:
            return message.blocks and message.state != "blocked" and not due(message)

        def free(id: int) -> bool:
            key = self.parked[id].key
            return key is None or not any(
                holds_back(other) for before, other in self.parked.items() if before < id and other.key == key
            )

        in_order = sorted(self.parked, key=lambda each: (self.parked[each].place, each))
        return [id for id in in_order if due(self.parked[id]) and free(id)][:ROWS]

    def heads(self) -> set[str]:
        """Keys whose oldest parked message waits for nothing but its turn."""
        first: dict[str, Set] = {}
        for _, message in sorted(self.parked.items()):
            if message.key is not None and message.blocks:
                first.setdefault(message.key, message)
        return {key for key, message in first.items() if message.state == "blocked"}


def upto(place: Place, id: int) -> Place:
    """In the window of `place`, behind `id`."""
    assert place.left is not None
    return replace(place, left=tuple(each for each in place.left if each > id))
