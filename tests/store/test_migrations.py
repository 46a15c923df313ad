"""The migrations make exactly the tables that the library works with, beside whatever an application has."""

import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, inspect, text

from outbox import Outbox, Relay, migrate, schema
from outbox.errors import DatabaseError, SchemaError
from outbox.store.dialects.postgresql import dialect
from outbox.testing.servers import PostgresServer
from tests.support.command_line import leading_to
from tests.support.destination import Destination, relay_to
from tests.support.parked import decisions
from tests.support.revisions import add_revision, make_earlier
from tests.support.waiting import eventually


@pytest.fixture
def empty_pg(postgres: PostgresServer) -> Iterator[Engine]:
    """A PostgreSQL database without anything."""
    name = f"empty_{uuid.uuid4().hex}"
    engine = sqlalchemy.create_engine(postgres.create_database(name))
    yield engine
    engine.dispose()
    postgres.drop_database(name)


@pytest.fixture
def empty_sqlite(tmp_path: Path) -> Iterator[Engine]:
    """A SQLite file without anything, behind an engine as an application makes it."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'empty.sqlite3'}")
    yield engine
    engine.dispose()


@pytest.fixture(params=["empty_pg", "empty_sqlite"])
def empty(request: pytest.FixtureRequest) -> Engine:
    """A database without anything, of each kind."""
    found: Engine = request.getfixturevalue(request.param)
    return found


def differences(engine: Engine, where: str | None = None) -> list[object]:
    """What an autogenerate over our tables alone would change."""

    def include(name: str | None, type_: str, _parents: object) -> bool:
        if type_ == "schema":
            return name == where
        return type_ != "table" or str(name).startswith(schema.PREFIX)

    options = {
        "include_name": include,
        "include_schemas": where is not None,
        "compare_type": True,
        "compare_server_default": True,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, schema.metadata(where, engine.dialect.name)))


def contents(connection: Connection, prefix: str = "") -> dict[str, list[tuple[object, ...]]]:
    """What a new outbox holds."""
    columns = {
        "message": "id",
        "parked": "id",
        "subscription": "name",
        "lease": "subscription, generation, partition, epoch",
        "progress": "subscription, generation, partition, epoch, n, base, target",
        "meta": "version, slots",
    }
    rows = {
        name: connection.execute(text(f"SELECT {chosen} FROM {prefix}outbox_{name}")).all()
        for name, chosen in columns.items()
    }
    return {name: [tuple(row) for row in found] for name, found in rows.items()}


NEW = {
    "message": [],
    "parked": [],
    "subscription": [("relay",)],
    "lease": [("relay", 1, 0, 0)],
    "progress": [("relay", 1, 0, 0, 0, "0:0:", None)],
    "meta": [(schema.VERSION, 256)],
}


def test_an_upgrade_makes_exactly_the_tables_of_the_library(empty):
    migrate.upgrade(empty)

    assert differences(empty) == []
    with empty.connect() as connection:
        assert contents(connection) == NEW
    assert migrate.current_revision(empty) == migrate.head_revision()


def test_a_difference_would_be_seen(empty):
    migrate.upgrade(empty)
    with empty.begin() as connection:
        connection.execute(text("DROP INDEX outbox_parked_due"))
        connection.execute(text("ALTER TABLE outbox_message ADD COLUMN extra int"))

    assert len(differences(empty)) == 2


def test_sequences_of_ids_have_no_cache_and_begin_with_one(empty_pg):
    migrate.upgrade(empty_pg)

    with empty_pg.connect() as connection:
        found = connection.execute(text("SELECT cache_size, start_value, increment_by FROM pg_sequences")).all()
    assert {tuple(row) for row in found} == {(1, 1, 1)}


#: What Alembic does not compare (predicates, checks, AUTOINCREMENT), in the database's own words.
DEFINITIONS = {
    "postgresql": """
        SELECT tablename, indexdef FROM pg_indexes WHERE tablename LIKE 'outbox!_%' ESCAPE '!'
        UNION ALL SELECT conrelid::regclass::text, conname || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
        WHERE conrelid::regclass::text LIKE 'outbox!_%' ESCAPE '!'
    """,
    "sqlite": "SELECT tbl_name, sql FROM sqlite_master WHERE tbl_name LIKE 'outbox!_%' ESCAPE '!' AND sql IS NOT NULL",
}


def definitions(engine: Engine) -> list[tuple[str, str]]:
    """What the database says of our tables."""
    with engine.connect() as connection:
        rows = connection.execute(text(DEFINITIONS[engine.dialect.name])).all()
    # What was added later stands in a line of its own.
    return sorted((table, " ".join(sql.split())) for table, sql in rows)


def test_an_upgrade_and_the_metadata_make_the_same_in_the_words_of_the_database(empty):
    metadata = schema.metadata(dialect=empty.dialect.name)
    metadata.create_all(empty)
    wanted = definitions(empty)
    metadata.drop_all(empty)

    migrate.upgrade(empty)

    assert definitions(empty) == wanted != []


@pytest.mark.parametrize(
    ("upgrade", "table"), [(migrate.upgrade_record, "outbox_record"), (migrate.upgrade_inbox, "outbox_inbox")]
)
def test_processes_that_start_together_may_all_make_a_table_that_stands_alone(empty, upgrade, table):
    where = "app" if empty.dialect.name == "postgresql" else None
    engines = [sqlalchemy.create_engine(empty.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda each: upgrade(each, where), engines))
    for engine in engines:
        engine.dispose()

    assert (sorted(made), inspect(empty).get_table_names(where)) == ([False, False, False, True], [table])


def test_a_second_upgrade_is_harmless(empty):
    migrate.upgrade(empty, slots=16)
    with empty.begin() as connection:
        connection.execute(text("UPDATE outbox_subscription SET destination = 'nats://localhost'"))

    migrate.upgrade(empty, slots=32)

    with empty.connect() as connection:
        assert connection.execute(text("SELECT slots FROM outbox_meta")).scalars().all() == [16]
        found = connection.execute(text("SELECT destination FROM outbox_subscription")).scalars().all()
        assert found == ["nats://localhost"]


@pytest.mark.storm
def test_processes_that_start_together_may_all_upgrade(empty):
    where = "app" if empty.dialect.name == "postgresql" else None
    start = "from outbox import migrate; from sqlalchemy import create_engine; import sys; sys.stdin.read();"
    script = f"{start} migrate.upgrade(create_engine(sys.argv[1]), {where!r})"
    command = [sys.executable, "-c", script, empty.url.render_as_string()]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=migrate._scripts().parent) for _ in range(3)]

    for process in processes:
        assert process.stdin is not None
        process.stdin.close()

    assert [process.wait() for process in processes] == [0, 0, 0]
    assert migrate.current_revision(empty, where) == migrate.head_revision()


def test_threads_may_all_upgrade(empty):
    engines = [sqlalchemy.create_engine(empty.url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(migrate.upgrade, engines))
    for engine in engines:
        engine.dispose()

    assert migrate.current_revision(empty) == migrate.head_revision()


def test_an_upgrade_is_one_transaction(empty):
    """What fails half way leaves nothing."""
    with empty.begin() as connection:
        connection.execute(text("CREATE VIEW outbox_meta AS SELECT 1 AS one"))

    with pytest.raises(SchemaError, match=r"would make what is there already .*outbox_meta.*; nothing was changed"):
        migrate.upgrade(empty)

    assert inspect(empty).get_table_names() == []


def test_another_failure_of_an_upgrade_is_told_as_it_is(empty_pg):
    """A role that may make nothing, for example."""
    with empty_pg.connect() as connection, connection.begin() as transaction:
        connection.execute(text("CREATE ROLE guest"))
        connection.execute(text("SET LOCAL ROLE guest"))
        with pytest.raises(sqlalchemy.exc.ProgrammingError, match="permission denied"):
            migrate.upgrade(connection, "app")
        transaction.rollback()


def make(engine: Engine, where: str | None = None) -> None:
    """The tables, as an application makes them without us."""
    with engine.begin() as connection:
        if where is not None:
            connection.execute(text(f"CREATE SCHEMA {where}"))
        schema.metadata(where, engine.dialect.name).create_all(connection)


def do(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def meta(engine: Engine) -> tuple[int, int]:
    """The version and the number of slots that the tables say."""
    with engine.connect() as connection:
        version, slots = connection.execute(text("SELECT version, slots FROM outbox_meta")).one()
    return version, slots


def test_an_upgrade_takes_complete_tables_over_and_keeps_what_they_hold(empty):
    make(empty)
    with (sender := Outbox(empty, slots=16)).begin() as session:
        sender.send(session, "orders", b"1")

    migrate.upgrade(empty, slots=16)

    assert migrate.current_revision(empty) == migrate.head_revision()
    with empty.connect() as connection:
        assert contents(connection) == NEW | {"message": [(1,)], "meta": [(schema.VERSION, 16)]}
    migrate.upgrade(empty, slots=32)
    assert meta(empty) == (schema.VERSION, 16)


def test_an_upgrade_takes_tables_over_that_have_no_table_for_their_revision(empty):
    make(empty)
    do(empty, f"DROP TABLE {schema.VERSION_TABLE}")

    migrate.upgrade(empty)

    assert (migrate.current_revision(empty), differences(empty)) == (migrate.head_revision(), [])


def test_an_upgrade_takes_tables_in_a_schema_over(empty_pg):
    make(empty_pg, "app")

    migrate.upgrade(empty_pg, "app")

    assert migrate.current_revision(empty_pg, "app") == migrate.head_revision()
    with empty_pg.connect() as connection:
        assert contents(connection, "app.") == NEW


def test_an_upgrade_refuses_tables_that_are_not_complete_and_changes_nothing(empty):
    make(empty)
    do(empty, "DROP INDEX outbox_decision_done_at")
    do(empty, "ALTER TABLE outbox_subscription DROP COLUMN topics")
    before = definitions(empty)

    with pytest.raises(SchemaError) as refused:
        migrate.upgrade(empty)

    assert str(refused.value) == (
        "`outbox db upgrade` did not make the outbox tables that are there, and cannot take them over as they are:"
        " index outbox_decision_done_at is missing; outbox_subscription.topics is missing. Nothing was changed; to see"
        f" what to do about each, run: outbox doctor {leading_to(empty)}"
    )
    assert (definitions(empty), migrate.current_revision(empty)) == (before, None)


def test_an_upgrade_names_some_of_many_differences(empty_pg):
    do(empty_pg, "CREATE SCHEMA app")
    do(empty_pg, "CREATE TABLE app.outbox_meta (one int)")

    with pytest.raises(SchemaError, match=r"missing; and \d+ more\. Nothing .* outbox doctor --schema app --database "):
        migrate.upgrade(empty_pg, "app")


def test_an_upgrade_refuses_tables_of_a_newer_version(empty):
    migrate.upgrade(empty)
    do(empty, f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'")
    do(empty, "UPDATE outbox_meta SET version = 9999")

    with pytest.raises(SchemaError, match=r"are of revision 9999, .* install a newer outbox-log"):
        migrate.upgrade(empty)


def test_an_upgrade_of_a_log_with_messages_reads_none_of_them(empty_pg):
    """Slots are checked from then on; a look at all messages would keep writers waiting."""
    make_earlier(empty_pg, "0002")
    do(empty_pg, "INSERT INTO outbox_message (message_id, topic, slot, body) VALUES (gen_random_uuid(), 'a', -1, 'x')")

    migrate.upgrade(empty_pg)

    with empty_pg.connect() as connection:
        check = text("SELECT convalidated FROM pg_constraint WHERE conname = 'outbox_message_slot'")
        assert connection.scalar(check) is False
        assert connection.scalar(text("SELECT to_regclass('outbox_message_delayed')")) is None


def test_an_upgrade_gives_up_behind_a_long_transaction_so_that_no_writer_waits(empty_pg, monkeypatch):
    """A change of the log waits for all who write to it, and later writers wait behind the change."""
    make_earlier(empty_pg, "0002")
    monkeypatch.setattr(dialect, "UPGRADE_PATIENCE", "50ms")
    outbox = Outbox(empty_pg)

    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
        with pytest.raises(SchemaError, match="nothing was changed: run it again when that transaction has ended"):
            migrate.upgrade(empty_pg)
    refused = migrate.current_revision(empty_pg)
    migrate.upgrade(empty_pg)

    assert (refused, migrate.current_revision(empty_pg)) == ("0002", migrate.head_revision())


def test_an_upgrade_is_not_refused_because_workers_renew_their_leases_meanwhile(empty_pg):
    """A worker that waits for a row keeps others from the table; so the upgrade takes the whole table before."""
    make_earlier(empty_pg, "0007")
    waits = text("SELECT cardinality(pg_blocking_pids(:pid))")
    with ThreadPoolExecutor() as pool, empty_pg.connect() as worker:
        pid = worker.scalar(text("SELECT pg_backend_pid()"))
        renewals = list[Future[object]]()

        def renew(connection, _cursor, statement, *_rest) -> None:
            if not renewals and statement.startswith("UPDATE outbox_lease"):
                renewals.append(pool.submit(worker.execute, text("UPDATE outbox_lease SET lease_until = now()")))
                assert eventually(lambda: connection.scalar(waits, {"pid": pid}))

        sqlalchemy.event.listen(empty_pg, "after_cursor_execute", renew)
        migrate.upgrade(empty_pg)
        renewals[0].result()

    assert migrate.current_revision(empty_pg) == migrate.head_revision()


@pytest.mark.storm
def test_an_upgrade_that_ends_in_a_deadlock_says_the_same(empty_pg):
    """A transaction took a parked message first, and writes to the log then; the upgrade takes the log first."""
    make_earlier(empty_pg, "0003")
    patient, hasty = (
        sqlalchemy.create_engine(empty_pg.url, connect_args={"options": f"-c deadlock_timeout={time}"})
        for time in ("60s", "1500ms")
    )
    waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outbox_parked'::regclass")

    with ThreadPoolExecutor() as pool, patient.connect() as connection:
        connection.execute(text("DELETE FROM outbox_parked"))
        upgrade = pool.submit(migrate.upgrade, hasty)
        with empty_pg.connect().execution_options(isolation_level="AUTOCOMMIT") as looking:
            assert eventually(lambda: looking.scalar(waits))
        Outbox(patient).send(connection, "orders", b"1")
        connection.commit()
        error = upgrade.exception()

    assert "nothing was changed: run it again when that transaction has ended" in str(error)
    assert migrate.current_revision(empty_pg) == "0003"


#: What was parked before held keys had one head: subscription, id, key, state, whether it blocks its key, place,
#: attempts, when it is due, error.
PARKED_EARLIER: list[tuple[str, int, str | None, str, bool, int, int, str | None, str | None]] = [
    ("relay", 1, "a", "dead", True, 1 << 20, 3, None, "no"),
    ("relay", 2, "a", "blocked", True, 2 << 20, 0, None, None),
    ("relay", 3, "a", "retry", True, 3 << 20, 2, "2026-01-01", "not now"),
    ("relay", 4, "b", "blocked", True, 4 << 20, 0, None, None),
    ("relay", 5, "b", "blocked", True, 5 << 20, 0, None, None),
    ("relay", 6, "c", "retry", True, 6 << 20, 1, "2026-01-01", "not now"),
    ("relay", 7, "c", "delayed", False, 7 << 20, 0, "2999-01-01", None),
    ("relay", 8, None, "waiting", True, 8 << 20, 0, "2999-01-01", "away"),
    ("relay", 9, "d", "dead", False, 9 << 20, 3, None, "no"),
    ("relay", 10, "d", "waiting", True, 10 << 20, 0, "2999-01-01", "away"),
    # The later one fell due first.
    ("relay", 11, "e", "blocked", True, (20 << 20) + 2, 0, None, None),
    ("relay", 12, "e", "blocked", True, (20 << 20) + 1, 0, None, None),
    ("relay", 13, None, "blocked", False, 13 << 20, 0, None, None),
    ("billing", 1, "a", "blocked", True, 1 << 20, 0, None, None),
]
#: As the same are now: state, unit, place in the unit, attempts, whether they are due at some moment, error.
PARKED_NOW: dict[tuple[str, int], tuple[str | None, str | None, int | None, int, bool, str | None]] = {
    ("billing", 1): ("retry", "a", 1, 0, True, None),
    ("relay", 1): ("dead", "a", 1, 3, False, "no"),
    ("relay", 2): (None, "a", 2, 0, False, None),
    ("relay", 3): (None, "a", 3, 0, False, None),
    ("relay", 4): ("retry", "b", 1, 0, True, None),
    ("relay", 5): (None, "b", 2, 0, False, None),
    ("relay", 6): ("retry", "c", 1, 1, True, "not now"),
    ("relay", 7): ("delayed", None, None, 0, True, None),
    ("relay", 8): ("waiting", None, None, 0, True, "away"),
    ("relay", 9): ("dead", None, None, 3, False, "no"),
    ("relay", 10): ("waiting", "d", 1, 0, True, "away"),
    ("relay", 11): (None, "e", 2, 0, False, None),
    ("relay", 12): ("retry", "e", 1, 0, True, None),
    ("relay", 13): ("retry", None, None, 0, True, None),
}


def park_earlier(engine: Engine) -> None:
    """Parked messages as the version before had them, each with its id as the body."""
    make_earlier(engine, "0004")
    names = ("subscription", "id", "key", "state", "blocks", "place", "attempts", "due_at", "error")
    more = {"topic": "t", "slot": 0, "created_at": "2026-01-01", "parked_at": "2026-01-01"}
    columns = (*names, *more, "message_id", "body")
    statement = text(
        f"INSERT INTO outbox_parked ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
    )
    with engine.begin() as connection:
        for row in PARKED_EARLIER:
            of_row = {"message_id": uuid.uuid4().hex, "body": str(row[1]).encode()}
            connection.execute(statement, {**dict(zip(names, row, strict=True)), **more, **of_row})


def test_an_upgrade_makes_each_held_key_a_queue_with_one_head(empty):
    """Of what failed behind another message the attempts begin again, and what nothing held back is due."""
    park_earlier(empty)

    migrate.upgrade(empty)

    with empty.connect() as connection:
        found = connection.execute(
            text("""
                SELECT subscription, id, state, unit, CASE WHEN unit IS NOT NULL THEN place END, attempts,
                       due_at IS NOT NULL, error
                FROM outbox_parked
            """)
        ).all()
    assert {(row[0], row[1]): tuple(row[2:]) for row in found} == PARKED_NOW


def test_what_is_dead_before_an_upgrade_counts_as_dead_from_then_on(empty):
    """Its moment is unknown, and a retention of dead letters is not to end too early."""
    park_earlier(empty)

    migrate.upgrade(empty)

    with empty.connect() as connection:
        dead = connection.execute(text("SELECT subscription, id FROM outbox_parked WHERE dead_at > parked_at")).all()
    assert sorted(map(tuple, dead)) == sorted(name for name, (state, *_) in PARKED_NOW.items() if state == "dead")


def test_an_upgrade_of_parked_messages_makes_the_tables_of_the_library(empty):
    metadata = schema.metadata(dialect=empty.dialect.name)
    metadata.create_all(empty)
    wanted = definitions(empty)
    metadata.drop_all(empty)
    park_earlier(empty)

    migrate.upgrade(empty)

    assert (definitions(empty), differences(empty), meta(empty)) == (wanted, [], (schema.VERSION, 256))


def test_an_upgrade_keeps_what_people_have_decided_and_nobody_has_carried_out(empty):
    """Also of a person without a name."""
    park_earlier(empty)
    ask = text("UPDATE outbox_parked SET request = :verb, requested_by = :by, request_reason = :why WHERE id = :id")
    with empty.begin() as connection:
        for id, verb, by in ((1, "discard", "ann"), (9, "discard", "ann"), (2, "replay", None)):
            connection.execute(ask, {"id": id, "verb": verb, "by": by, "why": 'it\'s: "gone"'})

    migrate.upgrade(empty)

    assert sorted(decisions(empty)) == [
        ("ann", "discard", "billing", 'it\'s: "gone"', [1], None, False),
        ("ann", "discard", "relay", 'it\'s: "gone"', [1], None, False),
        ("ann", "discard", "relay", 'it\'s: "gone"', [9], None, False),
        ("unknown", "replay", "relay", 'it\'s: "gone"', [2], None, False),
    ]


def test_a_revision_of_an_applications_own_alembic_is_refused_while_messages_are_parked(empty):
    """Alembic would drop the column by which keys are held, and each message would stand for itself."""
    park_earlier(empty)

    with (
        pytest.raises(SchemaError, match=r"^outbox_parked has .*`outbox db upgrade.*` .* keeps them$"),
        empty.begin() as connection,
    ):
        migrate.seed(connection)


def test_what_was_parked_before_an_upgrade_is_sent_in_the_order_of_its_keys(empty):
    park_earlier(empty)
    migrate.upgrade(empty)
    destination = Destination()

    relay_to(destination, Outbox(empty)).until_empty()

    of_keys = [[b"4", b"5"], [b"6"], [b"12", b"11"], [b"13"]]
    assert [[body for body in destination.bodies if body in of_key] for of_key in of_keys] == of_keys
    assert len(destination.bodies) == 6


def tables_of(engine: Engine) -> dict[str, object]:
    """Columns, indexes and checks by table, in no order."""
    inspector = inspect(engine)
    return {
        table: (
            {(each["name"], str(each["type"]), each["nullable"], each["default"], each.get("comment"))
             for each in inspector.get_columns(table)},
            {(each["name"], *each["column_names"], each["unique"], *map(str, each["dialect_options"].values()))
             for each in inspector.get_indexes(table)},
            {(each["name"], each["sqltext"]) for each in inspector.get_check_constraints(table)},
        )
        for table in inspector.get_table_names()
    }  # fmt: skip


#: From the newest before that of today to the first.
_, *EARLIER = (each.revision for each in ScriptDirectory.from_config(migrate._config()).walk_revisions())


@pytest.mark.parametrize(
    "revision",
    [EARLIER[0], *(pytest.param(each, marks=pytest.mark.storm) for each in EARLIER[1:-1]), EARLIER[-1]],
)
def test_a_downgrade_makes_the_tables_of_an_earlier_revision_again(empty, revision):
    make_earlier(empty, revision)
    wanted = tables_of(empty)
    migrate.upgrade(empty)

    migrate.downgrade(empty, revision)

    assert (tables_of(empty), migrate.current_revision(empty)) == (wanted, revision)


def go_back(engine: Engine) -> None:
    """As an operator does."""
    migrate.downgrade(engine, "0001")


def change_at_once(engine: Engine) -> None:
    """As a look at the tables meets them before the lease is renewed."""
    # In one transaction: a look in between would meet missing tables of this version.
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET version = 1"))
        connection.execute(text("DROP TABLE outbox_decision"))


@pytest.mark.parametrize("change", [go_back, change_at_once])
def test_a_relay_at_work_stops_with_the_version_when_its_tables_become_others(engine, change):
    relay = relay_to(Destination(), Outbox(engine))
    held = text("SELECT count(*) FROM outbox_lease WHERE owner IS NOT NULL")

    with ThreadPoolExecutor() as pool:
        running = pool.submit(relay.run, signals=False)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking:
            assert eventually(lambda: looking.scalar(held))
        change(engine)
        stopped = eventually(running.done)
        relay.stop()

    error = str(running.exception())
    assert (stopped, error.partition(";")[0]) == (True, f"the tables are of version 1, this is {schema.VERSION}")


def test_every_held_key_keeps_its_order_through_a_downgrade_and_an_upgrade(empty):
    park_earlier(empty)
    migrate.upgrade(empty)
    query = text("SELECT subscription, id, state, unit, place, attempts, error FROM outbox_parked ORDER BY 1, 2")
    with empty.connect() as connection:
        parked = connection.execute(query).all()

    migrate.downgrade(empty, "0001")
    migrate.upgrade(empty)

    with empty.connect() as connection:
        again = connection.execute(query).all()
    assert [tuple(each) for each in again] == [tuple(each) for each in parked]


def test_what_people_have_requested_stands_on_its_message_again_after_a_downgrade(empty):
    park_earlier(empty)
    do(
        empty,
        "UPDATE outbox_parked SET request = 'replay', requested_by = 'ann', requested_at = parked_at WHERE id = 1",
    )
    query = text("SELECT subscription, id, request, requested_by, request_reason, requested_at FROM outbox_parked")
    with empty.connect() as connection:
        requested = {tuple(each) for each in connection.execute(query)}
    migrate.upgrade(empty)

    migrate.downgrade(empty, "0004")

    with empty.connect() as connection:
        assert {tuple(each) for each in connection.execute(query)} == requested


def test_a_downgrade_forgets_that_a_writer_sends_a_message_itself(empty):
    """A relay of that time would leave the message to a writer that has no mark of it any more."""
    make_earlier(empty, "0003")
    do(
        empty,
        f"""
        INSERT INTO outbox_message (message_id, topic, slot, body, direct)
        VALUES ('{uuid.uuid4().hex}', 't', 0, '', 'relay')
    """,
    )
    migrate.upgrade(empty)

    migrate.downgrade(empty, "0003")

    with empty.connect() as connection:
        assert connection.scalars(text("SELECT direct FROM outbox_message")).all() == [None]


@pytest.mark.parametrize("to", ["0006", "base", "0005x"])
def test_a_downgrade_goes_to_an_earlier_revision_only(empty, to):
    make_earlier(empty, "0004")

    with pytest.raises(SchemaError, match=f"{to} is no revision before 0004; name one of: 0001, 0002, 0003, 0004"):
        migrate.downgrade(empty, to)


def test_the_newest_revision_stores_the_version_of_the_library(empty):
    scripts = ScriptDirectory.from_config(migrate._config())

    assert scripts.get_revision(str(migrate.head_revision())).module.version == schema.VERSION


def test_every_revision_says_how_the_version_before_works_beside_it():
    revisions = ScriptDirectory.from_config(migrate._config()).walk_revisions()

    silent = {each.revision for each in revisions if not re.search(r"version before[^.]* beside it\b", each.longdoc)}

    assert silent == {"0001"}


def test_an_upgrade_runs_the_revisions_that_are_missing(empty, tmp_path, monkeypatch):
    migrate.upgrade(empty)
    add_revision(tmp_path, monkeypatch)

    migrate.upgrade(empty)

    assert (migrate.current_revision(empty), inspect(empty).has_table("outbox_next")) == ("next", True)


def test_an_upgrade_says_so_when_something_else_has_made_what_the_next_revision_makes(empty, tmp_path, monkeypatch):
    migrate.upgrade(empty)
    add_revision(tmp_path, monkeypatch)
    do(empty, "CREATE TABLE outbox_next (id int)")

    with pytest.raises(SchemaError, match=r"already .*let that revision call outbox.migrate.seed"):
        migrate.upgrade(empty)


def test_an_upgrade_restores_the_one_row_about_them_all(empty):
    migrate.upgrade(empty)
    do(empty, "DELETE FROM outbox_meta")

    migrate.upgrade(empty)

    with empty.connect() as connection:
        assert contents(connection) == NEW


def test_an_upgrade_of_tables_that_are_up_to_date_writes_nothing(empty_pg):
    """So a role that may only read them may start an application that begins with it."""
    migrate.upgrade(empty_pg)

    with empty_pg.connect() as connection:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        migrate.upgrade(connection)


def test_seeding_writes_the_rows_of_a_new_outbox_once(empty):
    make(empty)

    for slots in (8, 16):
        with empty.begin() as connection:
            migrate.seed(connection, slots=slots)

    with empty.connect() as connection:
        assert contents(connection) == NEW | {"meta": [(schema.VERSION, 8)]}
    assert migrate.current_revision(empty) == migrate.head_revision()


def test_seeding_does_not_bring_a_subscription_back_that_somebody_has_dropped(empty):
    migrate.upgrade(empty)
    for table, column in (("lease", "subscription"), ("progress", "subscription"), ("subscription", "name")):
        do(empty, f"DELETE FROM outbox_{table} WHERE {column} = 'relay'")

    with empty.begin() as connection:
        migrate.seed(connection)

    with empty.connect() as connection:
        assert contents(connection) == NEW | {"subscription": [], "lease": [], "progress": []}


def test_tables_that_a_later_revision_completes_are_no_version_until_then(empty):
    """An application's first revision is run anew by a library that needs more: its workers wait for the second one."""
    make(empty)
    do(empty, "ALTER TABLE outbox_subscription DROP COLUMN topics")

    with empty.begin() as connection:
        migrate.seed(connection, slots=8)

    assert (meta(empty), migrate.current_revision(empty)) == ((0, 8), None)
    with pytest.raises(SchemaError, match="the tables are of version 0"):
        Relay(Outbox(empty, slots=8), print).until_empty()
    do(empty, "ALTER TABLE outbox_subscription ADD COLUMN topics text")
    with empty.begin() as connection:
        migrate.seed(connection)
    assert (meta(empty), migrate.current_revision(empty)) == ((schema.VERSION, 8), migrate.head_revision())


