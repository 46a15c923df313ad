"""The rules of the model are the statements of the library: what one says, the other does, on each database.

Each test takes random steps in both, and compares what comes back and what is there after each step.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select, update

from outbox.model.lease import Holder, Lease, Partition
from outbox.model.message import Message
from outbox.model.parking import STATES, Parking, State
from outbox.model.position import Position, Progress
from outbox.model.subscription import Declaration
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, executor, run
from outbox.store.half_messages.half import Half, Halves
from outbox.store.half_messages.op import Ops
from outbox.store.idempotency.dedup import Dedup
from outbox.store.idempotency.inbox import InboxRows
from outbox.store.idempotency.withdrawals import Withdrawing
from outbox.store.log.log import Log
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions.falling_due import FallingDue
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.parked import Parked
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.model import rules
from tests.model.rules import DedupRow, LeaseRow, LogRow, ParkedRow, ProgressRow

NAME = "relay"
PARTITION = Partition(NAME)
LENGTH = timedelta(minutes=10)
#: What has come, and what has not, is so many seconds away from `NOW`, which is when the tests began, long ago perhaps.
FAR = 1_000_000
NOW = datetime.now(UTC)


@pytest.fixture
def chance() -> random.Random:
    """Chance, which can be had again."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def steps(full: bool) -> range:
    """As many steps as there is time for."""
    return range(2000 if full else 150)


def scripts(engine: Engine, script: Script[Any]) -> Any:
    """Run a script in a transaction of its own."""
    with engine.begin() as connection:
        return run(executor(connection), script)


def after(seconds: float) -> datetime:
    """Return a moment so many seconds from now."""
    return NOW + timedelta(seconds=seconds)


def sign(moment: datetime | int | None) -> int | None:
    """Return whether a moment has come: 0, or not: 1. None: there is none."""
    if moment is None:
        return None
    if isinstance(moment, datetime):
        # SQLite's driver gives moments without a zone, which is always UTC.
        moment = int((moment.replace(tzinfo=UTC) - NOW).total_seconds())
    return int(moment > FAR / 2)


def test_a_lease_is_taken_renewed_given_back_and_held(
    engine: Engine, channel: Channel, chance: random.Random, steps: range
) -> None:
    """Two owners and one who watches, each also with an epoch or a sight of the lease that is not the newest."""
    Subscriptions(channel).declare(Declaration(name=NAME, destination="test"), "latest")
    leases, incarnation = Leases(channel), Log().now(channel).incarnation
    row, seen = LeaseRow(), list[LeaseRow]()
    for _ in steps:
        epoch = max(0, row.epoch - chance.choice((0, 0, 1)))
        lease = Lease(PARTITION, epoch, str(row.owner))
        verb = chance.choice(("take", "take", "claim", "renew", "renew", "give back", "hold"))
        if verb in ("take", "claim"):
            owner, sight = chance.choice(("one", "other")), chance.choice([*seen[-4:], row])
            claim = Holder(
                None if sight.owner is None else str(sight.owner), sight.epoch, sight.renewals, None, live=False
            )
            found = leases.acquire(PARTITION, owner, LENGTH, claim if verb == "claim" else None)
            said = rules.acquired(row, owner, 1, claim if verb == "claim" else None)
            assert found == (None if said is None else Lease(PARTITION, said.epoch, owner))
            row = said or row
        elif verb == "hold":
            same = chance.choice((True, True, False))
            found_held = leases.hold(lease, incarnation if same else "another")
            assert found_held == rules.held(row, epoch, same_server=same)
        elif verb == "give back":
            leases.release(lease)
            row = rules.given_back(row, epoch)
        else:
            said = rules.renewed(row, epoch, 1)
            ours = leases.renew(lease, LENGTH)
            assert ours == (said is not None)
            row = said or row
        seen.append(row)
        holder = leases.look(PARTITION)
        assert holder is not None
        until = None if holder.lease_until is None else 1
        assert LeaseRow(holder.owner, holder.epoch, holder.renewals, until) == row, verb


