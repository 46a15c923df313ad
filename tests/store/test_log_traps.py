"""Positions and the ways in which they could lie: own writes, prepared transactions, standbys, copies, pools."""

import re
from contextlib import closing
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.pool import StaticPool

from outbox import DatabaseError, Message, Outbox, PositionError, Reject, create_engine, migrate
from outbox.model.position import Position
from outbox.store.database import Database
from outbox.store.log.log import Log
from outbox.testing.servers import PostgresServer
from tests.support.command_line import outbox as run
from tests.support.destination import Destination, relay_to
from tests.support.readers import delivered, send, texts
from tests.support.servers.postgresql import Standby
from tests.support.waiting import eventually

# Captures


def test_a_transaction_that_has_written_captures_nothing(pg_engine):
    """Its own rows would count as settled, and nobody would read them after its commit."""
    outbox = Outbox(pg_engine)
    log = Log()
    with closing(outbox.database.open()) as channel:
        with channel.transaction():
            assert log.now(channel).position.head > 0
        with pytest.raises(DatabaseError, match="in a transaction that has written"), channel.transaction():
            channel.run("CREATE TABLE written (id int)")
            log.now(channel)
        with pytest.raises(DatabaseError, match="in a transaction that has written"), channel.transaction():
            channel.run("CREATE TABLE written (id int)")
            log.read_on(channel, Position(0))


def test_a_prepared_transaction_is_delivered_when_it_is_committed(pg_engine):
    outbox = Outbox(pg_engine)
    with pg_engine.connect() as connection:
        outbox.send(connection, "orders", "prepared")
        connection.execute(text("PREPARE TRANSACTION 'later'"))
        connection.rollback()
    with pg_engine.connect() as connection:
        outbox.send(connection, "orders", "given up")
        connection.execute(text("PREPARE TRANSACTION 'never'"))
        connection.rollback()
    send(outbox, "1")

    seen = [texts(delivered(outbox.database))]
    send(outbox, "2")
    seen.append(texts(delivered(outbox.database)))
    with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("COMMIT PREPARED 'later'"))
        connection.execute(text("ROLLBACK PREPARED 'never'"))
    send(outbox, "3")
    seen.append(texts(delivered(outbox.database)))
    seen.append(texts(delivered(outbox.database)))

    assert seen == [["1"], ["2"], ["prepared", "3"], []]


@pytest.mark.storm
def test_hundreds_of_savepoints_are_one_transaction(pg_engine):
    """More than a server keeps track of per process; every second one is rolled back."""
    outbox = Outbox(pg_engine)
    expected = [f"in {n}" for n in range(0, 300, 2)]
    with pg_engine.connect() as connection:
        for n in range(300):
            savepoint = connection.begin_nested()
            outbox.send(connection, "orders", f"in {n}")
            savepoint.rollback() if n % 2 else savepoint.commit()
            if n % 100 == 0:
                send(outbox, f"beside {n}")
        meanwhile = texts(delivered(outbox.database))
        connection.commit()

    assert meanwhile == ["beside 0", "beside 100", "beside 200"]
    assert texts(delivered(outbox.database)) == expected


def test_rows_that_come_by_other_ways_than_send_are_delivered(pg_engine):
    """COPY and INSERT … SELECT take the default of the column that tells what is settled."""
    outbox = Outbox(pg_engine)
    url = pg_engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO outbox_message (message_id, topic, slot, body)"
            " SELECT gen_random_uuid(), 'orders', 0, convert_to('row ' || n, 'UTF8') FROM generate_series(1, 2) AS n"
        )
        with cursor.copy("COPY outbox_message (message_id, topic, slot, body) FROM STDIN") as copy:
            copy.write_row(("01890000-0000-7000-8000-000000000000", "orders", 0, b"row 3"))

    assert texts(delivered(outbox.database)) == ["row 1", "row 2", "row 3"]


# Servers that are not the one


@pytest.mark.storm
def test_a_standby_is_refused():
    """Its snapshots know nothing of the transactions that are open on the primary."""
    with PostgresServer() as server:
        primary = create_engine(server.url())
        migrate.upgrade(primary)
        send(Outbox(primary), "1")
        with Standby(server) as standby:
            copy = create_engine(standby.url())
            assert eventually(lambda: has_the_tables(copy))
            with pytest.raises(DatabaseError, match=r"this server is a standby.*connect to the primary"):
                delivered(Outbox(copy).database)
            with closing(Database(copy).open()) as channel, pytest.raises(DatabaseError, match="standby"):
                Log().now(channel)
            copy.dispose()
        assert texts(delivered(Outbox(primary).database)) == ["1"]
        primary.dispose()