def test_seeding_needs_the_tables(empty):
    with empty.begin() as connection, pytest.raises(SchemaError, match=r"outbox_meta.*call seed after the statements"):
        migrate.seed(connection)


def test_seeding_takes_a_connection(empty):
    with pytest.raises(TypeError, match=r"a Connection that blocks, as op.get_bind\(\) is one, not Engine"):
        migrate.seed(empty)


def test_an_upgrade_joins_the_transaction_of_its_caller(empty_pg):
    with empty_pg.connect() as connection, connection.begin() as transaction:
        migrate.upgrade(connection)
        assert migrate.current_revision(connection) == migrate.head_revision()
        transaction.rollback()

    assert inspect(empty_pg).get_table_names() == []


def test_outboxes_in_schemas_live_side_by_side(empty_pg):
    migrate.upgrade(empty_pg)
    migrate.upgrade(empty_pg, "app one", slots=8)
    migrate.upgrade(empty_pg, "app one")

    assert differences(empty_pg, "app one") == []
    assert migrate.current_revision(empty_pg, "app one") == migrate.head_revision()
    assert migrate.current_revision(empty_pg, "elsewhere") is None
    with empty_pg.connect() as connection:
        assert contents(connection) == NEW
        assert contents(connection, '"app one".') == NEW | {"meta": [(schema.VERSION, 8)]}
        tables = inspect(connection).get_table_names("app one")
    assert schema.VERSION_TABLE in tables


