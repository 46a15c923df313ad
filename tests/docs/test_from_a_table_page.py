"""What `docs/from-a-table.md` says of triggers is so: with its SQL, real writers, an old reader and a relay."""

import json
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, text

from outbox import Message, Outbox, Relay, create_engine, migrate
from outbox.testing.servers import PostgresServer
from tests.conftest import adopt, started
from tests.support.command_line import outbox as typed
from tests.support.pages import TOP, blocks
from tests.support.waiting import eventually

PAGE = (TOP / "docs" / "from-a-table.md").read_text()
REHEARSE, MARK, UNSENT, DEBEZIUM, PUBLICATION, IN_SLOT, FASTSTREAM, UNLEASED = blocks(PAGE, "postgresql")
(ON_SQLITE,) = blocks(PAGE, "sql")
REAL = ["!rehearsal.*"]
KEYS, ENOUGH = 4, 30

#: A key and its number, which the key's row counts.
Numbered = tuple[int, int]


@dataclass(frozen=True)
class OldTable:
    """A table that was an outbox before: how it is made, filled, read by its old reader, and adopted."""

    made: str
    insert: str
    take: Callable[[Connection], list[Numbered]]
    mark: str
    left: str
    rehearsal: str = ""
    prefix: str | None = None


def numbered(body: Any) -> Numbered:
    """What a payload says."""
    found = json.loads(body) if isinstance(body, str | bytes) else body
    return found["id"], found["n"]


# The old readers


def take_unsent(connection: Connection) -> list[Numbered]:
    """Mark some rows as sent, and return them."""
    lock = "FOR UPDATE" if connection.dialect.name == "postgresql" else ""
    rows = connection.execute(text(f"SELECT id, payload FROM events WHERE NOT sent ORDER BY id LIMIT 10 {lock}")).all()
    for row in rows:
        connection.execute(text("UPDATE events SET sent = TRUE WHERE id = :id"), {"id": row.id})
    return [numbered(row.payload) for row in rows]


def take_from_slot(connection: Connection) -> list[Numbered]:
    """Read the INSERTs in the slot, as the connector does: by the plug-in pgoutput."""
    changes = connection.scalars(
        text(
            "SELECT data FROM pg_logical_slot_get_binary_changes('debezium', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'dbz_publication')"
        )
    ).all()
    return [numbered(payload_of(bytes(data))) for data in changes if data[:1] == b"I"]


def payload_of(insert: bytes) -> bytes:
    """The last column of an INSERT of pgoutput: each column is `t`, four bytes of length, and a text."""
    values, place = [], 8  # after the kind, the relation, the letter N and the number of columns
    while place < len(insert):
        assert insert[place : place + 1] == b"t"
        length = int.from_bytes(insert[place + 1 : place + 5], "big")
        values.append(insert[place + 5 : place + 5 + length])
        place += 5 + length
    return values[-1]


def take_leased(connection: Connection) -> list[Numbered]:
    """Lease available rows of a queue, and delete them as a subscriber does when its handler has returned."""
    leased = text("""
        UPDATE outbox SET acquired_at = now(), acquired_token = gen_random_uuid()
        WHERE id IN (
            SELECT id FROM outbox WHERE queue = 'orders' AND next_attempt_at <= now()
                AND (acquired_token IS NULL OR acquired_at < now() - interval '60 s')
            ORDER BY next_attempt_at, id LIMIT 10 FOR UPDATE SKIP LOCKED)
        RETURNING id, payload
    """)
    rows = sorted(connection.execute(leased), key=lambda row: row.id)
    for row in rows:
        connection.execute(text("DELETE FROM outbox WHERE id = :id AND acquired_token IS NOT NULL"), {"id": row.id})
    return [numbered(bytes(row.payload)) for row in rows]


