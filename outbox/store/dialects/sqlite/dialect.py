"""The dialect of SQLite. One writer at a time draws ids, under the write lock, so an id is a position."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine

from outbox.model.message import Message, stored_message
from outbox.model.topics import Topics
from outbox.store.dialects.claims import claiming
from outbox.store.dialects.dialect import (
    APPENDED,
    LOG_COLUMNS,
    RAW_COLUMNS,
    READ_COLUMNS,
    Clock,
    Dialect,
    Driving,
    Errors,
    Home,
    Location,
    Locks,
    Reads,
    Values,
    Writes,
    connects_by_url,
    driver_of,
)
from outbox.store.dialects.sqlite.channel import SqliteChannel
from outbox.store.dialects.sqlite.check import check_ids, check_tables
from outbox.store.dialects.sqlite.engine import commits_every_statement, configure, make_fit, waits_for_itself
from outbox.store.dialects.sqlite.filtering import FILTERING
from outbox.store.dialects.sqlite.locking import is_busy
from outbox.store.dialects.sqlite.speech import stored_moment
from outbox.store.dialects.statements import Execute, Parameters, Row, Script, Statement, counted

_PASSING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}


def _transient(error: Exception) -> bool:
    """Return whether the file is busy, or an operator can mend it while we wait: a full disk, no descriptors left."""
    code = getattr(error, "sqlite_errorcode", None)
    return is_busy(error) or (code is not None and code & 0xFF in _PASSING)


def _location(found: Any) -> Location | None:
    """Return the path of the file as the place; None for a database in memory, or one that is given as a URI."""
    if not isinstance(found, Engine):
        cursor = found.cursor()
        cursor.row_factory = None
        file = next(path for _, name, path in cursor.execute("PRAGMA database_list") if name == "main")
        return Location(os.path.realpath(file)) if file else None
    (file,), _ = found.dialect.create_connect_args(found.url)
    if not connects_by_url(found) or file == ":memory:" or file.startswith("file:"):
        return None
    return Location(os.path.realpath(file))


def _moment(value: Any) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value).replace(tzinfo=UTC)


def _messages(rows: Sequence[Row]) -> list[Message]:
    return [stored_message((*row[:8], *map(_moment, row[8:11]), *row[11:])) for row in rows]


def _executor(connection: sqlite3.Connection) -> Execute:
    def execute(statement: Statement) -> Sequence[Row]:
        # The connection's own row factory may give other rows.
        cursor = connection.cursor()
        cursor.row_factory = None
        if isinstance(statement.parameters, list):
            cursor.executemany(statement.sql, statement.parameters)
        else:
            cursor.execute(statement.sql, statement.parameters)
        return cursor.fetchall() if statement.returns else counted(statement, cursor)

    return execute


def _append(names: Mapping[str, str], rows: Sequence[Row]) -> Script[None]:
    """Append messages with one statement each, prepared once, because statements cost no round trip here."""
    bound: list[Parameters] = [_bound(row) for row in rows]
    yield Statement(_APPEND.format(**names), bound)


def _bound(row: Row) -> dict[str, Any]:
    bound = dict(zip(APPENDED, row, strict=True))
    bound["message_id"] = bound["message_id"].hex
    for moment in ("deliver_at", "expires_at"):
        bound[moment] = None if bound[moment] is None else stored_moment(bound[moment])
    bound["delay"] = None if bound["delay"] is None else f"{bound['delay'].total_seconds():+.6f} seconds"
    return bound


_APPEND = """
    INSERT INTO {message} (message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at,
                           expires_at)
    VALUES (:message_id, :topic, :key, :slot, :tags, :headers, :body, :content_type, {now},
            coalesce(:deliver_at, strftime('%Y-%m-%d %H:%M:%f', {now}, :delay)), :expires_at)
