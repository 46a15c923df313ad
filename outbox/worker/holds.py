"""The held keys of one partition, of which nothing is handed over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from outbox.model.message import Message
from outbox.model.parking import Held
from outbox.store.subscriptions.parked import Parked


class Holds:
    """The held keys: stored among parked messages, or paused by a person. Those of hanging calls are beside them.

    The keys are in memory, because only the lease holder changes parked rows.
    """

    def __init__(self, parked: Parked, most: int, paused: Collection[str | None] = ()) -> None:
        """`most`: so many keys are kept in memory; if there are more, the database is asked. `paused`: keys that are
        held by order of a person.
        """
        self._parked = parked
        self._most = most
        self.paused = frozenset(key for key in paused if key is not None)
        keys = parked.keys(most)
        self._keys: set[str] | None = None if keys is None else keys | self.paused

    def and_paused(self, called: Held) -> Held:
        """Return what hanging calls hold, and the paused keys: parked messages of both are not tried."""
        return replace(called, keys={*called.keys, *self.paused}) if self.paused else called

    def among(self, messages: Sequence[Message]) -> Collection[str | None]:
        """Return the stored and paused keys, at least among the keys of these messages."""
        if self._keys is not None:
            return self._keys
        return self.paused | self._parked.held_among({m.key for m in messages if m.key is not None})

    def hold(self, keys: Iterable[str | None]) -> None:
        """Hold keys from now on."""
        if self._keys is not None:
            self._keys.update(key for key in keys if key is not None)
            if len(self._keys) > self._most:
                self._keys = None

    def reconsider(self, keys: Iterable[str | None]) -> None:
        """Ask the database which keys are still held, after messages were done, discarded or replayed."""
        gone = {key for key in keys if key is not None}
        if gone and self._keys is not None:
            self._keys.difference_update(gone)
            self.hold(self._parked.held_among(gone) | self.paused.intersection(gone))