STATUS = OldTable(
    made="CREATE TABLE events (id serial PRIMARY KEY, topic text, payload jsonb, sent boolean DEFAULT false)",
    insert="INSERT INTO events (topic, payload, sent) VALUES ('orders', :payload, FALSE)",
    take=take_unsent,
    rehearsal=REHEARSE,
    mark=MARK,
    left=UNSENT,
)
ROUTER = OldTable(
    made="""
        CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text NOT NULL,
            aggregateid text NOT NULL, type text NOT NULL, payload jsonb);
        CREATE PUBLICATION dbz_publication FOR TABLE outbox;
        SELECT pg_create_logical_replication_slot('debezium', 'pgoutput');
    """,
    insert="""
        INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
        VALUES ('orders', CAST(:payload AS json) ->> 'id', 'placed', :payload)
    """,
    take=take_from_slot,
    mark=DEBEZIUM + PUBLICATION,
    left=IN_SLOT,
    prefix="outbox.event.",
)
#: As `make_outbox_table` of faststream-outbox 0.19 declares it.
LEASED = OldTable(
    made="""
        CREATE TABLE outbox (
            id bigserial PRIMARY KEY, queue varchar(255) NOT NULL, payload bytea NOT NULL, headers jsonb,
            attempts_count bigint NOT NULL DEFAULT 0, deliveries_count bigint NOT NULL DEFAULT 0,
            created_at timestamptz NOT NULL DEFAULT now(), next_attempt_at timestamptz NOT NULL DEFAULT now(),
            first_attempt_at timestamptz, last_attempt_at timestamptz, acquired_at timestamptz, acquired_token uuid,
            timer_id varchar(255),
            CONSTRAINT outbox_lease_ck CHECK ((acquired_token IS NULL) = (acquired_at IS NULL)))
    """,
    insert="""
        INSERT INTO outbox (queue, payload, headers)
        VALUES ('orders', convert_to(:payload, 'UTF8'), json_build_object('content-type', 'application/json',
                'correlation_id', 'c', 'key', CAST(:payload AS json) ->> 'id'))
    """,
    take=take_leased,
    mark=FASTSTREAM,
    left=UNLEASED,
)
ON_SQLITE_TABLE = OldTable(
    made="CREATE TABLE events (id INTEGER PRIMARY KEY, topic TEXT, payload TEXT, sent BOOLEAN DEFAULT FALSE)",
    insert=STATUS.insert,
    take=take_unsent,
    mark=ON_SQLITE,
    left=UNSENT,
)


# The parts of a move


def execute(engine: Engine, statements: str) -> None:
    """Execute what a page shows, as psql does."""
    if engine.dialect.name == "sqlite":
        with engine.begin() as connection:
            connection.exec_driver_sql(statements)
        return
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statements.encode())


def scalar(engine: Engine, query: str) -> Any:
    with engine.connect() as connection:
        return connection.scalar(text(query))


