"""Subscriptions: named readers of the log, each with one selection, one destination and one policy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from outbox.errors import SubscriptionError
from outbox.model.destination import same_destination
from outbox.model.position import EARLIEST, Position, Progress
from outbox.model.subscription import Declaration, Start, Subscription, compensation_of, route_name, subscription_of
from outbox.model.topics import ANYTHING, Topics
from outbox.store.database import Channel
from outbox.store.dialects.statements import Row
from outbox.store.log.log import Log
from outbox.store.log.moments import ids_before
from outbox.store.subscriptions.acks import Acks

_COLUMNS = "name, topics, destination, on_dead, partitions, generation, created_at, grace_ms, kind, tags, hold_ms"
_FIND = f"SELECT {_COLUMNS} FROM {{subscription}} WHERE name = :name"
_ALL = f"SELECT {_COLUMNS} FROM {{subscription}} ORDER BY name"
_CREATE = """
    INSERT INTO {subscription}
        (name, topics, destination, on_dead, partitions, generation, created_at, grace_ms, kind, tags)
    VALUES (:name, :topics, :destination, :on_dead, 1, 1, {now}, :grace_ms, :kind, :tags) ON CONFLICT (name) DO NOTHING
"""
_DECLARE = """
    UPDATE {subscription} SET topics = :topics, destination = :destination, on_dead = :on_dead
    WHERE name = :name AND destination IS NULL
"""
_ALTER = """
    UPDATE {subscription} SET topics = :topics, destination = :destination, on_dead = :on_dead, grace_ms = :grace_ms
    WHERE name = :name
"""
#: Compared with what was read before, so that it never undoes a change that was ordered meanwhile.
_STORE_HOSTS = """
    UPDATE {subscription} SET destination = :destination WHERE name IN (:name, :follower) AND destination = :stored
"""
#: Makes a split of this subscription wait for a transaction that creates its compensation, and the other way round.
_KEEP = "SELECT 1 FROM {subscription} WHERE name = :name {share_lock}"
_LEASE = """
    INSERT INTO {lease} (subscription, generation, partition, epoch, renewals)
    VALUES (:name, 1, 0, 0, 0) ON CONFLICT (subscription, generation, partition) DO NOTHING
"""
_FIRST_PROGRESS = """
    INSERT INTO {progress} (subscription, generation, partition, epoch, n, base, target, after_id, settled_at)
    VALUES (:name, 1, 0, 0, 0, :base, :target, :after, {now})
    ON CONFLICT (subscription, generation, partition, epoch, n) DO NOTHING
"""
#: A row that the writers of a subscription send themselves, from a position on. `:first` is the lowest number that the
#: position has not settled.
_LEFT_TO_WRITERS = """
    SELECT 1 FROM {message} WHERE {number} >= :first AND direct = :name AND {of_topics} LIMIT 1
