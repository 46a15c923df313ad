"""Dedup keys: of all messages with one, written within a window, there is the first."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Message, Outbox
from outbox.store.idempotency.dedup import prune
from tests.support.dialects import outbox_of, varied
from tests.support.readers import bodies
from tests.support.waiting import eventually

#: The database's clock, moved.
CLOCKS = {
    "postgresql": "(statement_timestamp() + interval '{moved} seconds')",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '{moved} seconds')",
}


def moved_by(engine: Engine, seconds: float, **options: Any) -> Outbox:
    """An outbox whose database's clock is so much ahead."""
    dialect = Outbox(engine).database.dialect
    now = CLOCKS[engine.dialect.name].format(moved=f"{seconds:+f}")
    return outbox_of(engine, varied(dialect, now=now), **options)


def write(outbox: Outbox, body: str, key: str | None = "order-1") -> UUID:
    """One message in a transaction of its own."""
    with outbox.begin() as session:
        return outbox.send(session, "orders", body, dedup_key=key)


def test_a_repetition_is_not_written_and_has_the_id_of_the_first(engine):
    outbox = Outbox(engine)
    first = write(outbox, "1")
    with outbox.begin() as session:
        again = outbox.send(session, "orders", "2", dedup_key="order-1")
        other = outbox.send(session, "orders", "3", dedup_key="order-2")
        none = [outbox.send(session, "orders", "4") for _ in range(2)]

    assert again == first
    assert len({first, other, *none}) == 4
    assert bodies(engine) == [b"1", b"3", b"4", b"4"]


def test_repetitions_within_one_send_all(engine):
    """The first of them is written, and what was written before counts too."""
    outbox = Outbox(engine)
    known = write(outbox, "0", "a")
    keys = ["b", "a", None, "b", "c", "b", None]
    messages = [Message("orders", str(place), dedup_key=key) for place, key in enumerate(keys, start=1)]
    with outbox.begin() as session:
        ids = outbox.send_all(session, messages)

    one, three, five, seven = (messages[place].message_id for place in (0, 2, 4, 6))
    assert ids == [one, known, three, one, five, one, seven]
    assert bodies(engine) == [b"0", b"1", b"3", b"5", b"7"]


def test_many_keys_at_once(engine):
    outbox = Outbox(engine)
    messages = [Message("orders", str(n), dedup_key=f"order-{n % 3_000}") for n in range(9_000)]
    with outbox.begin() as session:
        ids = outbox.send_all(session, messages)
    with outbox.begin() as session:
        again = outbox.send_all(session, [Message("orders", "", dedup_key=f"order-{n}") for n in range(3_000)])

    assert ids == [messages[n % 3_000].message_id for n in range(9_000)]
    assert again == ids[:3_000]
    assert bodies(engine) == [str(n).encode() for n in range(3_000)]


@pytest.mark.parametrize("window", [timedelta(hours=1), timedelta(days=7)])
def test_the_window_counts_from_the_write_by_the_clock_of_the_database(engine, window):
    seconds = window.total_seconds()
    first = write(Outbox(engine, dedup_window=window), "1")

    within = write(moved_by(engine, seconds - 60, dedup_window=window), "2")
    after = write(moved_by(engine, seconds + 60, dedup_window=window), "3")
    within_the_next = write(moved_by(engine, 2 * seconds, dedup_window=window), "4")

    assert within == first
    assert after != first
    assert within_the_next == after
    assert bodies(engine) == [b"1", b"3"]


def test_the_window_of_the_first_counts_not_that_of_the_repetition(engine):
    """A repetition does not prolong it, and changes nothing of the row."""
    first = write(Outbox(engine, dedup_window=timedelta(hours=1)), "1")
    within = write(moved_by(engine, 1_800, dedup_window=timedelta(days=7)), "2")
    after = write(moved_by(engine, 3_660), "3")

    assert (within == first, after == first) == (True, False)


