"""Metrics: the events of a process as counters, gauges and histograms, for Prometheus and for OpenTelemetry.

Names are those of OpenTelemetry's conventions for messaging, where there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from outbox.model.parking import States
from outbox.model.verdict import DONE
from outbox.telemetry.events import (
    Attended,
    BatchRead,
    Called,
    DestinationAway,
    DestinationBack,
    Event,
    HandedOver,
    LeaseLost,
    LeaseTaken,
    Parked,
    Questioned,
    Repeated,
    Settled,
    Worked,
)
from outbox.telemetry.lag import Lag

_WHERE = ("database", "subscription")
_CALL = ("messaging.system", "messaging.operation.name", *_WHERE, "error.type")
#: The bounds of histograms, in seconds.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0)


# Compared by identity, because a batch looks several of them up.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A metric by its name in OpenTelemetry. `labels`: attributes there."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    about: str

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus, as OpenTelemetry translates names."""
        name = self.name.replace(".", "_")
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return f"{name.removesuffix(unit)}{unit}{'_total' if self.kind == 'counter' else ''}"


SENT = Metric("messaging.client.sent.messages", "counter", "{message}", _CALL, "Messages handed to a destination.")
CONSUMED = Metric("messaging.client.consumed.messages", "counter", "{message}", _CALL, "Messages handed to functions.")
OPERATION = Metric(
    "messaging.client.operation.duration", "histogram", "s", _CALL, "Time of a call that sends, and of a settle."
)
PROCESS = Metric("messaging.process.duration", "histogram", "s", _CALL, "Time of a call that handles messages.")
LAG = Metric("outbox.delivery.lag", "histogram", "s", _WHERE, "Age of the oldest message of a settle.")
RETRIES = Metric("outbox.retries", "counter", "{message}", _WHERE, "Messages set aside for another try.")
UP = Metric("outbox.destination.up", "gauge", "1", (*_WHERE, "destination"), "1: accepts messages, 0: does not.")
HELD = Metric("outbox.lease.held", "gauge", "1", (*_WHERE, "partition"), "1: this process has the partition.")
TAKEOVERS = Metric("outbox.lease.takeovers", "counter", "{lease}", _WHERE, "Leases that this process has taken.")
REPEATS = Metric("outbox.inbox.repeats", "counter", "{message}", ("database", "consumer"), "Repetitions not handled.")
_DATABASE = ("database",)
CALLS = Metric("outbox.front.calls", "counter", "{call}", (*_DATABASE, "rpc", "code"), "Calls of RocketMQ's clients.")
CALL = Metric("outbox.front.call", "histogram", "s", (*_DATABASE, "rpc"), "Time of a call of RocketMQ's clients.")
CLIENTS = Metric("outbox.front.clients", "gauge", "{client}", _DATABASE, "RocketMQ's clients that a front knows.")
STREAMS = Metric("outbox.front.streams", "gauge", "{stream}", _DATABASE, "Open streams of RocketMQ's clients.")
QUESTIONS = Metric(
    "outbox.front.questions", "counter", "{question}", (*_DATABASE, "topic", "outcome"), "Questions about transactions."
)
HANDED_OUT = Metric("outbox.front.handed_out", "counter", "{message}", _DATABASE, "Messages handed to consumers.")
RENEWALS = Metric("outbox.front.renewals", "counter", "{message}", _DATABASE, "Messages renewed for push consumers.")

UNSENT = Metric("outbox.unsent.messages", "gauge", "{message}", (*_WHERE, "state"), "Messages that wait, by state.")
UNSENT_AGE = Metric("outbox.unsent.age", "gauge", "s", _WHERE, "For how long the oldest message could have been sent.")
DEAD = Metric("outbox.dead", "gauge", "{message}", _WHERE, "Dead letters.")
FINDINGS = Metric("outbox.findings", "gauge", "{finding}", (*_WHERE, "kind"), "Findings of `outbox status`, by kind.")
LOG_ROWS = Metric("outbox.log.rows", "gauge", "{row}", ("database",), "Rows of the log, at most.")
LOG_BYTES = Metric("outbox.log.bytes", "gauge", "By", ("database",), "Size of the log with its indexes.")
LOG_AGE = Metric("outbox.log.oldest.age", "gauge", "s", ("database",), "Age of the oldest row of the log.")
_TOPIC = ("database", "topic")
HALF = Metric("rocketmq_half_messages", "gauge", "{message}", _TOPIC, "Half messages without a verdict.")
HALF_COMMITTED = Metric(
    "rocketmq_commit_messages_total", "gauge", "{message}", _TOPIC, "Half messages with a commit, in the log."
)
HALF_ROLLED_BACK = Metric(
    "rocketmq_rollback_messages_total", "gauge", "{message}", _TOPIC, "Half messages with a rollback, in the log."
)

#: Metrics of events.
OF_EVENTS = (
    SENT, CONSUMED, OPERATION, PROCESS, LAG, RETRIES, UP, HELD, TAKEOVERS, REPEATS,
    CALLS, CALL, CLIENTS, STREAMS, QUESTIONS, HANDED_OUT, RENEWALS,
)  # fmt: skip
#: Metrics of looks at a database.
OF_STATE = (UNSENT, UNSENT_AGE, DEAD, FINDINGS, LOG_ROWS, LOG_BYTES, LOG_AGE, HALF, HALF_COMMITTED, HALF_ROLLED_BACK)