"""


class Subscriptions:
    """All subscriptions of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def find(self, name: str) -> Subscription | None:
        """Return the subscription of that name; None: there is none."""
        rows = self._channel.rows(_FIND, name=name)
        return self._of(rows[0]) if rows else None

    def all(self) -> list[Subscription]:
        """Return all subscriptions, sorted by name."""
        return [self._of(row) for row in self._channel.rows(_ALL)]

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

    def declare(self, declared: Declaration, start: Start = "earliest") -> Subscription:
        """Find the subscription, or create it at `start`.

        One that has no destination yet gets the selection, the destination and the policy that are declared.
        Any number of processes may do so at once: the first creates it, and the others find it.

        Raises:
            SubscriptionError: it is stored with another selection, destination or policy. (Two workers of one name with
                different selections would pass over each other's messages.) Or the messages that its direct writers
                leave behind go to another destination.
        """
        stored = self.check(declared)
        if stored is not None and (stored.destination is not None or declared.destination is None):
            return stored
        if stored is None:
            self._create(declared, start)
        if declared.destination is not None:
            values = self._values(declared)
            self._channel.run(_DECLARE, **values, on_dead=declared.on_dead or "block")
        stored = self.get(declared.name)
        self._require_same(stored, declared)
        return stored

    def check(self, declared: Declaration) -> Subscription | None:
        """Refuse what `declare` would refuse, and write nothing; return the subscription as it is stored, or None."""
        stored = self._check(declared)
        for each in declared.beside:
            try:
                self._check(each)
            except SubscriptionError as error:
                raise SubscriptionError(f"{declared.name} waits until all routes can begin: {error}") from None
        return stored

    def _check(self, declared: Declaration) -> Subscription | None:
        stored = self.find(declared.name)
        if stored is not None and (stored.destination is not None or declared.destination is None):
            self._require_same(stored, declared)
        if stored is None and declared.split_from is not None:
            self._require_split(declared, declared.split_from)
        follower = self.find(compensation_of(declared.name))
        if follower is not None:
            self._require_same_destination(follower, declared)
        return stored

    def base_of(self, name: str) -> str:
        """Return the subscription that `name` is a route of, such as `relay` for `relay:orders.*`; else `name`."""
        relays = {each.name for each in self.all() if each.kind == "relay"}
        shorter = (name[:at] for at, letter in enumerate(name) if letter == ":")
        return next((each for each in shorter if each in relays), name)

    def taken(self, stored: Subscription, topics: Sequence[str] | None) -> str | None:
        """Return in words which routes have topics of these that `stored` lacks, and how to get on; None: none has."""
        base = self.base_of(stored.name)
        now, wanted = Topics.of(stored.topics), Topics.of(topics)
        owners = [
            each
            for each in self._routes(base)
            if each.name != stored.name
            and wanted.shares(Topics.of(each.topics))
            and not now.shares(Topics.of(each.topics))
        ]
        if not owners:
            return None
        patterns = [each.name[len(base) + 1 :] or ANYTHING for each in (*owners, stored)]
        # The first that matches takes a message, so the wider ones come last.
        patterns.sort(key=lambda each: (-len(each.replace(ANYTHING, "")), each.count(ANYTHING)))
        run = " ".join(_option("route", f"{each}=URL") for each in patterns)
        named = " and ".join(repr(each.name) for each in owners)
        return f"{named} would send some of these topics too; run outbox relay with routes: {run}"

    def store_hosts(self, stored: Subscription, declared: Declaration) -> Subscription:
        """Store how this worker writes the destination, if another worker has written it with other hosts.

        So the hosts of a cluster can be exchanged one by one. A compensation that has the same text follows.
        """
        if declared.destination in (None, stored.destination):
            return stored
        names = {"name": stored.name, "follower": compensation_of(stored.name)}
        self._channel.run(_STORE_HOSTS, **names, destination=declared.destination, stored=stored.destination)
        return replace(stored, destination=declared.destination)

    def alter(self, changed: Subscription) -> None:
        """Store another selection, destination or policy. The caller must hold the lease."""
        values = {
            "name": changed.name,
            "topics": _topics_text(changed.topics),
            "destination": changed.destination,
            "on_dead": changed.on_dead,
            "grace_ms": _milliseconds(changed.grace),
        }
        self._channel.run(_ALTER, **values)

    def create_at(self, made: Subscription, progress: Progress) -> None:
        """Create a subscription that stands where another one does. Call it inside the transaction that reads that."""
        row = {
            "name": made.name,
            "topics": _topics_text(made.topics),
            "destination": made.destination,
            "on_dead": made.on_dead,
            "grace_ms": _milliseconds(made.grace),
            "kind": made.kind,
            "tags": None if made.tags is None else json.dumps(made.tags),
        }
        if not self._channel.run(_CREATE, **row):
            raise SubscriptionError(f"there is a subscription {made.name!r} already; take another name")
        self._channel.run(_LEASE, name=made.name)
        self._channel.run(_FIRST_PROGRESS, name=made.name, **_place(progress))

    def leaves_to_writers(self, name: str, topics: Topics, base: Position) -> bool:
        """Return whether writers of subscription `name` send messages of these topics themselves that `base` lacks."""
        database = self._channel.database
        statement = database.sql(_LEFT_TO_WRITERS, of_topics=database.dialect.of_topics)
        first = min((*base.open, base.head))
        return bool(self._channel.rows(statement, name=name, first=first, **database.dialect.bind_topics(topics)))

    def drop(self, name: str) -> None:
        """Delete a subscription, with its leases, progress and parked messages; for a compensation also the acks."""
        with self._channel.transaction():
            for table in ("parked", "progress", "lease"):
                self._channel.run(f"DELETE FROM {{{table}}} WHERE subscription = :name", name=name)
            followed = subscription_of(name)
            if followed is not None:
                Acks(self._channel, followed).forget()
            self._channel.run("DELETE FROM {subscription} WHERE name = :name", name=name)

    def _create(self, declared: Declaration, start: Start) -> None:
        # The position is captured before the transaction begins, because a transaction that has written cannot capture.
        if declared.grace and isinstance(start, datetime):
            raise SubscriptionError(f"{declared.name} has a grace, so it begins at earliest or latest")
        place = _place(self._first_progress(start))
        with self._channel.transaction():
            if declared.kind == "compensation":
                self._channel.rows(_KEEP, name=subscription_of(declared.name))
            grace = _milliseconds(declared.grace or timedelta(0))
            row = {
                **self._values(declared),
                "kind": declared.kind,
                "tags": None if declared.tags is None else json.dumps(declared.tags),
                "on_dead": declared.on_dead or "block",
                "grace_ms": grace,
            }
            if self._channel.run(_CREATE, **row):
                self._channel.run(_LEASE, name=declared.name)
                self._channel.run(_FIRST_PROGRESS, name=declared.name, **place)

    def _first_progress(self, start: Start) -> Progress:
        if start == "earliest":
            return Progress(EARLIEST)
        now = Log().now(self._channel).position
        if start == "latest":
            return Progress(now)
        _, last = ids_before(self._channel, start)
        return Progress(EARLIEST, now, last)

    def _require_same(self, stored: Subscription, declared: Declaration) -> None:
        if stored.kind != declared.kind:
            raise SubscriptionError(
                f"{stored.name!r} is the name of a subscription of another kind: {stored.kind}, not {declared.kind};"
                " use another name"
            )
        topics = None if declared.topics is None else tuple(sorted(set(declared.topics)))
        destination = declared.destination or stored.destination
        if destination and stored.destination and same_destination(stored.destination, destination):
            destination = stored.destination
        on_dead = declared.on_dead or stored.on_dead
        # A stored grace that is longer does no harm, because this worker needs only that rows wait long enough.
        grace = max(declared.grace or stored.grace, stored.grace)
        differing = [
            (f"has {what} {_shown(there)}, this worker asks for {_shown(here)}", option)
            for what, there, here, option in (
                ("topics", stored.topics, topics, _topics_option(topics)),
                ("destination", stored.destination, destination, _option("to", destination)),
                ("on-dead", stored.on_dead, on_dead, _option("on-dead", on_dead)),
                ("grace", stored.grace, grace, _option("grace", f"{_milliseconds(grace)}ms")),
            )
            if there != here
        ]
        if differing:
            # A compensation has a grace of its own; everything else is that of its subscription.
            altered = stored.name if stored.grace != grace else stored.direct or stored.name
            instead = (
                f"--transaction-timeout {_milliseconds(stored.grace)}ms"
                if stored.kind == "check" and stored.grace != grace
                else "another --name"
            )
            differs = f"subscription {stored.name!r} {'; it '.join(text for text, _ in differing)}"
            if stored.kind == "relay" and (taken := self.taken(stored, topics)):
                raise SubscriptionError(f"{differs}; {taken}; or give this worker {instead}")
            if moved := _moved(stored.topics, topics):
                # Altered topics would be sent again from the beginning by a new subscription, so this comes first.
                # One at a time, because each route has a subscription of its own.
                route = route_name(declared.split_from or declared.name, moved[0])
                options = f"{_topics_option(moved[:1])} --to URL {_option('as', route)}"
                raise SubscriptionError(
                    f"{differs}; give them to another subscription, from where this one stands: outbox subscriptions"
                    f" split {shlex.quote(stored.name)} {options}; or give this worker {instead}"
                )
            alter = f"outbox subscriptions alter {shlex.quote(altered)} {' '.join(option for _, option in differing)}"
            # First of all what is right after a move: a worker that moves it back is seldom meant.
            old = "" if stored.kind == "check" else "stop this worker if it is the old one, or "
            raise SubscriptionError(f"{differs}; {old}give this worker {instead}, or run: {alter}")

    def _require_split(self, declared: Declaration, base: str) -> None:
        """Refuse to begin with topics that another subscription has, and has perhaps sent."""
        wanted = Topics.of(declared.topics)
        # Another process may have created it since it was looked for.
        others = (each for each in self._routes(base) if each.name != declared.name)
        owners = [each for each in others if wanted.shares(Topics.of(each.topics))]
        if not owners:
            return
        named = " and ".join(repr(each.name) for each in owners)
        missing = f"subscription {declared.name!r} is not there yet, and {named} {'have' if owners[1:] else 'has'}"
        parts = _given(owners[0], wanted)
        if owners[1:] or not parts:
            raise SubscriptionError(
                f"{missing} its topics; a new route takes topics of one subscription, which keeps others. Put what has"
                " them before it among the routes, or leave it out"
            )
        raise SubscriptionError(
            f"{missing} its topics; to begin where that one stands, run: outbox subscriptions split"
            f" {shlex.quote(owners[0].name)} {_topics_option(parts)} {_option('to', declared.destination)}"
            f" {_option('as', declared.name)}"
        )

    def _routes(self, base: str) -> list[Subscription]:
        """Return the relay `base`, and those that have its routes, as far as they have begun."""
        return [
            each
            for each in self.all()
            if each.kind == "relay"
            and each.destination is not None
            and (each.name == base or each.name.startswith(route_name(base, "")))
        ]

    def _require_same_destination(self, follower: Subscription, declared: Declaration) -> None:
        there, here = follower.destination, declared.destination
        if there is not None and here is not None and not same_destination(there, here):
            raise SubscriptionError(
                f"the direct writers of {declared.name!r} send to {there}, this worker to {here}; give it and them the"
                " same destination. If this worker is right, stop the writers and run: outbox subscriptions alter"
                f" {declared.name} {_option('to', here)}"
            )

    def _values(self, declared: Declaration) -> dict[str, object]:
        return {"name": declared.name, "topics": _topics_text(declared.topics), "destination": declared.destination}

    def _of(self, row: Row) -> Subscription:
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
        )


