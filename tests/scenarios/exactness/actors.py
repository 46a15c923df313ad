"""Who acts in the state machine: transactions under way, and workers with what they remember."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from sqlalchemy import Connection

from outbox.model.lease import Lease, Partition
from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.model.position import Progress
from outbox.store.database import Channel
from outbox.store.log.cursor import Batch, Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.telemetry.events import Listeners, Teller
from outbox.worker.care import Care
from outbox.worker.deciding import Deciding
from outbox.worker.decisions import OpenDecisions
from outbox.worker.holds import Holds
from outbox.worker.hung import HungCalls
from outbox.worker.outcome import Outcome
from outbox.worker.parked import ParkedQueue
from outbox.worker.policy import BEHIND, HandlerPolicy
from outbox.worker.settings import Settings
from outbox.worker.settle import Parkings, Settlement
from tests.scenarios.exactness.history import Event, delivery_of
from tests.scenarios.exactness.model import RETRY, ROWS, Model, Place, Sent
from tests.scenarios.exactness.worlds import World
from tests.support.readers import selection_of

PARTITION = Partition("relay")
LIMITS = Limits(rows=ROWS)
FATES = {
    "retry": Parking(state="retry", holds=True, attempts=1, error="failed", delay=RETRY),
    "waiting": Parking(state="waiting", holds=True, error="away", delay=timedelta(0)),
    "dead": Parking(state="dead", holds=True, attempts=1, error="failed"),
}


class CrashError(Exception):
    """A process is gone."""


@dataclass(frozen=True)
class Write:
    """Messages in a transaction that is open or begins here, and what becomes of it `then`."""

    which: int
    early: bool
    keys: list[str | None]
    topic: str
    delay: int | None
    then: str


@dataclass(frozen=True)
class Work:
    """A worker's step. One message of a batch may fail with a `parking`; the batch may be left after place `stop`."""

    which: int
    acts: list[str]
    failing: int | None
    parking: str
    stop: int | None


WRITES = st.builds(
    Write,
    which=st.integers(0, 4),
    early=st.booleans(),
    keys=st.lists(st.sampled_from([None, "a", "a", "b", "c"]), max_size=5),
    topic=st.sampled_from(["orders", "orders", "mails"]),
    delay=st.none() | st.integers(1, 30),
    then=st.sampled_from(["commit", "commit", "commit", "stay", "stay", "save", "roll back"]),
)
_ROUND = ["fetch", "hand over", "settle"]
WORK = st.builds(
    Work,
    which=st.integers(0, 1),
    acts=st.sampled_from([_ROUND, 3 * _ROUND, ["fetch", *_ROUND], _ROUND[:2], ["settle"], ["settle", *_ROUND[:2]]]),
    failing=st.none() | st.integers(0, 3),
    parking=st.sampled_from(sorted(FATES)),
    stop=st.none() | st.none() | st.integers(0, 1),
)


@dataclass
class Open:
    """A transaction under way: a list of messages for itself and for each savepoint."""

    connection: Connection
    frames: list[list[Sent]] = field(default_factory=lambda: [[]])
    savepoints: list[Any] = field(default_factory=list)

    #: What it has locked, also for what it took back.
    keys: set[str] = field(default_factory=set)


@dataclass
class Fetched:
    """A batch in flight: where its reader stands before and behind it."""

    batch: Batch
    opened: Place
    end: Place


@dataclass
class Handed:
    """A batch that was handed over and is not settled."""

    end: Progress
    place: Place
    parkings: Parkings
    cut: bool
    sent: int = 0


class ScriptedHandOver:
    """A destination that fails for the message in place `failing`, and a process that may die when it has sent."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.history: list[Event] = []
        self.failing: int | None = None
        self.parking = FATES["retry"]
        self.die = False
        self.given: list[int] = []

    def run(self, messages: list[Message], **_: Any) -> Generator[Outcome, None, None]:
        """Done, until one fails; what stands behind it in its key is held."""
        outcome, behind = Outcome(), set[str | None]()
        self.given = [message.id or 0 for message in messages]
        for place, message in enumerate(messages):
            if message.key is not None and message.key in behind:
                outcome.parked.append((message, BEHIND))
            elif place == self.failing:
                outcome.parked.append((message, replace(self.parking, attempts=message.attempt)))
                behind.add(message.key)
            else:
                self.history.append(delivery_of(message, self._epoch))
                outcome.done.append(message)
        if self.die:
            raise CrashError
        yield outcome


class Holder:
    """A worker's memory."""

    def __init__(self, world: World, model: Model, lease: Lease, channel: Channel) -> None:
        self.lease, self.channel, self.batch_handler = lease, channel, ScriptedHandOver(lease.epoch)
        log = Log(LIMITS, selection_of(model.topics))
        newest = ProgressLog(channel).newest(PARTITION)
        assert newest is not None
        self.settlement = Settlement(channel, lease, log.now(channel).incarnation)
        hung = HungCalls()
        parked, teller = Parked(channel, "relay"), Teller(Listeners(), {})
        settings, policy = Settings(limits=LIMITS), HandlerPolicy()
        decisions = OpenDecisions(channel, parked, PARTITION, blocks=True)
        holds = Holds(parked, 100_000)
        self.deciding = Deciding(decisions, self.settlement, holds, hung.known, policy)
        care = Care(policy, hung.begun, 0)
        self.parked = ParkedQueue(
            parked, self.settlement, hung, settings, teller, policy=policy, holds=holds, care=care
        )
        self.cursor, self.place = Cursor(log, newest.progress), model.place
        self.ahead: list[Fetched] = []
        self.handed: Handed | None = None

    def look_at_parked(self) -> None:
        """Handle what is ready."""
        self.parked.begin()
        messages = self.parked.take(decided=self.deciding.carry_out(None))
        for outcome in self.batch_handler.run(messages) if messages is not None else ():
            self.parked.settle(outcome)
        self.parked.end()

    @property
    def may_fetch(self) -> bool:
        """One batch ahead of the one that is on its way."""
        return len(self.ahead) + (self.handed is not None) < 2

    @property
    def may_hand_over(self) -> bool:
        """Never a second batch before the first is settled."""
        return bool(self.ahead) and self.handed is None
