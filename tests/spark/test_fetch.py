"""Reading a task: all its rows, and on after the last row when the connection breaks."""

import sqlite3
import sys
from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from outbox import DatabaseError, Message, MissingExtraError, Outbox, PositionError
from outbox.model.position import EARLIEST, Window
from outbox.spark import connections
from outbox.spark.fetch import batches
from outbox.spark.place import Address, Place
from outbox.spark.planner import Planner
from outbox.spark.tables import arrow_schema
from tests.spark.reading import place_of, read
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually


def fill(engine: Engine, number: int, size: int = 100) -> None:
    """Many messages, with nulls and without, written by the server itself."""
    insert = text(
        "INSERT INTO outbox_message (message_id, topic, key, slot, headers, body, deliver_at)"
        " SELECT gen_random_uuid(), 'orders', CASE WHEN n % 3 = 0 THEN 'k' || n END, n % 256, '{}',"
        " convert_to(repeat('x', :size), 'UTF8'), CASE WHEN n % 2 = 0 THEN now() END"
        " FROM generate_series(1, :n) AS s(n)"
    )
    with engine.begin() as connection:
        connection.execute(insert, {"n": number, "size": size})


def whole_log(engine, batch_bytes=200_000, retries=5, **wanted):
    """One task with all rows."""
    with closing(Planner(place_of(engine), retries=retries)) as planner:
        (task,) = planner.tasks(Window(EARLIEST, planner.now().position), **wanted)
    return replace(task, batch_bytes=batch_bytes)


def test_batches_are_of_about_the_size_that_was_asked_for(pg_engine):
    fill(pg_engine, 20_000)

    sizes = [batch.nbytes for batch in batches(whole_log(pg_engine, batch_bytes=500_000))]

    assert len(sizes) > 4
    assert max(sizes) < 1_500_000


def test_the_first_batch_is_no_larger_than_others(engine):
    """Rows may have megabytes, and how many they have shows only when they are there."""
    with engine.begin() as connection:
        Outbox(engine).send_all(connection, [Message("orders", bytes(100_000)) for _ in range(50)])

    found = list(batches(whole_log(engine, batch_bytes=500_000)))

    assert sum(len(batch) for batch in found) == 50
    assert max(batch.nbytes for batch in found) < 1_000_000


@pytest.mark.storm
def test_a_read_goes_on_after_killed_backends(pg_engine):
    """Four times in one read, each in the middle of the stream."""
    fill(pg_engine, 60_000, size=300)
    ids, kills = [], 0

    for batch in batches(whole_log(pg_engine)):
        ids += batch.column("id").to_pylist()
        if kills < 4 and len(ids) > 12_000 * kills:
            kills += kill_backends(pg_engine)

    assert kills >= 4
    assert ids == list(range(1, 60_001))


def kill_backends(engine):
    """End every connection of a reader."""
    return of_backends(engine, "count(pg_terminate_backend(pid))")


def of_backends(engine, asked="count(*)"):
    """Ask something about the connections of readers."""
    backends = "pg_stat_activity WHERE application_name = 'outbox spark' AND datname = current_database()"
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT {asked} FROM {backends}"))


def test_a_read_goes_on_without_its_key_among_the_columns(pg_engine):
    """It is read all the same, and left out of what is shown."""
    fill(pg_engine, 40_000, size=300)
    rows, killed = 0, False

    for batch in batches(whole_log(pg_engine, columns=("topic", "body"))):
        assert batch.schema == arrow_schema("messages", ("topic", "body"))
        rows += batch.num_rows
        if not killed:
            killed = bool(kill_backends(pg_engine))

    assert killed
    assert rows == 40_000


@pytest.mark.storm
def test_other_tables_go_on_after_their_whole_key(pg_engine):
    """Keys of several columns: those of the first one are not enough."""
    with pg_engine.begin() as connection:
        values = "SELECT 'c' || n % 7, gen_random_uuid(), now(), now() FROM generate_series(1, 90000) AS s(n)"
        connection.execute(text(f"INSERT INTO outbox_inbox {values}"))
    with closing(Planner(place_of(pg_engine))) as planner:
        task = replace(planner.table_task("inbox"), batch_bytes=200_000)
    keys, kills = [], 0

    for batch in batches(task):
        keys += [(row["consumer"], row["message_id"]) for row in batch.select([0, 1]).to_pylist()]
        if kills < 2:
            kills += kill_backends(pg_engine)

    assert kills >= 2
    assert len(keys) == len(set(keys)) == 90_000


