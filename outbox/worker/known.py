"""Outcomes that are known and not settled, so that a lost connection does not cause a second hand-over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from outbox.model.message import Message
from outbox.model.parking import Parking

#: So many outcomes are remembered; a message whose outcome is forgotten is handed over again.
_MOST = 100_000

#: A message: its log id, and its message id, because a log id may be given out again.
Identity = tuple[int | None, UUID]


class _Known(NamedTuple):
    """An outcome; `parking` None: done. `reading`: 0 is the log, a larger number is the attempt of a parked row."""

    key: str | None
    parking: Parking | None
    reading: int

    def fits(self, message: Message, *, parked: bool) -> bool:
        return self.parking is None or self.reading == _reading(message, parked=parked)


def identity_of(message: Message) -> Identity:
    """Return the log id and the message id."""
    return message.id, message.message_id


class KnownOutcomes:
    """Outcomes that are not settled, over the leases of a subscription in this process.

    Their calls came back late, or the connection was lost before the settle. A message that is read again gets its
    outcome without another call. `parked`, below: the messages were read from where they are parked.

    A settle may be written although the answer is lost. Therefore a parking counts only for the same reading, because
    the written row is a new reading. A message that is done is done from wherever the next read comes.

    Several threads may use the object: a relay may stand for a moment beside its successor.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Identity, _Known] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def among(self, messages: Iterable[Message], *, parked: bool) -> set[Identity]:
        """Return the messages that have an outcome."""
        if not self._outcomes:
            return set()
        with self._lock:
            found = ((each, self._outcomes.get(identity_of(each))) for each in messages)
            return {identity_of(each) for each, known in found if known and known.fits(each, parked=parked)}

    def note(
        self,
        done: Iterable[Message],
        parkings: Iterable[tuple[Message, Parking]] = (),
        *,
        parked: bool = False,
    ) -> None:
        """Remember outcomes, except `behind` and `delayed`, which follow from other messages and from the time."""
        with self._lock:
            for message in done:
                self._note(message, None, parked=parked)
            for message, parking in parkings:
                if parking.state not in ("behind", "delayed") and not (parked and _looks_the_same(message, parking)):
                    self._note(message, parking, parked=parked)

    def _note(self, message: Message, parking: Parking | None, *, parked: bool) -> None:
        if len(self._outcomes) >= _MOST:
            self._outcomes.clear()
        self._outcomes[identity_of(message)] = _Known(message.key, parking, _reading(message, parked=parked))

    def take(self, messages: Sequence[Message], *, parked: bool) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Return the messages that are done, and the parkings of others; forget the outcomes."""
        done, parkings = list[Message](), list[tuple[Message, Parking]]()
        with self._lock:
            for message in messages:
                known = self._outcomes.get(identity_of(message))
                if known is None or not known.fits(message, parked=parked):
                    continue
                del self._outcomes[identity_of(message)]
                if known.parking is None:
                    done.append(message)
                else:
                    parkings.append((message, known.parking))
        return done, parkings

    def hand_over(self, messages: Sequence[Message], *, ordered: bool = True) -> None:
        """Forget the outcomes of messages, and of all messages of their keys, because these are sent again as well.

        Otherwise the destination's last message of the key would be an earlier message. `ordered`: whether keys have an
        order.
        """
        if self._outcomes:
            ids = {identity_of(message) for message in messages}
            keys = {message.key for message in messages if message.key is not None} if ordered else set[str]()
            self._forget(lambda identity, known: identity in ids or known.key in keys)

    def forget(self, ids: Collection[int]) -> None:
        """Forget outcomes by log id, because a person has decided about the messages."""
        self._forget(lambda identity, _: identity[0] in ids)

    def clear(self) -> None:
        """Forget all."""
        self._forget(lambda *_: True)

    def _forget(self, gone: Callable[[Identity, _Known], bool]) -> None:
        with self._lock:
            self._outcomes = {each: known for each, known in self._outcomes.items() if not gone(each, known)}


def _reading(message: Message, *, parked: bool) -> int:
    return message.attempt if parked else 0


def _looks_the_same(message: Message, parking: Parking) -> bool:
    """Return whether a parking leaves a parked row at its attempt: the next reading would look the same."""
    return parking.state != "dead" and parking.attempts == message.attempt - 1
