"""The outcome of a batch or of a part of it, and the messages of a batch that have none yet."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.worker.blame import Findings
from outbox.worker.known import Identity, identity_of
from outbox.worker.policy import BLOCKED, EXPIRED


@dataclass(slots=True)
class Outcome:
    """The result of a batch, or of a part of it.

    `open`: without a result, because the worker was stopped or the topic is in `sick`. `next`: the first message that
    has no result yet; None in the last part.
    """

    done: list[Message] = field(default_factory=list)
    parked: list[tuple[Message, Parking]] = field(default_factory=list)
    open: list[Message] = field(default_factory=list)
    sick: set[str] = field(default_factory=set)
    #: `paused`: the batch waited for the destination. `away`: the destination accepts nothing at the end.
    paused: bool = False
    away: bool = False
    next: Message | None = None

    @property
    def accepted_topics(self) -> set[str]:
        """The topics that the destination accepts, as far as is known at the end of the batch."""
        waiting = {message.topic for message, parking in self.parked if parking.state == "waiting"}
        return set() if self.away else {message.topic for message in self.done} - waiting - self.sick


class Clock(Protocol):
    """The clock of the database, as far as it is known here."""

    @property
    def now(self) -> datetime:
        """The moment now."""


class Pending:
    """The messages of one batch that have no outcome yet, and the outcomes since the last part."""

    def __init__(self, messages: list[Message], quota: int, *, parked: bool, clock: Clock | None = None) -> None:
        """`quota`: how many messages may be parked as waiting. `parked`: the messages were read from where they are
        parked. `clock`: by which messages expire; None: they do not.
        """
        self.messages = messages
        self.quota = quota
        self.parked = parked
        self._clock = clock
        self.findings = Findings()
        self.outcome = Outcome()
        self._part_began = time.monotonic()

    def has_part(self, *, after: float = 0.0) -> bool:
        """Return whether messages got outcomes since the last part, which began so many seconds ago, and others not."""
        some = bool(self.outcome.done or self.outcome.parked) and bool(self.messages)
        return some and time.monotonic() - self._part_began >= after

    def next_part(self, *, away: bool) -> Outcome:
        """Return the outcomes since the last part, and begin another part. `away`: nothing is accepted now."""
        part, self._part_began = self.outcome, time.monotonic()
        part.away = away
        part.next = self.messages[0] if self.messages else None
        self.outcome = Outcome(open=list(part.open), sick=set(part.sick), paused=part.paused)
        return part

    def in_turn(self, identities: Container[Identity]) -> list[Message]:
        """Return those of these messages that have no other message of their key before them."""
        found: list[Message] = []
        held: set[str | None] = set()
        for message in self.messages:
            if message.key in held:
                continue
            if identity_of(message) in identities:
                found.append(message)
            elif message.key is not None:
                held.add(message.key)
        return found

    def by_id(self) -> dict[int | None, Message]:
        """Return the messages without an outcome, by log id."""
        return {message.id: message for message in self.messages}

    def heads(self) -> list[Message]:
        """Return the first message of each key, and the messages without a key."""
        return list({message.key or message.id: message for message in reversed(self.messages)}.values())

    def timed(self) -> list[Message]:
        """Return the messages that expire some time, if there is a clock."""
        return [] if self._clock is None else [message for message in self.messages if message.expires_at is not None]

    def expire(self, messages: Iterable[Message]) -> None:
        """Park as dead those of these messages that are expired by now."""
        if self._clock is not None:
            now = self._clock.now
            late = [(message, EXPIRED) for message in messages if message.expires_at and message.expires_at <= now]
            if late:
                self.resolve([], late)

    def resolve(self, done: Sequence[Message], parked: list[tuple[Message, Parking]]) -> None:
        """Give messages their outcome; park as `blocked` the rest of each key that one of them blocks."""
        self.outcome.done.extend(done)
        if len(done) == len(self.messages):
            self.messages = []
            return
        self.outcome.parked.extend(parked)
        resolved = {message.id for message in done} | {message.id for message, _ in parked}
        blocked_keys = {message.key for message, parking in parked if parking.blocks and message.key is not None}
        rest = [message for message in self.messages if message.id not in resolved]
        if blocked_keys:
            self.outcome.parked.extend((message, BLOCKED) for message in rest if message.key in blocked_keys)
            rest = [message for message in rest if message.key not in blocked_keys]
        self.messages = rest

    def leave_all(self) -> None:
        """Leave all messages open."""
        self.outcome.open.extend(self.messages)
        self.messages = []

    def leave_topics(self, messages: Iterable[Message]) -> None:
        """Leave all messages of these messages' topics open, and other messages of the same keys."""
        self.outcome.sick.update(message.topic for message in messages)
        left = [message for message in self.messages if message.topic in self.outcome.sick]
        keys = {message.key for message in left if message.key is not None}
        self.outcome.open.extend(left)
        self.outcome.open.extend(m for m in self.messages if m.topic not in self.outcome.sick and m.key in keys)
        self.messages = [m for m in self.messages if m.topic not in self.outcome.sick and m.key not in keys]
