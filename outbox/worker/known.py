"""Outcomes that are known and not settled, so that a lost connection does not cause a second hand-over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from outbox.model.message import Message
from outbox.model.parking import Parking

#: So many outcomes are remembered; a message whose outcome is forgotten is handed over again.
_MOST = 100_000


#: A message: its log id, and its message id, because a log id may be given out again.
Identity = tuple[int | None, UUID]


def identity_of(message: Message) -> Identity:
    """Return the log id and the message id."""
    return message.id, message.message_id


class KnownOutcomes:
    """Outcomes of messages that are not settled, over the leases of a subscription in this process.

    The calls that gave them came back after their deadline, or the connection was lost before the settle. Such a
    message gets its outcome when it is read again, without another call.
    """

    def __init__(self) -> None:
        #: None: done.
        self._outcomes: dict[Identity, Parking | None] = {}
        self._keys: dict[str, set[Identity]] = {}

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def __contains__(self, identity: object) -> bool:
        return identity in self._outcomes

    @property
    def ids(self) -> set[int | None]:
        """The log ids of the messages."""
        return {id for id, _ in self._outcomes}

    def note(self, done: Iterable[Message], parked: Iterable[tuple[Message, Parking]] = ()) -> None:
        """Remember these outcomes. Not `blocked` and `delayed`: they follow from other messages and from the time."""
        for message in done:
            self._note(message, None)
        for message, parking in parked:
            if parking.state not in ("blocked", "delayed"):
                self._note(message, parking)

    def _note(self, message: Message, outcome: Parking | None) -> None:
        if len(self._outcomes) >= _MOST:
            self.clear()
        identity = identity_of(message)
        self._outcomes[identity] = outcome
        if message.key is not None:
            self._keys.setdefault(message.key, set()).add(identity)

    def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Return which of these messages are done and how others are to be parked; forget these outcomes.

        All of the messages have known outcomes.
        """
        done, parked = [], []
        for message in messages:
            identity = identity_of(message)
            outcome = self._outcomes.pop(identity)
            if message.key is not None:
                self._forget(message.key, identity)
            if outcome is None:
                done.append(message)
            else:
                parked.append((message, outcome))
        return done, parked

    def hand_over(self, messages: Iterable[Message]) -> None:
        """Forget the outcomes of all messages of these messages' keys, because what follows in a key is sent again.

        Otherwise the destination's last message of the key would be an earlier one.
        """
        if self._keys:
            for key in {message.key for message in messages if message.key is not None}:
                for identity in self._keys.pop(key, ()):
                    self._outcomes.pop(identity, None)

    def _forget(self, key: str, identity: Identity) -> None:
        self._keys[key].discard(identity)
        if not self._keys[key]:
            del self._keys[key]

    def clear(self) -> None:
        """Forget all."""
        self._outcomes.clear()
        self._keys.clear()
