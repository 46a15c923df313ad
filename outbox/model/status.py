"""Status as frozen values: of a subscription, a partition, transactions, the log. Every output prints their fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from outbox.model.parking import State, States
from outbox.model.subscription import Reader

#: Rows are counted up to this number; more are estimated.
MOST_COUNTED = 10_000
#: States whose messages will be sent without a person, as soon as nothing holds them back.
UNSENT: tuple[State, ...] = (States.WAITING, States.RETRY, States.BEHIND)
#: The name, beside the states, of what is in the hands of clients.
INFLIGHT = "inflight"


@dataclass(frozen=True, slots=True)
class Count:
    """A number of rows: counted, or, if `about`, estimated."""

    number: int
    about: bool = False

    def __str__(self) -> str:
        return f"~{self.number}" if self.about else str(self.number)

    @classmethod
    def upto(cls, number: int, read: int | None = None) -> Count:
        """Return the count of rows; `read`: the rows that were read, at most `MOST_COUNTED` + 1; None: `number`."""
        return cls(min(number, MOST_COUNTED), about=(number if read is None else read) > MOST_COUNTED)

    @classmethod
    def total(cls, counts: Iterable[Count]) -> Count:
        """Return the sum of counts."""
        each = list(counts)
        return cls(sum(count.number for count in each), about=any(count.about for count in each))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """The status of one partition; the fields mean for the partition what they mean in `Status` for all.

    Attributes:
        number: from 0 on.
        lag_seconds: of the log; parked messages are left out.
        arrived: the partition of a backfill has come to its end, so nobody needs to run the partition.
    """

    number: int
    backlog: int
    backlog_is_estimate: bool
    lag_seconds: float
    lag_is_estimate: bool
    idle_seconds: float | None
    worker: str | None
    lease_until: datetime | None
    arrived: bool

    @property
    def unsettled(self) -> Count:
        """The backlog with the mark of an estimate."""
        return Count(self.backlog, about=self.backlog_is_estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class TroubleStatus:
    """Parked messages without success, of one state and one error.

    Attributes:
        state: `waiting` for the destination, `retry` or `dead`.
        messages: their number.
        messages_is_minimum: there are more.
        since: when the first of them was parked; of what was handed out, when the first time was over.
        error: the answer of the destination; answers that differ in numbers alone count as the same.
    """

    state: str
    messages: int
    messages_is_minimum: bool
    since: datetime
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProperties(Reader):
    """The properties of a subscription that `Status` and `SubscriptionDetails` share.

    Attributes:
        grace_seconds: from the commit until a message may be read.
        held_since: of an extract: its last progress, since when retention waits for the extract.
        held_until: until when retention waits.
        released: retention does not wait any more.
    """

    grace_seconds: float
    held_since: datetime | None
    held_until: datetime | None
    released: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(StoredProperties):
    """The status of one subscription.

    Attributes:
        backlog: messages of the log that are not settled; of a check-back, messages without a verdict.
        lag_seconds: for how long the oldest unsent message, parked ones included, could have been sent; at most that if
            `lag_is_estimate`. A delayed message counts from its due moment, and what was handed out from the end of its
            time; dead letters do not count. Of a check-back only the backlog counts.
        idle_seconds: since the last settle; of several partitions that of one without a worker, if there is one.
        worker: the holder of the lease; of several partitions the first holder, if each has a holder.
        partitions: in the order of their numbers.
        live: each partition has a worker.
        lease_until: the end of the lease, also of a worker that was killed; None: the lease was given back.
        lease_seconds: for how long the worker takes the lease each time.
        notice: why a worker does not work, in its own words.
        noticed_at: since when.
        parked: numbers of parked messages by state: `delayed`, `waiting`, `retry`, `dead`, `behind`; and `inflight`,
            which a client has received, and whose invisible time is not over.
        parked_is_minimum: states of which there are more.
        all_held: every message that waits is behind a dead letter of its key, or a person has paused its key.
        troubles: messages without success, by state and error, the most frequent error first.
    """

    backlog: int
    backlog_is_estimate: bool
    lag_seconds: float
    lag_is_estimate: bool
    idle_seconds: float | None
    worker: str | None
    partitions: tuple[PartitionStatus, ...]
    live: bool
    lease_until: datetime | None
    lease_seconds: float | None
    notice: str | None
    noticed_at: datetime | None
    parked: Mapping[str, int]
    parked_is_minimum: tuple[str, ...]
    all_held: bool
    troubles: tuple[TroubleStatus, ...]

    def count(self, state: str) -> Count:
        """Return the number of parked messages in a state."""
        return Count(self.parked[state], about=state in self.parked_is_minimum)

    @property
    def unsettled(self) -> Count:
        """The backlog with the mark of an estimate."""
        return Count(self.backlog, about=self.backlog_is_estimate)

    @property
    def unsent(self) -> Count:
        """The messages that wait: in the log, and parked without need of a person or a later moment."""
        return Count.total([self.unsettled, *map(self.count, UNSENT)])

    @property
    def unowned(self) -> tuple[int, ...]:
        """The numbers of the partitions that nobody runs and that have not come to their end."""
        return tuple(each.number for each in self.partitions if each.worker is None and not each.arrived)

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of all partitions, sorted."""
        return tuple(sorted({each.worker for each in self.partitions if each.worker is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStep:
    """A subscription during one step of time.

    Attributes:
        at: the end of the step.
        passed: about how many selected messages the position has passed; None: no settle of that time is kept.
        per_second: the same by the second.
        lag_seconds: for how long the oldest message behind the position had been written, at the end of the step. A
            position is stored at least every 30 s, so less says nothing about a topic where nothing comes.
        parked: numbers of the messages that are parked now, and were parked by then, by state.
    """

    at: datetime
    passed: int | None
    per_second: float | None
    lag_seconds: float | None
    parked: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The history of a subscription, as far as settles are kept: for a day, and not beyond another generation.

    Attributes:
        subscription: the name.
        step_seconds: the length of each step.
        steps: the oldest first.
        parked_is_minimum: states of which more are parked now than were looked at.
    """

    subscription: str
    step_seconds: float
    steps: tuple[HistoryStep, ...]
    parked_is_minimum: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A process that works for one subscription.

    Attributes:
        name: as in the leases: host, process and a random part.
        host: None: the name was given by an application.
        process: the number that the host gives the process.
        version: of its library; None: the worker stands by.
        since: when the worker took the first of these partitions; None: the worker stands by.
        subscription: the name.
        partitions: the numbers of the partitions whose leases the worker holds; empty: the worker stands by.
        partitions_in_all: of the subscription.
        lease_until: the first end of the leases; the worker renews them before.
        last_settle_at: the newest progress under these leases; None: the worker has settled nothing yet.
        notice: why the worker does not get on, in its own words.
    """

    name: str
    host: str | None
    process: int | None
    version: str | None
    since: datetime | None
    subscription: str
    partitions: tuple[int, ...]
    partitions_in_all: int
    lease_until: datetime | None
    last_settle_at: datetime | None
    notice: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsStatus:
    """The half messages of one producer group with one real topic.

    Attributes:
        group: of the producer.
        topic: where the messages are delivered; empty for rows that no producer wrote.
        half: without a verdict, and not given up.
        given_up: a person has to decide.
        committed: with this verdict, as far as the log reaches back.
        rolled_back: likewise.
        estimates: the names of the numbers above that are estimates.
        oldest_seconds: the age of the oldest without a verdict.
        last_verdict_seconds: since the newest verdict.
    """

    group: str
    topic: str
    half: int
    given_up: int
    committed: int
    rolled_back: int
    estimates: tuple[str, ...]
    oldest_seconds: float | None
    last_verdict_seconds: float | None

    def count(self, name: str) -> Count:
        """Return one of the numbers by its name."""
        return Count(getattr(self, name), about=name in self.estimates)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStatus:
    """The status of the log.

    Attributes:
        rows: how many ids lie between the first and the last message: at least as many as messages.
        bytes: with indexes; on SQLite of the whole file.
        oldest: when the first message was written.
        purged_at: the end of the last purge.
        keep_seconds: the retention of the last purge.
        keep_dead_seconds: so long the last purge by a person has kept dead letters; None: for ever.
        held_back: about how many messages past this retention are kept for a subscription, by name.
    """

    rows: int
    bytes: int
    oldest: datetime | None
    purged_at: datetime | None
    keep_seconds: float | None
    keep_dead_seconds: float | None
    held_back: Mapping[str, int] = field(default_factory=dict)
