"""Writers in other languages: the function computes and refuses what the library does, and the page's code runs."""

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from outbox import InvalidMessageError, Message, Outbox, Relay, migrate
from outbox.model.limits import stored_headers
from outbox.model.message import uuid7
from outbox.model.slots import slot_of
from outbox.testing.servers.postgresql import postgres_programs
from tests.support.command_line import outbox as typed
from tests.support.guests import owner_and_guest
from tests.support.pages import TOP, blocks
from tests.support.servers.maven import class_path

PAGE = (TOP / "docs" / "other-languages.md").read_text()
IN_SQL, AS_OWNER, ON_SQLITE = blocks(PAGE, "sql")
(TRIGGER,) = blocks(PAGE, "postgresql")
VECTORS = json.loads(blocks(PAGE, "json")[0])
JDBC = "org.postgresql:postgresql:42.7.7"
ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, status text)"


@pytest.fixture
def shop(pg_engine: Engine) -> Engine:
    """A database with the function, and a table of orders."""
    make(pg_engine)
    return pg_engine


def make(engine: Engine, *options: str) -> None:
    """As the page says, by its psql."""
    psql(engine, typed(None, "db", "sql", "--function", *options).out + ORDERS)


def psql(engine: Engine, statements: str) -> str:
    """What psql prints."""
    program = str(postgres_programs(None) / "psql")
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    command: list[str] = [program, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-At", url]
    return subprocess.run(command, input=statements, capture_output=True, text=True, check=True).stdout


def sent(engine: Engine) -> list[tuple[str, str | None, Any]]:
    """What a relay sends now."""
    found: list[tuple[str, str | None, Any]] = []
    relay = Relay(Outbox(engine), lambda m: found.append((m.topic, m.key, m.json())))
    relay.until_empty()
    return found


def call(engine: Engine, **given: Any) -> None:
    """Call the function with these parameters, each of the type of its value."""
    names = ", ".join(f"{name} => %({name})s" for name in given)
    with engine.begin() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        driver.execute(f"SELECT outbox_send({names})".encode(), given)


# Vectors


@pytest.mark.parametrize("vector", VECTORS["slots"], ids=lambda vector: ascii(vector["key"]))
def test_the_slots_of_the_page_are_those_of_the_library(vector):
    key = vector["key"]

    assert (slot_of(key, 256), slot_of(key, 1000)) == (vector["of_256"], vector["of_1000"])


@pytest.mark.parametrize("vector", VECTORS["ids"], ids=lambda vector: vector["random"][:2])
def test_the_ids_of_the_page_are_those_of_the_library(vector, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: vector["milliseconds"] * 1_000_000)
    monkeypatch.setattr("os.urandom", lambda _: bytes.fromhex(vector["random"]))

    assert str(uuid7()) == vector["id"]


@pytest.mark.parametrize("vector", VECTORS["headers"], ids=lambda vector: next(iter(vector["given"])))
def test_the_headers_of_the_page_are_those_of_the_library(vector):
    assert stored_headers(vector["given"]) == vector["stored"]


# The function


GOOD: list[dict[str, Any]] = [
    {"topic": "a.B_9%|-" + "x" * 241, "body": b"\0\xff"},
    {"topic": "orders", "body": "Gr\u00fc\u00dfe", "tags": "t" * 255},
    {"topic": "orders", "body": b"", "key": "k" * 1024, "content_type": "text/plain; charset=latin-1"},
    {"topic": "orders", "body": b"x", "key": "\U0001f600" * 256, "headers": {}},
    {"topic": "orders", "body": b"x", "headers": {f"h{n}": "" for n in range(160)}},
    {"topic": "orders", "body": b"x", "headers": {"a": "v" * (32 * 1024 - 1)}, "tags": "\u00e9"},
    {
        "topic": "orders",
        "body": b"x",
        "deliver_at": datetime(2030, 1, 1, tzinfo=UTC),
        "expires_at": datetime(2030, 1, 1, tzinfo=UTC) + timedelta(microseconds=1),
    },
    *({"topic": "orders", "body": b"x", "key": each["key"]} for each in VECTORS["slots"]),
    *({"topic": "orders", "body": b"x", "headers": each["given"]} for each in VECTORS["headers"]),
]
ROW = """
    SELECT topic, key, CASE WHEN key IS NOT NULL THEN slot END, tags, headers, content_type, body, deliver_at,
           expires_at, xact_id > 0, created_at <= now() FROM outbox_message ORDER BY id
"""


@pytest.mark.parametrize("slots", [256, 1000])
def test_a_row_of_the_function_is_the_librarys(pg_engine, slots):
    make(pg_engine, "--slots", f"{slots}")
    outbox = Outbox(pg_engine, slots=slots)
    before = datetime.now(UTC)
    for each in GOOD:
        with outbox.begin() as session:
            outbox.send(session, **each)
        call(pg_engine, **(each | ({"headers": json.dumps(each["headers"])} if "headers" in each else {})))

    with pg_engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(text(ROW))]
        ids = [uuid.UUID(str(id)) for id in connection.scalars(text("SELECT message_id FROM outbox_message"))]
    assert rows[::2] == rows[1::2]
    assert {(id.version, id.variant) for id in ids} == {(7, uuid.RFC_4122)}
    assert all(0 <= (id.int >> 80) - before.timestamp() * 1000 + 1 < 600_000 for id in ids)
    assert len(set(ids)) == 2 * len(GOOD)