def test_the_progress_that_counts_is_that_of_the_newest_epoch(
    channel: Channel, chance: random.Random, steps: range
) -> None:
    """Settles of old and of new epochs, one after the other, and of another server; and pops, of a free lease."""
    Subscriptions(channel).declare(Declaration(name=NAME, destination="test"), "earliest")
    leases, log, incarnation = Leases(channel), ProgressLog(channel), Log().now(channel).incarnation
    first = log.newest(PARTITION)
    assert first is not None
    rows, row = {ProgressRow(0, 0, first.progress)}, LeaseRow()
    for n in steps:
        if chance.random() < 0.2:
            lease = leases.acquire(PARTITION, "one", LENGTH)
            row = rules.acquired(row, "one", 1, None) or row
            assert lease is not None
        epoch, same = max(0, row.epoch - chance.choice((0, 0, 1))), chance.random() < 0.9
        new = ProgressRow(epoch, n + 1, Progress(Position(0), Position(n + 5), n))
        said = rules.settled(row, rows, new, same_server=same)
        lease = Lease(PARTITION, epoch, "one")
        assert log.settle(lease, n + 1, new.progress, incarnation if same else "other") == (said != rows)
        rows = said
        if chance.random() < 0.3:
            leases.release(Lease(PARTITION, row.epoch, "one"))
            row = rules.given_back(row, row.epoch)
        before = log.newest(PARTITION)
        assert before is not None
        assert before.progress == rules.newest(rows).progress
        leased, progress = max(0, row.epoch - chance.choice((0, 0, 1))), Progress(Position(0), Position(n + 6), n)
        pop = log.pop(PARTITION, before, leased, progress, incarnation)
        free = rules.free(row, leased)
        assert channel.run(pop.sql, **pop.bound) == free
        rows |= {ProgressRow(before.epoch, max(before.n + 1, 2), progress)} if free else set()


def test_the_first_verdict_stands_and_nothing_is_sent_behind_it(engine: Engine, chance: random.Random) -> None:
    """Commits, rollbacks and sends to a few transactions, in any order."""
    database = Database(engine)
    ops, halves = Ops(database), Halves(database)
    known, standing = set[str](), dict[str, str]()
    transactions = [uuid.uuid4().hex for _ in range(8)]
    for _ in range(60):
        transaction, verb = chance.choice(transactions), chance.choice(("send", "commit", "rollback", "join"))
        op = standing.get(transaction)
        if verb == "send":
            half = Half(transaction=transaction, group="shop", way="listener")
            stored = scripts(engine, halves.append(half, Message("orders", b""), 0, "{}"))
            assert (stored is not None) == rules.takes_half(op)
            known |= {transaction} if stored is not None else set()
            continue
        if transaction not in known and verb != "join":
            continue
        script = {"commit": ops.commit, "rollback": ops.roll_back, "join": ops.join}[verb]
        decision = scripts(engine, script(transaction, by="test"))
        said, first = rules.decided(op, "rollback" if verb == "rollback" else "commit")
        assert (decision.op, decision.first) == (said, first)
        standing[transaction] = said


def test_a_dedup_key_is_that_of_its_first_message_until_it_expires(engine: Engine, chance: random.Random) -> None:
    """Claims of a few keys, alone and together, of which some expire in between."""
    database = Database(engine)
    withdraw, table = Withdrawing(database).withdraw, tables_of(database).dedup
    dedup = Dedup(database, timedelta(seconds=FAR), withdraw)
    rows: dict[str, DedupRow] = {}
    for _ in range(100):
        keys = chance.sample(["a", "b", "c", "d"], chance.randrange(1, 4))
        if chance.random() < 0.3:
            with engine.begin() as connection:
                connection.execute(update(table).where(table.c.dedup_key == keys[0]).values(expires_at=after(-1)))
            if keys[0] in rows:
                rows[keys[0]] = rows[keys[0]]._replace(expires_at=-1)
        ids: dict[str, int] = {}
        messages = [Message("orders", b"", dedup_key=key) for key in keys]
        for key, message in zip(keys, messages, strict=True):
            ids[key] = message.message_id.int
        repeated = scripts(engine, dedup.claim(messages))
        said = {key: rules.claimed(rows.get(key), ids[key], 0, FAR) for key in keys}
        assert repeated == {
            place: uuid.UUID(int=said[key].message_id)
            for place, key in enumerate(keys)
            if said[key].message_id != ids[key]
        }
        rows |= said


