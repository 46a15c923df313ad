"""Readers outside of the database, such as an extract to an archive. Retention waits for readers, but not for ever.

The archive says how far the reader is; a copy of its position is stored here for the purge. A reader without progress
for the length of the hold is released: the purge goes on, and the next run of the reader finds the gap.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta

from outbox.errors import SubscriptionError
from outbox.model.position import Position
from outbox.model.subscription import Subscription, check_of, subscription_of
from outbox.store.database import Channel
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

LONGEST_HOLD = timedelta(days=3650)

_REGISTER = """
    {insert_once} {subscription} (name, kind, destination, created_at) VALUES (:name, 'extract', :archive, {now})
    {unless_there}
"""
#: The lease that every subscription has, which `drop` deletes; no worker takes it.
_LEASE = """
    {insert_once} {lease} (subscription, generation, partition) VALUES (:name, 1, 0) {unless_there}
"""
_DECLARE = "UPDATE {subscription} SET topics = :topics, hold_ms = :hold WHERE name = :name AND kind = 'extract'"


class Readers:
    """The registered readers outside of the database."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._subscriptions = Subscriptions(channel)
        self._progress = ProgressLog(channel)

    def register(
        self, name: str, *, archive: str, hold: timedelta, topics: Sequence[str] | None = None
    ) -> Subscription:
        """Create the subscription of an archive, or find it; store the given hold and topics.

        Retention waits from the first progress on.
        """
        self.require_registrable(name, archive=archive, hold=hold)
        with self._subscriptions.changing():
            self._channel.run(_REGISTER, name=name, archive=archive)
            # Another process may have created a subscription of this name since the check above.
            self._require_free(self._subscriptions.get(name), name, archive)
            self._channel.run(_LEASE, name=name)
            declared = {
                "name": name,
                "topics": None if topics is None else json.dumps(sorted(set(topics))),
                "hold": hold // timedelta(milliseconds=1),
            }
            self._channel.run(_DECLARE, **declared)
        return self._subscriptions.get(name)

    def require_registrable(self, name: str, *, archive: str, hold: timedelta) -> None:
        """Raise if an archive cannot have the name, of a relay, another archive or reserved, or the hold is wrong."""
        _require_sound(name, hold)
        self._require_free(self._subscriptions.find(name), name, archive)

    def window(self, name: str) -> int:
        """Return the number of the last window that was stored; 0: there is none, or no reader of this name."""
        reader = self._subscriptions.find(name)
        stored = None if reader is None else self._progress.newest(reader.partition(0))
        return 0 if stored is None else stored.n

    def advance(self, name: str, window: int, position: Position) -> None:
        """Store how far an archive says it is: it has all that `position` sees, with the `window`-th window.

        A position that is stored already is not written, and does not count as progress. If the archive went back, for
        example by a restore from a backup, the subscription goes back, too.
        """
        partition = self._subscriptions.get(name).partition(0)
        stored = self._progress.newest(partition)
        if stored is not None and (stored.n, stored.progress.base) == (window, position):
            return
        epoch = 0 if stored is None else stored.epoch + (stored.n >= window)
        self._progress.append(partition, epoch, window, position)
        self._progress.prune(partition)

    def _require_free(self, stored: Subscription | None, name: str, archive: str) -> None:
        if stored is None:
            return
        if stored.kind != "extract":
            raise SubscriptionError(
                f"{name!r} is the name of a subscription of another kind: {stored.kind}, not extract; use another name"
            )
        if stored.destination != archive:
            drop = self._channel.database.commands.line("subscriptions", "drop", name)
            raise SubscriptionError(
                f"{name!r} is registered for the archive {stored.destination}, not for {archive}; use another name, or,"
                f" if it is the same archive in another place, run before: {drop}"
            )


def _require_sound(name: str, hold: timedelta) -> None:
    if not name or subscription_of(name) is not None or name.startswith(("--", check_of(""))):
        raise SubscriptionError(f"{name!r} cannot be the name of an extract: others are made by that form; use another")
    if not timedelta(0) < hold <= LONGEST_HOLD:
        raise SubscriptionError(
            f"hold: must be longer than 0 and at most {LONGEST_HOLD.days}d, not {hold}; 30d leaves a month to mend what"
            " stopped the extract"
        )