BAD: list[dict[str, Any]] = [
    *({"topic": topic} for topic in ("", ".", "..", "x" * 250, "a b", "\u00fc", "RMQ_SYS_TRANS_HALF_TOPIC", "a\n")),
    {"body": b"x" * (4 * 1024 * 1024 + 1)},
    *({"key": key} for key in ("", "k" * 1025, "\U0001f600" * 256 + "x")),
    *({"tags": tags} for tags in ("", "t" * 256, "a|b", "a\tb", "a\u2028b", "a\x85")),
    *({"content_type": kind} for kind in ("", " text/plain", "text/pl\u00e4in", "x" * 256, "a\nb")),
    {"headers": {"a b": "c"}},
    {"headers": {"": "c"}},
    {"headers": {"Outbox-Id": "c"}},
    {"headers": {"nats-Msg-Id": "c"}},
    {"headers": {"Content-Type": "c"}},
    {"headers": {"a": "1", "A": "2"}},
    *({"headers": {"a": value}} for value in ("a\nb", " a", "a ", "a\u00a0", "\u3000a", "\x7f", "\u2029")),
    {"headers": {f"h{n}": "" for n in range(161)}},
    {"headers": {"a": "v" * 32 * 1024}},
    {"deliver_at": datetime(1960, 1, 1, tzinfo=UTC)},
    {"expires_at": datetime(9500, 1, 1, tzinfo=UTC)},
    {"deliver_at": datetime(2030, 1, 1, tzinfo=UTC), "expires_at": datetime(2030, 1, 1, tzinfo=UTC)},
]


def test_the_function_refuses_what_the_library_refuses(shop):
    """By the same field."""
    for each in BAD:
        given = {"topic": "orders", "body": b"x", **each}
        with pytest.raises(InvalidMessageError) as refused:
            Message(**given)
        field = str(refused.value).split("[")[0].split(" ")[0].rstrip(":")
        given |= {"headers": json.dumps(each["headers"])} if "headers" in each else {}
        with pytest.raises(psycopg.errors.InvalidParameterValue) as told:
            call(shop, **given)
        assert re.match(r"\w+", str(told.value))[0] == field, each  # type: ignore[index]
    for headers in ('["a"]', '{"a": 1}', '{"a": null}', "null"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="headers must be a JSON object of strings"):
            call(shop, topic="orders", body=b"x", headers=headers)
    for name in ("topic", "body"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"^{name} must"):
            call(shop, **{"topic": "orders", "body": b"x", name: None})

    with shop.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox_message")) == 0


@pytest.fixture
def listening(pg_engine: Engine) -> Iterator[psycopg.Connection[Any]]:
    """A connection that listens as a relay does."""
    url = pg_engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute('LISTEN outbox; LISTEN "outbox_Shop"')
        yield connection


@pytest.mark.storm
def test_a_commit_wakes_relays_and_a_rollback_does_not(pg_engine, listening):
    migrate.upgrade(pg_engine, "Shop")
    make(pg_engine)
    make_in_schema = typed(None, "db", "sql", "--function", "--schema", "Shop").out
    psql(pg_engine, make_in_schema)

    for end in ("ROLLBACK", "COMMIT"):
        psql(pg_engine, f"BEGIN; SELECT outbox_send('orders', 'x'); SELECT \"Shop\".outbox_send('orders', 'x'); {end}")
    psql(pg_engine, "SELECT outbox_send('orders', 'x', wake => false)")

    assert [(each.channel, each.payload) for each in listening.notifies(timeout=2)] == [
        ("outbox", ""), ("outbox_Shop", ""),
    ]  # fmt: skip


def test_relays_with_and_without_the_schema_public_hear_the_same_name(pg_engine, listening):
    psql(pg_engine, typed(None, "db", "sql", "--function", "--schema", "public").out)

    psql(pg_engine, "SELECT outbox_send('orders', 'x')")

    assert [each.channel for each in listening.notifies(timeout=60, stop_after=1)] == ["outbox"]
    assert Outbox(pg_engine, schema="public").database.wake_up_name == Outbox(pg_engine).database.wake_up_name


@pytest.mark.parametrize("body", ["'{}'::bytea", "'{}'::text", "'{}'::json", "'{}'::jsonb"])
def test_the_function_finds_its_tables_whatever_the_search_path_is(shop, body):
    psql(shop, f"CREATE SCHEMA other; SET search_path = other; SELECT public.outbox_send('orders', {body})")

    assert sent(shop) == [("orders", None, {})]


