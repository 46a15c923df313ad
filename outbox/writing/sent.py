"""The messages that a transaction has sent, until it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outbox.model.message import Message


@dataclass(slots=True)
class Sent:
    """The messages that a transaction has sent.

    `needs_hint`: something was written that workers wait for. `last`: functions to call right before the commit; an
    error ends the transaction. `committed`: the commit was seen, and has succeeded. `messages`: the messages of
    `Written` events so far; `savepoints`: each savepoint since the first such message, with the number of messages
    before it.
    """

    needs_hint: bool = False
    last: list[Callable[[], None]] = field(default_factory=list)
    committed: bool = False
    messages: list[Message] = field(default_factory=list)
    savepoints: list[tuple[str, int]] = field(default_factory=list)

    def add(self, messages: Sequence[Message], *, watched: bool) -> None:
        """Add messages that were appended; `watched`: listeners get an event."""
        self.needs_hint = self.needs_hint or bool(messages)
        if watched:
            self.messages.extend(messages)

    def set_savepoint(self, name: str) -> None:
        """Note a savepoint, unless no message is there that a rollback could concern."""
        if self.messages:
            self.savepoints.append((name, len(self.messages)))

    def release(self, name: str) -> None:
        """Forget a savepoint, and all later savepoints."""
        del self.savepoints[self._newest(name) or 0 :]

    def roll_back_to(self, name: str) -> list[Message]:
        """Return the messages that a rollback to a savepoint undoes; the savepoint itself stays."""
        newest = self._newest(name)
        # All messages came after a savepoint that is not noted.
        first = 0 if newest is None else self.savepoints[newest][1]
        del self.savepoints[0 if newest is None else newest + 1 :]
        gone = self.messages[first:]
        del self.messages[first:]
        return gone

    def _newest(self, name: str) -> int | None:
        return next((i for i in reversed(range(len(self.savepoints))) if self.savepoints[i][0] == name), None)
