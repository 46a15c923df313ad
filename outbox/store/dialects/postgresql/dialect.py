"""The dialect of PostgreSQL. Positions are snapshots of transactions, and a hint is a NOTIFY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import psycopg
from sqlalchemy import Connection, text

from outbox.model.message import Message, from_microseconds, stored_message
from outbox.model.topics import ANYTHING, Topics
from outbox.store.dialects.claims import claiming
from outbox.store.dialects.dialect import (
    LOG_COLUMNS,
    RAW_COLUMNS,
    READ_COLUMNS,
    Clock,
    Dialect,
    Driving,
    Errors,
    Home,
    Locks,
    Reads,
    Values,
    WriteAheadLog,
    Writes,
)
from outbox.store.dialects.postgresql import drivers
from outbox.store.dialects.postgresql.address import check_address, location
from outbox.store.dialects.postgresql.append import append
from outbox.store.dialects.postgresql.channel import PostgresChannel, WorkerChannel
from outbox.store.dialects.postgresql.check import check_ids, check_slots, check_tables
from outbox.store.dialects.postgresql.filtering import FILTERING
from outbox.store.dialects.postgresql.function import send_function
from outbox.store.dialects.postgresql.grants import check_rights
from outbox.store.dialects.postgresql.restore import RESTORE
from outbox.store.dialects.postgresql.server import check_server, why_foreign
from outbox.store.dialects.postgresql.silence import watch
from outbox.store.dialects.statements import Parameters, Row


def _messages(rows: Sequence[Row]) -> list[Message]:
    return [stored_message(row if row[9] is None is row[10] else _with_times(row)) for row in rows]


def _with_times(row: Row) -> Row:
    return (*row[:9], _moment(row[9]), _moment(row[10]), *row[11:])


def _moment(value: Any) -> datetime | None:
    return from_microseconds(value) if isinstance(value, int) else cast("datetime | None", value)


def _transient(error: Exception) -> bool:
    # Internal errors come from a connection that is no longer usable, for example because of a time-out between two
    # statements after the machine was suspended.
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError)


#: Ids that were drawn but not flushed are given out again after a crash. A restart shows in the postmaster's start, a
#: promotion in the timeline, the crash of a single backend only in the statistics' reset time. Reading them costs
#: nothing and needs no privilege.
_INCARNATION = """concat_ws(' ', extract(epoch FROM pg_postmaster_start_time()),
    extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()),
    CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END)"""

#: A standby's snapshot has an empty list of open transactions. In a transaction that has an id, the snapshot would
#: count the transaction's own rows, which are not committed yet.
_FORBIDDEN = """CASE WHEN pg_is_in_recovery() THEN 'standby'
    WHEN pg_current_xact_id_if_assigned() IS NOT NULL THEN 'written' END"""

#: A standby may lack rows that a position sees, wherever the position was captured.
_WHO_ANSWERS = f"{_INCARNATION}, CASE WHEN pg_is_in_recovery() THEN 'standby' END"

_CAPTURE = f"SELECT pg_current_snapshot()::text, {_INCARNATION}, {_FORBIDDEN}, {{now}}"

_HEAD = f"""s AS MATERIALIZED (SELECT pg_current_snapshot()::text AS snapshot, {_INCARNATION} AS incarnation,
    {_FORBIDDEN} AS forbidden)"""

#: The first row of a whole read carries the capture in the columns of a message; it has no message_id. Where a
#: selection applies, it also carries the number of rows before that, and the highest id.
_HEAD_ROW = """SELECT {count} AS id, NULL::uuid, snapshot, incarnation, forbidden, NULL, NULL::bytea, {highest},
    {{now}}, NULL::timestamptz, NULL::timestamptz FROM s"""

#: Rows that were committed late: a probe of (xact_id, id) per transaction that was open at the base. It is written as a
#: range: with an equality the planner knows that the order is that of the primary key, and may walk the primary key.
_LATE = f"""SELECT l.* FROM unnest(CAST(:open AS bigint[])) AS o(x) CROSS JOIN LATERAL (
        SELECT {RAW_COLUMNS} FROM {{message}} WHERE xact_id >= o.x AND xact_id <= o.x
        ORDER BY xact_id, id LIMIT :limit) AS l
        LIMIT :limit"""

#: Fresh rows: one range of (xact_id, id). The ORDER BY keeps never-analysed tables and generic plans on the index.
_FRESH = f"""SELECT {RAW_COLUMNS} FROM {{message}} WHERE xact_id >= CAST(:head AS bigint)
        ORDER BY xact_id, id LIMIT :limit"""

_READ_ON = f"""
    WITH {_HEAD}
    {_HEAD_ROW.format(count="NULL::bigint", highest="NULL")}
    UNION ALL ({_LATE})
    UNION ALL ({_FRESH})