def test_a_key_rolled_back_with_its_message_is_free(engine):
    outbox = Outbox(engine)
    with pytest.raises(LookupError), outbox.begin() as session:
        outbox.send(session, "orders", "1", dedup_key="order-1")
        raise LookupError
    with outbox.begin() as session:
        savepoint = session.begin_nested()
        outbox.send(session, "orders", "2", dedup_key="order-1")
        savepoint.rollback()
        id = outbox.send(session, "orders", "3", dedup_key="order-1")

    assert write(outbox, "4") == id
    assert bodies(engine) == [b"3"]


def test_an_expired_key_claimed_by_a_transaction_that_is_rolled_back_stays_expired(engine):
    write(Outbox(engine), "1")
    later = moved_by(engine, timedelta(days=8).total_seconds())
    with pytest.raises(LookupError), later.begin() as session:
        later.send(session, "orders", "2", dedup_key="order-1")
        raise LookupError
    id = write(later, "3")

    assert write(later, "4") == id
    assert bodies(engine) == [b"1", b"3"]


def test_concurrent_writers_write_one_message_and_get_one_id(engine):
    outbox = Outbox(engine)
    writers = 8
    together = threading.Barrier(writers)

    def writer(number: int) -> list[UUID]:
        together.wait()
        return [write(outbox, f"{number}", f"order-{n}") for n in range(5)]

    with ThreadPoolExecutor(writers) as pool:
        found = list(pool.map(writer, range(writers)))

    assert found == [found[0]] * writers
    assert len(bodies(engine)) == 5


def test_writers_of_the_same_keys_in_another_order_do_not_wait_for_each_other(pg_engine):
    """The keys of one send_all are claimed in an order of their own: there is no deadlock."""
    outbox = Outbox(pg_engine)
    together = threading.Barrier(4)

    def writer(number: int) -> list[UUID]:
        first: list[UUID] = []
        for turn in range(10):
            keys = [f"{turn}-{n}" for n in range(20)]
            messages = {key: Message("orders", key, dedup_key=key) for key in (keys if number % 2 else keys[::-1])}
            together.wait()
            with outbox.begin() as session:
                ids = dict(zip(messages, outbox.send_all(session, list(messages.values())), strict=True))
            first += [ids[key] for key in keys]
        return first

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(writer, range(4)))

    assert found == [found[0]] * 4
    assert len(bodies(pg_engine)) == 200


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_meets_an_open_claim_waits_for_its_end(engine, end):
    outbox = Outbox(engine)
    others: list[UUID] = []
    second = threading.Thread(target=lambda: others.append(write(outbox, "2")))
    with engine.connect() as connection:
        first = outbox.send(connection, "orders", "1", dedup_key="order-1")
        second.start()
        assert not eventually(lambda: bool(others), 0.3)
        getattr(connection, end)()
        second.join(60)

    assert len(others) == 1
    if end == "commit":
        assert (others, bodies(engine)) == ([first], [b"1"])
    else:
        assert (others != [first], bodies(engine)) == (True, [b"2"])


def test_a_repetition_that_its_snapshot_cannot_see_is_the_database_s_error(pg_engine):
    """Under REPEATABLE READ the transaction has to be tried again, as for any row; it neither hangs nor writes."""
    outbox = Outbox(pg_engine)
    with pg_engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.execute(text("SELECT 1"))
        connection.execute(text("SELECT count(*) FROM outbox_message"))
        first = write(outbox, "1")
        with pytest.raises(DBAPIError, match="could not serialize access"):
            outbox.send(connection, "orders", "2", dedup_key="order-1")
        connection.rollback()
        again = outbox.send(connection, "orders", "3", dedup_key="order-1")
        connection.commit()

    assert (again, bodies(pg_engine)) == (first, [b"1"])


def test_an_outbox_without_dedup_keys_never_touches_their_table(engine):
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outbox_dedup"))
    outbox = Outbox(engine)

    write(outbox, "1", None)

    assert bodies(engine) == [b"1"]


@pytest.mark.parametrize("key", ["ü" * 512, "a b\t", "order-1;DROP", '{"a":"b"}', "%s %(x)s :x", "\\", "'"])
def test_a_key_is_any_text(engine, key):
    outbox = Outbox(engine)

    ids = [write(outbox, str(n), key) for n in range(2)]

    assert ids == ids[:1] * 2
    assert bodies(engine) == [b"0"]