def has_the_tables(engine: Engine) -> bool:
    """Whether the replication has come so far."""
    return sqlalchemy.inspect(engine).has_table("outbox_message")


@pytest.mark.parametrize("change", ["system_identifier = '4711'", "database_oid = 4711", "system_identifier = NULL"])
def test_a_copy_on_another_server_is_refused(pg_engine, change):
    with pg_engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_meta SET {change}"))

    with pytest.raises(DatabaseError, match=r"this database is a copy.*outbox restore"):
        delivered(Outbox(pg_engine).database)


def test_a_copy_within_one_server_is_refused(postgres, pg_engine):
    """The copy of a database beside its original would send everything again."""
    pg_engine.dispose()
    name = f"{pg_engine.url.database}_copy"
    copy = create_engine(postgres.create_database(name, template=pg_engine.url.database))

    with pytest.raises(DatabaseError, match=r"this database is a copy.*outbox restore"):
        delivered(Outbox(copy).database)

    copy.dispose()
    postgres.drop_database(name)


def test_a_position_ahead_of_the_server_is_an_error(engine):
    """It was restored to an earlier state: whoever goes on would pass over what is written from now on.

    A message from before has a number that PostgreSQL has not reached, and would wait for it.
    """
    outbox, since = Outbox(engine), datetime.now(UTC).isoformat()
    delivered(outbox.database)
    send(outbox, "1")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET base = '900000000:900000000:'"))
        if engine.dialect.name == "postgresql":
            connection.execute(text("UPDATE outbox_message SET xact_id = 900000000"))
    send(outbox, "2")

    with pytest.raises(PositionError, match=r"behind the stored position .*Check that .* run outbox doctor .*, which"):
        delivered(outbox.database)
    found = run(engine, "doctor").out
    advised = re.findall(r"run.*: outbox (subscriptions reset relay --to TIME|restore --force)", found)
    ended = [run(engine, *command.replace("TIME", since).split(), "--yes").code for command in advised]

    restore = ["restore --force"] if engine.dialect.name == "postgresql" else []
    assert "outbox_progress: says that relay is at 900000000:900000000:, and the server is only at" in found
    assert advised == ["subscriptions reset relay --to TIME", *restore]
    assert set(ended) == {0}
    assert texts(delivered(outbox.database)) == ["1", "2"]
    left = run(engine, "doctor").out
    assert [where for where in ("outbox_progress", "xact_id") if where in left] == []


# What a role or a pool says


DEFAULTS = {
    "default_transaction_isolation": "'serializable'",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "statement_timeout": "'100ms'",
    "lock_timeout": "'1ms'",
    "idle_in_transaction_session_timeout": "'100ms'",
    "synchronous_commit": "off",
    "DateStyle": "'German'",
    "IntervalStyle": "'iso_8601'",
    "TimeZone": "'Australia/Lord_Howe'",
    "extra_float_digits": "-15",
    "bytea_output": "'escape'",
    "client_encoding": "'LATIN1'",
    "search_path": '"$user", public',
    "standard_conforming_strings": "off",
}


def test_the_defaults_of_a_role_do_not_matter_to_workers(postgres, pg_engine):
    outbox = Outbox(pg_engine)
    with pg_engine.begin() as connection:
        for body in ("1 €", "2"):
            outbox.send(connection, "orders", body, key="ä😀", headers={"a": "ß€"})
        outbox.send(connection, "orders", "later", delay=timedelta(milliseconds=1))
    role = f"worker_{pg_engine.url.database}"
    with pg_engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN SUPERUSER"))
        for name, value in DEFAULTS.items():
            connection.execute(text(f"ALTER ROLE {role} SET {name} = {value}"))
    engine = create_engine(pg_engine.url.set(username=role))

    found = delivered(Database(engine))

    with closing(Database(engine).open()) as channel:
        channel.rows("SELECT pg_sleep(0.2)")
        settings = {
            name: channel.rows(f"SHOW {name}")[0][0]
            for name in ("transaction_isolation", "transaction_read_only", "synchronous_commit", "statement_timeout")
        }
    engine.dispose()
    with pg_engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {role}"))
    assert [(m.body.decode(), m.key, dict(m.headers)) for m in found] == [
        ("1 €", "ä😀", {"a": "ß€"}), ("2", "ä😀", {"a": "ß€"}), ("later", None, {}),
    ]  # fmt: skip
    assert settings == {
        "transaction_isolation": "read committed", "transaction_read_only": "off", "synchronous_commit": "on",
        "statement_timeout": "1min",
    }  # fmt: skip


