"""Subscriptions: named readers of the log, each with a selection, a destination and a policy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from outbox.errors import SubscriptionError
from outbox.model.pausing import Pauses, read_form, stored_form
from outbox.model.position import EARLIEST, Position, Progress
from outbox.model.subscription import (
    AT,
    Declaration,
    Start,
    Subscription,
    grace_milliseconds,
    subscription_of,
)
from outbox.runtime.failpoints import crash_point
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row
from outbox.store.log.log import Log, last_id_before
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.generations import Generations
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.refusals import require_fitting, require_partitions, require_same

#: The columns of which `Subscriptions.of` makes a subscription.
COLUMNS = (
    "name, topics, destination, on_dead, partitions, generation, created_at, grace_ms, kind, tags, hold_ms, stop_at,"
    " next_partitions, ordered, compact, filter, pauses"
)
_FIND = f"SELECT {COLUMNS} FROM {{subscription}} WHERE name = :name"
_ALL = f"SELECT {COLUMNS} FROM {{subscription}} ORDER BY name"
_CREATE = """
    {insert_once} {subscription}
        (name, topics, tags, filter, destination, on_dead, partitions, generation, created_at, grace_ms, kind, ordered,
         compact, pauses)
    VALUES (:name, :topics, :tags, :filter, :destination, :on_dead, :partitions, :generation, {now}, :grace_ms, :kind,
            :ordered, :compact, :pauses) {unless_there}
"""
_DECLARE = """
    UPDATE {subscription} SET topics = :topics, tags = :tags, filter = :filter, destination = :destination,
           on_dead = :on_dead, ordered = :ordered, compact = :compact
    WHERE name = :name AND destination IS NULL
"""
_ALTER = """
    UPDATE {subscription} SET topics = :topics, tags = :tags, filter = :filter, destination = :destination,
           on_dead = :on_dead, grace_ms = :grace_ms, ordered = :ordered, compact = :compact
    WHERE name = :name
"""
_PAUSE = "UPDATE {subscription} SET pauses = :pauses WHERE name = :name"
#: Compared with what was read before, so that it never undoes a change that was ordered meanwhile.
_STORE_HOSTS = """
    UPDATE {subscription} SET destination = :destination WHERE name = :name AND destination = :stored
