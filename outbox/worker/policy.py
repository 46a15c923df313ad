"""The rules for failures: when a message is tried again, is parked, or becomes a dead letter."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from tenacity.wait import wait_base, wait_random_exponential

from outbox.model.message import Message
from outbox.model.parking import NOTHING_HELD, Held, Parking, States
from outbox.model.retry import RetryPolicy
from outbox.model.subscription import Subscription
from outbox.model.verdict import Retry
from outbox.runtime.throttled_log import Throttle

BEHIND = Parking(state=States.BEHIND, holds=True)
DELAYED = Parking(state=States.DELAYED, holds=False)
EXPIRED = Parking(state=States.DEAD, holds=False, error="expired before it was delivered")
#: The error of a message that waits for a call past its deadline.
CALLED = "its call has not come back; it is held until the call does, or the process is started again"
MAX_ERROR = 2000
#: With so many calls past their deadline no further call is made, and with so many past three deadlines the worker
#: gives up.
MAX_HUNG = 8
#: The worker gives up as well when half as many have been under way for so many seconds: by then a silent topic is
#: not tried any more.
HALF_HUNG_SECONDS = 300.0
#: So many messages of a partition are parked as waiting before the partition pauses.
MAX_WAITING = 1_000_000
#: So many topics are probed at once.
MOST_PROBES = 50
#: Between probes of a destination that accepts nothing.
PAUSE: wait_base = wait_random_exponential(multiplier=0.05, min=0.05, max=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Portions:
    """The way in which a call hands its messages over.

    `size`: so many messages at once; the deadline counts for each portion. `seconds`: later in a call no portion
    begins. `in_order`: nothing behind a failed message of a key is handed over. `suspend`: nothing behind any failed
    message is. `passes_dead`: a rejected message holds nothing back. `log`: allows each line once.
    """

    size: int
    seconds: float
    in_order: bool = True
    suspend: bool = False
    passes_dead: bool = False
    log: Throttle = field(default_factory=lambda: Throttle(math.inf), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerPolicy:
    """The rules for failures.

    `ordered`: later messages of a key wait for a failed one. `compact`: of each topic and key in a batch only the
    newest message is handled. `deadline`: of one call. `least`: messages in a call, however long calls take; after a
    failure of unknown cause a call has one message all the same. `portion`: so many messages are handed over at once,
    with the deadline for each portion, and a failure is the message's; None: whole calls, whose failures may be the
    destination's. `suspend`: nothing of a partition is handled while a message waits for another try. `paused`: keys
    whose messages are held back.

    Raises:
        TypeError: the deadline is no timedelta above 0, or `retry` is no RetryPolicy.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    block_on_dead: bool = True
    ordered: bool = True
    compact: bool = False
    deadline: timedelta = timedelta(seconds=5)
    least: int = 1
    portion: int | None = None
    suspend: bool = False
    paused: Collection[str | None] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.retry, RetryPolicy):
            raise TypeError(f"retry must be a RetryPolicy(attempts=…, wait=…), not {type(self.retry).__name__}")
        if not isinstance(self.deadline, timedelta) or self.deadline <= timedelta(0):
            raise TypeError(
                f"deadline must be a timedelta greater than 0, not {self.deadline!r:.60}; write timedelta(seconds=10)"
            )

    def of(self, stored: Subscription) -> HandlerPolicy:
        """Return the rules with what is stored of a subscription."""
        return replace(
            self,
            block_on_dead=stored.on_dead != "continue",
            ordered=stored.ordered,
            compact=stored.compact,
            paused=frozenset(each.key for each in stored.pauses),
        )

    @property
    def in_portions(self) -> bool:
        """True when a failure is the message's, and calls end by themselves in time; False when a failure may be the
        destination's.
        """
        return self.portion is not None

    def portions(self, seconds: float) -> Portions | None:
        """Return the way in which a call hands its messages over; `seconds`: later in a call no portion begins."""
        if self.portion is None:
            return None
        return Portions(
            size=self.portion,
            seconds=seconds,
            in_order=self.ordered,
            suspend=self.suspend,
            passes_dead=not self.block_on_dead,
        )

    def dead(self, message: Message, error: str) -> Parking:
        """Return the parking of a dead letter; with `block_on_dead` the rest of its key waits for a person."""
        holds = self.ordered and self.block_on_dead
        return Parking(state=States.DEAD, holds=holds, attempts=message.attempt, error=error[:MAX_ERROR])

    def failed(self, message: Message, verdict: Retry) -> Parking:
        """Return the parking of a message that failed: `retry`, or `dead` without attempts left."""
        error, after = verdict.error, verdict.after
        if verdict.counts and self.retry.exhausted(message.attempt):
            return self.dead(message, error)
        delay = self.retry.delay(message.attempt, verdict.cause or error) if after is None else after
        attempts = message.attempt if verdict.counts else message.attempt - 1
        return Parking(state=States.RETRY, holds=self.ordered, attempts=attempts, error=error[:MAX_ERROR], delay=delay)

    def waiting(self, message: Message, error: str) -> Parking:
        """Return the parking of a message that waits until the destination accepts messages; no attempt is counted."""
        attempts, delay = message.attempt - 1, timedelta(0)
        return Parking(
            state=States.WAITING, holds=self.ordered, attempts=attempts, error=error[:MAX_ERROR], delay=delay
        )

    def sort_out(
        self,
        messages: Sequence[Message],
        now: datetime,
        *,
        held: Container[str | None],
        called: Held = NOTHING_HELD,
        known: Container[int | None] = (),
    ) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Separate the messages to be handled from messages to be parked at once.

        `held`: keys that are held back. `called`: messages and keys of hanging calls. `known`: log ids of accepted
        messages. A message that may have arrived does not expire.
        """
        to_send: list[Message] = []
        parkings: list[tuple[Message, Parking]] = []
        for message in messages:
            expired = message.expires_at is not None and message.expires_at <= now
            is_called = called.has(message.id, message.key)
            if message.deliver_at is not None and message.deliver_at > now:
                parkings.append((message, EXPIRED if expired else DELAYED))
            elif expired and message.id not in known and not is_called:
                parkings.append((message, EXPIRED))
            elif message.key in held:
                parkings.append((message, BEHIND))
            elif is_called:
                parkings.append((message, self.waiting(message, CALLED)))
            else:
                to_send.append(message)
        return to_send, parkings

    def without_refused(
        self, messages: Sequence[Message], refused: Mapping[str, str], quota: int
    ) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Separate messages from those of refused topics, which wait, and from what is behind a waiting message.

        `refused`: why, by topic. `quota`: so many may wait; the others are tried.
        """
        free, waiting = list[Message](), list[tuple[Message, Parking]]()
        held, tried = set[str | None](), set[str | None]()
        for message in messages:
            keys = {message.key} if self.ordered and message.key is not None else set[str | None]()
            is_refused = message.topic in refused
            if keys & held or (is_refused and keys & tried):
                waiting.append((message, BEHIND))
                held |= keys
            elif is_refused and len(waiting) < quota:
                waiting.append((message, self.waiting(message, refused[message.topic])))
                held |= keys
            else:
                free.append(message)
                tried |= keys
        return free, waiting


def with_one_head(parkings: Iterable[tuple[Message, Parking]]) -> list[tuple[Message, Parking]]:
    """Return parkings in the order of a batch: of each key the first that holds the key, and the rest behind."""
    held, found = set[str](), list[tuple[Message, Parking]]()
    for message, parking in parkings:
        if not parking.holds or message.key is None:
            found.append((message, parking))
            continue
        found.append((message, BEHIND if message.key in held else parking))
        held.add(message.key)
    return found


def newest(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Separate the newest message of each topic and key, and messages without a key, from the messages before.

    `messages`: in the order of the log. A message that may expire before it is handed over stands for no other.
    """
    last = {(message.topic, message.key): message.id or 0 for message in messages if message.expires_at is None}
    found: tuple[list[Message], list[Message]] = ([], [])
    for message in messages:
        found[message.key is not None and (message.id or 0) < last.get((message.topic, message.key), 0)].append(message)
    return found
