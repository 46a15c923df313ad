"""The check of a database: finds all that is wrong with the server, and with the tables for this version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ClauseElement,
    Column,
    Connection,
    DefaultClause,
    Index,
    Inspector,
    MetaData,
    Table,
    inspect,
    text,
)
from sqlalchemy.dialects import registry
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from outbox.errors import DatabaseError
from outbox.model.limits import HALF_TOPIC
from outbox.model.slots import slot_of
from outbox.schema import VERSION, Tables, tables
from outbox.store.database import Channel, Database
from outbox.store.dialects.finding import Finding
from outbox.store.dialects.statements import Sql
from outbox.store.identity import NEWER, is_elsewhere, stored_identity
from outbox.store.log.log import Log
from outbox.store.subscriptions.progress import ProgressLog
from outbox.store.subscriptions.subscriptions import Subscriptions

_MISSING = "is missing"
#: The tables with positions, and with what positions are compared with.
_READ = {"outbox_message", "outbox_progress", "outbox_lease", "outbox_subscription"}
#: The tables in the database of a consumer without an outbox.
INBOX_ALONE = {"outbox_inbox"}
_MARK = "outbox_progress.last_message"
#: Without these columns nobody can tell what is parked under which id.
_PARKED_IDS = {f"outbox_{table}.{column}" for table in ("message", "parked") for column in ("id", "message_id")}
_MOST_SLOTS = 32_767
_SAMPLED = 1_000
_MOST_PARKED = 10_000
#: Clocks that NTP sets differ by milliseconds.
_MOST_AHEAD = timedelta(seconds=5)
#: A pooler may give a session the same process again by chance.
_POOLER_LOOKS = 5


#: The newest messages with a key, among a bounded number of rows by primary key.
_KEYED = """
    SELECT key, slot FROM (SELECT key, slot FROM {message} ORDER BY id DESC LIMIT :limit) AS r WHERE key IS NOT NULL
"""
#: Among as many of the newest messages, those that are in no slot of the outbox.
_STRAY = """
    SELECT count(*), min(id) FROM (SELECT id, slot FROM {message} ORDER BY id DESC LIMIT :limit) AS r
    WHERE slot < 0 OR slot >= :slots
"""
_HIGHEST_NUMBER = "SELECT max({number}) FROM {message}"
#: Columns with ids of the log, none of which may be drawn again.
_IDS = (
    ("message", "id"), ("parked", "id"), ("progress", "after_id"), ("progress", "highest_id"),
    ("meta", "purged_id"),
)  # fmt: skip
#: Columns with positions, whose numbers are ids where the log has no `xact_id`. A head is one more than the last id.
_POSITIONS = (("progress", "base"), ("progress", "target"), ("meta", "purged"))
#: Messages parked under an id that another message of the log has, among the newest of each subscription.
_UNDER_ANOTHERS_ID = """
    SELECT min(p.id), count(*)
    FROM (SELECT id, message_id FROM {parked} WHERE subscription = :name ORDER BY id DESC LIMIT :limit) AS p
    JOIN {message} AS m ON m.id = p.id
    WHERE p.message_id <> m.message_id
