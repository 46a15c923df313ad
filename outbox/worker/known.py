"""Outcomes that are known and not settled, so that a lost connection does not cause a second hand-over."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
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


#: From where a message was read that gets an outcome: 0 is the log, a larger number is the attempt of a parked row.
Reading = int


def _reading(message: Message, *, parked: bool) -> Reading:
    return message.attempt if parked else 0


class KnownOutcomes:
    """Outcomes of messages that are not settled, over the leases of a subscription in this process.

    The calls that gave them came back after their deadline, or the connection was lost before the settle. Such a
    message gets its outcome when it is read again, without another call.

    A settle may also be written although its answer is lost. Therefore a parking counts only for the same reading: the
    row that it made, or changed, is another one. What is done is done, from wherever it is read.

    Several threads may use the object, because a relay may stand for a moment beside the one that took over.
    """

    def __init__(self) -> None:
        #: The outcome of each message, and the reading that it is of. None: done.
        self._outcomes: dict[Identity, tuple[Parking, Reading] | None] = {}
        self._keys: dict[str, set[Identity]] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def among(self, messages: Iterable[Message], *, parked: bool) -> set[Identity]:
        """Return which of these messages have an outcome. `parked`: they were read from where they are parked."""
        if not self._outcomes:
            return set()
        with self._lock:
            return {identity_of(each) for each in messages if self._fits(each, parked=parked)}

    def _fits(self, message: Message, *, parked: bool) -> bool:
        outcome = self._outcomes.get(identity_of(message), _UNKNOWN)
        return outcome is None or outcome[1] == _reading(message, parked=parked)

    def note(
        self,
        done: Iterable[Message],
        parkings: Iterable[tuple[Message, Parking]] = (),
        *,
        parked: bool = False,
    ) -> None:
        """Remember these outcomes. `parked`: the messages were read from where they are parked.

        Not `blocked` and `delayed`: they follow from other messages and from the time.
        """
        with self._lock:
            for message in done:
                self._note(message, None)
            for message, parking in parkings:
                if parking.state not in ("blocked", "delayed") and not (parked and _looks_the_same(message, parking)):
                    self._note(message, (parking, _reading(message, parked=parked)))

    def _note(self, message: Message, outcome: tuple[Parking, Reading] | None) -> None:
        if len(self._outcomes) >= _MOST:
            self._clear()
        identity = identity_of(message)
        self._outcomes[identity] = outcome
        if message.key is not None:
            self._keys.setdefault(message.key, set()).add(identity)

    def take(self, messages: Sequence[Message], *, parked: bool) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Return which of these messages are done and how others are to be parked; forget these outcomes."""
        done, parkings = list[Message](), list[tuple[Message, Parking]]()
        with self._lock:
            for message in messages:
                if not self._fits(message, parked=parked):
                    continue
                outcome = self._outcomes[identity_of(message)]
                self._forget(message.key, identity_of(message))
                if outcome is None:
                    done.append(message)
                else:
                    parkings.append((message, outcome[0]))
        return done, parkings

    def hand_over(self, messages: Iterable[Message]) -> None:
        """Forget the outcomes of these messages, and of all messages of their keys: what follows is sent again as well.

        Otherwise the destination's last message of the key would be an earlier one.
        """
        if not self._outcomes:
            return
        with self._lock:
            for message in messages:
                self._outcomes.pop(identity_of(message), None)
                if message.key is not None:
                    for identity in self._keys.pop(message.key, ()):
                        self._outcomes.pop(identity, None)

    def forget(self, ids: Collection[int]) -> None:
        """Forget the outcomes of the messages with these log ids, because a person has decided about them."""
        with self._lock:
            gone = {identity for identity in self._outcomes if identity[0] in ids}
            for identity in gone:
                del self._outcomes[identity]
            if gone:
                self._keys = {key: left for key, all in self._keys.items() if (left := all - gone)}

    def _forget(self, key: str | None, identity: Identity) -> None:
        del self._outcomes[identity]
        if key is not None:
            self._keys[key].discard(identity)
            if not self._keys[key]:
                del self._keys[key]

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._outcomes.clear()
        self._keys.clear()


#: Fits no reading.
_UNKNOWN: tuple[None, Reading] = (None, -1)


def _looks_the_same(message: Message, parking: Parking) -> bool:
    """Return whether this parking leaves a parked row at its attempt; its next reading would be taken for this one."""
    return parking.state != "dead" and parking.attempts == message.attempt - 1
