"""Acks: what writers say they have sent; looked up by page, and kept until nobody will ask again."""

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, func, insert, select, text

from outbox.model.lease import Lease, Partition
from outbox.model.position import Position
from outbox.store.database import Channel, Database
from outbox.store.log.log import Log
from outbox.store.operations.check import tables_of
from outbox.store.subscriptions import acks as ack
from outbox.store.subscriptions.acks import SPAN, Acks
from outbox.store.subscriptions.leases import Leases
from tests.support.direct import acked, append, declare_compensation, stored_acks, write

PARTITION = Partition("relay:compensation")
NOW = datetime.now(UTC)


@pytest.fixture
def database(engine: Engine) -> Database:
    """Where the acks are."""
    declare_compensation(engine)
    return Database(engine)


@pytest.fixture
def channel(database: Database) -> Iterator[Channel]:
    """The compensation's connection."""
    with closing(database.open()) as channel:
        yield channel


@pytest.fixture
def lease(channel: Channel) -> Lease:
    """The compensation's."""
    lease = Leases(channel).acquire(PARTITION, "tests", timedelta(minutes=5))
    assert lease is not None
    return lease


def pruned(channel: Channel, lease: Lease, base: Position) -> bool:
    return Acks(channel, "relay").prune(lease, base)


def test_a_batch_is_a_row(engine, database):
    acked(engine, [7, 3, 5])

    table = tables_of(database).ack
    with engine.connect() as connection:
        columns = (table.c.subscription, table.c.writer, table.c.first_id, table.c.last_id, table.c.ids)
        assert connection.execute(select(*columns)).all() == [("relay", "writer", 3, 7, "[3,5,7]")]


def test_ids_that_lie_far_apart_are_cut_into_rows(engine):
    acked(engine, [5, 10 * SPAN, 4 + SPAN, 5 + SPAN])

    assert stored_acks(engine) == [[5, 4 + SPAN], [5 + SPAN], [10 * SPAN]]


def test_a_page_finds_its_acks_and_no_others(engine, database, channel):
    """Batches of many writers, wherever their ids lie, and those of another subscription."""
    chance, sent = random.Random(4), set[int]()
    for _ in range(60):
        middle = chance.randrange(5 * SPAN)
        batch = {middle + chance.randrange(-SPAN, SPAN) for _ in range(chance.choice((1, 5, 80)))}
        acked(engine, sorted(batch))
        sent |= batch
    acked(engine, range(5 * SPAN), subscription="other")

    for _ in range(60):
        first = chance.randrange(5 * SPAN)
        page = sorted({first + chance.randrange(chance.choice((10, SPAN))) for _ in range(200)})
        assert Acks(channel, "relay").among(page) == sent & set(page)


def test_a_page_reads_the_acks_around_it_only(pg_engine):
    """However many came before and after it."""
    database = Database(pg_engine)
    places = range(0, 200 * SPAN, SPAN // 10)
    values = [
        {"subscription": "relay", "writer": "w", "first_id": n, "last_id": n, "ids": f"[{n}]", "acked_at": NOW}
        for n in places
    ]
    asked = {"subscription": "relay", "first": 100 * SPAN, "last": 100 * SPAN + 1000}
    with pg_engine.begin() as connection:
        connection.execute(insert(tables_of(database).ack), values)
        connection.execute(text("ANALYZE outbox_ack"))
        explained = connection.execute(
            text("EXPLAIN (ANALYZE, FORMAT JSON) " + database.sql(ack._AMONG, acked="xact_id")), asked
        )
        plan = explained.scalar_one()[0]["Plan"]

    assert plan["Index Name"] == "outbox_ack_last_id"
    assert (plan["Actual Rows"], plan["Rows Removed by Filter"]) == (2, 9)


def test_an_ack_goes_when_the_stored_base_has_seen_it(engine, database, channel, lease):
    before = Log().now(channel).position
    ids = write(engine, "1", "2")
    acked(engine, ids[:1])
    between = Log().now(channel).position
    later = write(engine, "3")
    acked(engine, later)
    acked(engine, later, subscription="other")
    after = Log().now(channel).position

    left = []
    for base in (before, between, after):
        assert not pruned(channel, lease, base)
        left.append(stored_acks(engine))

    assert left == [[ids[:1], later, later], [later, later], [later]]


def test_an_ack_whose_transaction_is_open_at_the_base_stays(pg_engine):
    """Numbers say nothing: it began first, and its messages were committed before it."""
    declare_compensation(pg_engine)
    database = Database(pg_engine)
    with closing(database.open()) as channel:
        lease = Leases(channel).acquire(PARTITION, "tests", timedelta(minutes=5))
        assert lease is not None
        with pg_engine.connect() as long:
            long.execute(text("SELECT pg_current_xact_id()"))
            ids = write(pg_engine, "1")
            values = {"subscription": "relay", "writer": "w", "first_id": ids[0], "last_id": ids[0], "ids": str(ids)}
            long.execute(insert(tables_of(database).ack).values(**values, acked_at=func.now()))
            base = Log().now(channel).position
            write(pg_engine, "2")
            long.commit()
        pruned(channel, lease, base)
        kept = stored_acks(pg_engine)
        pruned(channel, lease, Log().now(channel).position)

    assert (kept, stored_acks(pg_engine)) == ([ids], [])


def test_a_late_owner_prunes_nothing(engine, database, channel, lease):
    acked(engine, write(engine, "1"))
    successor = Leases(channel).acquire(PARTITION, "tests", timedelta(minutes=5))
    assert successor is not None
    base = Log().now(channel).position

    pruned(channel, lease, base)
    kept = stored_acks(engine)
    pruned(channel, successor, base)

    assert (len(kept), stored_acks(engine)) == (1, [])


def test_a_long_list_is_pruned_in_portions(engine, database, channel, lease, monkeypatch):
    monkeypatch.setattr(ack, "PRUNED_AT_ONCE", 3)
    with engine.begin() as connection:
        ids = append(connection, *map(str, range(8)))
    for id in ids:
        acked(engine, [id])
    base = Log().now(channel).position

    left = []
    while pruned(channel, lease, base):
        left.append(len(stored_acks(engine)))

    assert (left, stored_acks(engine)) == ([5, 2], [])
