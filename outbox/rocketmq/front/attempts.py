"""Attempts: a receive that its client repeats, because the answer was lost, gets the same messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outbox.model.message import Message

#: So many attempts are kept, with so many bytes of ids and messages.
MOST_ATTEMPTS, MOST_BYTES = 16_384, 16 * 1024 * 1024


class Key(NamedTuple):
    """The name of an attempt: `id` is the client's own."""

    client: str
    group: str
    topic: str
    id: str


@dataclass(eq=False, slots=True)
class Attempt:
    """A receive, with the messages under their receipt. `replaced`: a later receive has taken the messages over."""

    key: Key
    receipt: str = ""
    messages: Sequence[Message] = ()
    bytes: int = 0
    replaced: bool = False


class Attempts:
    """The latest receives that may be repeated; in one event loop only."""

    def __init__(self, most: int = MOST_ATTEMPTS, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        #: The oldest first.
        self._kept: dict[Key, Attempt] = {}
        self._bytes = 0

    def begin(self, key: Key) -> Attempt:
        """Return a new attempt, with the messages of an earlier one with the key, which is replaced."""
        attempt, earlier = Attempt(key, bytes=_bytes(key, ())), self._kept.get(key)
        if earlier is not None:
            attempt.receipt, attempt.messages, attempt.bytes = earlier.receipt, earlier.messages, earlier.bytes
            earlier.replaced = True
            self._drop(earlier)
        if key.id:
            self._keep(attempt)
        return attempt

    def got(self, attempt: Attempt, receipt: str, messages: Sequence[Message]) -> bool:
        """Note the messages of an attempt; return False if the attempt was replaced meanwhile."""
        if attempt.replaced:
            return False
        self._drop(attempt)
        attempt.receipt, attempt.messages, attempt.bytes = receipt, messages, _bytes(attempt.key, messages)
        if attempt.key.id and messages:
            self._keep(attempt)
        return True

    def end(self, attempt: Attempt) -> bool:
        """Forget an attempt; return False if it was replaced."""
        self._drop(attempt)
        return not attempt.replaced

    def _keep(self, attempt: Attempt) -> None:
        self._kept[attempt.key] = attempt
        self._bytes += attempt.bytes
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept.values())))

    def _drop(self, attempt: Attempt) -> None:
        if self._kept.get(attempt.key) is attempt:
            del self._kept[attempt.key]
            self._bytes -= attempt.bytes


def _bytes(key: Key, messages: Sequence[Message]) -> int:
    of_messages = (
        len(each.body) + sum(len(name) + len(value) for name, value in each.headers.items()) for each in messages
    )
    return sum(map(len, key)) + sum(of_messages)