def test_a_server_that_stays_away_is_an_error(pg_engine, monkeypatch):
    monkeypatch.setattr("outbox.spark.fetch.time.sleep", lambda _: None)
    fill(pg_engine, 20_000, size=300)
    url = pg_engine.url
    with TcpProxy(url.host, url.port) as proxy:
        place = Place(rows=Address(url.set(host="127.0.0.1", port=proxy.port).render_as_string()))
        reading = batches(replace(whole_log(pg_engine, retries=2), place=place))
        next(reading)
        proxy.refuse()
        proxy.reset_all()

        with pytest.raises(DatabaseError, match=r"was lost after \d+, and 2 tries to read on failed"):
            list(reading)


@pytest.mark.parametrize("change", [{"timeline": "00000007"}, {"system": "7"}, {"installation": "another"}])
def test_another_server_is_not_read_from(pg_engine, change):
    fill(pg_engine, 1)
    task = whole_log(pg_engine)

    with pytest.raises(PositionError, match="is another server, timeline or outbox now"):
        read([replace(task, server=replace(task.server, **change))])


def test_another_file_is_not_read_from(sqlite_engine):
    with sqlite_engine.begin() as connection:
        Outbox(sqlite_engine).send(connection, "orders", "1")
    task = whole_log(sqlite_engine)

    with pytest.raises(PositionError, match=r"installation of the outbox another then, \w{32} now"):
        read([replace(task, server=replace(task.server, installation="another"))])


def test_a_standby_that_is_promoted_while_it_is_waited_for_is_not_read_from(pg_engine, monkeypatch):
    """It is no standby any more and waits for nothing, but may never have had the rows."""
    fill(pg_engine, 1)
    task = whole_log(pg_engine)
    one = f"SELECT '{task.server.system}', {{}}, '{task.server.installation}'"
    answers = iter([one.format("CAST(NULL AS text)"), one.format("'00000002'")])
    monkeypatch.setattr("outbox.store.log.extraction.server", lambda *_: next(answers))

    with pytest.raises(PositionError, match=r"is another server, .* \(timeline 00000001 then, 00000002 now\)"):
        read([replace(task, replayed="FFFFFFFF/0")])


def test_closing_early_ends_the_connection(pg_engine):
    fill(pg_engine, 50_000, size=300)

    reading = batches(whole_log(pg_engine))
    next(reading)
    reading.close()

    # The server notices a moment later that its client is gone.
    assert eventually(lambda: of_backends(pg_engine) == 0)


def test_a_table_that_is_gone_is_no_matter_for_retries(pg_engine):
    fill(pg_engine, 1)
    task = whole_log(pg_engine)

    with pytest.raises(DatabaseError, match="refuses to be read"):
        read([replace(task, extraction=replace(task.extraction, schema="nowhere"))])


def test_without_adbc_the_extra_is_named(pg_engine, monkeypatch):
    fill(pg_engine, 3)
    monkeypatch.setattr(connections, "find_spec", lambda name: None)

    with pytest.raises(MissingExtraError, match="read by ADBC, on every executor: pip install"):
        read([whole_log(pg_engine)])


def test_without_pyarrow_the_extra_is_named(sqlite_engine, monkeypatch):
    with sqlite_engine.begin() as connection:
        Outbox(sqlite_engine).send(connection, "orders", b"1")
    task = whole_log(sqlite_engine)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(MissingExtraError, match=r"outbox-log\[spark\]"):
        read([task])


def test_a_sqlite_file_is_not_made_by_reading(sqlite_engine, tmp_path):
    with sqlite_engine.begin() as connection:
        Outbox(sqlite_engine).send(connection, "orders", b"1")
    task = whole_log(sqlite_engine)
    gone = Place(rows=Address(f"sqlite:///{tmp_path}/gone.db"))

    with pytest.raises(DatabaseError, match="refuses to be read: unable to open"):
        read([replace(task, place=gone)])
    assert not (tmp_path / "gone.db").exists()


@pytest.mark.storm
def test_a_busy_sqlite_file_is_waited_for(sqlite_engine, monkeypatch):
    """What a driver raises in mid-read, and how the read goes on after the last row that came."""
    with sqlite_engine.begin() as connection:
        for n in range(2_500):
            Outbox(sqlite_engine).send(connection, "orders", str(n))
    task = whole_log(sqlite_engine)
    monkeypatch.setattr("outbox.spark.fetch.PAUSE", lambda state: 0.0)
    first_read = connections.SqliteConnection.batches
    broke: list[int] = []

    def break_once(self, statement, schema, size):
        for batch in first_read(self, statement, schema, size):
            yield batch
            if not broke and batch.num_rows > 1:
                broke.append(batch.num_rows)
                raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(connections.SqliteConnection, "batches", break_once)
    ids = [row["id"] for row in read([task])]

    assert broke == [2]
    assert ids == list(range(1, 2_501))
