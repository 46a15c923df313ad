"""Whose fault a failure is: the message's, or the destination's.

A handler that raises, or comes back too late, does not name the cause. So a failure counts against a message only when
the message was alone in its call, and the destination has accepted another message since the previous failure.
Therefore an outage causes no dead letters, and a message that crashes its handler does not stop the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from outbox.model.message import Message


@dataclass(slots=True)
class Findings:
    """The facts that one batch has shown about the destination so far."""

    #: Ids of messages that failed since the destination last accepted something: others are tried first.
    tried: set[int | None] = field(default_factory=set)
    #: Topics of the log that are not accepted, with the last error: messages of others are tried first.
    refused: dict[str, str] = field(default_factory=dict)
    #: The last error of each message that was not accepted, by log id.
    errors: dict[int | None, str] = field(default_factory=dict)
    #: Why the destination accepts nothing at all, since it last accepted something.
    away: str | None = None
    #: True when the destination has accepted a message of the batch.
    some_accepted: bool = False
    #: True when several messages failed together, and nobody knows which one failed.
    unclear: bool = False

    @property
    def seek_accepted(self) -> bool:
        """True while a topic is refused, and messages of others together may show whether the destination is away."""
        return bool(self.refused) and not (self.some_accepted or self.unclear or self.away is not None)

    def accepted(self, messages: Iterable[Message]) -> None:
        """Note that the destination has accepted messages of the batch."""
        self.tried.clear()
        self.away, self.some_accepted = None, True
        for message in messages if self.refused else ():
            self.refused.pop(message.topic, None)

    def failed(self, message: Message, error: str) -> None:
        """Note a message that failed alone, without blame."""
        self.tried.add(message.id)
        self.errors[message.id] = error

    def failed_twice(self, topic: str, pending: Iterable[Message]) -> bool:
        """Return whether two messages of a topic have failed alone; `pending`: the messages without an outcome."""
        return sum(m.topic == topic for m in pending if m.id in self.tried) > 1

    def errors_by_topic(self, messages: Iterable[Message]) -> dict[str, str]:
        """Return, by topic, why messages were not accepted, as far as an error is known."""
        return {m.topic: self.errors[m.id] for m in messages if m.id in self.errors} if self.errors else {}

    def error_of(self, message: Message) -> str:
        """Return the last error of a message that was not accepted, or of its topic, or a general text."""
        of_topic = self.refused.get(message.topic, "not accepted, and there was nothing else to try")
        return self.errors.get(message.id, of_topic)

    def error_of_all(self, errors: Iterable[str]) -> str | None:
        """Return why the destination accepts nothing at all: as the destination says, or if several topics have one and
        the same error. `errors`: of the topics; without errors the answer is None.
        """
        found = list(errors)
        alike = len(found) > 1 and len(set(found)) == 1 and not self.some_accepted
        return (self.away or (found[0] if alike else None)) if found else None


class Blame:
    """The messages that failed alone in a call, and how much the destination has accepted since; over all batches."""

    def __init__(self) -> None:
        #: How many messages were accepted.
        self.count = 0
        #: By log id, the number of accepted messages at the first failure; in the order of the last failures.
        self._failed_alone: dict[int | None, int] = {}
        #: How often in a row a batch had to pause, because nothing was accepted.
        self.pauses = 0

    def accepted(self, count: int) -> None:
        """Note that the destination has accepted so many messages."""
        self.count += count
        self.pauses = 0

    def accepted_since_failure(self, message: Message) -> bool:
        """Return whether the destination has accepted another message since a message failed alone."""
        return self.count > self._failed_alone.get(message.id, self.count)

    def failed_alone(self, message: Message) -> bool:
        """Note that a message failed alone; return whether the failure counts against the message."""
        counts = self.accepted_since_failure(message)
        self._note(message, self.count)
        return counts

    def refused_alone(self, message: Message) -> None:
        """Note that the destination was unavailable for a message alone; earlier accepted messages still count."""
        self._note(message, self._failed_alone.get(message.id, self.count))

    def _note(self, message: Message, accepted: int) -> None:
        self._failed_alone.pop(message.id, None)
        self._failed_alone[message.id] = accepted

    @property
    def some_suspects(self) -> bool:
        """True when some messages have failed alone."""
        return bool(self._failed_alone)

    def is_suspect(self, message: Message) -> bool:
        """Return whether a message has failed alone: its next call comes after all others, and has no other message."""
        return message.id in self._failed_alone

    def next_suspect(self, messages: Iterable[Message]) -> list[Message]:
        """Return the message whose last failure was first; an empty list if no message is a suspect."""
        suspects = {message.id: message for message in messages}
        return [suspects[id] for id in self._failed_alone if id in suspects][:1] if suspects else []

    def forget(self, messages: Iterable[Message]) -> None:
        """Forget the failures of messages that will not be handled again."""
        if self._failed_alone:
            for message in messages:
                self._failed_alone.pop(message.id, None)