"""


def findings(channel: Channel, slots: int | None = None, *, behind: bool = False) -> list[Finding]:
    """Return all defects; an empty list if all is well.

    `slots`: the number in the application, if the number is to be compared. `behind`: True if an upgrade has not run
    yet, which is then the fix for what is missing.
    """
    database = channel.database
    foreign = database.dialect.home.why_foreign(lambda query: channel.rows(Sql(query))[0][0], database.names["message"])
    if foreign is not None:
        return [Finding("server", *foreign)]
    with database.engine.connect() as connection:
        present = tables_there(connection, tables_of(database))
        if not present:
            return [Finding("tables", "are not there", f"run: {database.upgrade_command}"), *_of_server(channel)]
        found = of_tables(connection, database)
        if behind:
            # If it were made by hand, it would be in the way of the revision that makes it.
            upgrade = f"run: {database.upgrade_command}"
            found = [replace(each, fix=upgrade) if each.problem == _MISSING else each for each in found]
        is_readable = _READ <= present and not any(_lacks_column(each) for each in found)
        if "outbox_message" in present:
            found += _of_ids(connection, inspect(connection), database, present)
            if not behind:
                # No difference of the tables, because Alembic's autogenerate makes them without the check.
                found += database.dialect.home.check_slots(connection, tables_of(database).message)
    found += _of_server(channel)
    if "outbox_meta" in present:
        found += _of_meta(channel, slots, log_is_there="outbox_message" in present)
    if {"outbox_message", "outbox_progress"} <= present and not any(each.where == _MARK for each in found):
        found += _of_progress(channel)
    if is_readable and not any(each.where in ("server", "database") for each in found):
        # First, because a mended sequence lets a subscription pass over what was written under the ids given out again.
        found[:0] = _of_positions(channel)
    tables = {"outbox_message", "outbox_parked", "outbox_subscription"}
    if tables <= present and not any(each.where in _PARKED_IDS for each in found):
        found += _of_parked(channel)
    return found


def findings_of_ids(channel: Channel) -> list[Finding]:
    """Return why ids of the log would be drawn a second time; an empty list if none would."""
    database = channel.database
    with database.engine.connect() as connection:
        present = tables_there(connection, tables_of(database))
        return list(_of_ids(connection, inspect(connection), database, present))


def _lacks_column(found: Finding) -> bool:
    """Return whether positions cannot be read because a column is missing; an index or a type hides nothing."""
    return found.problem == _MISSING and found.where.partition(".")[0] in _READ


def holds_inbox_alone(channel: Channel) -> bool:
    """Return whether of our tables there is only the inbox, as in the database of a consumer without an outbox."""
    with channel.database.engine.connect() as connection:
        return tables_there(connection, tables_of(channel.database)) == INBOX_ALONE


def findings_of_one(channel: Channel, metadata: MetaData) -> list[Finding]:
    """Return all defects of the table in a database with only one of our tables."""
    database = channel.database
    (table,) = metadata.tables.values()
    with database.engine.connect() as connection:
        inspector = inspect(connection)
        if not inspector.has_table(table.name, schema=database.schema):
            found = [Finding(table.name, "is not there", f"run: {database.upgrade_command}")]
        else:
            found = list(_of_table(inspector, table, database.dialect.name))
        found += database.dialect.home.check_tables(connection, metadata, set())
    return [*found, *_of_server(channel)]


def tables_of(database: Database) -> Tables:
    """Return the tables that a database should have."""
    return tables(database.schema, database.dialect.name)


def tables_there(connection: Connection, wanted: Tables) -> set[str]:
    """Return the names of the tables that are there."""
    needed = {table.name for table in wanted.metadata.tables.values()}
    return needed.intersection(inspect(connection).get_table_names(schema=wanted.metadata.schema))


def of_tables(connection: Connection, database: Database) -> list[Finding]:
    """Return the defects of the tables, their columns and indexes."""
    inspector, ours = inspect(connection), tables_of(database)
    present, dialect = tables_there(connection, ours), database.dialect.name
    needed = {table.name: table for table in ours.metadata.tables.values()}
    found = [Finding(name, _MISSING, _table_made(needed[name], dialect)) for name in sorted(set(needed) - present)]
    for name in sorted(present):
        found += _of_table(inspector, needed[name], dialect)
    found += database.dialect.home.check_tables(connection, ours.metadata, present)
    return found


def _of_table(inspector: Inspector, table: Table, dialect: str) -> Iterator[Finding]:
    reflected: dict[str, Any] = {each["name"]: each for each in inspector.get_columns(table.name, schema=table.schema)}
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        if column.name in reflected:
            yield from _of_column(where, column, reflected[column.name], dialect)
        else:
            yield Finding(where, _MISSING, f"ALTER TABLE {table} ADD COLUMN {_made_by(CreateColumn(column), dialect)}")
    for name in sorted(set(reflected) - set(table.columns.keys())):
        column = reflected[name]
        if not column["nullable"] and column["default"] is None and not column.get("identity"):
            yield Finding(f"{table.name}.{name}", "is not ours and must not be null", "drop it, or give it a default")
    primary = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    wanted = [column.name for column in table.primary_key.columns]
    if primary != wanted:
        problem = f"has the primary key ({_listed(primary)}), not ({_listed(wanted)})"
        yield Finding(table.name, problem, "give it that primary key")
    yield from _of_indexes(inspector, table, dialect)


def _of_column(where: str, column: Column[Any], found: dict[str, Any], dialect: str) -> Iterator[Finding]:
    wanted_type = _family(column.type.compile(_dialect(dialect)))
    found_type = _family(found["type"].compile(_dialect(dialect)))
    if found_type != wanted_type:
        yield Finding(where, f"is {found_type}, not {wanted_type}", "give it that type")
    if bool(found["nullable"]) != bool(column.nullable) and not column.primary_key:
        yield Finding(where, "may be null" if found["nullable"] else "must not be null", "change that")
    if column.identity is not None:
        yield from _of_identity(where, column, found.get("identity"))
    elif isinstance(column.server_default, DefaultClause):
        wanted = _plain(str(column.server_default.arg))
        if _plain(found["default"] or "") != wanted:
            yield Finding(where, f"has the default {found['default'] or 'none'}", f"set it to {wanted}")


def _of_identity(where: str, column: Column[Any], found: dict[str, Any] | None) -> Iterator[Finding]:
    alter = f"ALTER TABLE {column.table} ALTER {column.name}"
    if not found:
        yield Finding(where, "is no identity column", "make it one, GENERATED BY DEFAULT with CACHE 1")
        return
    cache, step = found["cache"], found["increment"]
    if cache != 1:
        problem = f"draws ids with a cache of {cache}, so that their order is not that of writing"
        yield Finding(where, problem, f"{alter} SET CACHE 1")
    if step < 1:
        yield Finding(where, f"draws ids in steps of {step}, but they must rise", f"{alter} SET INCREMENT BY 1")


def _of_indexes(inspector: Inspector, table: Table, dialect: str) -> Iterator[Finding]:
    reflected: dict[Any, Any] = {each["name"]: each for each in inspector.get_indexes(table.name, schema=table.schema)}
    for index in sorted(table.indexes, key=lambda each: str(each.name)):
        where, make = f"index {index.name}", _made_by(CreateIndex(index), dialect)
        found = reflected.get(index.name)
        if found is None:
            yield Finding(where, _MISSING, make)
            continue
        there, wanted = found["column_names"], [column.name for column in index.columns]
        if there != wanted:
            yield Finding(where, f"is on ({_listed(there)}), not on ({_listed(wanted)})", f"drop it; {make}")
        selects = _predicate(found.get("dialect_options", {}), dialect)
        needed = _predicate(_options(index, dialect), dialect)
        if selects != needed:
            yield Finding(where, f"selects {selects or 'all rows'}, not {needed or 'all rows'}", f"drop it; {make}")


def _of_ids(connection: Connection, inspector: Inspector, database: Database, present: set[str]) -> Iterator[Finding]:
    """Find ids that would be drawn a second time: a row under such an id would count for the new message."""
    # Read before the sequence, because both rise meanwhile.
    known = _highest_ids(connection, inspector, database, present)
    if "outbox_message.id" not in known:
        return
    where = max(known, key=lambda each: known[each])
    yield from database.dialect.home.check_ids(connection, database.names, where, known[where])


def _highest_ids(connection: Connection, inspector: Inspector, database: Database, present: set[str]) -> dict[str, int]:
    """Return the highest id of the log that each column holds, by column."""
    places = [(name, column, column) for name, column in _IDS]
    below_head = database.dialect.reads.below_head
    if below_head is not None:
        places += [(name, column, below_head.format(column=column)) for name, column in _POSITIONS]
    known: dict[str, int] = {}
    for name, column, value in places:
        table = f"outbox_{name}"
        if table in present and column in _columns(inspector, table, database):
            statement = f"SELECT max({value}) FROM {database.names[name]}"
            known[f"{table}.{column}"] = connection.execute(text(statement)).scalar_one() or 0
    return known


def _columns(inspector: Inspector, table: str, database: Database) -> set[str]:
    return {each["name"] for each in inspector.get_columns(table, schema=database.schema)}


def _of_progress(channel: Channel) -> Iterator[Finding]:
    """Find subscriptions that would pass over messages, because ids were given out before."""
    for name, id in ProgressLog(channel).given_again().items():
        problem = f"says that {name} has passed message {id}, but another message has this id now: ids were given again"
        quoted = name.replace("'", "''")
        progress = channel.database.names["progress"]
        again = (
            f"with its worker stopped, for all of the log to be sent: UPDATE {progress} SET base = '0:0:',"
            f" target = NULL, after_id = NULL WHERE subscription = '{quoted}'"
        )
        yield Finding("outbox_progress", problem, again)


def _of_positions(channel: Channel) -> Iterator[Finding]:
    """Find subscriptions ahead of the server. A worker of one refuses to go on, because it would pass over messages."""
    # Read before the position of now, because all of these rise meanwhile.
    bases = [(each, [p.base for p in ProgressLog(channel).standing(each)]) for each in Subscriptions(channel).all()]
    highest = int(channel.rows(_HIGHEST_NUMBER)[0][0] or 0)
    now = Log().now(channel).position
    commands = channel.database.commands
    for each, found in bases:
        ahead = next((base for base in found if base.head > now.head), None)
        if ahead is None:
            continue
        fix = f"with all workers stopped, run: {commands.line('subscriptions', 'drop', each.name)}"
        if each.kind == "check":
            pending = commands.line("half", "list", *(("--group", each.tags[0]) if each.tags else ()))
            fix = f"decide on its pending transactions, which {pending} shows; then, {fix}"
        if each.kind == "backfill":
            fix += "; then begin another one"
        if each.kind in ("relay", "consumer", "broadcast"):
            reset = commands.line("subscriptions", "reset", each.name, "--to", "TIME")
            fix = (
                "decide on its parked messages, because a reset deletes them; then, with all workers stopped, run, with"
                f" a time before the server went back: {reset}"
            )
        yield Finding("outbox_progress", f"says that {each.name} is at {ahead}, and the server is only at {now}", fix)
    if highest >= now.head and channel.database.dialect.home.restore is not None:
        problem = f"has transaction ids up to {highest}: such messages wait until the server, at {now.head}, is there"
        fix = f"after all resets and drops, with all workers stopped, run: {commands.line('restore', '--force')}"
        yield Finding("outbox_message.xact_id", problem, fix)


def _of_parked(channel: Channel) -> Iterator[Finding]:
    """Find parked messages whose id another message of the log has: that message could not be parked."""
    for (name,) in channel.rows("SELECT name FROM {subscription} ORDER BY name"):
        id, number = channel.rows(_UNDER_ANOTHERS_ID, name=name, limit=_MOST_PARKED)[0]
        if number:
            more = "" if number == 1 else f" (the first of {number})"
            problem = f"has message {id} of {name}{more}, but another message has this id now: ids were given again"
            look = channel.database.commands.line("parked", "show", id, "--name", name)
            fix = f"replay or discard the parked message, and run doctor again; to see the message, run: {look}"
            yield Finding("outbox_parked", problem, fix)


def _of_server(channel: Channel) -> Iterator[Finding]:
    yield from channel.database.dialect.home.check_address(channel.database.engine)
    with channel.database.engine.connect() as connection:
        yield from channel.database.dialect.home.check_server(connection)
    yield from _of_clock(channel)
    yield from _of_pooler(channel)
    try:
        Log().now(channel)
    except DatabaseError as error:
        problem, _, fix = str(error).partition("; ")
        yield Finding("server", problem, fix)
    except Exception as error:
        # On SQLite there is no position without the log; the missing table is a finding already.
        if not channel.database.dialect.errors.missing_table(error):
            raise


def _of_clock(channel: Channel) -> Iterator[Finding]:
    """Find clocks that differ: moments of messages come from applications, and the database compares."""
    before, here, after = datetime.now(UTC), channel.now(), datetime.now(UTC)
    ahead = max(before - here, here - after)
    if ahead > _MOST_AHEAD:
        evidence = f"{before:%Y-%m-%d %H:%M:%S} here, {here:%Y-%m-%d %H:%M:%S} there"
        problem = "of this machine differs from that of the database, so delayed messages come too early or too late"
        yield Finding("clock", problem, "let NTP set both clocks", evidence)


def _of_pooler(channel: Channel) -> Iterator[Finding]:
    """Find a pooler that gives each transaction another session, where LISTEN is lost and settings reach others."""
    backend = channel.database.dialect.home.backend
    if backend is None:
        return
    with closing(channel.database.open()) as other:
        for _ in range(_POOLER_LOOKS):
            ((mine,),) = channel.rows(backend)
            with other.transaction():
                ((its,),) = other.rows(backend)
                # Another session has the process now, or this one has another: the process is not the session's own.
                now = mine if mine == its else channel.rows(backend)[0][0]
            if mine == its or now != mine:
                problem = (
                    "go through a pooler in transaction mode, which loses LISTEN and hands settings to other sessions"
                )
                fix = "give workers and commands the URL of the server itself, or of a pooler in session mode"
                evidence = f"two connections had process {mine} of the server" if mine == its else f"{mine}, then {now}"
                yield Finding("connections", problem, fix, evidence)
                return


def _of_meta(channel: Channel, slots: int | None, *, log_is_there: bool) -> Iterator[Finding]:
    stored = stored_identity(channel)
    if stored is None:
        yield Finding("outbox_meta", "is empty", f"run: {channel.database.upgrade_command}, or start a worker")
        return
    if stored.version != VERSION:
        fix = f"run: {channel.database.upgrade_command}" if stored.version < VERSION else NEWER
        yield Finding("outbox_meta", f"says version {stored.version}, this is {VERSION}", fix)
    if not 1 <= stored.slots <= _MOST_SLOTS:
        yield Finding("outbox_meta", f"says {stored.slots} slots", f"between 1 and {_MOST_SLOTS} make sense")
    elif slots is not None and slots != stored.slots:
        yield Finding("outbox_meta", f"says {stored.slots} slots, not {slots}", f"say Outbox(…, slots={stored.slots})")
    elif log_is_there:
        number, first = channel.rows(_STRAY, limit=_MOST_PARKED, slots=stored.slots)[0]
        if number:
            problem = f"of {number} of the newest messages, from id {first} on, is not from 0 to {stored.slots - 1}"
            fix = "mend their writer; send those with a negative slot again, because no partition delivers them"
            yield Finding("outbox_message.slot", problem, fix)
        keyed = channel.rows(_KEYED, limit=_SAMPLED)
        wrong = sum(slot_of(key, stored.slots) != slot for key, slot in keyed)
        if wrong:
            problem = f"{wrong} of the newest {len(keyed)} messages with a key are not in the slot of their key"
            yield Finding("outbox_message.slot", problem, f"an application writes without slots={stored.slots}")
    if is_elsewhere(channel, stored):
        problem = "its log was written on another server, or under another database oid: this is a copy"
        restore = channel.database.commands.line("restore")
        yield Finding("database", problem, f"run, with all workers stopped: {restore}")


def _dialect(name: str) -> Any:
    return registry.load(name)()


def _family(type: str) -> str:
    """Return a type without the collation, under one name for all databases."""
    plain = re.sub(r" COLLATE .*", "", type).upper()
    return {"TIMESTAMP": "DATETIME", "UUID": "CHAR(32)", "INT": "INTEGER"}.get(plain, plain)


def _options(index: Index, dialect: str) -> dict[str, Any]:
    return {f"{dialect}_where": index.dialect_options[dialect].get("where")}


def _predicate(options: dict[str, Any], dialect: str) -> str:
    condition = options.get(f"{dialect}_where")
    return "" if condition is None else _plain(str(condition))


def _made_by(element: ClauseElement, dialect: str) -> str:
    return re.sub(r"\s+", " ", str(element.compile(dialect=_dialect(dialect))).strip())


def _table_made(table: Table, dialect: str) -> str:
    indexes = sorted(table.indexes, key=lambda each: str(each.name))
    statements: list[ClauseElement] = [CreateTable(table), *map(CreateIndex, indexes)]
    return "; ".join(_made_by(each, dialect) for each in statements)


def _plain(expression: str) -> str:
    """Return an SQL expression without what databases add in storing: casts, parentheses, another form of IN."""
    plain = re.sub(r"::[a-z]+( [a-z]+)*(\[\])?", "", expression)
    plain = re.sub(r"= ANY \(ARRAY\[(.*?)\]\)", r"IN \1", plain)
    plain = re.sub(r"[()]", " ", plain)
    return re.sub(r"\s+", " ", re.sub(r"\s*,\s*", ", ", plain)).strip()


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names))


#: So many of the newest messages are looked at.
_NEWEST = 10_000
_TOPICS = f"""
    SELECT topic, max(length(body)), sum(CASE WHEN key IS NULL THEN 1 ELSE 0 END)
    FROM (SELECT topic, key, body FROM {{message}} ORDER BY id DESC LIMIT {_NEWEST}) AS newest
    WHERE topic <> '{HALF_TOPIC}' GROUP BY topic ORDER BY topic
"""


def newest_topics(channel: Channel) -> dict[str, tuple[int, int]]:
    """Return the topics of the newest messages, each with its largest body in bytes and its number without a key."""
    return {topic: (int(largest), int(keyless)) for topic, largest, keyless in channel.rows(_TOPICS)}