def _place(progress: Progress) -> dict[str, object]:
    """Return a progress as parameters."""
    return {
        "base": str(progress.base),
        "target": progress.target and str(progress.target),
        "after": progress.after,
    }


def _topics_text(topics: Sequence[str] | None) -> str | None:
    return None if topics is None else json.dumps(sorted(set(topics)))


def _milliseconds(grace: timedelta) -> int:
    return -(-grace // timedelta(milliseconds=1))


def _topics_option(topics: Sequence[str] | None) -> str:
    return "--all-topics" if topics is None else _option("topics", ",".join(topics))


def _moved(there: Sequence[str] | None, here: Sequence[str] | None) -> tuple[str, ...]:
    """Return the topics that a worker leaves out and its stored subscription does not; empty if they differ more."""
    stored, declared = Topics.of(there), Topics.of(here)
    moved = tuple(each for each in declared.exceptions if each not in stored.exceptions)
    try:
        left = stored.without(moved)
    except SubscriptionError:
        return ()
    return moved if left.chosen() == declared.chosen() else ()


def _given(owner: Subscription, wanted: Topics) -> list[str]:
    """Return those of the wanted topics that a split of `owner` would give away; empty if it cannot be split so."""
    stored = Topics.of(owner.topics)
    parts = [each for each in wanted.included if not stored.lacks(each)]
    try:
        given = stored.within(parts)
        return parts if given is not None and stored.without(given.included) else []
    except SubscriptionError:
        return []


def _option(name: str, value: str | None) -> str:
    return f"--{name} {shlex.quote(value or '')}"


def _shown(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, tuple):
        return ",".join(value)
    return "all" if value is None else str(value)
