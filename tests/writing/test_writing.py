"""`send` is an INSERT in the caller's transaction: one statement, at once, on the caller's own connection."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy
from sqlalchemy import Engine, Table, event, make_url, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import DatabaseError, Message, Outbox, SchemaError, create_engine, migrate
from outbox.model.slots import slot_of
from outbox.store.operations.check import tables_of
from tests.support.orders import Order, customers
from tests.support.readers import bodies, delivered, in_utc
from tests.support.waiting import eventually


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """The first words of the statements that are executed."""
    seen: list[str] = []

    def executed(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(" ".join(statement.split()[:3]))

    event.listen(engine, "before_cursor_execute", executed)
    yield seen
    event.remove(engine, "before_cursor_execute", executed)


def log_of(outbox: Outbox) -> Table:
    """The table of the log."""
    return tables_of(outbox.database).message


# What a row holds


def test_a_row_holds_what_was_said(engine):
    outbox = Outbox(engine)
    at, until = datetime(2031, 2, 3, 4, 5, 6, 789_123, tzinfo=UTC), datetime(2032, 1, 1, tzinfo=UTC)
    before = datetime.now(UTC) - timedelta(seconds=1)
    with engine.begin() as connection:
        id = outbox.send(
            connection, "orders", {"id": 1}, key="order-1", tags="placed", headers={"a": "ü"},
            content_type="application/vnd.order+json", deliver_at=at, expires_at=until,
        )  # fmt: skip
    with engine.connect() as connection:
        row = dict(connection.execute(log_of(outbox).select()).mappings().one())

    row.pop("xact_id", None)
    for moment in ("created_at", "deliver_at", "expires_at"):
        row[moment] = in_utc(row[moment])
    created_at = row.pop("created_at")
    assert before < created_at < datetime.now(UTC) + timedelta(seconds=1)
    assert row == {
        "id": 1, "message_id": id, "topic": "orders", "key": "order-1", "slot": slot_of("order-1", 256),
        "tags": "placed", "headers": '{"a":"ü"}', "body": b'{"id":1}', "content_type": "application/vnd.order+json",
        "deliver_at": at, "expires_at": until, "direct": None,
    }  # fmt: skip


def test_what_was_not_said_is_null(engine):
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.send(connection, "orders", b"")
    with engine.connect() as connection:
        row = connection.execute(log_of(outbox).select()).mappings().one()

    absent = ("key", "tags", "headers", "content_type", "deliver_at", "expires_at")
    assert {name: row[name] for name in absent} == dict.fromkeys(absent)
    assert 0 <= row["slot"] < 256


def test_the_number_of_slots_is_that_of_the_tables(engine):
    outbox = Outbox(engine, slots=16)
    with engine.begin() as connection:
        outbox.send_all(connection, [Message("orders", b"", key=key) for key in ("order-1", "a", "kéy")])
    with engine.connect() as connection:
        slots = connection.execute(sqlalchemy.select(log_of(outbox).c.slot)).scalars().all()

    assert slots == [slot_of(key, 16) for key in ("order-1", "a", "kéy")]


# What it costs


def test_send_is_one_statement(shop, engine):
    with Session(engine) as session:
        session.add(Order(customer="ann"))
        session.flush()
        with statements(engine) as seen:
            shop.send(session, "orders", b"1")
            shop.send(session, "orders", b"2", key="order-1", headers={"a": "1"}, delay=timedelta(seconds=1))
        session.commit()

    assert seen == ["INSERT INTO outbox_message"] * 2


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_send_all_is_one_statement(engine, count):
    """On SQLite, where statements cost no round trip, it is one that is executed many times."""
    outbox = Outbox(engine)
    messages = [Message("orders", str(n), key=None if n % 3 else f"order-{n}") for n in range(count)]
    with engine.begin() as connection, statements(engine) as seen:
        ids = outbox.send_all(connection, messages)
    with engine.connect() as connection:
        rows = connection.execute(log_of(outbox).select().order_by(log_of(outbox).c.id)).all()

    assert seen == ["INSERT INTO outbox_message"]
    assert ids == [message.message_id for message in messages] == [row.message_id for row in rows]
    assert [row.id for row in rows] == list(range(1, count + 1))


def test_send_all_of_nothing_does_nothing(engine):
    outbox = Outbox(engine)
    with engine.begin() as connection, statements(engine) as seen:
        assert outbox.send_all(connection, []) == []

    assert seen == []


def test_send_all_mixes_messages_of_every_kind(engine):
    outbox = Outbox(engine)
    moment = datetime(2031, 1, 1, tzinfo=UTC)
    messages = [
        Message("orders", b"\0", key="k", tags="t", headers={"a": "{}\\,\"'"}, content_type="x/y"),
        Message("mail", ""),
        Message("later", [1], deliver_at=moment, expires_at=moment + timedelta(days=1)),
        Message("soon", {"a": None}, delay=timedelta(hours=1)),
    ]
    with engine.begin() as connection:
        outbox.send_all(connection, tuple(messages))
    with engine.connect() as connection:
        rows = connection.execute(log_of(outbox).select().order_by(log_of(outbox).c.id)).all()

    assert [
        (r.message_id, r.topic, r.key, r.tags, r.headers, r.body, r.content_type, in_utc(r.expires_at)) for r in rows
    ] == [
        (m.message_id, m.topic, m.key, m.tags, m.headers_json, m.body, m.content_type, m.expires_at) for m in messages
    ]
    later = in_utc(rows[3].created_at + timedelta(hours=1))
    assert [in_utc(r.deliver_at) for r in rows] == [None, None, moment, later]


def test_ids_are_known_before_the_commit_and_arrive(engine):
    outbox = Outbox(engine)
    with engine.begin() as connection:
        ids = [outbox.send(connection, "orders", str(n)) for n in range(3)]
        ids += outbox.send_all(connection, [Message("orders", "3"), Message("orders", "4")])

    assert {(type(id), id.version) for id in ids} == {(UUID, 7)}
    assert [message.message_id for message in delivered(outbox.database)] == ids


# Order: a keyed message is written after the row that orders its key


def test_a_keyed_send_flushes_first(shop, engine):
    with statements(engine) as seen, Session(engine) as session, session.begin():
        session.add(Order(customer="ann"))
        shop.send(session, "orders", b"1", key="order-1")

    assert seen == ["INSERT INTO orders", "INSERT INTO outbox_message"]


def test_send_all_flushes_first_if_one_of_them_has_a_key(shop, engine):
    with statements(engine) as seen, Session(engine) as session, session.begin():
        session.add(Order(customer="ann"))
        shop.send_all(session, [Message("mail", b"1"), Message("orders", b"2", key="order-1")])

    assert seen == ["INSERT INTO orders", "INSERT INTO outbox_message"]


def test_a_send_without_key_leaves_the_session_alone(shop, engine):
    with statements(engine) as seen, Session(engine) as session, session.begin():
        session.add(Order(customer="ann"))
        shop.send(session, "orders", b"1")
        shop.send_all(session, [Message("mail", b"2")])

    assert seen == ["INSERT INTO outbox_message", "INSERT INTO outbox_message", "INSERT INTO orders"]


def test_who_switches_autoflush_off_gets_no_flush(shop, engine):
    with statements(engine) as seen, Session(engine) as session, session.begin():
        session.add(Order(customer="ann"))
        with session.no_autoflush:
            shop.send(session, "orders", b"1", key="order-1")
    with statements(engine) as seen_without, Session(engine, autoflush=False) as session, session.begin():
        session.add(Order(customer="ben"))
        shop.send(session, "orders", b"2", key="order-2")

    assert seen == seen_without == ["INSERT INTO outbox_message", "INSERT INTO orders"]


def test_a_flush_that_fails_sends_nothing(shop, engine):
    with Session(engine) as session:
        session.add(Order(customer="ann"))
        session.commit()
        session.add(Order(customer="ann"))
        with pytest.raises(sqlalchemy.exc.IntegrityError):
            shop.send(session, "orders", b"1", key="order-1")
        session.rollback()

    assert bodies(engine) == []


def test_writers_of_a_key_without_a_row_can_take_a_lock(pg_engine):
    """The second one draws its place in the log only when the first has committed."""
    outbox = Outbox(pg_engine)
    second = threading.Thread(target=send_locked, args=(outbox, b"2"))
    with pg_engine.begin() as connection:
        with statements(pg_engine) as seen:
            outbox.send(connection, "orders", b"1", key="k", lock_key=True)
        second.start()
        assert eventually(lambda: waiting(pg_engine) == 1)
        send_locked(outbox, b"0", key="another")
        outbox.send(connection, "orders", b"1 too", key="k")
    second.join()

    assert [words.partition("(")[0] for words in seen] == ["SELECT pg_advisory_xact_lock", "INSERT INTO outbox_message"]
    assert bodies(pg_engine) == [b"1", b"0", b"1 too", b"2"]
    assert waiting(pg_engine, granted=True) == 0


def send_locked(outbox: Outbox, body: bytes, key: str = "k") -> None:
    """Send in a transaction of its own."""
    with outbox.begin() as session:
        outbox.send(session, "orders", body, key=key, lock_key=True)


def waiting(engine: Engine, *, granted: bool = False) -> int:
    """How many wait for an advisory lock, or hold one."""
    question = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = :granted"
    with engine.connect() as connection:
        return int(connection.execute(text(question), {"granted": granted}).scalar_one())


def test_a_lock_is_wanted_or_not(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with sqlite_engine.begin() as connection:
        for send in (
            lambda: outbox.send(connection, "orders", b"1", key="k", lock_key="no"),  # type: ignore[arg-type]
            lambda: outbox.send_all(connection, [Message("orders", b"1")], lock_keys=0),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=r"^lock_keys must be True or False, not "):
                send()

    assert bodies(sqlite_engine) == []


def test_sqlite_has_one_writer_anyway_so_the_lock_costs_nothing(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    with sqlite_engine.begin() as connection, statements(sqlite_engine) as seen:
        outbox.send(connection, "orders", b"1", key="k", lock_key=True)

    assert seen == ["INSERT INTO outbox_message"]


# Who holds the transaction


def test_an_engine_and_a_factory_are_no_transactions(engine):
    outbox = Outbox(engine)
    for handle in (engine, sessionmaker(engine)):
        wrong: Any = handle
        with pytest.raises(TypeError, match=f"not {type(handle).__name__}"):
            outbox.send(wrong, "orders", b"")


@pytest.mark.parametrize(
    "wrong", [b"orders", {"topic": "orders"}, ("orders", b"")], ids=lambda wrong: type(wrong).__name__
)
def test_send_all_takes_messages(engine, wrong: Any):
    outbox = Outbox(engine)
    with engine.begin() as connection, statements(engine) as seen, pytest.raises(TypeError, match="Message objects"):
        outbox.send_all(connection, [Message("orders", b""), wrong])

    assert seen == []


@pytest.mark.parametrize("bind", [None, "sqlite://", object(), sessionmaker()], ids=lambda bind: type(bind).__name__)
def test_an_outbox_needs_an_engine(bind: Any):
    with pytest.raises(DatabaseError, match="Engine"):
        Outbox(bind)


def test_an_outbox_takes_the_application_s_own_factory_of_sessions(engine):
    class OurSession(Session):
        """One with the application's own ways."""

    outbox = Outbox(sessionmaker(engine, class_=OurSession, expire_on_commit=False))
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")

    assert isinstance(session, OurSession)
    assert bodies(engine) == [b"1"]