"""

#: For a base at which nothing was open. The server has a third less work, which counts when it reads a single message.
_READ_ON_FRESH = f"""
    WITH {_HEAD}
    {_HEAD_ROW.format(count="NULL::bigint", highest="NULL")}
    UNION ALL ({_FRESH})
"""

_OF_TOPICS = """(CAST(:topics AS text[]) IS NULL OR topic = ANY(CAST(:topics AS text[]))
        OR topic LIKE ANY(CAST(:patterns AS text[])))
    AND (CAST(:exceptions AS text[]) IS NULL OR topic NOT LIKE ALL(CAST(:exceptions AS text[])))"""

#: The rows with their slots, by which they are chosen.
_RAW = f"({_LATE}) UNION ALL ({_FRESH})".replace(RAW_COLUMNS, f"{RAW_COLUMNS}, slot")

#: The limit applies before the selection, so that the work is bounded however rare a topic is, or a partition's share.
_READ_ON_CHOSEN = f"""
    WITH {_HEAD}, raw AS MATERIALIZED ({_RAW})
    {_HEAD_ROW.format(count="(SELECT count(*) FROM raw)", highest="(SELECT max(id)::text FROM raw)")}
    UNION ALL SELECT {READ_COLUMNS} FROM raw WHERE {{chosen}}
"""

_IN_SPAN = "id > CAST(:after AS bigint) AND id >= CAST(:first AS bigint) AND id <= CAST(:upto AS bigint)"

_IN_WINDOW = """xact_id >= CAST(:head AS bigint) AND xact_id < CAST(:target AS bigint)
          AND xact_id <> ALL (CAST(:open AS bigint[]))"""

#: A page walks the primary key. OFFSET 0 keeps the planner off the other index, which would sort the whole window.
#: First the condition of the selection: most rows fail by a filter, and of these no column behind the headers is read.
_PAGE_FRESH = f"""SELECT {LOG_COLUMNS}
        FROM (SELECT * FROM {{message}} WHERE {_IN_SPAN} AND {{chosen}} ORDER BY id OFFSET 0) AS m
        WHERE {_IN_WINDOW}
        ORDER BY id LIMIT :limit"""

_PAGE_LATE = f"""SELECT l.* FROM unnest(CAST(:late AS bigint[])) AS o(x) CROSS JOIN LATERAL (
        SELECT {LOG_COLUMNS} FROM {{message}}
        WHERE xact_id >= o.x AND xact_id <= o.x AND id > CAST(:after AS bigint) AND id <= CAST(:upto AS bigint)
          AND {{chosen}}
        ORDER BY xact_id, id LIMIT :limit) AS l"""

#: The first row of a page carries who answers and the clock, in the columns in which `_HEAD_ROW` has them.
_CLOCK_ROW = """SELECT NULL::bigint AS id, NULL::uuid, NULL, {who_answers}, NULL, NULL::bytea, NULL, {now},
    NULL::timestamptz, NULL::timestamptz"""

_PAGE = f"{_CLOCK_ROW} UNION ALL ({_PAGE_FRESH})"

_PAGE_WITH_LATE = f"""
    {_CLOCK_ROW} UNION ALL (
        SELECT * FROM (({_PAGE_LATE}) UNION ALL ({_PAGE_FRESH})) AS p ORDER BY id LIMIT :limit)