def test_a_message_is_noted_once_for_each_consumer(engine: Engine, chance: random.Random) -> None:
    """Some transactions roll back, and leave nothing."""
    inbox, noted = InboxRows(Database(engine), timedelta(days=1)), rules.Handled()
    for _ in range(100):
        consumer, message = chance.choice(("billing", "mail")), chance.randrange(8)
        said, first = rules.noted(noted, consumer, message)
        with engine.connect() as connection:
            handled_at = run(executor(connection), inbox.handle(consumer, uuid.UUID(int=message)))
            assert (handled_at is not None) == first
            if chance.random() < 0.5:
                connection.commit()
                noted = said


class TwoParked:
    """Parked rows in the database and in the model."""

    def __init__(self, engine: Engine, channel: Channel, chance: random.Random) -> None:
        self._engine, self._chance = engine, chance
        self.tables = tables_of(Database(engine))
        self.parked, self.falling_due = Parked(channel, NAME), FallingDue(channel, NAME)
        self.rows: rules.Parked = frozenset()
        self.log: list[LogRow] = []
        Subscriptions(channel).declare(Declaration(name=NAME, destination="test"), "latest")

    def message(self) -> None:
        """Append a message to the log."""
        deliver_at = self._chance.choice((None, -self._chance.randrange(1, FAR), FAR))
        expires_at = self._chance.choice((None, None, -FAR, FAR))
        row = LogRow(len(self.log) + 1, self._chance.choice((None, "a", "b", "c")), deliver_at, expires_at)
        times = {"deliver_at": deliver_at, "expires_at": expires_at}
        moments = {column: None if seconds is None else after(seconds) for column, seconds in times.items()}
        columns = {"id": row.id, "key": row.key, **moments}
        values = {"message_id": uuid.UUID(int=row.id), "topic": "orders", "slot": 0, "body": b"", **columns}
        with self._engine.begin() as connection:
            connection.execute(insert(self.tables.message), values)
        self.log.append(row)

    def some(self, rows: list[Any]) -> list[int]:
        """Return the ids of some of these rows."""
        return [row.id for row in rows if self._chance.random() < 0.5]

    def parking(self, states: Collection[State] = STATES) -> Parking:
        """Return any parking that a handler may give a message."""
        state = self._chance.choice([*states])
        delays = (timedelta(0), timedelta(seconds=FAR)) if state in ("waiting", "retry", "behind") else (None,)
        delay = self._chance.choice((*delays, None) if state == "behind" else delays)
        holds = state == "behind" or (state != "delayed" and self._chance.random() < 0.7)
        return Parking(state=state, holds=holds, attempts=self._chance.randrange(3), delay=delay)

    def there(self) -> Iterator[ParkedRow]:
        """Yield the rows of the database."""
        c = self.tables.parked.c
        columns = (c.id, c.key, c.state, c.unit, c.place, c.attempts, c.due_at, c.expires_at)
        with self._engine.connect() as connection:
            for row in connection.execute(select(*columns)):
                yield ParkedRow(*row[:6], sign(row[6]), sign(row[7]))

    def said(self) -> Iterator[ParkedRow]:
        """Yield the rows of the model."""
        return (row._replace(due_at=sign(row.due_at), expires_at=sign(row.expires_at)) for row in self.rows)