def installation(engine):
    with engine.connect() as connection:
        return connection.execute(text("SELECT installation FROM outbox_meta")).scalar()


def test_each_log_has_an_installation_of_its_own(empty):
    """However its tables came to be, and it keeps it."""
    found = []
    migrate.upgrade(empty)
    found.append(installation(empty))
    migrate.upgrade(empty)
    again = installation(empty)
    do(empty, "DELETE FROM outbox_meta")
    with empty.begin() as connection:
        migrate.seed(connection)
    found.append(installation(empty))
    do(empty, "DELETE FROM outbox_meta")
    Relay(Outbox(empty), Destination()).until_empty()
    found.append(installation(empty))

    assert again == found[0]
    assert len({*found} - {None}) == 3


def test_an_outbox_knows_the_database_that_it_was_made_in(empty_pg):
    migrate.upgrade(empty_pg)

    with empty_pg.connect() as connection:
        stored = connection.execute(text("SELECT system_identifier, database_oid FROM outbox_meta")).one()
        system = connection.execute(text("SELECT system_identifier::text FROM pg_control_system()")).scalar()
        database = connection.execute(text("SELECT oid FROM pg_database WHERE datname = current_database()")).scalar()
    assert tuple(stored) == (system, database)


@pytest.mark.parametrize("where", [None, "app"])
def test_the_printed_sql_makes_the_same_in_postgresql(empty_pg, where):
    script = migrate.sql("postgresql+psycopg://user:p%25ss@host/db", where)

    with psycopg.connect(empty_pg.url.set(drivername="postgresql").render_as_string(), autocommit=True) as connection:
        connection.execute(script.encode())

    assert differences(empty_pg, where) == []
    with empty_pg.connect() as connection:
        assert contents(connection, f"{where}." if where else "") == NEW
    migrate.upgrade(empty_pg, where)