def test_a_session_with_several_binds_is_asked_for_the_one_of_the_log(shop, engine, tmp_path):
    elsewhere = create_engine(f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}")
    with Session(engine, binds={Order: elsewhere}) as session, session.begin():
        shop.send(session, "orders", b"1", key="order-1")
    with Session(binds={Order: elsewhere, log_of(shop): engine}) as session, session.begin():
        shop.send(session, "orders", b"2")

    assert bodies(engine) == [b"1", b"2"]


def test_a_scoped_session_is_the_one_of_its_scope(shop, engine):
    session = scoped_session(sessionmaker(engine))
    session.add(Order(customer="ann"))
    shop.send(session, "orders", b"1", key="order-1")
    assert bodies(engine) == []
    session.commit()
    session.remove()

    assert (bodies(engine), customers(engine)) == ([b"1"], ["ann"])


# Where the tables are


def test_missing_tables_name_the_command(postgres, tmp_path):
    name = f"empty_{UUID(int=0).hex[:8]}_{tmp_path.name[-8:]}"
    engines = [create_engine(f"sqlite:///{tmp_path / 'empty.sqlite3'}"), create_engine(postgres.create_database(name))]
    for engine in engines:
        with pytest.raises(SchemaError, match="the outbox tables are not there; run: outbox db upgrade"):
            send_one(Outbox(engine))
        with pytest.raises(SchemaError, match="run: outbox db upgrade"):
            delivered(Outbox(engine).database)
        engine.dispose()
    with pytest.raises(SchemaError, match="not there in schema events; run: outbox db upgrade"):
        send_one(Outbox(engines[1], schema="events"))
    engines[1].dispose()
    postgres.drop_database(name)