def test_parked_messages_are_parked_changed_and_found(
    engine: Engine, channel: Channel, chance: random.Random, steps: range
) -> None:
    """All that a lease holder does with them, and all that it asks."""
    two = TwoParked(engine, channel, chance)
    changes: list[Callable[[TwoParked], None]] = [park, change, remove, discard, replay, fall_due]
    for _ in steps:
        two.message()
        verb = chance.choice([park, park, park, *changes])
        verb(two)
        assert set(two.there()) == set(two.said()), verb.__name__
        limit = chance.choice((1, 3, 100))
        ready = two.parked.ready((), limit, 1 << 20)
        said = rules.ready(two.rows, 0, 1000)
        found = {(each.message.id, each.message.attempt, each.expired) for each in ready}
        possible = {(row.id, row.attempts + 1, rules.expired(row, 0)) for row in said}
        assert found <= possible
        assert (found == possible) if limit == 100 else len(rules.heads(two.rows, 0)[:limit]) <= len(found) <= limit
        for key in ("a", "b", "c"):
            ids = [each.message.id for each in ready if each.message.id in {row.id for row in said if row.unit == key}]
            assert ids == [row.id for row in said if row.unit == key][: len(ids)]
        assert two.parked.keys(100) == rules.keys_held(two.rows)
        assert two.parked.keys(0) == (None if rules.keys_held(two.rows) else set())
        assert two.parked.held_among({"a", "b"}) == rules.keys_held(two.rows) & {"a", "b"}
        heads = [row.unit for row in two.rows if row.unit is not None and row.state is not None]
        assert sorted(heads) == sorted(rules.keys_held(two.rows))


def park(two: TwoParked) -> None:
    """Park messages of the log, among them some that are parked already."""
    ids, parking = two.some(two.log[-5:]), two.parking()
    if parking.holds and parking.state != "behind":
        # A worker parks one head of a key that is not held, and what is behind it.
        held, firsts = rules.keys_held(two.rows), {row.key: row.id for row in reversed(two.log[-5:]) if row.id in ids}
        ids = [row.id for row in two.log[-5:] if row.id in ids and (not row.key or firsts[row.key] == row.id)]
        ids = [row.id for row in two.log[-5:] if row.id in ids and row.key not in held]
    if parking.state == "behind":
        ids = [row.id for row in two.log[-5:] if row.id in ids and row.key]
    messages = [row for row in two.log if row.id in ids]
    keys = {row.key for row in messages if row.key is not None}
    two.parked.park([(id, parking) for id in ids])
    two.parked.advance(keys)
    two.rows = rules.advanced(rules.parked(two.rows, messages, parking, 0), keys, 0)


def change(two: TwoParked) -> None:
    """Give heads another state."""
    heads = [row for row in two.rows if row.state not in (None, "delayed")]
    ids, parking = two.some(heads), two.parking(("waiting", "retry", "dead"))
    keys = {row.unit for row in heads if row.id in ids and row.unit}
    two.parked.change([(id, parking) for id in ids])
    two.parked.advance(keys)
    two.rows = rules.advanced(rules.changed(two.rows, ids, parking, 0), keys, 0)


def remove(two: TwoParked) -> None:
    """Remove what is done."""
    ids = two.some(list(two.rows))
    keys = {row.unit for row in two.rows if row.id in ids and row.unit}
    two.parked.remove(ids)
    two.parked.advance(keys)
    two.rows = rules.advanced(rules.removed(two.rows, ids), keys, 0)


def discard(two: TwoParked) -> None:
    """Discard dead letters."""
    ids = two.some([row for row in two.rows if row.state == "dead"])
    keys = {row.unit for row in two.rows if row.id in ids and row.unit}
    two.parked.remove(ids)
    two.parked.advance(keys)
    two.rows = rules.advanced(rules.removed(two.rows, ids), keys, 0)


def replay(two: TwoParked) -> None:
    """Replay dead letters, and messages that have joined the unit of their key since a person decided."""
    ids = two.some([row for row in two.rows if row.state in ("dead", None)])
    keys = {row.key for row in two.rows if row.id in ids and row.key}
    two.parked.replay(ids)
    two.falling_due.join(ids)
    two.parked.advance(keys)
    two.rows = rules.advanced(rules.replayed(two.rows, ids, 0), keys, 0)


def fall_due(two: TwoParked) -> None:
    """Let delayed messages take their places."""
    limit = len(two.rows) or 1
    due = two.falling_due.due(limit)
    keys = {*due.values()}
    two.falling_due.join(due)
    two.parked.advance(keys)
    two.rows, said = rules.fallen_due(two.rows, 0, limit)
    assert keys == said
