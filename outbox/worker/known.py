"""Messages that were accepted and not settled: a lost connection must not cause a second hand-over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from uuid import UUID

from outbox.model.message import Message

#: So many messages are remembered; a message that is forgotten is handed over again.
_MOST = 100_000

#: A message: its log id, and its message id, because a log id may be given out again.
Identity = tuple[int | None, UUID]


def identity_of(message: Message) -> Identity:
    """Return the log id and the message id."""
    return message.id, message.message_id


class KnownOutcomes:
    """Messages that were accepted and not settled, over the leases of a partition in this process.

    The call came back late, or the connection was lost before the settle. A message that is read again, from the log
    or from parked rows, is done without another call.

    Several threads may use the object: a relay may stand for a moment beside its successor.
    """

    def __init__(self) -> None:
        #: With their keys.
        self._done: dict[Identity, str | None] = {}
        self._lock = threading.Lock()

    def among(self, messages: Sequence[Message], *, ordered: bool) -> list[Message]:
        """Return the messages that were accepted. `ordered`: only if no other message of the key is in front."""
        if not self._done:
            return []
        found, behind = list[Message](), set[str | None]()
        for message in messages:
            if identity_of(message) not in self._done:
                behind |= {message.key} if ordered and message.key is not None else set()
            elif message.key not in behind:
                found.append(message)
        return found

    def note(self, done: Iterable[Message]) -> None:
        """Remember messages."""
        with self._lock:
            for message in done:
                if len(self._done) >= _MOST:
                    self._done.clear()
                self._done[identity_of(message)] = message.key

    def settled(self, messages: Sequence[Message]) -> None:
        """Forget messages."""
        self.hand_over(messages, ordered=False)

    def hand_over(self, messages: Sequence[Message], *, ordered: bool) -> None:
        """Forget messages, and all messages of their keys, because these are sent again as well.

        Otherwise the destination's last message of the key would be an earlier message. `ordered`: keys have an order.
        """
        if self._done:
            ids = {identity_of(message) for message in messages}
            keys = {message.key for message in messages if message.key is not None} if ordered else set[str]()
            self._forget(lambda identity, key: identity in ids or key in keys)

    def forget(self, ids: Collection[int]) -> None:
        """Forget messages by log id, because a person has decided about them."""
        self._forget(lambda identity, _: identity[0] in ids)

    def clear(self) -> None:
        """Forget all."""
        self._forget(lambda *_: True)

    def _forget(self, gone: Callable[[Identity, str | None], bool]) -> None:
        with self._lock:
            self._done = {each: key for each, key in self._done.items() if not gone(each, key)}