def send_one(outbox: Outbox) -> None:
    """Send in a transaction of its own."""
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")


def test_the_tables_may_be_in_a_schema(pg_engine):
    migrate.upgrade(pg_engine, schema="Events")
    outbox, other = Outbox(pg_engine, schema="Events"), Outbox(pg_engine)
    with pg_engine.begin() as connection:
        outbox.send(connection, "orders", b"1")
        other.send(connection, "orders", b"2")
        outbox.send_all(connection, [Message("orders", b"3"), Message("orders", b"4")])

    assert [message.body for message in delivered(outbox.database)] == [b"1", b"3", b"4"]
    assert [message.body for message in delivered(other.database)] == [b"2"]


def test_missing_tables_name_their_database_with_its_user_and_without_its_password(postgres, tmp_path):
    name = f"named_{tmp_path.name[-8:]}"
    url = make_url(postgres.create_database(name)).set(password="c4nary")
    named = rf"--database 'postgresql://{url.host}:{url.port}/{name}\?user={url.username}'$"
    for asked, says in [
        (url.render_as_string(hide_password=False), named),
        (f"sqlite:///{tmp_path}/a shop.db", f"--database 'sqlite:///{tmp_path}/a shop.db'$"),
        (
            f"sqlite:///file:{tmp_path}/shop.db?uri=true",
            f"not there in file:{tmp_path}/shop.db; run: outbox db upgrade$",
        ),
    ]:
        engine = create_engine(asked)
        with pytest.raises(SchemaError, match=says):
            send_one(Outbox(engine))
        engine.dispose()
    postgres.drop_database(name)


@pytest.mark.parametrize("schema", ["", "a b", 'x"; DROP TABLE outbox_message; --', "a.b", "1a", "x" * 64])
def test_a_schema_is_an_identifier(engine, schema):
    with pytest.raises(DatabaseError, match="not a plain identifier"):
        Outbox(engine, schema=schema)


def test_missing_tables_are_told_with_the_command_that_makes_them(pg_engine):
    outbox = Outbox(pg_engine, schema="elsewhere")
    with (
        pytest.raises(SchemaError, match=r"run: outbox db upgrade --schema elsewhere --database 'postgresql://"),
        outbox.begin() as session,
    ):
        outbox.send(session, "orders", b"1")
