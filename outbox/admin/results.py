"""The frozen results of `Outbox.admin`, with the fields that `--json` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

from outbox.model.decision import Decision
from outbox.model.message import Message
from outbox.model.parking import State, States
from outbox.model.pausing import Pause
from outbox.model.status import LogStatus, Status, StoredProperties, TransactionsStatus, TroubleStatus
from outbox.runtime.text import age, labelled
from outbox.store.subscriptions.parked_messages import ParkedMessage

Kind = Literal[
    "unread", "refused", "stuck", "waiting", "failing", "dead", "given_up", "behind_head", "not_run", "behind", "held",
    "released", "unpurged", "held_back", "undone",
]  # fmt: skip

PassageState = Literal["unread", "passed", "discarded", "withdrawn", "unselected", "before", "unknown", State]

#: Kinds without dead letters that RocketMQ's metric could count.
_NO_LETTERS = ("check", "extract")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The limits beyond which a subscription causes a finding.

    `max_lag`: how long the oldest message may wait. `max_dead`: how many dead letters there may be. `max_backlog`: how
    many messages may wait; None: any number. The limits count for each subscription. `named`: other limits for single
    subscriptions, by name.
    """

    max_lag: timedelta = timedelta(minutes=5)
    max_dead: int = 0
    max_backlog: int | None = None
    named: Mapping[str, Thresholds] = field(default_factory=dict)

    def of(self, subscription: str) -> Thresholds:
        """Return the limits of one subscription."""
        return self.named.get(subscription, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A decision that a finding offers: a method of `Outbox.admin` with its arguments.

    Attributes:
        verb: the name of the method, such as `replay`, `discard` or `pause`.
        arguments: by name. A person adds `reason`, which a discard needs, and `by`.
    """

    verb: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem for a person; `str(finding)` is the whole text in one line.

    Attributes:
        kind: a stable name for programs. `unread`: no subscription reads the log. `refused`: a worker cannot begin.
            `stuck`: a worker does not get on, and says why. `waiting`: messages wait for their destination. `failing`:
            messages failed, and are tried again. `dead`: dead letters. `given_up`: transactions wait for a person.
            `behind_head`: messages wait behind the head of their key. `not_run`: a subscription has no worker.
            `behind`: a limit of `Thresholds` is exceeded. `held`: an extract makes no progress; `released`: retention
            no longer waits for the extract. `unpurged`: old messages are kept, and nothing purges the log. `held_back`:
            a purge keeps messages past their retention for a subscription. `undone`: decisions of people that nobody
            carries out.
        subscription: the name; None: the log as a whole.
        what: the fact in words.
        since: the moment of the database's clock when the problem began; None: unknown.
        seconds: for how long the problem has lasted.
        evidence: the grounds: the error of the destination, or what depends on the subscription.
        advice: what to do, in words.
        next_command: the safest next command; None: there is nothing to type.
        decisions: what a person can decide at once, the safest first.
    """

    kind: Kind
    subscription: str | None
    what: str
    since: datetime | None = None
    seconds: float | None = None
    evidence: str | None = None
    advice: str | None = None
    next_command: str | None = None
    decisions: tuple[Proposal, ...] = ()

    def __str__(self) -> str:
        name = self.subscription
        text = self.what if name is None else labelled(name, name, self.what)
        text += "" if self.seconds is None else f" (since {age(self.seconds)})"
        text += "" if self.evidence is None else f": {self.evidence}"
        todo = self.advice if self.next_command is None else f"{self.advice or 'run'}: {self.next_command}"
        return text if todo is None else f"{text}; {todo}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All of a database at one moment: the results of `statuses` and of `diagnosis`, which agree with each other.

    Attributes:
        at: the database's clock.
        findings: problems, since when, and what to do.
        subscriptions: sorted by name.
        transactions: by producer group and real topic; empty without half messages.
        log: the log's size and age, the last purge, and what is held back; None: there is no log.
        latencies: seconds from the half message to its commit, by real topic: `count`, `sum` and `max` of the newest.
    """

    at: datetime
    findings: tuple[Finding, ...] = ()
    subscriptions: tuple[Status, ...] = ()
    transactions: tuple[TransactionsStatus, ...] = ()
    log: LogStatus | None = None
    latencies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def by_topic(self, name: str) -> Counter[str]:
        """Return a number of `TransactionsStatus` by its name, added up over the producer groups, by real topic."""
        found = Counter[str]()
        for each in self.transactions:
            found[each.topic] += each.count(name).number
        return found

    def document(self) -> dict[str, object]:
        """Return all fields for JSON, with RocketMQ's metrics where there are half messages."""
        halves = ("transactions",) if self.transactions else ()
        shown = {name: getattr(self, name) for name in ("at", "findings", "subscriptions", *halves, "log")}
        return shown | self._metrics() if self.transactions else shown

    def _metrics(self) -> dict[str, object]:
        """Return RocketMQ's metrics by RocketMQ's names and by real topic; dead letters by subscription.

        The latency is in seconds, as in RocketMQ: the number of messages, the sum of the latencies, the longest.
        """
        return {
            "rocketmq_half_messages": self.by_topic("half"),
            "rocketmq_commit_messages_total": self.by_topic("committed"),
            "rocketmq_rollback_messages_total": self.by_topic("rolled_back"),
            "rocketmq_finish_message_latency": {"unit": "seconds", "topics": self.latencies},
            "rocketmq_send_to_dlq_messages_total": {
                each.name: each.parked[States.DEAD] for each in self.subscriptions if each.kind not in _NO_LETTERS
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedCount:
    """The number of parked messages of a choice.

    Attributes:
        messages: their number.
        messages_is_minimum: the time was over before all were counted.
        states: the number by state.
        errors: by state and error, the most frequent first; errors that differ in numbers alone count as the same.
    """

    messages: int
    messages_is_minimum: bool
    states: Mapping[str, int]
    errors: tuple[TroubleStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedDetail:
    """A parked message with its contents.

    `behind`: so many messages behind it go on when it is gone. `dead_at`: since when it is a dead letter; None: it is
    none.
    """

    parked: ParkedMessage
    message: Message
    behind: int
    dead_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The result of a replay, a discard or a set-aside for one subscription.

    Attributes:
        name: of the subscription.
        messages: so many were decided on.
        behind: so many messages behind them go on when these are gone; counted up to 10 000.
        worker: the live worker that carries the decision out; None: the decision is carried out.
        unread: so many messages more were decided on, which a worker has still to read; the decision waits until then.
    """

    name: str
    messages: int
    behind: int
    worker: str | None
    unread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldKey:
    """A key of which a subscription holds messages back.

    Attributes:
        subscription: the name.
        key: of the messages.
        head: the message that holds the key, with error, attempts and moment; None: a person has paused the key before
            any message came.
        behind: so many messages go on when the head is delivered or discarded.
        behind_is_minimum: there may be more.
        pause: the order of a person to hold back the key; None: there is none.
    """

    subscription: str
    key: str
    head: ParkedMessage | None
    behind: int
    behind_is_minimum: bool
    pause: Pause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDetail(HeldKey):
    """A held key with the messages behind the head.

    Attributes:
        messages: the first messages behind the head, in order.
        topics: numbers of messages behind the head, by topic, the most frequent first.
    """

    messages: tuple[ParkedMessage, ...]
    topics: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """The way of a message through one subscription.

    Attributes:
        subscription: the name.
        kind: `relay`, `consumer`, `broadcast`, `backfill` or `extract`.
        state: `unread`: not yet. `passed`: the position is behind the message, and nothing is parked: the message was
            handed over, then or later, or skipped by a reset. `discarded`: a person has given the message up.
            `withdrawn`: the writer has taken a delayed message back. The states of parked messages: `delayed`,
            `waiting`, `retry`, `dead`, `behind`. `unselected`: the subscription does not select the message, as it is
            declared now. `before`: the subscription began behind the message. `unknown`.
        what: the state in words, with what is known besides.
        passed_at: the settle that passed the message; None: not passed, or no settle of that time is kept.
        passed_at_is_latest: the message may have been passed earlier.
        copy: the parked copy, with attempts, error, next try and the open decision of a person.
        decisions: those of people that were carried out, as far as they are kept.
        worker: who runs the partition of an unread message; None: nobody, or the message is not unread.
    """

    subscription: str
    kind: str
    state: PassageState
    what: str
    passed_at: datetime | None = None
    passed_at_is_latest: bool = False
    copy: ParkedMessage | None = None
    decisions: tuple[Decision, ...] = ()
    worker: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What is stored of a message, without body and headers, and the way of the message through each subscription.

    Attributes:
        id: in the log.
        message_id: as `send` returned it.
        created_at: when the message was written, by the database's clock.
        in_log: false: the message was purged, and only parked copies are left.
        subscriptions: sorted by name; check-backs are left out, because they read only half messages.
    """

    id: int
    message_id: UUID
    topic: str
    key: str | None
    tags: str | None
    created_at: datetime | None
    deliver_at: datetime | None
    expires_at: datetime | None
    in_log: bool
    subscriptions: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDetails(StoredProperties):
    """All properties of a subscription, and the workers.

    Attributes:
        on_dead: `block`: a dead letter holds back its key; `continue`. None: no worker has declared it yet.
        partitions: their number.
        ordered: a message waits for earlier messages of its key.
        compact: only the newest of a key's waiting messages is handled.
        created_at: by the database's clock.
        live: each partition has a worker.
        workers: of each partition; None: nobody.
        hold_seconds: of an extract: for how long retention waits after its last progress.
    """

    on_dead: str | None
    partitions: int
    ordered: bool
    compact: bool
    created_at: datetime
    live: bool
    workers: tuple[str | None, ...]
    hold_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """The split subscription, the new subscription, and how many parked messages moved."""

    split: SubscriptionDetails
    made: SubscriptionDetails
    moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The result of a reset or a drop: names of the subscriptions, and by state the parked messages to be deleted.

    `kind`: of the named subscription. Before the change the numbers are counted up to 10 000.
    """

    kind: str
    names: tuple[str, ...]
    parked: Mapping[str, int]
