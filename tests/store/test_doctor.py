"""The check finds what is not as this version needs it, and nothing else."""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
import sqlalchemy
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

from outbox import DatabaseError, Message, Outbox, Relay, create_engine, migrate
from outbox.cli.failures import report_failure
from outbox.model.parking import Parking
from outbox.model.position import Capture
from outbox.schema import VERSION, metadata
from outbox.store.database import Channel, Database
from outbox.store.dialects.postgresql import server as postgresql_server
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.log.log import Log
from outbox.store.operations import check
from outbox.store.operations.check import findings
from outbox.store.subscriptions.parked import Parked
from outbox.testing.servers import PostgresServer
from tests.support.command_line import outbox as typed
from tests.support.destination import Destination, fill
from tests.support.dialects import database_of
from tests.support.guests import owner_and_guest
from tests.support.parked import by_id
from tests.support.waiting import eventually


def found(engine: Engine, schema: str | None = None, slots: int | None = None) -> list[str]:
    """Where something is wrong, and what."""
    database = Database(engine, schema)
    with closing(database.open()) as channel:
        return [f"{each.where} {each.problem}" for each in findings(channel, slots)]


def do(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_migrated_tables_are_as_they_should_be(engine):
    with (outbox := Outbox(engine)).begin() as session:
        outbox.send(session, "orders", b"1", key="k")

    assert found(engine) == []


def test_a_worker_that_settles_during_the_check_is_not_ahead_of_the_server(engine, monkeypatch):
    """The position of now is read last."""
    outbox = Outbox(engine)

    class Overtaken(Log):
        def now(self, channel: Channel) -> Capture:
            capture = super().now(channel)
            fill(outbox, 1)
            Relay(outbox, Destination()).until_empty()
            return capture

    monkeypatch.setattr(check, "Log", Overtaken)
    with closing(outbox.database.open()) as channel:
        ahead = [each for each in findings(channel) if each.where == "outbox_progress"]

    assert ahead == []


def test_tables_made_by_an_application_are_as_they_should_be(pg_engine):
    """With `metadata`, in a schema of its own; only the row about them is missing until a worker writes it."""
    do(pg_engine, "CREATE SCHEMA shop")
    metadata("shop").create_all(pg_engine)

    assert found(pg_engine, "shop") == ["outbox_meta is empty"]


def test_missing_tables_are_one_finding(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path / 'empty.sqlite3'}")

    assert found(engine) == ["tables are not there"]


INDEX = "CREATE INDEX outbox_parked_due ON outbox_parked"
EVERYWHERE = {
    "a table": ("DROP TABLE outbox_parked", "outbox_parked is missing"),
    "an index": ("DROP INDEX outbox_decision_done_at", "index outbox_decision_done_at is missing"),
    "the columns of an index": (
        f"DROP INDEX outbox_parked_due; {INDEX} (due_at) WHERE state IN ('delayed', 'waiting', 'retry')",
        "index outbox_parked_due is on (due_at), not on (subscription, due_at)",
    ),
    "the predicate of an index": (
        f"DROP INDEX outbox_parked_due; {INDEX} (subscription, due_at) WHERE state IN ('delayed', 'retry')",
        "index outbox_parked_due selects state IN 'delayed', 'retry', not state IN 'delayed', 'waiting', 'retry'",
    ),
    "an index without its predicate": (
        f"DROP INDEX outbox_parked_due; {INDEX} (subscription, due_at)",
        "index outbox_parked_due selects all rows, not state IN 'delayed', 'waiting', 'retry'",
    ),
    "a column": ("ALTER TABLE outbox_subscription DROP COLUMN topics", "outbox_subscription.topics is missing"),
    "a column of somebody else": (
        "ALTER TABLE outbox_subscription ADD COLUMN colour text NOT NULL DEFAULT 'red'",
        None,
    ),
    "the version": ("UPDATE outbox_meta SET version = 99", f"outbox_meta says version 99, this is {VERSION}"),
    "the row about it all": ("DELETE FROM outbox_meta", "outbox_meta is empty"),
}
ON_POSTGRESQL = {
    "the cache of the ids": (
        "ALTER TABLE outbox_message ALTER id SET CACHE 20",
        "outbox_message.id draws ids with a cache of 20, so that their order is not that of writing",
    ),
    "the step of the ids": (
        "ALTER TABLE outbox_message ALTER id SET INCREMENT BY -1",
        "outbox_message.id draws ids in steps of -1, but they must rise",
    ),
    "what a crash of the server leaves": (
        "ALTER TABLE outbox_parked SET UNLOGGED",
        "outbox_parked is not logged, so a crash of the server empties it",
    ),
    "a table that autovacuum leaves out": (
        "ALTER TABLE outbox_parked SET (autovacuum_enabled = off)",
        "outbox_parked is left out by autovacuum, so dead rows pile up",
    ),
    "an unlogged table of somebody else": ("CREATE UNLOGGED TABLE outbox_cache (id integer)", None),
    "the default of the transaction id": (
        "ALTER TABLE outbox_message ALTER xact_id DROP DEFAULT",
        "outbox_message.xact_id has the default none",
    ),
    "the clock": (
        "ALTER TABLE outbox_message ALTER created_at SET DEFAULT clock_timestamp()",
        "outbox_message.created_at has the default clock_timestamp()",
    ),
    "a type": (
        "ALTER TABLE outbox_message ALTER slot TYPE integer",
        "outbox_message.slot is INTEGER, not SMALLINT",
    ),
    "what may be null": ("ALTER TABLE outbox_message ALTER topic DROP NOT NULL", "outbox_message.topic may be null"),
    "a column that writers do not fill": (
        "ALTER TABLE outbox_message ADD COLUMN colour text NOT NULL",
        "outbox_message.colour is not ours and must not be null",
    ),
    "a collation": (
        'ALTER TABLE outbox_parked ALTER key TYPE text COLLATE "default"',
        "outbox_parked.key is ordered by the collation of the database",
    ),
    "the order of the log's index": (
        "DROP INDEX outbox_message_xact_id; CREATE INDEX outbox_message_xact_id ON outbox_message (id, xact_id)",
        "index outbox_message_xact_id is on (id, xact_id), not on (xact_id, id)",
    ),
    "an index that was never finished": (
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_decision_done_at'::regclass",
        "index outbox_decision_done_at is not valid",
    ),
    "the server": (
        "UPDATE outbox_meta SET system_identifier = '42'",
        "database its log was written on another server, or under another database oid: this is a copy",
    ),
}


@pytest.mark.parametrize("what", EVERYWHERE)
def test_what_is_not_as_it_should_be_is_found(engine, what):
    change, finding = EVERYWHERE[what]

    do(engine, *change.split("; "))

    assert found(engine) == ([] if finding is None else [finding])


@pytest.mark.parametrize("what", ON_POSTGRESQL)
def test_what_postgresql_may_have_otherwise_is_found(pg_engine, what):
    change, finding = ON_POSTGRESQL[what]

    do(pg_engine, *change.split("; "))

    assert found(pg_engine) == ([] if finding is None else [finding])


@pytest.mark.parametrize(
    "what",
    [
        "the cache of the ids",
        "the step of the ids",
        "what a crash of the server leaves",
        "a table that autovacuum leaves out",
    ],
)
def test_a_fix_that_is_a_statement_mends_it(pg_engine, what):
    do(pg_engine, ON_POSTGRESQL[what][0])
    database = Database(pg_engine)
    with closing(database.open()) as channel:
        (finding,) = findings(channel)

    do(pg_engine, finding.fix)

    assert found(pg_engine) == []


OFF = "SET synchronous_commit = off"
ASYNCHRONOUS = {
    "user": ("ALTER ROLE {role} " + OFF, "ALTER ROLE {role} SET synchronous_commit = on"),
    "database": ("ALTER DATABASE {database} " + OFF, "ALTER DATABASE {database} SET synchronous_commit = on"),
    "database user": (
        "ALTER ROLE {role} IN DATABASE {database} " + OFF,
        "ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = on",
    ),
}


@pytest.fixture
def role_engine(pg_engine: Engine) -> Iterator[Engine]:
    """A database as a role of its own reaches it, whose name has to be quoted."""
    name = f"Writer-{uuid4().hex}"
    do(pg_engine, f'CREATE ROLE "{name}" SUPERUSER LOGIN')
    engine = sqlalchemy.create_engine(pg_engine.url.set(username=name), poolclass=NullPool)
    yield engine
    engine.dispose()
    do(pg_engine, f'DROP ROLE "{name}"')


@pytest.mark.parametrize("source", ASYNCHRONOUS)
def test_commits_that_a_crash_takes_back_are_found(role_engine, source):
    """Where it comes from, and the statement that mends it there."""
    names = {"role": f'"{role_engine.url.username}"', "database": role_engine.url.database}
    change, fix = (statement.format(**names) for statement in ASYNCHRONOUS[source])
    before = found(role_engine)
    do(role_engine, change)
    with closing(Database(role_engine).open()) as channel:
        (finding,) = findings(channel)

    assert before == []
    assert str(finding) == (
        f"synchronous_commit: is off (source: {source}), so a crash may take a transaction back whose messages are"
        f" delivered; {fix}"
    )
    do(role_engine, finding.fix)
    assert found(role_engine) == []


def test_a_client_that_asks_for_such_commits_is_found(pg_engine):
    engine = sqlalchemy.create_engine(pg_engine.url, connect_args={"options": "-c synchronous_commit=off"})
    setting = sqlalchemy.create_engine(pg_engine.url)
    event.listen(setting, "connect", lambda driver, _: driver.execute(OFF))
    event.listen(setting, "connect", lambda driver, _: driver.commit())
    what = "so a crash may take a transaction back whose messages are delivered"

    assert found(engine) == [f"synchronous_commit is off (source: client), {what}"]
    assert found(setting) == [f"synchronous_commit is off (source: session), {what}"]
    for each in (engine, setting):
        each.dispose()


def test_sqlite_without_autoincrement_would_give_ids_out_twice(sqlite_engine):
    with sqlite_engine.begin() as connection:
        made = connection.execute(text("SELECT sql FROM sqlite_master WHERE name = 'outbox_message'")).scalar_one()
        indexes = connection.scalars(
            text(
                "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'outbox_message' AND sql IS NOT NULL"
            )
        ).all()
        connection.execute(text("DROP TABLE outbox_message"))
        connection.execute(text(made.replace("AUTOINCREMENT", "")))
        for index in indexes:
            connection.execute(text(index))

    assert found(sqlite_engine) == ["outbox_message.id is without AUTOINCREMENT, so ids would be given out twice"]


def test_slots_that_no_partition_has_are_found(engine):
    """A writer of another hand takes the remainder of a signed number."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("ALTER TABLE outbox_message DROP CONSTRAINT outbox_message_slot")
        for slot in (-3, 7, 256):
            values = {"id": uuid4().hex, "slot": slot}
            statement = text(
                "INSERT INTO outbox_message (message_id, topic, slot, body) VALUES (:id, 'orders', :slot, 'x')"
            )
            connection.execute(statement, values)

    assert "outbox_message.slot of 2 of the newest messages, from id 1 on, is not from 0 to 255" in found(engine)


def test_a_negative_slot_is_refused_and_older_messages_are_checked_by_hand(pg_engine):
    message = "INSERT INTO outbox_message (message_id, topic, slot, body) VALUES (gen_random_uuid(), 'orders', {}, 'x')"
    with pytest.raises(IntegrityError, match="outbox_message_slot"):
        do(pg_engine, message.format(-3))
    do(pg_engine, message.format(3))
    with closing(Database(pg_engine).open()) as channel:
        do(pg_engine, "ALTER TABLE outbox_message DROP CONSTRAINT outbox_message_slot")
        fixes = []
        while wrong := findings(channel):
            fixes.append(wrong[0].fix)
            do(pg_engine, wrong[0].fix)

    assert fixes == [
        "ALTER TABLE outbox_message ADD CONSTRAINT outbox_message_slot CHECK (slot >= 0) NOT VALID",
        "ALTER TABLE outbox_message VALIDATE CONSTRAINT outbox_message_slot",
    ]


def test_another_number_of_slots_is_found(engine):
    """By what the application says, or by the messages that it wrote."""
    with (outbox := Outbox(engine, slots=16)).begin() as session:
        outbox.send(session, "orders", b"1", key="k2")

    assert found(engine, slots=16) == ["outbox_meta says 256 slots, not 16"]
    assert found(engine) == [
        "outbox_message.slot 1 of the newest 1 messages with a key are not in the slot of their key"
    ]


@pytest.mark.storm
def test_a_standby_is_found(tmp_path):
    server = PostgresServer()
    try:
        server.start()
        url = server.create_database("shop")
        engine = create_engine(url)
        migrate.upgrade(engine)
        engine.dispose()
        server.stop()
        (signal,) = [folder for folder in server.folder.rglob("PG_VERSION") if folder.parent.name != "base"][:1]
        (signal.parent / "standby.signal").touch()
        server.start()

        wrong = found(create_engine(url))
    finally:
        server.close()

    assert wrong == ["server this server is a standby: its snapshots miss open transactions"]


# Ids that would be given out again


def advice(engine: Engine) -> list[tuple[str, str]]:
    """What is wrong, and what to do."""
    database = Database(engine)
    with closing(database.open()) as channel:
        return [(f"{each.where} {each.problem}", each.fix) for each in findings(channel)]


MEND = {
    "postgresql": "ALTER TABLE outbox_message ALTER id RESTART WITH 42",
    "sqlite": "UPDATE sqlite_sequence SET seq = 41 WHERE name = 'outbox_message'",
}
SET_BACK = {
    "postgresql": "ALTER TABLE outbox_message ALTER id RESTART WITH 3",
    "sqlite": "UPDATE sqlite_sequence SET seq = 2 WHERE name = 'outbox_message'",
}
KNOWN = {
    "outbox_message.id": "UPDATE outbox_message SET id = 41 WHERE id = 2",
    "outbox_parked.id": "UPDATE outbox_parked SET id = 41",
    "outbox_progress.after_id": "UPDATE outbox_progress SET target = base, after_id = 41",
    "outbox_meta.purged_id": "UPDATE outbox_meta SET purged_id = 41",
}
#: Positions, where they are ids.
SEEN = {
    "outbox_progress.base": "UPDATE outbox_progress SET base = '42:42:'",
    "outbox_progress.target": "UPDATE outbox_progress SET target = '42:42:', after_id = 1",
    "outbox_meta.purged": "UPDATE outbox_meta SET purged = '42:42:'",
}


def fill_every_table(engine: Engine) -> None:
    """Two messages, one of which is parked, and a sequence that stands at 2."""
    with (outbox := Outbox(engine)).begin() as session:
        outbox.send_all(session, [Message("orders", b"1"), Message("orders", b"2")])
    with closing(outbox.database.open()) as channel, channel.transaction():
        Parked(channel, "relay").park(by_id({Parking(state="dead", holds=True): [1]}))


@pytest.mark.parametrize("where", KNOWN)
def test_a_sequence_behind_ids_that_are_in_use_is_found_and_mended(engine, where):
    """Also when it has been set, and nothing was drawn since."""
    fill_every_table(engine)
    before = found(engine)
    do(engine, KNOWN[where], SET_BACK[engine.dialect.name])

    problem = f"outbox_message.id has drawn ids up to 2, but {where} has 41: ids would be given out again"
    assert (before, advice(engine)) == ([], [(problem, MEND[engine.dialect.name])])
    do(engine, MEND[engine.dialect.name])
    assert found(engine) == []
    with (outbox := Outbox(engine)).begin() as session:
        outbox.send(session, "orders", b"next")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT max(id) FROM outbox_message")).scalar_one() == 42


@pytest.mark.parametrize("where", SEEN)
def test_a_sequence_behind_a_position_is_found_where_positions_are_ids(sqlite_engine, where):
    fill_every_table(sqlite_engine)
    do(sqlite_engine, SEEN[where])

    problem = f"outbox_message.id has drawn ids up to 2, but {where} has 41: ids would be given out again"
    (*ahead, sequence) = advice(sqlite_engine)
    assert sequence == (problem, MEND["sqlite"])
    said = "outbox_progress says that relay is at 42:42:, and the server is only at 3:3:"
    assert [each for each, _ in ahead] == ([said] if where == "outbox_progress.base" else [])


def test_a_finding_about_an_index_hides_no_position_ahead_of_the_server(engine):
    """The refused worker sends people here for the position."""
    fill_every_table(engine)
    number = "900000000:900000000:"
    do(engine, f"UPDATE outbox_progress SET base = '{number}'", "DROP INDEX outbox_parked_state")

    said = found(engine)

    assert [each for each in said if "outbox_parked_state" in each] != []
    assert [each for each in said if f"says that relay is at {number}, and the server is only at" in each] != []


def test_positions_say_nothing_of_ids_where_they_are_something_else(pg_engine):
    fill_every_table(pg_engine)

    do(pg_engine, *SEEN.values())

    assert found(pg_engine) == []


def test_a_sequence_that_sqlite_has_forgotten_is_put_back(sqlite_engine):
    fill_every_table(sqlite_engine)
    do(sqlite_engine, "DELETE FROM sqlite_sequence WHERE name = 'outbox_message'")

    ((problem, fix),) = advice(sqlite_engine)
    do(sqlite_engine, fix)

    assert (
        problem == "outbox_message.id has drawn ids up to 0, but outbox_message.id has 2: ids would be given out again"
    )
    assert found(sqlite_engine) == []


def test_a_role_that_may_not_read_the_sequence_is_told_so(pg_engine):
    do(pg_engine, 'CREATE ROLE "a reader"', 'GRANT SELECT ON ALL TABLES IN SCHEMA public TO "a reader"')
    reader = create_engine(pg_engine.url, connect_args={"options": "-c role=a\\ reader"})
    try:
        ((problem, fix),) = advice(reader)
        do(pg_engine, fix)
        after = found(reader)
    finally:
        reader.dispose()
        do(pg_engine, 'DROP OWNED BY "a reader"', 'DROP ROLE "a reader"')

    said = "draws ids from a sequence that this role may not read, so nobody knows whether they rise"
    assert problem == f"outbox_message.id {said}"
    assert fix == 'GRANT SELECT ON SEQUENCE public.outbox_message_id_seq TO "a reader"'
    assert after == []


def test_the_sequence_of_a_schema_is_its_own(pg_engine):
    """Its name needs quotes."""
    do(pg_engine, 'CREATE SCHEMA "Shop"')
    metadata("Shop").create_all(pg_engine)
    do(pg_engine, "UPDATE outbox_meta SET purged_id = 41")
    do(pg_engine, "INSERT INTO \"Shop\".outbox_progress SELECT 'x', 1, 0, 0, 0, '0:0:', NULL, 7, now()")

    database = Database(pg_engine, "Shop")
    with closing(database.open()) as channel:
        (finding, _) = findings(channel)
    do(pg_engine, finding.fix)

    assert finding.fix == 'ALTER TABLE "Shop".outbox_message ALTER id RESTART WITH 8'
    assert found(pg_engine, "Shop") == ["outbox_meta is empty"]


# The server


def of_server(engine: Engine) -> list[tuple[str, str, str | None, str]]:
    """What is found, with its evidence and fix."""
    with engine.connect() as connection:
        return [
            (each.where, each.problem, each.evidence, each.fix) for each in postgresql_server.check_server(connection)
        ]


def test_who_keeps_dead_rows_is_found_with_how_to_end_it(pg_engine, monkeypatch):
    """A session in a transaction, and a transaction that was prepared and left."""
    before = of_server(pg_engine)
    monkeypatch.setattr(postgresql_server, "PATIENCE", timedelta(0))
    with pg_engine.connect() as idle:
        pid = idle.scalar(text("SELECT pg_backend_pid() FROM outbox_meta, pg_current_xact_id()"))
        two_phases = pg_engine.raw_connection()
        two_phases.driver_connection.execute("CREATE TABLE orders ()")
        two_phases.driver_connection.execute("PREPARE TRANSACTION 'it''s left'")
        two_phases.close()
        session, prepared = of_server(pg_engine)
        do_alone(pg_engine, prepared[3].partition(", or ")[2])
        do_alone(pg_engine, session[3].partition(", or ")[2])
        idle.invalidate()

    kept = "has kept dead rows from being removed for 00:00:"
    assert (before, session[0], prepared[0]) == ([], f"session {pid}", "prepared transaction 'it''s left'")
    assert (session[1].startswith(kept), prepared[1].startswith(kept)) == (True, True)
    assert session[2] == "role postgres, 127.0.0.1, idle in transaction"
    assert prepared[2:] == ("owner postgres", "COMMIT PREPARED 'it''s left', or ROLLBACK PREPARED 'it''s left'")
    assert eventually(lambda: of_server(pg_engine) == [])  # a server ends a session when it comes to that


def do_alone(engine: Engine, statement: str) -> None:
    """Outside of a transaction."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statement)


def test_connections_that_run_out_are_found(pg_engine, monkeypatch):
    """Those of other roles count, also for a role that may not look at them."""
    monkeypatch.setattr(postgresql_server, "MOST_USED", 2 / 197)
    with owner_and_guest(pg_engine) as (owner, guest), owner.connect():
        ((where, problem, evidence, _),) = of_server(guest)

    assert (where, problem, re.fullmatch(r"\d+ of 197", evidence or "") is None) == (
        "connections",
        "are nearly used up",
        False,
    )


def test_a_server_that_never_cleans_up_is_found(pg_engine):
    engine = sqlalchemy.create_engine(pg_engine.url, connect_args={"options": "-c track_counts=off"})

    assert found(engine) == ["track_counts is off, so dead rows pile up"]
    engine.dispose()


def test_a_pooler_that_changes_the_session_is_found(pg_engine):
    """By the process of the server, which two connections have here, or which changes."""
    shared = replace(POSTGRESQL, home=replace(POSTGRESQL.home, backend="SELECT 42"))
    changing = replace(POSTGRESQL, home=replace(POSTGRESQL.home, backend="SELECT (random() * 1e9)::int"))

    for dialect, evidence in ((shared, "two connections had process 42 of the server"), (changing, ", then ")):
        with closing(database_of(pg_engine, dialect).open()) as channel:
            (finding,) = findings(channel)
        assert (finding.where, finding.problem, evidence in str(finding.evidence)) == (
            "connections",
            "go through a pooler in transaction mode, which loses LISTEN and hands settings to other sessions",
            True,
        )


@pytest.mark.parametrize("minutes", [-1, 1])
def test_clocks_that_differ_are_found(pg_engine, minutes):
    clock = replace(POSTGRESQL.clock, now=f"(statement_timestamp() + interval '{minutes} minutes')")
    with closing(database_of(pg_engine, replace(POSTGRESQL, clock=clock)).open()) as channel:
        (finding,) = findings(channel)

    assert (finding.where, finding.fix) == ("clock", "let NTP set both clocks")


SPREAD = "runs transactions on several servers; no snapshot of one server lists its open transactions"


def test_a_server_that_only_speaks_as_postgresql_does_is_refused(pg_engine):
    """By the upgrade and by workers; the check says why."""
    do(
        pg_engine,
        "CREATE SCHEMA other",
        "CREATE FUNCTION other.version() RETURNS text LANGUAGE sql AS"
        " $$ SELECT text 'PostgreSQL 15.2-YB-2.25.1.0-b0 on x86_64' $$",
    )
    options = {"options": "-c search_path=other,pg_catalog,public"}
    other = sqlalchemy.create_engine(pg_engine.url, connect_args=options)
    with pytest.raises(DatabaseError, match=f"YugabyteDB {SPREAD}"):
        migrate.upgrade(other)
    with pytest.raises(DatabaseError, match=f"YugabyteDB {SPREAD}"):
        Relay(Outbox(other), lambda _: None).until_empty()

    assert advice(other) == [
        (f"server YugabyteDB {SPREAD}, so a position would pass over messages", "use PostgreSQL itself")
    ]
    other.dispose()


def test_a_log_that_citus_spreads_is_refused(pg_engine):
    """By the trigger that Citus puts on each of its tables."""
    do(
        pg_engine,
        "CREATE FUNCTION citus_truncate_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER truncate_trigger_16400 AFTER TRUNCATE ON outbox_message"
        " EXECUTE FUNCTION citus_truncate_trigger()",
    )
    with pytest.raises(DatabaseError, match=f"Citus {SPREAD}"):
        Relay(Outbox(pg_engine), lambda _: None).until_empty()

    ((_, fix),) = advice(pg_engine)
    assert fix == "keep the tables of the outbox local: SELECT undistribute_table('outbox_message')"


def test_a_server_that_the_driver_does_not_know_is_told(capsys):
    """As SQLAlchemy says it at the first connection."""
    code = report_failure(AssertionError("Could not determine version from string 'CockroachDB CCL v24.1.0'"))

    told = "its snapshots cannot tell which messages are new; use PostgreSQL itself"
    assert code == 2
    assert capsys.readouterr().err == f"Error: CockroachDB CCL v24.1.0 only speaks as PostgreSQL does; {told}\n"


# Rights


def test_rights_that_a_role_lacks_are_found_with_the_grants(pg_engine):
    with owner_and_guest(pg_engine) as (owner, guest):
        role = str(guest.url.username)
        roles = ("--writer", role, "--dedup", "--relay", role, "--dashboard", role, "--decide")
        lacking = typed(owner, "doctor", *roles, "--reader", "nobody_of_this_name", "--json").json["findings"]
        do(owner, *(each["fix"] for each in lacking if each["problem"] != "is not there"))
        after = typed(owner, "doctor", *roles)

    assert [(each["where"], each["problem"]) for each in lacking] == [
        (f"role {role}", "lacks rights of a writer"),
        (f"role {role}", "lacks rights of a relay"),
        ("role nobody_of_this_name", "is not there"),
        (f"role {role}", "lacks rights of a dashboard"),
    ]
    assert lacking[0]["evidence"] == (
        "INSERT on outbox_message, INSERT on outbox_dedup, SELECT on outbox_dedup, UPDATE on outbox_dedup"
    )
    assert (after.code, after.err) == (0, "everything is as it should be\n")


def test_a_file_has_no_roles(sqlite_engine):
    ended = typed(sqlite_engine, "doctor", "--relay", "worker")

    assert (ended.code, "an SQLite file has no roles" in ended.err) == (2, True)
