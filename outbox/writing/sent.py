"""What one transaction has sent, until it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outbox.model.message import Message
from outbox.store.log.append import Appended, LogRef


@dataclass(slots=True)
class Sent:
    """The messages that one transaction has sent.

    `direct`: places and ids of those that their writer is to send itself. `more`: there are others, which need a hint.
    `last`: functions to call in the transaction, right before its commit. An error that one raises ends the
    transaction. `committed`: the commit was seen, and has succeeded. `messages`: those of which listeners were told
    that they are written; `savepoints`: each savepoint set since, with the number of such messages before it.
    """

    direct: list[LogRef] = field(default_factory=list)
    more: bool = False
    last: list[Callable[[], None]] = field(default_factory=list)
    committed: bool = False
    messages: list[Message] = field(default_factory=list)
    savepoints: list[tuple[str, int]] = field(default_factory=list)

    def add(self, written: Appended, *, watched: bool) -> None:
        """Add messages that were appended; `watched`: listeners are told of them."""
        self.direct.extend(written.direct)
        self.more = self.more or len(written.direct) < len(written.messages)
        if watched:
            self.messages.extend(written.messages)

    def set_savepoint(self, name: str) -> None:
        """Note a savepoint, if there is anything that could be rolled back to it."""
        if self.messages:
            self.savepoints.append((name, len(self.messages)))

    def release(self, name: str) -> None:
        """Forget a savepoint, and those that were set after it."""
        del self.savepoints[self._newest(name) or 0 :]

    def roll_back_to(self, name: str) -> list[Message]:
        """Return the messages that are gone with a rollback to a savepoint, which itself stays."""
        newest = self._newest(name)
        # All messages came after a savepoint that is not noted.
        first = 0 if newest is None else self.savepoints[newest][1]
        del self.savepoints[0 if newest is None else newest + 1 :]
        gone = self.messages[first:]
        del self.messages[first:]
        return gone

    def _newest(self, name: str) -> int | None:
        """Return the index of the newest savepoint of that name; None if there is none."""
        return next((i for i in reversed(range(len(self.savepoints))) if self.savepoints[i][0] == name), None)