def test_the_printed_sql_makes_the_same_in_sqlite(empty_sqlite):
    connection = sqlite3.connect(str(empty_sqlite.url.database))
    connection.executescript(migrate.sql("sqlite"))
    connection.close()

    assert differences(empty_sqlite) == []
    with empty_sqlite.connect() as connection:
        assert contents(connection) == NEW
    migrate.upgrade(empty_sqlite)


def test_the_autogenerate_of_an_application_leaves_our_tables_alone(engine):
    """Its own table is proposed, ours are not, also where they are part of its metadata."""
    application = sqlalchemy.MetaData()
    sqlalchemy.Table("orders", application, sqlalchemy.Column("id", sqlalchemy.Integer, primary_key=True))

    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_name": schema.include_name})
        proposed = compare_metadata(context, application)

    assert [(change[0], change[1].name) for change in proposed] == [("add_table", "orders")]


def test_an_application_may_make_the_tables_with_its_own_metadata(empty):
    schema.metadata(dialect=empty.dialect.name).create_all(empty)

    assert differences(empty) == []


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (lambda: schema.metadata(dialect="mariadb"), "no outbox on mariadb yet; use PostgreSQL or SQLite"),
        (lambda: migrate.sql("mysql://localhost/x"), "no outbox on mysql yet; use PostgreSQL or SQLite"),
        (lambda: migrate.sql("sqlite", "app"), "no schemas"),
        (lambda: migrate.upgrade(sqlalchemy.create_engine("sqlite://"), "app"), "no schemas"),
    ],
)
def test_what_cannot_hold_an_outbox_is_refused(attempt, reason):
    with pytest.raises(DatabaseError, match=reason):
        attempt()


def test_scripts_are_found_in_a_folder_with_a_percent_sign(tmp_path, monkeypatch):
    head = migrate.head_revision()
    folder = tmp_path / "100% ours"
    folder.mkdir()
    (folder / "_migrations").symlink_to(migrate._scripts(), target_is_directory=True)
    monkeypatch.setattr(migrate, "__file__", str(folder / "migrate.py"))

    assert migrate._scripts() == folder / "_migrations"
    assert migrate.head_revision() == head


def test_what_is_no_engine_is_refused(engine):
    with pytest.raises(TypeError, match="upgrade takes an Engine or a Connection that blocks, not Outbox"):
        migrate.upgrade(Outbox(engine))  # type: ignore[arg-type]
