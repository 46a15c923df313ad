"""The outcome of a batch or of a part of a batch, and the messages of a batch without an outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import is_
from typing import Protocol

from outbox.model.message import Message
from outbox.model.parking import Parking, States
from outbox.worker.blame import Findings
from outbox.worker.policy import BEHIND, EXPIRED, with_one_head


class Finished(Protocol):
    """Knows which messages of a subscription are done already, by the verdict on their transaction."""

    def finished(self, messages: Sequence[Message]) -> set[int]:
        """Return the log ids of messages that are done already."""

    def dead(self, subscription: str, limit: int) -> list[tuple[int, str | None]]:
        """Return log id and key of dead letters of a subscription that are done by now, `limit` at most."""


@dataclass(slots=True)
class Outcome:
    """The result of a batch, or of a part of a batch.

    `open`: without a result, because the worker was stopped or the topic is refused. `refused`: topics of which some
    message was not accepted, with the error, as far as known. `next`: the first message without a result; None in the
    last part.
    """

    done: list[Message] = field(default_factory=list)
    parked: list[tuple[Message, Parking]] = field(default_factory=list)
    open: list[Message] = field(default_factory=list)
    refused: dict[str, str | None] = field(default_factory=dict)
    #: True when the destination accepts nothing at the end.
    away: bool = False
    next: Message | None = None

    @property
    def accepted_topics(self) -> set[str]:
        """The topics that the destination accepts, as far as known at the end of the batch."""
        waiting = {message.topic for message, parking in self.parked if parking.state == States.WAITING}
        return set() if self.away else {message.topic for message in self.done} - waiting - self.refused.keys()


class Pending:
    """The messages of one batch without an outcome, and the outcomes since the last part."""

    def __init__(self, messages: list[Message], quota: int, *, parked: bool, now: datetime | None = None) -> None:
        """`quota`: how many messages may be parked as waiting. `parked`: the messages were read from where they are
        parked. `now`: by the database's clock; None: messages do not expire.
        """
        self.messages = messages
        self.quota = quota
        self.parked = parked
        #: The database's clock at the moment 0 of ours.
        self._zero = None if now is None else now - timedelta(seconds=time.monotonic())
        self.findings = Findings()
        #: True when a message failed that is to be tried again.
        self.suspended = False
        self.outcome = Outcome()
        self._part_began = time.monotonic()

    def has_part(self, *, after: float = 0.0) -> bool:
        """Return whether some messages got outcomes and some did not, `after` so many seconds of the present part."""
        some = bool(self.outcome.done or self.outcome.parked) and bool(self.messages)
        return some and time.monotonic() - self._part_began >= after

    def next_part(self, *, away: bool) -> Outcome:
        """Return the outcomes since the last part, and begin another part. `away`: nothing is accepted now."""
        part, self._part_began = self.outcome, time.monotonic()
        part.away = away
        part.next = self.messages[0] if self.messages else None
        self.outcome = Outcome(open=list(part.open), refused=dict(part.refused) if self.parked else {})
        return part

    def heads(self) -> list[Message]:
        """Return the first message of each key, and the messages without a key."""
        return list({message.key or message.id: message for message in reversed(self.messages)}.values())

    def timed(self) -> list[Message]:
        """Return the messages that expire some time, if there is a clock."""
        return [] if self._zero is None else [message for message in self.messages if message.expires_at is not None]

    def seconds_to_expiry(self, messages: Iterable[Message]) -> float:
        """Return the seconds until the first message expires; infinite if none does."""
        moments = [each.expires_at for each in messages if each.expires_at is not None] if self._zero else []
        return (min(moments) - self._now).total_seconds() if moments else math.inf

    def expire(self, messages: Iterable[Message]) -> None:
        """Park expired messages as dead."""
        now = self._now
        late = [(message, EXPIRED) for message in messages if message.expires_at and message.expires_at <= now]
        if late:
            self.resolve([], late)

    @property
    def _now(self) -> datetime:
        """The database's clock; without one, a moment before all others."""
        zero = datetime.min.replace(tzinfo=UTC) if self._zero is None else self._zero
        return zero + timedelta(seconds=time.monotonic())

    def resolve(self, done: Sequence[Message], parked: list[tuple[Message, Parking]]) -> None:
        """Give messages their outcome; park the rest of each held key behind them."""
        self.outcome.done.extend(done)
        if len(done) == len(self.messages) and all(map(is_, done, self.messages)):
            self.messages = []
            return
        if self.outcome.open:
            # They were left open while a call had them.
            answered = {message.id for message in done} | {message.id for message, _ in parked}
            self.outcome.open = [message for message in self.outcome.open if message.id not in answered]
        parked = with_one_head(parked) if len(parked) > 1 else parked
        self.outcome.parked.extend(parked)
        self.suspended |= any(parking.state == States.RETRY for _, parking in parked)
        resolved = {message.id for message in done} | {message.id for message, _ in parked}
        held_keys = {message.key for message, parking in parked if parking.holds and message.key is not None}
        rest = [message for message in self.messages if message.id not in resolved]
        if held_keys:
            self.outcome.parked.extend((message, BEHIND) for message in rest if message.key in held_keys)
            rest = [message for message in rest if message.key not in held_keys]
        self.messages = rest

    def keep_open(self) -> None:
        """Keep all messages open."""
        self.outcome.open.extend(self.messages)
        self.messages = []

    def note_refused(self, errors: Mapping[str, str], *, accepted: Container[str]) -> None:
        """Note the errors of topics. Of what is parked, keep messages of refused topics open, unless `accepted`.

        If the destination accepts nothing, all messages stay open.
        """
        if not self.parked:
            self.outcome.refused |= {} if self.findings.away else errors
            return
        everything = {message.topic: self.findings.away for message in self.messages} if self.findings.away else {}
        self.outcome.refused |= {**everything, **errors}
        self._keep_open({topic for topic in (*everything, *errors) if topic not in accepted})

    def keep_topics_open(self, messages: Iterable[Message]) -> None:
        """Keep all messages of the topics of some messages open, and later messages of the same keys."""
        topics = {message.topic for message in messages}
        errors = self.findings.errors_by_topic(message for message in self.messages if message.topic in topics)
        self.outcome.refused |= {topic: errors.get(topic, self.findings.away) for topic in topics}
        self._keep_open(topics)

    def _keep_open(self, topics: Container[str]) -> None:
        kept, keys = list[Message](), set[str | None]()
        for message in self.messages:
            if message.topic not in topics and message.key not in keys:
                kept.append(message)
                continue
            self.outcome.open.append(message)
            keys.update((message.key,) if message.key is not None else ())
        self.messages = kept