def test_the_same_message_twice_is_a_repetition_too(engine):
    """Who tries again after a lost answer may have kept the object, and with it the id."""
    outbox = Outbox(engine)
    message = Message("orders", "1", dedup_key="order-1")
    with outbox.begin() as session:
        once = outbox.send_all(session, [message, message])
    with outbox.begin() as session:
        again = outbox.send_all(session, [message])

    assert [*once, *again] == [message.message_id] * 3
    assert bodies(engine) == [b"1"]


def pruned(outbox: Outbox) -> int:
    """How many keys go, as a lease holder deletes what has expired."""
    with closing(outbox.database.open()) as channel:
        return prune(channel)


def test_a_key_that_a_transaction_is_claiming_anew_is_not_pruned(engine):
    """Who prunes leaves it alone, or waits for the end of the transaction and finds it good."""
    outbox, expired = Outbox(engine), timedelta(days=-8).total_seconds()
    write(moved_by(engine, expired), "1")
    write(moved_by(engine, expired), "2", "order-2")
    with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
        claimed = outbox.send(connection, "orders", "3", dedup_key="order-1")
        count = pool.submit(pruned, outbox)
        eventually(count.done, 0.3)
        connection.commit()
        gone = count.result(60)

    assert gone == 1
    assert write(outbox, "4") == claimed
    assert bodies(engine) == [b"1", b"2", b"3"]


_FILL = """
    INSERT INTO outbox_dedup
    SELECT n, gen_random_uuid(), statement_timestamp() + CASE WHEN n % 50 = 0 THEN -:day ELSE :day END
    FROM generate_series(1, 50000) AS n
"""
_READ_IN_SEQUENCE = "SELECT pg_stat_get_xact_tuples_returned('outbox_dedup'::regclass)"


def test_pruning_does_not_read_the_keys_that_are_good(pg_engine):
    """Each portion comes between the messages of a relay, so it has to be quick however many keys there are."""
    outbox = Outbox(pg_engine)
    with pg_engine.begin() as connection:
        connection.execute(text(_FILL), {"day": timedelta(days=1)})
        connection.execute(text("ANALYZE outbox_dedup"))
    with closing(outbox.database.open()) as channel, channel.transaction():
        gone = prune(channel)
        read = channel.rows(_READ_IN_SEQUENCE)[0][0]

    assert (gone, read) == (1000, 0)


#: A clock that stands still while somebody else has its lock.
HELD_CLOCK = """
    CREATE FUNCTION held_clock() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
        BEGIN PERFORM pg_advisory_xact_lock(42); RETURN statement_timestamp(); END $$
"""
_WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


def test_a_key_that_was_claimed_anew_after_the_prune_began_is_not_pruned(pg_engine):
    """The prune's snapshot holds the expired row; the lock that it takes shows the row as it is now."""
    outbox, expired = Outbox(pg_engine), timedelta(days=-8).total_seconds()
    write(moved_by(pg_engine, expired), "1")
    write(moved_by(pg_engine, expired), "2", "order-2")
    with pg_engine.begin() as connection:
        connection.execute(text(HELD_CLOCK))
    held = outbox_of(pg_engine, varied(outbox.database.dialect, now="held_clock()"))
    with ThreadPoolExecutor(1) as pool, pg_engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(42)"))
        count = pool.submit(pruned, held)
        waits = eventually(lambda: connection.scalar(text(_WAITING)) == 1)
        claimed = write(outbox, "3")
        connection.execute(text("SELECT pg_advisory_unlock(42)"))
        gone = count.result(60)

    assert (waits, gone) == (True, 1)
    assert write(outbox, "4") == claimed
    assert bodies(pg_engine) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("window", [7, timedelta(0), timedelta(days=-1), timedelta(days=40_000), None])
def test_a_window_that_is_none_is_refused_at_once(engine, window):
    with pytest.raises(ValueError, match="dedup_window must be a timedelta above 0, of at most 36525 days, not"):
        Outbox(engine, dedup_window=window)