"""
#: The sequence, because `max(id)` falls when the whole log is purged.
_SNAPSHOT = """(SELECT (coalesce(max(seq), 0) + 1) || ':' || (coalesce(max(seq), 0) + 1) || ':' FROM sqlite_sequence
    WHERE name = '{message}')"""
#: The file that the connection has opened. Rows of another one at the same path have nothing to do with it.
_INCARNATION = "outbox_file()"
_HEAD_ROW = f"SELECT NULL AS id, NULL, {_SNAPSHOT}, {_INCARNATION}, NULL, NULL, NULL, NULL, {{now}}, NULL, NULL"
#: GLOB, because LIKE takes letters in upper and lower case for the same.
_OF_TOPICS = """(:topics IS NULL OR topic IN (SELECT value FROM json_each(:topics))
        OR EXISTS (SELECT 1 FROM json_each(:patterns) WHERE topic GLOB value))
    AND (:exceptions IS NULL OR NOT EXISTS (SELECT 1 FROM json_each(:exceptions) WHERE topic GLOB value))"""
_FRESH = f"SELECT {RAW_COLUMNS} FROM {{message}} WHERE id >= :head ORDER BY id LIMIT :limit"
#: The rows with their slots, by which they are chosen.
_RAW = _FRESH.replace(RAW_COLUMNS, f"{RAW_COLUMNS}, slot")
_READ_ON = f"SELECT * FROM ({_HEAD_ROW}) UNION ALL SELECT * FROM ({_FRESH})"
_READ_ON_CHOSEN = f"""SELECT (SELECT count(*) FROM (SELECT 1 FROM {{message}} WHERE id >= :head LIMIT :limit)), NULL,
        {_SNAPSHOT}, {_INCARNATION}, NULL, NULL, NULL, NULL, {{now}}, NULL, NULL
    UNION ALL SELECT {READ_COLUMNS} FROM ({_RAW}) WHERE {{chosen}}"""
_PAGE = f"""SELECT NULL AS id, NULL, NULL, {{who_answers}}, NULL, NULL, NULL, {{now}}, NULL, NULL
    UNION ALL SELECT * FROM (SELECT {LOG_COLUMNS} FROM {{message}}
        WHERE id > max(:after, :first - 1) AND id <= :upto AND id >= :head AND id < :target AND {{chosen}}
        ORDER BY id LIMIT :limit)"""
_BELOW_HEAD = "CAST(substr({column}, instr({column}, ':') + 1) AS integer) - 1"
#: The last message of a position is one look-up by the primary key. A message that was purged proves nothing.
_GIVEN_AGAIN = f"""EXISTS (
    SELECT 1 FROM {{message}} AS m
    WHERE m.id = coalesce(p.after_id, {_BELOW_HEAD.format(column="p.base")}) AND m.message_id <> p.last_message)"""
_EXTENT = """SELECT min(id), max(id), NULL, NULL, {who_answers} FROM {message} WHERE id >= :head AND id < :target"""


def _records(parameter: str, columns: Mapping[str, str]) -> str:
    values = ", ".join(f"json_extract(value, '$[{place}]') AS {name}" for place, name in enumerate(columns))
    return f"(SELECT {values} FROM json_each(:{parameter}))"


def _bind_topics(topics: Topics) -> Parameters:
    # Patterns are as GLOB reads them: of what else it knows, `?` and `[`, no topic holds any.
    return {
        "topics": None if topics.any_name else json.dumps(topics.names),
        "patterns": json.dumps(topics.patterns) if topics.patterns and not topics.any_name else None,
        "exceptions": json.dumps(topics.exceptions) if topics.exceptions else None,
    }


def _serialize_upgrades(connection: Connection, _name: str) -> None:
    driver: Any = driver_of(connection)
    if not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _commit(do: Callable[[], None], _connection: Any) -> bool:
    do()
    return True


DIALECT = Dialect(
    name="sqlite",
    schemas=False,
    clock=Clock(
        now="strftime('%Y-%m-%d %H:%M:%f', 'now')",
        later="strftime('%Y-%m-%d %H:%M:%f', {now}, ({seconds}) || ' seconds')",
        # Rounded, because differences of fractional days may come out a little too long; moments have milliseconds.
        seconds="round((julianday({until}) - julianday({since})) * 86400.0, 3)",
        from_milliseconds="strftime('%Y-%m-%d %H:%M:%f', CAST({value} AS integer) / 1000.0, 'unixepoch')",
        bind=stored_moment,
        read=_moment,
    ),
    values=Values(
        types={
            "text": "text",
            "bigint": "bigint",
            "smallint": "smallint",
            "float": "real",
            "uuid": "text",
            "moment": "text",
        },
        among_numbers="{value} IN (SELECT value FROM json_each({list}))",
        among_texts="{value} IN (SELECT value FROM json_each({list}))",
        among_many="{value} IN (SELECT value FROM json_each({list}))",
        records=_records,
        bind_records=lambda parameter, _columns, rows: {parameter: json.dumps(rows)},
        bind_list=json.dumps,
        bind_uuid=lambda uuid: uuid.hex,
        rows="VALUES {rows}",
        of_topics=_OF_TOPICS,
        bind_topics=_bind_topics,
        filtering=FILTERING,
        header="json_extract({headers}, '$.\"{name}\"')",
    ),
    reads=Reads(
        transaction_ids=False,
        incarnation=_INCARNATION,
        who_answers=f"{_INCARNATION}, NULL",
        capture=f"SELECT {_SNAPSHOT}, {_INCARNATION}, NULL, {{now}}",
        read_on=_READ_ON,
        read_on_fresh=_READ_ON,
        read_on_chosen=_READ_ON_CHOSEN,
        page=_PAGE,
        page_late=_PAGE,
        extent=_EXTENT,
        late=None,
        messages=_messages,
        last_message="(SELECT message_id FROM {message} WHERE id = :last)",
        below_head=_BELOW_HEAD,
        given_again=_GIVEN_AGAIN,
    ),
    writes=Writes(
        append=_append,
        claim=claiming(
            # `true` keeps a following ON CONFLICT from being read as the condition of a join.
            "(SELECT json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS id"
            " FROM json_each(:pairs) WHERE true) AS pairs",
            lambda pairs: {"pairs": json.dumps([(name, id.hex) for name, id in pairs])},
        ),
        insert_once="INSERT INTO",
        unless_there="ON CONFLICT DO NOTHING",
        update_from="UPDATE {table} SET {changes} FROM {source} WHERE {joined}",
        # What is read afterwards costs no round trip here, and is the same: nobody else writes meanwhile.
        returning=None,
        both=None,
        outermost=None,
    ),
    locks=Locks(
        one_writer=True,
        waits_for_itself=waits_for_itself,
        keys=None,
        share_text=None,
        own_text=None,
        try_share_text=None,
        patience=None,
        subscriptions=None,
        upgrades=_serialize_upgrades,
        table=None,
        share="",
        keep="",
        skip_locked="",
        check_now=None,
    ),
    driving=Driving(
        blocking_url=lambda url: url.set(drivername="sqlite"),
        names=frozenset(("pysqlite", "aiosqlite")),
        own=frozenset(("sqlite3",)),
        executor=_executor,
        async_executor=None,
        commits_every_statement=commits_every_statement,
        in_transaction=lambda driver: bool(driver.in_transaction),
        is_aborted=lambda _driver: False,
        commit=_commit,
        connect=SqliteChannel,
        connect_plainly=SqliteChannel,
        sends_together=False,
        notifies=False,
        location=_location,
        prepare=make_fit,
        configure=configure,
        impatient=None,
        watch=None,
    ),
    errors=Errors(
        transient=_transient,
        locked=is_busy,
        missing_table=lambda error: "no such table" in str(error),
        missing_column=lambda error: "no such column" in str(error),
        lacks_right=lambda _error: False,
        already_there=lambda error: any(words in str(error) for words in (" already ", "duplicate column")),
        in_failed_transaction=lambda _error: False,
    ),
    home=Home(
        identity="SELECT NULL AS system_identifier, NULL AS database_oid",
        installation="lower(hex(randomblob(16)))",
        wal=None,
        restore=None,
        why_foreign=lambda _read, _message: None,
        size="(SELECT page_count * page_size FROM pragma_page_count, pragma_page_size)",
        backend=None,
        check_address=lambda _engine: iter(()),
        check_server=lambda _connection: iter(()),
        send_function=None,
        check_rights=None,
        check_tables=check_tables,
        check_ids=check_ids,
        check_slots=lambda _connection, _message: iter(()),
    ),
)