"""

#: `id + 0` keeps the planner from walking the primary key from its beginning.
_EXTENT = """
    SELECT f.first, f.last, l.first, l.last, {who_answers}
    FROM (SELECT min(id + 0) AS first, max(id + 0) AS last FROM {message}
          WHERE xact_id >= CAST(:head AS bigint) AND xact_id < CAST(:target AS bigint)
            AND xact_id <> ALL (CAST(:open AS bigint[]))) AS f,
         (SELECT min(x.first) AS first, max(x.last) AS last
          FROM unnest(CAST(:late AS bigint[])) AS o(n) CROSS JOIN LATERAL (
              SELECT min(id + 0) AS first, max(id + 0) AS last FROM {message} WHERE xact_id = o.n) AS x) AS l
"""


def _bind_topics(topics: Topics) -> Parameters:
    # Nulls where nothing is named, because they are cheaper to compare with than empty lists.
    return {
        "topics": None if topics.any_name else list(topics.names),
        "patterns": None if topics.any_name else list(map(_like, topics.patterns)) or None,
        "exceptions": list(map(_like, topics.exceptions)) or None,
    }


def _records(parameter: str, columns: Mapping[str, str]) -> str:
    lists = ", ".join(f"CAST(:{parameter}_{name} AS {type}[])" for name, type in columns.items())
    return f"(SELECT * FROM unnest({lists}) AS each({', '.join(columns)}))"


def _bind_records(parameter: str, columns: Sequence[str], rows: Sequence[Row]) -> Parameters:
    return {f"{parameter}_{name}": [row[place] for row in rows] for place, name in enumerate(columns)}


def _like(pattern: str) -> str:
    """Return a pattern of topics as LIKE reads it. Topics hold `%` and `_`, and no backslash."""
    return pattern.replace("%", r"\%").replace("_", r"\_").replace(ANYTHING, "%")


#: For so long an upgrade waits for another transaction, unless the session has a limit: all writers wait behind it.
UPGRADE_PATIENCE = "3s"


def _serialize_upgrades(connection: Connection, name: str) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": name})
    limit = "SELECT set_config('lock_timeout', :patience, true) WHERE current_setting('lock_timeout') = '0'"
    connection.execute(text(limit), {"patience": UPGRADE_PATIENCE})


DIALECT = Dialect(
    name="postgresql",
    schemas=True,
    clock=Clock(
        now="statement_timestamp()",
        later="({now} + CAST({seconds} AS double precision) * interval '1 second')",
        seconds="CAST(extract(epoch FROM ({until}) - ({since})) AS double precision)",
        from_milliseconds="(timestamptz 'epoch' + CAST({value} AS bigint) * interval '1 millisecond')",
        bind=lambda moment: moment,
        read=_moment,
    ),
    values=Values(
        types={
            "text": "text",
            "bigint": "bigint",
            "smallint": "smallint",
            "float": "double precision",
            "uuid": "uuid",
            "moment": "timestamptz",
        },
        among_numbers="{value} = ANY(CAST({list} AS bigint[]))",
        among_texts="{value} = ANY(CAST({list} AS text[]))",
        among_many="{value} IN (SELECT unnest(CAST({list} AS text[])))",
        records=_records,
        bind_records=_bind_records,
        bind_list=list,
        bind_uuid=lambda uuid: uuid,
        rows="VALUES {rows}",
        of_topics=_OF_TOPICS,
        bind_topics=_bind_topics,
        filtering=FILTERING,
        header="(CAST({headers} AS json) ->> '{name}')",
    ),
    reads=Reads(
        transaction_ids=True,
        incarnation=_INCARNATION,
        who_answers=_WHO_ANSWERS,
        capture=_CAPTURE,
        read_on=_READ_ON,
        read_on_fresh=_READ_ON_FRESH,
        read_on_chosen=_READ_ON_CHOSEN,
        page=_PAGE,
        page_late=_PAGE_WITH_LATE,
        extent=_EXTENT,
        late=_LATE.replace(RAW_COLUMNS, "{columns}"),
        messages=_messages,
        last_message="CAST(NULL AS uuid)",
        below_head=None,
        given_again=None,
    ),
    writes=Writes(
        append=append,
        claim=claiming(
            "unnest(CAST(:names AS text[]), CAST(:ids AS uuid[])) AS pairs(name, id)",
            lambda pairs: {"names": [name for name, _ in pairs], "ids": [id for _, id in pairs]},
        ),
        insert_once="INSERT INTO",
        unless_there="ON CONFLICT DO NOTHING",
        update_from="UPDATE {table} SET {changes} FROM {source} WHERE {joined}",
        returning="RETURNING {columns}",
        both="WITH first AS ({first} RETURNING 1) {second}",
        # Inside a savepoint the row has the id of a subtransaction.
        outermost="xmin = CAST(pg_current_xact_id() AS xid)",
    ),
    locks=Locks(
        one_writer=False,
        waits_for_itself=lambda _engine: False,
        # Locked in the order of the keys, so that two writers of two keys cannot wait for each other.
        keys="SELECT pg_advisory_xact_lock(hashtextextended(key, :seed))"
        " FROM (SELECT key FROM unnest(CAST(:keys AS text[])) AS k(key) ORDER BY key) AS ordered",
        share_text="pg_advisory_xact_lock_shared(hashtextextended(CAST({text} AS text), {seed}))",
        own_text="pg_advisory_xact_lock(hashtextextended(CAST({text} AS text), {seed}))",
        try_share_text="pg_try_advisory_xact_lock_shared(hashtextextended(CAST({text} AS text), {seed}))",
        patience="SELECT set_config('lock_timeout', :patience, true)",
        # The table's oid stands for this outbox among several in one database.
        subscriptions="SELECT pg_advisory_xact_lock(hashtext('outbox_subscription'),"
        " CAST(CAST(CAST('{subscription}' AS regclass) AS oid) AS integer))",
        upgrades=_serialize_upgrades,
        table="LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE",
        share="FOR SHARE",
        keep="FOR KEY SHARE",
        skip_locked="FOR UPDATE SKIP LOCKED",
        check_now="SET CONSTRAINTS ALL IMMEDIATE",
    ),
    driving=Driving(
        blocking_url=drivers.blocking_url,
        names=drivers.NAMES,
        own=frozenset(("psycopg", "asyncpg")),
        executor=drivers.executor,
        async_executor=drivers.async_executor,
        commits_every_statement=drivers.commits_every_statement,
        in_transaction=drivers.in_transaction,
        is_aborted=drivers.is_aborted,
        commit=drivers.commit,
        connect=WorkerChannel,
        connect_plainly=PostgresChannel,
        sends_together=True,
        notifies=True,
        location=location,
        prepare=None,
        configure=None,
        impatient="SET idle_in_transaction_session_timeout = '5s'",
        watch=watch,
    ),
    errors=Errors(
        transient=_transient,
        locked=lambda error: drivers.state_of(error) in ("55P03", "40P01"),
        missing_table=lambda error: drivers.state_of(error) in ("42P01", "3F000"),
        missing_column=lambda error: drivers.state_of(error) == "42703",
        lacks_right=lambda error: drivers.state_of(error) == "42501",
        already_there=lambda error: drivers.state_of(error) in ("42P07", "42701"),
        in_failed_transaction=lambda error: drivers.state_of(error) == "25P02",
    ),
    home=Home(
        identity="SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system_identifier,"
        " (SELECT oid::bigint FROM pg_database WHERE datname = current_database()) AS database_oid",
        installation="CAST(gen_random_uuid() AS text)",
        wal=WriteAheadLog(
            end="SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), pg_current_wal_insert_lsn()::text",
            flushed="SELECT pg_current_wal_flush_lsn() >= CAST(:lsn AS pg_lsn)",
            # Every role may execute it. The message is meant for logical decoding, where nobody reads this prefix.
            flush="SELECT pg_logical_emit_message(true, 'outbox', '')::text",
        ),
        restore=RESTORE,
        why_foreign=why_foreign,
        size="pg_total_relation_size(CAST({log} AS regclass))",
        backend="SELECT pg_backend_pid()",
        check_address=check_address,
        check_server=check_server,
        send_function=send_function,
        check_rights=check_rights,
        check_tables=check_tables,
        check_ids=check_ids,
        check_slots=check_slots,
    ),
)
