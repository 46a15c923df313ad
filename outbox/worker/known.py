"""Outcomes that are known and not settled, so that a lost connection does not cause a second hand-over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple
from uuid import UUID

from outbox.model.message import Message
from outbox.model.parking import Parking, States

#: So many outcomes are remembered; a message whose outcome is forgotten is handed over again.
_MOST = 100_000

#: A message: its log id, and its message id, because a log id may be given out again.
Identity = tuple[int | None, UUID]


def identity_of(message: Message) -> Identity:
    """Return the log id and the message id."""
    return message.id, message.message_id


class _Known(NamedTuple):
    """An outcome; `parking` None: done."""

    key: str | None
    parking: Parking | None


class KnownOutcomes:
    """Outcomes that are not settled, over the leases of a partition in this process: done, or a dead letter.

    The call came back late, or the connection was lost before the settle. A message that is read again, from the log
    or from parked rows, gets the outcome without another call.

    Several threads may use the object: a relay may stand for a moment beside its successor.
    """

    def __init__(self) -> None:
        self._outcomes: dict[Identity, _Known] = {}
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def ids(self, messages: Iterable[Message]) -> set[int | None]:
        """Return the log ids of the messages with an outcome."""
        return {each.id for each in messages if identity_of(each) in self._outcomes}

    def among(
        self, messages: Sequence[Message], *, ordered: bool
    ) -> tuple[list[Message], list[tuple[Message, Parking]]]:
        """Return the done messages, and the dead letters. `ordered`: none behind a message without an outcome."""
        done, dead, behind = list[Message](), list[tuple[Message, Parking]](), set[str | None]()
        for message in messages:
            known = self._outcomes.get(identity_of(message))
            if known is None:
                behind |= {message.key} if ordered and message.key is not None else set()
            elif message.key in behind:
                continue
            elif known.parking is None:
                done.append(message)
            else:
                dead.append((message, known.parking))
        return done, dead

    def note(self, done: Iterable[Message], parkings: Iterable[tuple[Message, Parking]] = ()) -> None:
        """Remember outcomes. Any other parking than a dead letter follows from another call, or from the time."""
        with self._lock:
            for message, parking in chain(((message, None) for message in done), _dead(parkings)):
                if len(self._outcomes) >= _MOST:
                    self._outcomes.clear()
                self._outcomes[identity_of(message)] = _Known(message.key, parking)

    def settled(self, done: Iterable[Message], parkings: Iterable[tuple[Message, Parking]]) -> None:
        """Forget outcomes that are settled. The outcome of a message that only waits now counts later."""
        if self._outcomes:
            ids = {identity_of(message) for message in chain(done, (message for message, _ in _dead(parkings)))}
            self._forget(lambda identity, _: identity in ids)

    def hand_over(self, messages: Sequence[Message], *, ordered: bool) -> None:
        """Forget the outcomes of messages, and of all messages of the keys, because these are sent again as well.

        Otherwise the destination's last message of the key would be an earlier message. `ordered`: keys have an order.
        """
        if self._outcomes:
            ids = set(map(identity_of, messages))
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


def _dead(parkings: Iterable[tuple[Message, Parking]]) -> Iterator[tuple[Message, Parking]]:
    return ((message, parking) for message, parking in parkings if parking.state == States.DEAD)