class Sample(NamedTuple):
    """The value of a gauge, with a text for each label."""

    metric: Metric
    value: float
    labels: tuple[str, ...]


class Exporter(Protocol):
    """The way of metrics to a library for metrics."""

    def instrument(self, metric: Metric) -> Callable[..., object]:
        """Return a function of a value and of a text for each label: counts, sets or records, after the kind.

        None ends a gauge.
        """

    def observe(self, metrics: Sequence[Metric], samples: Callable[[], Iterable[Sample]]) -> None:
        """Ask for the values of gauges whenever somebody reads metrics."""


class Metrics:
    """Counts events: `EVERYWHERE.listen(Metrics(exporter).told)`. Costs a few look-ups for a batch."""

    def __init__(self, exporter: Exporter) -> None:
        self._put = {metric: exporter.instrument(metric) for metric in OF_EVENTS}
        self._lags: dict[str, Lag] = defaultdict(Lag)
        #: By subscription: the destination shown as up, the destination shown as down, and the partitions held here.
        self._up: dict[tuple[str, ...], str] = {}
        self._down: dict[tuple[str, ...], str] = {}
        self._held: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self._count: Mapping[type, Callable[[Any], None]] = {
            BatchRead: self._read,
            HandedOver: self._call,
            Settled: self._settled,
            Parked: self._parked,
            LeaseTaken: self._taken,
            LeaseLost: self._lost,
            DestinationAway: self._away,
            DestinationBack: self._back,
            Repeated: self._repeated,
            Called: self._called,
            Questioned: self._questioned,
            Attended: self._attended,
        }

    def told(self, event: Event) -> None:
        """Count an event."""
        count = self._count.get(type(event))
        if count is not None:
            count(event)

    def _read(self, event: BatchRead) -> None:
        self._lags[event.database.label].read(event.now)

    def _call(self, event: HandedOver) -> None:
        """Count the messages of a call by outcome, and its time."""
        sends, verdicts = event.destination is not None, event.verdicts
        system = str(event.destination).partition(":")[0] if sends else "outbox"
        labels = (system, "send" if sends else "process", *_where(event))
        # The only `Done` is found without a look at each verdict.
        done = 0 if verdicts is None else verdicts.count(DONE)
        outcomes = {"": done} if done else {}
        if verdicts is None:
            outcomes["Exception"] = len(event.messages)
        elif done < len(verdicts):
            outcomes |= Counter(type(each).__name__ for each in verdicts if each is not DONE)
        for outcome, number in outcomes.items():
            self._put[SENT if sends else CONSUMED](number, *labels, outcome)
        self._put[OPERATION if sends else PROCESS](event.seconds, *labels, next(iter(outcomes), ""))
        if sends and done:
            self._show_up(event, str(event.destination))

    def _settled(self, event: Settled) -> None:
        where, lag = _where(event), self._lags[event.database.label].of(event.messages)
        self._put[OPERATION](event.seconds, "outbox", "settle", *where, "")
        if lag is not None:
            self._put[LAG](lag, *where)

    def _parked(self, event: Parked) -> None:
        self._put[RETRIES](sum(parking.state == States.RETRY for _, parking in event.messages), *_where(event))

    def _taken(self, event: LeaseTaken) -> None:
        self._put[TAKEOVERS](1, *_where(event))
        self._put[HELD](1, *_where(event), str(event.partition))
        self._held[_where(event)].add(event.partition)

    def _lost(self, event: LeaseLost) -> None:
        """End the gauge of the partition, and with the last partition the gauge of the destination.

        The process hears no more of either. Where a gauge cannot end, the gauge gets the value of a standby.
        """
        where = _where(event)
        for value in (0, None):
            self._put[HELD](value, *where, str(event.partition))
        self._held[where].discard(event.partition)
        if self._held[where]:
            return
        if where in self._down:
            self._show_up(event, self._down[where])
        if where in self._up:
            self._put[UP](None, *where, self._up.pop(where))

    def _away(self, event: DestinationAway) -> None:
        if any(each.topic is None for each in event.outages):
            self._up.pop(_where(event), None)
            self._down[_where(event)] = event.destination
            self._put[UP](0, *_where(event), event.destination)

    def _back(self, event: DestinationBack) -> None:
        if event.outage.topic is None:
            self._show_up(event, event.destination)

    def _show_up(self, event: Worked, destination: str) -> None:
        where = _where(event)
        if where not in self._up:
            self._up[where] = destination
            self._down.pop(where, None)
            self._put[UP](1, *where, destination)

    def _repeated(self, event: Repeated) -> None:
        self._put[REPEATS](1, event.database.label, event.consumer)

    def _called(self, event: Called) -> None:
        database = event.database.label
        self._put[CALLS](1, database, event.rpc, event.code)
        self._put[CALL](event.seconds, database, event.rpc)
        if event.messages:
            self._put[HANDED_OUT](event.messages, database)

    def _questioned(self, event: Questioned) -> None:
        self._put[QUESTIONS](1, event.database.label, event.topic, "asked" if event.asked else "nobody")

    def _attended(self, event: Attended) -> None:
        for metric, value in ((CLIENTS, event.clients), (STREAMS, event.streams)):
            self._put[metric](value, event.database.label)
        if event.renewals:
            self._put[RENEWALS](event.renewals, event.database.label)


def _where(event: Worked) -> tuple[str, str]:
    return event.database.label, event.subscription
