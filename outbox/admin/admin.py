"""The orders and the questions of an operator, as one object: `Outbox.admin`. The command line prints its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Unpack
from uuid import UUID

from outbox.admin import commands, pausing, subscriptions
from outbox.admin.backfill import backfill
from outbox.admin.borrowing import NO_WAIT, WAIT
from outbox.admin.decisions import Deciding, purge_dead
from outbox.admin.erase import erase
from outbox.admin.face import awaited
from outbox.admin.half import HalfMessages
from outbox.admin.keys import HeldKeys
from outbox.admin.looking import Looking
from outbox.admin.results import Removal, SplitResult, SubscriptionDetails
from outbox.admin.split import split
from outbox.admin.subscriptions import Properties
from outbox.admin.trace import Messages
from outbox.model.limits import checked_key, require_flags, require_notes, require_wait
from outbox.model.subscription import Start, Subscription, require_start
from outbox.runtime.process import user_and_host
from outbox.store.database import Channel
from outbox.store.operations.erasure import Erased
from outbox.store.operations.purge import Purge, Purged
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.subscriptions import Subscriptions


class Admin(Looking, HeldKeys, Messages, Deciding, HalfMessages):
    """Answers an operator's questions about an outbox, and carries out orders; `outbox.admin` is one.

    Each call opens a connection, and closes the connection at the end. So calls may overlap; those of `connected` share
    a connection. The results are frozen, with the fields of `--json`.

    Args:
        where: the database of an outbox; or a connection for all calls, one after the other.

    Raises:
        TypeError: `where` is something else, such as an engine.
    """

    def subscriptions(self) -> tuple[SubscriptionDetails, ...]:
        """Return all subscriptions with their properties and workers, sorted by name."""
        with self._channel() as channel:
            return subscriptions.details(channel, Subscriptions(channel).all())

    def create(self, name: str, *, start: Start = "earliest", **properties: Unpack[Properties]) -> SubscriptionDetails:
        """Make the subscription of a relay before its first worker; or find the same subscription.

        Args:
            name: of the subscription.
            start: "earliest", "latest" or a moment.
            properties: `destination`, which is needed, and `topics`, `tags`, `filter`, `on_dead`, `grace`, `ordered`,
                `compact`, `partitions`.

        Raises:
            SubscriptionError: a subscription of this name has other properties, or a route has the topics.
        """
        with self._channel_that_reads_leases() as channel:
            return self._details(channel, subscriptions.create(channel, name, start, properties))

    def alter(
        self, name: str, *, wait: timedelta = WAIT, by: str | None = None, **properties: Unpack[Properties]
    ) -> SubscriptionDetails:
        """Give a subscription other properties, as `outbox subscriptions alter` does, while workers go on.

        Args:
            name: of the subscription.
            wait: for how long a worker is asked for its lease.
            by: the person; None: user and host of the process.
            properties: those of `create`; `partitions` is a change of its own.

        Raises:
            SubscriptionError: the change does not fit the subscription, or a worker keeps the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        with self._channel() as channel:
            return self._details(channel, subscriptions.alter(channel, name, wait, properties, by=by))

    def split(
        self,
        name: str,
        topics: Sequence[str],
        *,
        destination: str,
        as_name: str | None = None,
        wait: timedelta = WAIT,
        by: str | None = None,
    ) -> SplitResult:
        """Give topics of a subscription to a new subscription, which begins exactly at the position of the old.

        Args:
            name: of the subscription with the topics.
            topics: names and patterns.
            destination: of the new subscription, a URL.
            as_name: of the new subscription; None: the name of a route with the topics, such as `relay:orders.*`, also
                if `name` is a route.
            wait: for how long a worker is asked for its lease.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError, LeaseLostError: as `alter`.
        """
        require_notes(by=by)
        with self._channel() as channel:
            to = subscriptions.checked_destination(destination, Subscriptions(channel).get(name))
            *both, moved = split(channel, name, topics, destination=to, as_name=as_name, wait=wait, by=by)
            origin, made = subscriptions.details(channel, both)
            return SplitResult(split=origin, made=made, moved=moved)

    def backfill(
        self, name: str, topics: Sequence[str], *, start: Start = "earliest", by: str | None = None
    ) -> SubscriptionDetails:
        """Have workers handle earlier messages of topics beside a subscription, up to now; return the backfill.

        Args:
            name: of the subscription.
            topics: names and patterns.
            start: "earliest" or a moment.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: another backfill is under way, or the subscription cannot have one.
        """
        require_notes(by=by)
        with self._channel_that_reads_leases() as channel:
            return self._details(channel, backfill(channel, name, topics, start, by=by))

    def pause(
        self,
        name: str,
        *,
        key: str | None = None,
        rate: float | None = None,
        reason: str | None = None,
        by: str | None = None,
    ) -> tuple[SubscriptionDetails, ...]:
        """Let the workers of a subscription hand nothing over, or less; return all that are paused.

        Args:
            name: of the subscription; its backfill is paused as well.
            key: only messages of the key are held back.
            rate: so many messages a second go on; None: none.
            reason: why; `outbox status` shows it.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: the subscription cannot be paused, or the rate is wrong.
            InvalidMessageError: no message can have the key, or a text is too long, or no text.
        """
        with self._channel_that_reads_leases() as channel:
            found = pausing.pause(channel, name, key=key, rate=rate, by=by or user_and_host(), reason=reason)
            return subscriptions.details(channel, found)

    def resume(self, name: str, *, key: str | None = None, by: str | None = None) -> tuple[SubscriptionDetails, ...]:
        """Take a pause back, of the subscription or of one key; return all that go on.

        Args:
            name: of the subscription.
            key: only messages of the key go on.
            by: the person; None: user and host of the process.

        Raises:
            SubscriptionError: there is no such pause.
        """
        with self._channel_that_reads_leases() as channel:
            return subscriptions.details(channel, pausing.resume(channel, name, key=key, by=by))

    def reset(
        self,
        name: str,
        start: Start,
        *,
        wait: timedelta = NO_WAIT,
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Removal:
        """Let a subscription begin again at another position, and delete its parked messages.

        Args:
            name: of the subscription.
            start: "earliest", "latest" or a moment.
            wait: for how long a worker at work is asked for its lease; 0: not at all.
            by: the person; None: user and host of the process.
            rehearsal: change nothing, and return what would go.

        Raises:
            SubscriptionError: the kind has no such position, or a worker holds the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        require_start(start)
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            meant, parked = subscriptions.with_followers(channel, name, backfills=False)
            commands.require_resettable(meant[0], channel.database.commands)
            gone = parked if rehearsal else commands.reset(channel, name, start, wait=wait, by=by)
            return Removal(kind=meant[0].kind, names=tuple(each.name for each in meant), parked=gone)

    def drop(self, name: str, *, by: str | None = None, rehearsal: bool = False) -> Removal:
        """Forget a subscription, with its position and its parked messages, while no worker runs.

        Args:
            name: of the subscription; its backfill goes as well.
            by: the person; None: user and host of the process.
            rehearsal: change nothing, and return what would go.

        Raises:
            SubscriptionError: a worker holds the lease. Nothing changed.
            LeaseLostError: a worker took the lease meanwhile. Nothing changed.
        """
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            meant, parked = subscriptions.with_followers(channel, name)
            names = [each.name for each in meant] if rehearsal else commands.drop(channel, name, by=by)
            return Removal(kind=meant[0].kind, names=tuple(names), parked=parked)

    def purge(
        self,
        older_than: timedelta,
        *,
        keep_dead: timedelta | None = None,
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Purged:
        """Delete old messages that every subscription has passed, in small batches; see `outbox purge`.

        Args:
            older_than: the age by the database's clock.
            keep_dead: discard what has been a dead letter for longer, by a live worker or here; None: dead letters
                stay.
            by: the person; None: user and host of the process.
            rehearsal: delete nothing, and count.

        Raises:
            SubscriptionError: there is no subscription, so nobody can tell which messages are needed.
            ValueError: an age is below 0, or above 100 years.
            LeaseLostError: a worker took the lease of a subscription while its dead letters were discarded.
        """
        require_wait("older_than", older_than)
        if keep_dead is not None:
            require_wait("keep_dead", keep_dead)
        require_flags(rehearsal=rehearsal)
        require_notes(by=by)
        with self._channel() as channel:
            if not rehearsal:
                with channel.transaction():
                    note(channel, "purge", by=by, choice={"older_than": older_than, "keep_dead": keep_dead})
            purged = Purge(channel).run(older_than, rehearsal=rehearsal)
            dead, behind = purge_dead(channel, keep_dead, by=by, rehearsal=rehearsal)
            return replace(purged, dead_letters=dead, behind=behind)

    def erase(
        self,
        *,
        keys: Sequence[str] = (),
        message_ids: Sequence[UUID] = (),
        by: str | None = None,
        rehearsal: bool = False,
    ) -> Erased:
        """Delete the messages of a person that every subscription has passed, and discard their dead letters.

        Messages that are still to be delivered stay, and are counted: call again after the delivery.

        Args:
            keys: the messages with one of these keys.
            message_ids: the messages with one of these ids, as `send` returned them.
            by: the person who decides; None: user and host of the process.
            rehearsal: delete nothing, and count.

        Raises:
            SubscriptionError: there is no subscription, so nobody can tell which messages are needed.
            InvalidMessageError: no message can have a key, or `by` cannot be stored.
            TypeError: one text is given in place of a list, or an id is no UUID.
        """
        for field, given in {"keys": keys, "message_ids": message_ids}.items():
            if isinstance(given, str):
                # Its letters would be taken for keys, and the messages of others would go.
                raise TypeError(f"{field} must be a list, and not one text: {given!r:.80}; pass […]")
        for id in message_ids:
            if not isinstance(id, UUID):
                raise TypeError(f"message_ids must be UUIDs, not {id!r:.80}; pass the ids that send has returned")
        require_notes(by=by)
        require_flags(rehearsal=rehearsal)
        for key in keys:
            checked_key(key)
        with self._channel() as channel:
            by = by or user_and_host()
            return erase(channel, keys=keys, message_ids=message_ids, by=by, rehearsal=rehearsal)

    asubscriptions = awaited(subscriptions)
    acreate = awaited(create)
    aalter = awaited(alter)
    asplit = awaited(split)
    abackfill = awaited(backfill)
    apause = awaited(pause)
    aresume = awaited(resume)
    areset = awaited(reset)
    adrop = awaited(drop)
    apurge = awaited(purge)
    aerase = awaited(erase)

    @staticmethod
    def _details(channel: Channel, found: Subscription) -> SubscriptionDetails:
        (known,) = subscriptions.details(channel, [found])
        return known

    @contextmanager
    def _channel_that_reads_leases(self) -> Iterator[Channel]:
        """Do as `_channel`, for an order that takes no lease, but reads leases for its answer.

        A role without the right to read leases is refused here, and has ordered nothing.
        """
        with self._channel() as channel:
            Leases(channel).require_readable()
            yield channel