"""


class Subscriptions:
    """All subscriptions of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands = channel.database.commands

    def find(self, name: str) -> Subscription | None:
        """Return the subscription of that name; None: there is none."""
        rows = self._channel.rows(_FIND, name=name)
        return self.of(rows[0]) if rows else None

    def all(self) -> list[Subscription]:
        """Return all subscriptions, sorted by name."""
        return [self.of(row) for row in self._channel.rows(_ALL)]

    def get(self, name: str) -> Subscription:
        """Return the subscription of that name.

        Raises:
            SubscriptionError: there is none; the error says which there are.
        """
        found = self.find(name)
        if found is None:
            known = ", ".join(s.name for s in self.all()) or "none"
            raise SubscriptionError(f"there is no subscription {name!r}; there are: {known}")
        return found

    def get_all(self, name: str) -> list[Subscription]:
        """Return the subscription of that name, or all instances of the broadcast consumer; raises as `get`."""
        instances = [each for each in self.all() if each.kind == "broadcast" and each.name.startswith(name + AT)]
        return [self.get(name)] if not instances or self.find(name) is not None else instances

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Begin a transaction beside which nobody else declares, alters, splits or drops a subscription.

        All such changes are read and written inside, so that none acts on a stale state. A position may be captured
        inside before anything is written.
        """
        lock = self._channel.database.dialect.locks.subscriptions
        with self._channel.transaction():
            if lock is not None:
                self._channel.rows(lock)
            yield

    def declare(self, declared: Declaration, start: Start | None = "earliest") -> Subscription:
        """Find the subscription, or create it at `start`; None: the subscription has to be there.

        A subscription without a destination gets the declared selection, destination and policy. Any number of
        processes may declare at once: the first creates the subscription, and the others find it.

        Raises:
            SubscriptionError: the stored selection, destination or policy differs (two workers of one name with
                different selections would pass over each other's messages); a route has the topics of a new
                subscription; or there is no start for a new one.
        """
        stored = self.check(declared)
        if stored is not None and (stored.destination is not None or declared.destination is None):
            return stored
        with self.changing():
            # Checked again, because another one may have been declared or changed before the lock was taken.
            stored = self.check(declared)
            crash_point("subscription.checked")
            if stored is None:
                self._create(declared, start)
            elif stored.destination is None and declared.destination is not None:
                self._channel.run(_DECLARE, **_row(declared) | {"on_dead": declared.on_dead or "block"})
                # Nobody has worked for it yet, so its one partition stands where all of them begin.
                if declared.partitions is not None:
                    Generations(self._channel).order(stored, declared.partitions)
            stored = self.get(declared.name)
            require_same(stored, declared, self.all(), self._commands)
        return stored

    def check(self, declared: Declaration) -> Subscription | None:
        """Refuse what `declare` would refuse, and write nothing; return the stored subscription, or None."""
        if declared.partitions is not None:
            require_partitions(declared.name, declared.kind, declared.partitions, self._channel.database.slots)
        known = self.all()
        stored = require_fitting(declared, known, self._commands)
        for each in declared.beside:
            try:
                require_fitting(each, known, self._commands)
            except SubscriptionError as error:
                raise SubscriptionError(f"{declared.name} waits until all routes can begin: {error}") from None
        return stored

    def store_hosts(self, stored: Subscription, declared: Declaration) -> Subscription:
        """Store the destination as this worker writes it, if another worker wrote other hosts.

        So the hosts of a cluster can be exchanged one by one.
        """
        if declared.destination in (None, stored.destination):
            return stored
        moved = {"name": stored.name, "destination": declared.destination, "stored": stored.destination}
        with self.changing():
            self._channel.run(_STORE_HOSTS, **moved)
        return self.get(stored.name)

    def alter(self, changed: Subscription) -> None:
        """Store another selection, destination or policy. Call it inside `changing`; the caller must hold the lease."""
        crash_point("subscription.checked")
        self._channel.run(_ALTER, **_row(changed))

    def pause(self, name: str, pauses: Pauses) -> None:
        """Store what is paused of a subscription. Call it inside `changing`; workers follow within a poll."""
        self._channel.run(_PAUSE, name=name, pauses=stored_form(pauses))

    def repartition(self, name: str, partitions: int) -> None:
        """Give a subscription another number of partitions, or order it; see `Generations.order`.

        Call it inside `changing`; the caller must hold all leases.
        """
        Generations(self._channel).order(self.get(name), partitions)

    def take_back_number(self, ordered: Subscription) -> bool:
        """Take the order of another number of partitions back; return False if it is carried out, or is another one."""
        with self.changing():
            stored = self.find(ordered.name)
            same = stored is not None and (stored.generation, stored.stop_at) == (ordered.generation, ordered.stop_at)
            if stored is not None and same:
                Generations(self._channel).take_back(stored)
            return same

    def restart(self, name: str, start: Progress) -> dict[str, int]:
        """Let all partitions begin again at `start`; delete the parked messages, and return how many, by state.

        Open decisions on the messages are closed.

        Call it inside `changing`; the caller must hold all leases.
        """
        Generations(self._channel).restart(self.get(name), start)
        Decisions(self._channel, name).close()
        return Parked(self._channel, name).clear()

    def begin_next_generation(self, name: str) -> bool:
        """Begin the ordered generation if all partitions have met; return True if it began.

        A backfill has no other generation: it is dropped, and the return value is True, if nothing is parked.
        """
        with self.changing():
            stored = self.find(name)
            if stored is None or stored.kind != "backfill":
                return stored is not None and Generations(self._channel).advance(stored)
            if Generations(self._channel).ended(stored) and not Parked(self._channel, name).some():
                self.drop(name)
                return True
            return False

    def create_at(self, made: Subscription, standing: Sequence[Progress]) -> None:
        """Create a subscription whose partitions stand as given; for use inside `changing`."""
        if not self._channel.run(_CREATE, **_row(made)):
            raise SubscriptionError(f"there is a subscription {made.name!r} already; take another name")
        Generations(self._channel).begin(made, standing)
        if made.stop_at is not None:
            Generations(self._channel).end_at(made, made.stop_at)

    def drop(self, name: str) -> None:
        """Delete a subscription, with its leases, progress and parked messages, and close the open decisions on these.

        Call it inside `changing`.
        """
        Decisions(self._channel, name).close()
        for table in ("parked", "progress", "lease"):
            self._channel.run(f"DELETE FROM {{{table}}} WHERE subscription = :name", name=name)
        self._channel.run("DELETE FROM {subscription} WHERE name = :name", name=name)

    def _create(self, declared: Declaration, start: Start | None) -> None:
        if start is None:
            raise SubscriptionError(f"there is no subscription {declared.name!r}")
        if declared.grace and isinstance(start, datetime):
            raise SubscriptionError(f"{declared.name} has a grace, so it begins at earliest or latest")
        # The position is captured first, because a transaction that has written cannot capture.
        place = self.first_progress(start, Log().now(self._channel).position)
        own = {"on_dead": declared.on_dead or "block", "pauses": stored_form(self._pauses_around(declared))}
        if self._channel.run(_CREATE, **_row(declared) | own):
            made = self.get(declared.name)
            Generations(self._channel).begin(made, [place] * made.partitions)

    def _pauses_around(self, new: Declaration) -> Pauses:
        """Return what is paused of the subscription that a new one follows, or of all other instances of a consumer."""
        consumer, at, _instance = new.name.partition(AT)
        followed = subscription_of(new.name)
        around = [each for each in self.all() if each.name == followed or (at and each.name.startswith(consumer + AT))]
        found = around[0].pauses if around else ()
        return tuple(pause for pause in found if all(pause in each.pauses for each in around))

    def first_progress(self, start: Start, now: Position) -> Progress:
        """Return the progress of a partition that begins at `start`; `now`: the position of now."""
        if start == "earliest":
            return Progress(EARLIEST)
        if start == "latest":
            return Progress(now)
        return Progress(EARLIEST, now, last_id_before(self._channel, start))

    def of(self, row: Row) -> Subscription:
        """Return the subscription of a row of `COLUMNS`."""
        return Subscription(
            name=row[0],
            topics=None if row[1] is None else tuple(json.loads(row[1])),
            destination=row[2],
            on_dead=row[3],
            partitions=row[4],
            generation=row[5],
            created_at=self._channel.database.moment(row[6]),
            grace=timedelta(milliseconds=row[7]),
            kind=row[8],
            tags=None if row[9] is None else tuple(json.loads(row[9])),
            hold=None if row[10] is None else timedelta(milliseconds=row[10]),
            stop_at=None if row[11] is None else Position.parse(row[11]),
            next_partitions=row[12],
            ordered=bool(row[13]),
            compact=bool(row[14]),
            filter=row[15],
            pauses=read_form(row[16]),
        )


def _row(made: Subscription | Declaration) -> dict[str, object]:
    return {
        "name": made.name,
        "topics": None if made.topics is None else json.dumps(sorted(set(made.topics))),
        "destination": made.destination,
        "on_dead": made.on_dead,
        "grace_ms": grace_milliseconds(made.grace or timedelta(0)),
        "kind": made.kind,
        "tags": None if made.tags is None else json.dumps(made.tags),
        "filter": made.filter,
        "partitions": made.partitions or 1,
        "generation": made.generation if isinstance(made, Subscription) else 1,
        "ordered": made.ordered is not False,
        "compact": made.compact is True,
        "pauses": stored_form(made.pauses) if isinstance(made, Subscription) else None,
    }
