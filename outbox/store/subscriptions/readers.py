"""Readers outside of the database, such as an extract to an archive. Retention waits for them, but not for ever.

What such a reader has written elsewhere says how far it is; a copy of that is stored here for the purge. A reader that
made no progress for the length of its hold is released: the purge goes on without it, and its next run finds the gap.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from outbox.errors import SubscriptionError
from outbox.model.position import Position
from outbox.model.subscription import Subscription, check_of, subscription_of
from outbox.store.database import Channel
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

LONGEST_HOLD = timedelta(days=3650)

_REGISTER = """
    INSERT INTO {subscription} (name, kind, destination, created_at) VALUES (:name, 'extract', :archive, {now})
    ON CONFLICT (name) DO NOTHING
"""
#: The lease that every subscription has, which `drop` deletes; no worker takes it.
_LEASE = """
    INSERT INTO {lease} (subscription, generation, partition) VALUES (:name, 1, 0)
    ON CONFLICT (subscription, generation, partition) DO NOTHING
"""
_DECLARE = "UPDATE {subscription} SET topics = :topics, hold_ms = :hold WHERE name = :name AND kind = 'extract'"
_NEWEST = """
    SELECT epoch, n, base FROM {progress} WHERE subscription = :subscription AND generation = :generation
      AND partition = :partition ORDER BY epoch DESC, n DESC LIMIT 1
"""
_APPEND = """
    INSERT INTO {progress} (subscription, generation, partition, epoch, n, base, settled_at)
    VALUES (:subscription, :generation, :partition, :epoch, :n, :base, {now})
    ON CONFLICT (subscription, generation, partition, epoch, n) DO NOTHING
"""
_NOW = "SELECT {now}"


@dataclass(frozen=True, slots=True)
class Hold:
    """The time for which a reader holds retention back, from its last progress on. `released`: that time is over."""

    since: datetime
    until: datetime
    released: bool


class Readers:
    """The readers outside of the database that are registered in one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._subscriptions = Subscriptions(channel)
        self._progress = ProgressLog(channel)

    def register(
        self, name: str, *, archive: str, hold: timedelta, topics: Sequence[str] | None = None
    ) -> Subscription:
        """Create the subscription of an archive, or find it; store the hold and the topics that are given now.

        Retention waits for it from its first progress on.

        Raises:
            SubscriptionError: the name is that of a relay, of another archive or reserved; or the hold is out of range.
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
        """Make sure that an archive may have this name.

        Raises:
            SubscriptionError: the name is that of a relay, of another archive or reserved; or the hold is out of range.
        """
        _require_sound(name, hold)
        self._require_free(self._subscriptions.find(name), name, archive)

    def window(self, name: str) -> int:
        """Return the number of the last window that was stored; 0: there is none, or no reader of this name."""
        reader = self._subscriptions.find(name)
        stored = [] if reader is None else self._channel.rows(_NEWEST, **reader.partition(0).parameters)
        return stored[0][1] if stored else 0

    def advance(self, name: str, window: int, position: Position) -> None:
        """Store how far an archive says it is: it has all that `position` sees, with its `window`-th window.

        If exactly that is stored already, nothing is written, and it does not count as progress. If the archive went
        back, for example because it was restored from a backup, its subscription goes back with it.
        """
        partition = self._subscriptions.get(name).partition(0)
        stored = self._channel.rows(_NEWEST, **partition.parameters)
        epoch, n, base = stored[0] if stored else (0, window - 1, None)
        if (n, base) == (window, str(position)):
            return
        place = {"epoch": epoch + (n >= window), "n": window, "base": str(position)}
        self._channel.run(_APPEND, **partition.parameters, **place)
        self._progress.prune(partition)

    def hold(self, subscription: Subscription) -> Hold | None:
        """Return until when a reader holds retention back, by the database's clock; None: it is no such reader."""
        if subscription.hold is None:
            return None
        settled = self._progress.newest(subscription.partition(0))
        since = subscription.created_at if settled is None else settled.settled_at
        now = self._channel.database.moment(self._channel.rows(_NOW)[0][0])
        until = since + subscription.hold
        return Hold(since, until, released=until <= now)

    def _require_free(self, stored: Subscription | None, name: str, archive: str) -> None:
        if stored is None:
            return
        if stored.kind != "extract":
            raise SubscriptionError(
                f"{name!r} is the name of a subscription of another kind: {stored.kind}, not extract; use another name"
            )
        if stored.destination != archive:
            drop = f"outbox subscriptions drop {shlex.quote(name)}"
            raise SubscriptionError(
                f"{name!r} is registered for the archive {stored.destination}, not for {archive}; use another name, or,"
                f" if it is the same archive in another place, run before: {drop}"
            )


def _require_sound(name: str, hold: timedelta) -> None:
    if not name or subscription_of(name) is not None or name.startswith(check_of("")):
        raise SubscriptionError(f"{name!r} cannot be the name of an extract: others are made by that form; use another")
    if not timedelta(0) < hold <= LONGEST_HOLD:
        raise SubscriptionError(
            f"hold: must be longer than 0 and at most {LONGEST_HOLD.days}d, not {hold}; 30d leaves a month to mend what"
            " stopped the extract"
        )