def test_what_a_destination_says_may_hold_letters_that_the_database_lacks(postgres):
    """The letters that it has stay: a key is found again."""
    postgres.create_database("latin", encoding="LATIN1")
    engine = create_engine(postgres.url("latin"))
    migrate.upgrade(engine)
    outbox, destination = Outbox(engine), Destination(lambda _message: Reject("l\u2019été 😀"))
    for body in (b"1", b"2"):
        with outbox.begin() as session:
            outbox.send(session, "orders", body, key="ä")
        relay_to(destination, outbox).until_empty()

    with engine.connect() as connection:
        parked = connection.execute(
            text("SELECT key, coalesce(state, 'behind'), error FROM outbox_parked ORDER BY id")
        ).all()
    engine.dispose()
    postgres.drop_database("latin")
    assert parked == [("ä", "dead", "l\\u2019été \\U0001f600"), ("ä", "behind", None)]
    assert destination.calls == 1


def test_a_database_may_have_an_encoding_that_python_does_not_know(postgres):
    postgres.create_database("taiwan", encoding="EUC_TW")
    engine = create_engine(postgres.url("taiwan"), connect_args={"client_encoding": "utf8"})
    migrate.upgrade(engine)
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.send(connection, "orders", b"1", key="漢")

    found = [(message.key, message.body) for message in delivered(Database(engine))]
    engine.dispose()
    postgres.drop_database("taiwan")
    assert found == [("漢", b"1")]


@pytest.mark.parametrize("length", [1, 5, 30])
def test_bytes_are_bytes_whatever_a_backslash_means_in_a_string(pg_engine, length):
    with pg_engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{pg_engine.url.database}" SET standard_conforming_strings = off'))
    pg_engine.dispose()
    outbox, expected = Outbox(pg_engine), [b"\\x61" + bytes(range(256)) + str(n).encode() for n in range(length)]
    with pg_engine.begin() as connection:
        outbox.send_all(connection, [Message("orders", body, headers={"a": "\\n'"}) for body in expected])

    found = delivered(Database(pg_engine))
    assert [message.body for message in found] == expected
    assert {message.headers["a"] for message in found} == {"\\n'"}


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file::memory:?uri=true"])
def test_a_database_in_memory_is_refused(url):
    engine = create_engine(url)
    migrate.upgrade(engine)

    with pytest.raises(DatabaseError, match="file"):
        delivered(Outbox(engine).database)


def test_a_pool_of_one_shared_connection_is_refused(tmp_path, pg_engine):
    """A worker would read, and commit, what the application has not committed."""
    for url in (f"sqlite:///{tmp_path / 'static.sqlite3'}", pg_engine.url, "sqlite://"):
        engine = create_engine(url, poolclass=StaticPool)
        migrate.upgrade(engine)
        outbox = Outbox(engine)
        with pytest.raises(DatabaseError, match="StaticPool"):
            delivered(outbox.database)
        with engine.connect() as connection:
            outbox.send(connection, "orders", "1")
            with pytest.raises(DatabaseError, match="StaticPool"):
                delivered(outbox.database)
            connection.rollback()
            assert connection.execute(text("SELECT count(*) FROM outbox_message")).scalar() == 0
        engine.dispose()


def test_a_shared_cache_in_memory_is_refused():
    engine = create_engine("sqlite:///file:shared?mode=memory&cache=shared&uri=true")
    migrate.upgrade(engine)

    with pytest.raises(DatabaseError, match="file"):
        delivered(Outbox(engine).database)


# SQLite: the log's own ids


def test_purging_everything_does_not_set_a_position_back(sqlite_engine):
    """`max(id)` would fall to nothing, and the worker take the database for another one."""
    outbox = Outbox(sqlite_engine)
    send(outbox, "1", "2")
    seen = [texts(delivered(outbox.database))]
    with sqlite_engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message"))
    with closing(outbox.database.open()) as channel:
        position = Log().now(channel).position
    seen.append(texts(delivered(outbox.database)))
    send(outbox, "3")
    seen.append(texts(delivered(outbox.database)))

    assert (position, seen) == (Position(3), [["1", "2"], [], ["3"]])


def test_a_file_restored_to_an_earlier_state_is_noticed(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    send(outbox, "1")
    delivered(outbox.database)
    with sqlite_engine.begin() as connection:
        connection.execute(text("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'outbox_message'"))
        connection.execute(text("DELETE FROM outbox_message"))

    with pytest.raises(PositionError):
        delivered(outbox.database)