def test_the_function_may_be_made_in_another_schema_than_the_tables(pg_engine):
    function = typed(None, "db", "sql", "--function").out
    psql(pg_engine, f'CREATE SCHEMA "Api"; SET search_path = "Api", public; {function}')

    psql(pg_engine, "SET search_path = pg_catalog; SELECT \"Api\".outbox_send('orders', '{}'::json)")

    assert sent(pg_engine) == [("orders", None, {})]


def test_the_function_is_not_made_where_the_search_path_leads_to_no_tables(pg_engine):
    function = typed(None, "db", "sql", "--function").out

    with pytest.raises(subprocess.CalledProcessError) as refused:
        psql(pg_engine, f"CREATE SCHEMA other; SET search_path = other; {function}")

    assert "outbox_message is not there; make the tables first, or give --schema" in refused.value.stderr


@pytest.mark.parametrize("schema", [None, "public"])
def test_a_function_with_the_rights_of_its_owner_is_no_way_to_them(pg_engine, schema):
    """A table of the session's own is looked for first, unless the path says otherwise; its triggers would be run."""
    make(pg_engine, *([] if schema is None else ["--schema", schema]))
    trap = """
        CREATE TEMP TABLE outbox_message (message_id uuid, topic text, key text, slot int, tags text, headers text,
            content_type text, deliver_at timestamptz, expires_at timestamptz, body bytea);
        CREATE FUNCTION pg_temp.seize() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''seized''; END';
        CREATE TRIGGER seize BEFORE INSERT ON outbox_message FOR EACH ROW EXECUTE FUNCTION pg_temp.seize();
    """
    with owner_and_guest(pg_engine) as (owner, guest):
        psql(owner, AS_OWNER.replace("app", str(guest.url.username)))
        psql(guest, f"{trap} SELECT outbox_send('a', '{{}}'::bytea); SELECT outbox_send('b', '{{}}'::jsonb)")
        psql(owner, AS_OWNER.replace("GRANT", "REVOKE").replace("TO app", f"FROM {guest.url.username}"))
        with pytest.raises(subprocess.CalledProcessError) as refused:
            psql(guest, "SELECT outbox_send('c', '{}'::text)")

    assert sorted(sent(pg_engine)) == [("a", None, {}), ("b", None, {})]
    assert "permission denied for function outbox_send" in refused.value.stderr


def test_a_plain_writer_may_call_the_function(shop):
    with owner_and_guest(shop) as (owner, guest):
        psql(owner, typed(None, "db", "grants", "--writer", str(guest.url.username)).out)
        returned = psql(guest, "SELECT outbox_send('orders', '{}'::json)")

    assert uuid.UUID(returned.strip()).version == 7


# The page's code


def test_what_sql_and_a_trigger_commit_is_sent_and_nothing_else(shop):
    psql(shop, IN_SQL)
    psql(shop, TRIGGER)
    psql(shop, IN_SQL.replace("7", "8").replace("COMMIT", "ROLLBACK"))
    psql(shop, "UPDATE orders SET status = 'sent' WHERE id = 7")

    assert sent(shop) == [
        ("orders", "order-7", {"id": 7}),
        ("orders", "order-7", {"id": 7, "status": "sent"}),
    ]


@pytest.mark.jvm
def test_what_java_commits_is_sent_and_nothing_else(shop, tmp_path):
    (tmp_path / "Send.java").write_text(blocks(PAGE, "java")[0])
    url = f"jdbc:postgresql://127.0.0.1:{shop.url.port}/{shop.url.database}?user=postgres"
    subprocess.run(["java", "-cp", class_path("jdbc", JDBC), tmp_path / "Send.java", url], check=True)

    assert sent(shop) == [("orders", "order-8", {"id": 8})]


def test_what_is_inserted_into_sqlite_is_sent(sqlite_engine):
    with sqlite_engine.begin() as connection:
        connection.exec_driver_sql(ON_SQLITE)
        connection.exec_driver_sql(ON_SQLITE)
    with sqlite_engine.connect() as connection:
        ids = [uuid.UUID(id) for id in connection.scalars(text("SELECT message_id FROM outbox_message"))]

    assert sent(sqlite_engine) == [("orders", "order-42", {"id": 42})] * 2
    assert {(id.version, id.variant) for id in ids} == {(7, uuid.RFC_4122)}
    assert all(abs((id.int >> 80) - datetime.now(UTC).timestamp() * 1000) < 600_000 for id in ids)
    assert typed(sqlite_engine, "doctor").code == 0


def test_the_function_is_for_postgresql():
    ended = typed(None, "db", "sql", "--function", "--dialect", "sqlite")

    assert (ended.code, "--function is for PostgreSQL; SQLite has no functions in SQL" in ended.err) == (2, True)