def made(engine: Engine, table: OldTable) -> None:
    """Make the old table, the rows that its writers lock, and on PostgreSQL the function."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id integer PRIMARY KEY, n integer)"))
        connection.execute(text("INSERT INTO orders VALUES " + ", ".join(f"({key}, 0)" for key in range(KEYS))))
    for statement in table.made.split(";"):
        execute(engine, statement)
    if engine.dialect.name == "postgresql":
        execute(engine, typed(None, "db", "sql", "--function").out)


def next_payload(connection: Connection, key: int) -> str:
    """Lock the row of a key, and return a payload with its next number."""
    changed = text("UPDATE orders SET n = n + 1 WHERE id = :id RETURNING n")
    return json.dumps({"id": key, "n": connection.scalar(changed, {"id": key})})


class Writers:
    """Threads that insert into the old table in transactions of one to three rows; some transactions roll back.

    Once told to move, each second transaction writes by `send` instead.
    """

    def __init__(self, engine: Engine, table: OldTable) -> None:
        self._engine, self._table, self._outbox = engine, table, Outbox(engine)
        self._ended, self.moving = threading.Event(), threading.Event()
        self.errors: list[Exception] = []
        self.commits = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write in the background."""
        threads = [threading.Thread(target=self._write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(60)

    def more(self) -> bool:
        """Wait until some more transactions were committed."""
        wanted = self.commits + ENOUGH
        return eventually(lambda: self.commits >= wanted or self.errors) and self.errors == []

    def _write(self, seed: int) -> None:
        choice = random.Random(seed)
        try:
            while not self._ended.is_set():
                with self._engine.connect() as connection, connection.begin() as transaction:
                    # In one order, so that no two writers wait for each other.
                    for key in sorted(choice.sample(range(KEYS), choice.randint(1, 3))):
                        self._send(connection, next_payload(connection, key), old=choice.random() < 0.5)
                    if choice.random() < 0.2:
                        transaction.rollback()
                    else:
                        transaction.commit()
                        self.commits += 1
        except Exception as error:
            self.errors.append(error)

    def _send(self, connection: Connection, payload: str, *, old: bool) -> None:
        if old or not self.moving.is_set():
            connection.execute(text(self._table.insert), {"payload": payload})
            return
        key = f"{numbered(payload)[0]}"
        key = f"order-{key}" if self._table is STATUS else key
        self._outbox.send(connection, "orders", payload, key=key, content_type="application/json")


class OldReader:
    """A thread that takes rows and tells whom it sent, until it is stopped."""

    def __init__(self, engine: Engine, table: OldTable, sent: list[tuple[str, Numbered]]) -> None:
        self._engine, self._take, self._sent = engine, table.take, sent

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read in the background."""
        ended = threading.Event()
        errors: list[Exception] = []

        def read() -> None:
            try:
                while not ended.wait(0.005):
                    with self._engine.begin() as connection:
                        self._sent.extend(("old", each) for each in self._take(connection))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(60)
        assert errors == []


def set_mark(engine: Engine, mark: str) -> None:
    """Execute the statements again until they get the lock, as the page says."""

    def tried() -> bool:
        with suppress(LockNotAvailable):
            execute(engine, mark)
            return True
        return False

    assert eventually(tried)


def finish(engine: Engine, table: OldTable, sent: list[tuple[str, Numbered]]) -> None:
    """Stop the old reader, and look what is left; start it once more as long as there is something."""

    def finished() -> bool:
        with OldReader(engine, table, sent).reading():
            seen = len(sent)
            eventually(lambda: len(sent) > seen, seconds=0.05)
        return bool(scalar(engine, table.left) == 0)

    assert eventually(finished)


def relay_to(engine: Engine, table: OldTable, sent: list[tuple[str, Numbered]], keys: list[str | None]) -> Relay:
    def note(message: Message) -> None:
        assert message.topic == f"{table.prefix or ''}orders"
        keys.append(message.key)
        sent.append(("relay", numbered(message.body)))

    return Relay(Outbox(engine), note, topics=REAL, prefix=table.prefix)


def adopted(engine: Engine, table: OldTable) -> tuple[list[tuple[str, Numbered]], dict[int, int]]:
    """Move as the page says while writers write; return who sent what, and each key's last number."""
    made(engine, table)
    sent: list[tuple[str, Numbered]] = []
    keys: list[str | None] = []
    writers = Writers(engine, table)
    with writers.writing():
        with OldReader(engine, table, sent).reading():
            assert writers.more(), writers.errors
            if table.rehearsal:
                execute(engine, table.rehearsal)
                assert writers.more(), writers.errors
            set_mark(engine, table.mark)
            assert writers.more(), writers.errors
        finish(engine, table, sent)
        with relay_to(engine, table, sent, keys):
            assert writers.more(), writers.errors
            if engine.dialect.name == "postgresql":
                writers.moving.set()
            assert writers.more(), writers.errors
    with closing(relay_to(engine, table, sent, keys)) as relay:
        relay.until_empty()
    with engine.connect() as connection:
        last = {row.id: row.n for row in connection.execute(text("SELECT id, n FROM orders ORDER BY id"))}
    assert writers.errors == []
    return sent, last


def of_each_key(sent: list[tuple[str, Numbered]]) -> dict[int, list[int]]:
    return {key: [n for _, (found, n) in sent if found == key] for key in range(KEYS)}


@pytest.fixture(scope="module")
def logical() -> Iterator[PostgresServer]:
    """A server whose log can be read by a connector; what is committed asynchronously is flushed much later."""
    settings = {"wal_level": "logical", "wal_writer_delay": "10s"}
    with started(lambda: PostgresServer(in_memory=True, settings=settings)) as server:
        yield server


@pytest.fixture
def logical_engine(logical: PostgresServer) -> Iterator[Engine]:
    engine = create_engine(logical.create_database(f"test_{uuid.uuid4().hex}"))
    migrate.upgrade(engine)
    adopt(engine)
    yield engine
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_drop_replication_slot('debezium')"))
    engine.dispose()


# Under load


def test_an_adopted_table_loses_nothing_sends_nothing_twice_and_keeps_the_order_of_keys(pg_engine):
    sent, last = adopted(pg_engine, STATUS)

    assert of_each_key(sent) == {key: [*range(1, n + 1)] for key, n in last.items()}
    assert {by for by, _ in sent} == {"old", "relay"}


def test_the_table_of_faststream_outbox_is_adopted_without_loss_and_in_order_from_the_mark_on(pg_engine):
    """Its old reader sends by the time at which transactions began, which is no order of keys."""
    sent, last = adopted(pg_engine, LEASED)

    assert {key: sorted(found) for key, found in of_each_key(sent).items()} == {
        key: [*range(1, n + 1)] for key, n in last.items()
    }
    by_relay = of_each_key([each for each in sent if each[0] == "relay"])
    assert by_relay == {key: sorted(found) for key, found in by_relay.items()}
    assert {by for by, _ in sent} == {"old", "relay"}


@pytest.mark.storm
def test_the_table_of_debezium_is_adopted_without_loss_and_in_order(logical_engine):
    """Its old reader reads the slot by the connector's plug-in."""
    sent, last = adopted(logical_engine, ROUTER)

    assert of_each_key(sent) == {key: [*range(1, n + 1)] for key, n in last.items()}
    assert {by for by, _ in sent} == {"old", "relay"}


@pytest.mark.storm
def test_a_publication_for_all_tables_is_made_anew_without_the_table(logical_engine):
    everything = ROUTER.made.replace("FOR TABLE outbox", "FOR ALL TABLES")
    anew = ROUTER.mark.replace(
        "ALTER PUBLICATION dbz_publication DROP TABLE outbox",
        "DROP PUBLICATION dbz_publication; CREATE PUBLICATION dbz_publication FOR TABLE orders",
    )
    table = OldTable(**(vars(ROUTER) | {"made": everything, "mark": anew, "take": take_orders_apart}))

    sent, last = adopted(logical_engine, table)

    assert of_each_key(sent) == {key: [*range(1, n + 1)] for key, n in last.items()}


def take_orders_apart(connection: Connection) -> list[Numbered]:
    """As a connector that has other tables too, and routes the INSERTs of the outbox alone."""
    changes = connection.scalars(
        text(
            "SELECT data FROM pg_logical_slot_get_binary_changes('debezium', NULL, NULL, 'proto_version', '1',"
            " 'publication_names', 'dbz_publication')"
        )
    ).all()
    outbox = connection.scalar(text("SELECT CAST(CAST('outbox' AS regclass) AS oid)"))
    inserts = [bytes(data) for data in changes if data[:1] == b"I" and int.from_bytes(data[1:5], "big") == outbox]
    return [numbered(payload_of(insert)) for insert in inserts]


def test_a_table_without_keys_is_adopted_on_sqlite(sqlite_engine):
    """Nothing is lost or sent by both; without keys there is no order."""
    sent, last = adopted(sqlite_engine, ON_SQLITE_TABLE)

    assert sorted(each for _, each in sent) == [(key, n) for key in last for n in range(1, last[key] + 1)]
    assert {by for by, _ in sent} == {"old", "relay"}


# Step by step


def test_the_mark_waits_for_a_writer_and_the_next_writer_for_the_mark(pg_engine):
    made(pg_engine, STATUS)
    execute(pg_engine, REHEARSE)
    with pg_engine.connect() as before:
        before.execute(text(STATUS.insert), {"payload": '{"id": 1, "n": 1}'})
        mark = threading.Thread(target=execute, args=(pg_engine, MARK.replace("2s", "60s")))
        mark.start()
        assert eventually(lambda: scalar(pg_engine, WAITING) == 1)
        after = threading.Thread(target=insert, args=(pg_engine, '{"id": 1, "n": 2}'))
        after.start()
        assert eventually(lambda: scalar(pg_engine, WAITING) == 2)
        before.commit()
    mark.join(60)
    after.join(60)

    with pg_engine.connect() as connection:
        rows = connection.execute(text("SELECT CAST(payload ->> 'n' AS integer), sent FROM events ORDER BY id")).all()
    assert [tuple(row) for row in rows] == [(1, False), (2, True)]
    assert [(m.topic, m.json()["n"]) for m in drained(pg_engine)] == [("rehearsal.orders", 1), ("orders", 2)]


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def insert(engine: Engine, payload: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(STATUS.insert), {"payload": payload})


def drained(engine: Engine) -> list[Message]:
    found: list[Message] = []
    with closing(Relay(Outbox(engine), found.append)) as relay:
        relay.until_empty()
    return found


def test_a_mark_without_its_lock_changes_nothing(pg_engine):
    made(pg_engine, STATUS)
    execute(pg_engine, REHEARSE)
    triggers = "SELECT count(*) FROM pg_trigger WHERE tgrelid = CAST('events' AS regclass)"
    with pg_engine.connect() as writer:
        writer.execute(text(STATUS.insert), {"payload": '{"id": 1, "n": 1}'})
        with pytest.raises(LockNotAvailable):
            execute(pg_engine, MARK.replace("2s", "1ms"))

    assert scalar(pg_engine, triggers) == 1


def test_a_rehearsal_fills_the_log_and_leaves_the_rows_to_the_old_reader(pg_engine):
    made(pg_engine, STATUS)
    execute(pg_engine, REHEARSE)

    insert(pg_engine, '{"id": 1, "n": 1}')

    assert [(m.topic, m.key, m.json(), dict(m.headers)) for m in drained(pg_engine)] == [
        ("rehearsal.orders", "order-1", {"id": 1, "n": 1}, {"event": "1"})
    ]
    assert scalar(pg_engine, UNSENT) == 1


def test_the_way_back_leaves_new_rows_to_the_old_reader(pg_engine):
    made(pg_engine, STATUS)
    execute(pg_engine, REHEARSE)
    execute(pg_engine, MARK)
    insert(pg_engine, '{"id": 1, "n": 1}')

    execute(pg_engine, "BEGIN; LOCK TABLE events; DROP TRIGGER taken ON events; DROP TRIGGER adopted ON events; COMMIT")
    insert(pg_engine, '{"id": 1, "n": 2}')

    with pg_engine.begin() as connection:
        assert (take_unsent(connection), [m.json()["n"] for m in drained(pg_engine)]) == ([(1, 2)], [1])


def test_rows_of_faststream_outbox_keep_their_headers_content_type_and_delay(pg_engine):
    made(pg_engine, LEASED)
    execute(pg_engine, FASTSTREAM)

    with pg_engine.begin() as connection:
        connection.execute(text(LEASED.insert), {"payload": '{"id": 1, "n": 1}'})
        connection.execute(
            text("INSERT INTO outbox (queue, payload, next_attempt_at) VALUES ('later', 'x', now() + interval '1 day')")
        )
        connection.execute(text("INSERT INTO outbox (queue, payload, timer_id) VALUES ('timers', 'x', 'a')"))

    with pg_engine.connect() as connection:
        log = "SELECT topic, key, headers, content_type, deliver_at > now() FROM outbox_message ORDER BY id"
        assert [tuple(row) for row in connection.execute(text(log))] == [
            ("orders", "1", '{"key":"1","correlation_id":"c"}', "application/json", None),
            ("later", None, None, None, True),
        ]
        assert connection.scalars(text("SELECT queue FROM outbox WHERE acquired_at IS NULL")).all() == ["timers"]


def test_consumers_of_the_router_know_the_id_of_an_adopted_row(pg_engine):
    made(pg_engine, OldTable(**(vars(ROUTER) | {"made": ROUTER.made.split(";")[0]})))
    execute(pg_engine, DEBEZIUM + PUBLICATION.replace("ALTER PUBLICATION dbz_publication DROP TABLE outbox;", ""))

    with pg_engine.begin() as connection:
        connection.execute(text(ROUTER.insert), {"payload": '{"id": 1, "n": 1}'})

    found: list[Message] = []
    with closing(Relay(Outbox(pg_engine), found.append, prefix="outbox.event.")) as relay:
        relay.until_empty()
    id = scalar(pg_engine, "SELECT CAST(id AS text) FROM outbox")
    assert [(m.topic, m.key, m.tags, m.body, m.headers["id"]) for m in found] == [
        ("outbox.event.orders", "1", "placed", b'{"n": 1, "id": 1}', id)
    ]
