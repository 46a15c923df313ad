"""The dialect of SQLite. One writer at a time draws ids, under the write lock, so an id is its own position."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.util import await_only

from outbox.errors import DatabaseError
from outbox.model.message import Message, stored_message
from outbox.store.dialects.dialect import APPENDED, COLUMNS, Dialect, Hint, Location, connects_by_url, driver_of
from outbox.store.dialects.statements import NONE, Parameters, Row, Script, Statement

#: How long a writer waits for the others, in seconds.
BUSY_SECONDS = 30.0
#: How long SQLite itself waits where a read finds the whole file locked for a moment.
_OWN_PAUSES, _BUSY_MILLISECONDS = "PRAGMA busy_timeout = {}", 1000
#: The driver begins transactions as `isolation_level` says. Before Python 3.12 it knew no other mode; since then this
#: one is the default.
_LEGACY = -1
_PASSING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}


def begin_immediate(
    execute: Callable[[str], Any],
    begin: Callable[[str], Any] | None = None,
    *,
    seconds: float = BUSY_SECONDS,
    pause: Callable[[float], Any] = time.sleep,
) -> None:
    """Take the write lock now, trying every 0.3 to 2 ms; `begin` executes the statement that takes it.

    SQLite's own busy handler is off until the lock is taken. It sleeps up to 100 ms between tries, so that among busy
    writers one might never get the lock.
    """
    execute(_OWN_PAUSES.format(0))
    try:
        _until_taken(begin or execute, time.monotonic() + seconds, pause)
    except BaseException:
        # If the connection is closed by now, the setting fails as well; the first error is the one to raise.
        with suppress(sqlite3.Error):
            execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))
        raise
    execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))


def _until_taken(begin: Callable[[str], Any], deadline: float, pause: Callable[[float], Any]) -> None:
    while True:
        try:
            begin("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if not _busy(error) or time.monotonic() > deadline:
                raise
        pause(random.uniform(0.0003, 0.002))


def _busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))


def _transient(error: Exception) -> bool:
    """Return whether the file is busy, or an operator can mend it while we wait: a full disk, no descriptors left."""
    code = getattr(error, "sqlite_errorcode", None)
    return _busy(error) or (code is not None and code & 0xFF in _PASSING)


def require_legacy_control(connect_args: Mapping[str, Any]) -> None:
    """Refuse a driver that would begin transactions by itself, or would not commit those that we begin.

    Raises:
        DatabaseError: `autocommit` is among the driver's arguments.
    """
    if connect_args.get("autocommit", _LEGACY) != _LEGACY:
        raise DatabaseError(
            "outbox.create_engine begins and commits SQLite's transactions itself, which the driver's"
            f" autocommit={connect_args['autocommit']!r} does not let it do; leave autocommit out of connect_args"
        )


def configure(engine: Engine) -> None:
    """Set up an engine of our own: WAL, durable commits, and every transaction begins with the write lock."""

    @event.listens_for(engine, "connect")
    def _connected(driver: sqlite3.Connection, _record: object) -> None:
        _disown_inherited()
        driver.isolation_level = None
        _prepare(driver)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection._is_autocommit_isolation():
            # SQLAlchemy does not commit in this mode, so a transaction that we begin would be lost.
            return
        begin_immediate(_cursor_of(connection).execute, pause=_pause_of(engine))


def _cursor_of(connection: Connection) -> Any:
    """Return a cursor that can be used without await, also where SQLAlchemy itself awaits an async driver."""
    return connection.connection.dbapi_connection.cursor()  # type: ignore[union-attr]


def _pause_of(engine: Engine) -> Callable[[float], Any]:
    """Return a sleep that does not stop the holder of the lock, which may run in the same event loop."""
    if not engine.dialect.is_async:
        return time.sleep
    import asyncio

    return lambda seconds: await_only(asyncio.sleep(seconds))


#: Dialects of engines that `_make_fit` has prepared. Engines that differ only in execution options share a dialect.
_fit: WeakSet[Any] = WeakSet()


def _make_fit(engine: Engine) -> None:
    """Prepare an engine of the application for sending messages; once, however many outboxes use it.

    Other threads may be connecting with it meanwhile.
    """
    if engine.dialect not in _fit:
        _fit.add(engine.dialect)
        _remember_begins(engine.dialect)
        _begin_before_savepoints(engine.dialect)
        _end_what_was_begun(engine.dialect)
        event.listen(engine, "connect", _about_to_connect, insert=True)


class _Begun:
    """A transaction of SQLAlchemy; `pooled` is its connection, and None once the transaction has ended."""

    def __init__(self, dialect: Any, pooled: Any) -> None:
        self.dialect = dialect
        self.pooled = pooled


#: Transactions that this thread or task has begun; in those that have ended, `pooled` is None.
_begun: ContextVar[tuple[_Begun, ...]] = ContextVar("outbox_begun", default=())
_BEGUN = object()


def _waits_for_itself(engine: Engine) -> bool:
    """Return whether this thread or task has a transaction open on the engine, for which another one would wait."""
    return any(
        each.dialect is engine.dialect and _driver_is_busy(each) for each in _begun.get() if each.pooled is not None
    )


def _driver_is_busy(begun: _Begun) -> bool:
    driver = begun.dialect.get_driver_connection(begun.pooled.dbapi_connection)
    return bool(driver is not None and driver.in_transaction)


def _remember_begins(dialect: Any) -> None:
    """Record in `_begun` each transaction that SQLAlchemy begins, by replacing the dialect's `do_begin`."""
    begin_first = dialect.do_begin

    def do_begin(pooled: Any) -> None:
        begin_first(pooled)
        begun = _Begun(dialect, pooled)
        pooled.info[_BEGUN] = begun
        _begun.set((*(each for each in _begun.get() if each.pooled is not None), begun))

    dialect.do_begin = do_begin


def _forget_begin(pooled: Any) -> None:
    with suppress(NotImplementedError, InvalidRequestError):
        begun = pooled.info.pop(_BEGUN, None)
        if begun is not None:
            begun.pooled = None


def _about_to_connect(_driver: object, _record: object) -> None:
    _disown_inherited()


def _begin_before_savepoints(dialect: Any) -> None:
    """Begin a transaction before a savepoint, because the driver does not, and RELEASE would commit."""
    by_driver = dialect.do_savepoint

    def do_savepoint(connection: Connection, name: str) -> None:
        if not driver_of(connection).in_transaction:
            _cursor_of(connection).execute("BEGIN")
        by_driver(connection, name)

    dialect.do_savepoint = do_savepoint


def _end_what_was_begun(dialect: Any) -> None:
    """Make commit and rollback end a transaction that a BEGIN statement opened, in every mode of the driver.

    The BEGIN may come from the application, or from us before a savepoint. With `autocommit=True` the driver's own
    commit and rollback do nothing.
    """

    def ending(by_driver: Callable[[Any], None], statement: str) -> Callable[[Any], None]:
        def end(pooled: Any) -> None:
            by_driver(pooled)
            _forget_begin(pooled)
            driver = dialect.get_driver_connection(pooled.dbapi_connection)
            if _autocommit_of(driver) is True and driver.in_transaction:
                pooled.cursor().execute(statement)

        return end

    dialect.do_commit = ending(dialect.do_commit, "COMMIT")
    dialect.do_rollback = ending(dialect.do_rollback, "ROLLBACK")


def _prepare(driver: sqlite3.Connection) -> None:
    # Do not wait inside SQLite for a locked file, because a fork may wait for us.
    driver.execute(_OWN_PAUSES.format(0))
    # Changing the journal mode locks the whole file for a moment; other processes may try the same.
    for _ in range(200):
        try:
            if driver.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                break
            driver.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if not _busy(error):
                raise
            time.sleep(random.uniform(0.005, 0.02))
    driver.execute(_OWN_PAUSES.format(_BUSY_MILLISECONDS))
    driver.execute("PRAGMA synchronous = FULL")


#: Connections of our own threads. Each has a lock, which is held while SQLite works for it and until its transaction
#: ends. A fork waits for all of these locks, because SQLite holds locks in memory then. A child would get copies of
#: them that are never released, and it would hang as soon as it connects.
_channels: WeakSet[SqliteChannel] = WeakSet()
_connecting = threading.RLock()
#: The locks that each fork in progress holds; a signal handler may fork in the middle of another fork.
_held: list[list[threading.RLock]] = []
_inherited: list[SqliteChannel] = []


def _before_fork() -> None:
    held: list[threading.RLock] = []
    _held.append(held)
    _connecting.acquire()
    held.append(_connecting)
    for channel in list(_channels):
        # Noted one by one, because Ctrl-C may interrupt the waiting.
        channel.lock.acquire()
        held.append(channel.lock)


def _after_fork() -> None:
    for lock in reversed(_held.pop()):
        lock.release()


def _after_fork_in_child() -> None:
    _inherited.extend(_channels)
    _after_fork()


def _disown_inherited() -> None:
    """Close the parent's connections, before this process opens one of its own.

    As long as one of them is open, SQLite believes that it still holds the lock on the file, and takes none for this
    process. The last other process to close the file would then delete the write-ahead log, with what is committed
    here.
    """
    with _connecting:
        while _inherited:
            _inherited.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class SqliteChannel:
    """A sqlite3 connection of its own to the same file."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.lock = threading.RLock()
        with _connecting:
            _disown_inherited()
            self._driver = sqlite3.connect(_file_of(engine), isolation_level=None, check_same_thread=False)
            _prepare(self._driver)
            _channels.add(self)
        self.fileno: int | None = None

    def rows(self, statement: str, parameters: Parameters = NONE) -> list[Row]:
        """Run a statement and return its rows."""
        with self._working(statement):
            return self._driver.execute(statement, parameters).fetchall()

    def run(self, statement: str, parameters: Parameters = NONE) -> int:
        """Run a statement and return how many rows it touched."""
        with self._working(statement):
            return self._driver.execute(statement, parameters).rowcount

    def _working(self, statement: str) -> AbstractContextManager[Any]:
        """Return the context for a statement: a transaction for a write outside of one, else only the lock."""
        alone = not self._driver.in_transaction and not statement.lstrip().startswith("SELECT")
        return self.transaction() if alone else self.lock

    @contextmanager
    def transaction(self, *, patience: float | None = None) -> Iterator[None]:
        """Run the statements inside between BEGIN IMMEDIATE and COMMIT."""
        begun = False

        def begin(statement: str) -> None:
            # The second acquire keeps the lock until the end of the transaction. If the statement fails because
            # another connection has the write lock, only the `with` held it, and gives it back.
            nonlocal begun
            with self.lock:
                self._driver.execute(statement)
                begun = self.lock.acquire()

        try:
            begin_immediate(self._execute, begin, seconds=BUSY_SECONDS if patience is None else patience)
            yield
            self._execute("COMMIT")
        except BaseException:
            if begun:
                with suppress(sqlite3.Error):
                    self._execute("ROLLBACK")
            raise
        finally:
            if begun:
                self.lock.release()

    def _execute(self, statement: str) -> None:
        with self.lock:
            self._driver.execute(statement)

    def listen(self) -> None:
        """Do nothing: on SQLite wake-ups do not reach other processes."""

    def hinted(self) -> Hint | None:
        """Return None: no wake-ups arrive on SQLite."""
        return None

    def notify(self, pause: float = 0.0) -> None:
        """Do nothing: no other process can listen on SQLite."""

    def close(self) -> None:
        """Close the file."""
        with self.lock, suppress(Exception):
            self._driver.close()


def _file_of(engine: Engine) -> str:
    """Return the file that an engine opens. A new connection is asked, because the engine's pool may be exhausted."""
    pool = engine.pool.recreate()
    with closing(pool.connect()) as connection:
        files = [row[2] for row in connection.cursor().execute("PRAGMA database_list") if row[1] == "main"]
    pool.dispose()
    if not files or not files[0]:
        raise DatabaseError("a worker cannot open an in-memory SQLite database on its own; use a file")
    return str(files[0])


def _location(engine: Engine) -> Location | None:
    """Return the path of the file as the place; None for a database in memory, or one that is given as a URI."""
    (file,), _ = engine.dialect.create_connect_args(engine.url)
    if not connects_by_url(engine) or file == ":memory:" or file.startswith("file:"):
        return None
    return Location(os.path.realpath(file))


def _moment(value: Any) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value).replace(tzinfo=UTC)


def _bind_moment(moment: datetime) -> str:
    """Return a moment as text, to the millisecond where that is exact, as SQLite itself writes it.

    The texts `.123` and `.123000` would compare as two moments.
    """
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f").removesuffix("000")


def _messages(rows: Sequence[Row]) -> list[Message]:
    return [stored_message(*row[:8], *map(_moment, row[8:11]), *row[11:]) for row in rows]


def _append(
    names: Mapping[str, str], rows: Sequence[Row], *, compensation: str | None = None
) -> Script[list[tuple[int, bool]]]:
    """Append messages with one statement each, prepared once, because statements cost no round trip here."""
    bound: list[Parameters] = [{**_bound(row), "compensation": compensation} for row in rows]
    yield Statement(_APPEND.format(**names), bound)
    if compensation is None:
        return []
    # The new rows are those with the last ids, because nobody else draws ids while this transaction has the write lock.
    found = yield Statement(_APPENDED_LAST.format(**names), {"count": len(rows)}, returns=True)
    return [(id, bool(marked)) for id, marked in found]


def _bound(row: Row) -> dict[str, Any]:
    bound = dict(zip(APPENDED, row, strict=True))
    bound["message_id"] = bound["message_id"].hex
    for moment in ("deliver_at", "expires_at"):
        bound[moment] = None if bound[moment] is None else _bind_moment(bound[moment])
    bound["delay"] = None if bound["delay"] is None else f"{bound['delay'].total_seconds():+.6f} seconds"
    return bound


_APPEND = """
    INSERT INTO {message} (message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at,
                           expires_at, direct)
    VALUES (:message_id, :topic, :key, :slot, :tags, :headers, :body, :content_type, {now},
            coalesce(:deliver_at, strftime('%Y-%m-%d %H:%M:%f', {now}, :delay)), :expires_at,
            CASE WHEN EXISTS (SELECT 1 FROM {subscription} WHERE name = :compensation) THEN :direct END)
"""

_APPENDED_LAST = """
    SELECT id, direct IS NOT NULL FROM {message} WHERE id > last_insert_rowid() - :count ORDER BY id
"""

#: The sequence, because `max(id)` falls when the whole log is purged.
_SNAPSHOT = """(SELECT (coalesce(max(seq), 0) + 1) || ':' || (coalesce(max(seq), 0) + 1) || ':' FROM sqlite_sequence
    WHERE name = '{message}')"""

_HEAD_ROW = f"SELECT NULL AS id, NULL, {_SNAPSHOT}, '', NULL, NULL, NULL, NULL, {{now}}, NULL, NULL, NULL"
_BODY = "CASE WHEN length(body) <= :inline THEN body END"
_COLUMNS = COLUMNS.format(body=_BODY, direct="direct")
#: Rows that the reader leaves out at once come without their bodies: half messages, and those that the subscription's
#: writers send.
_LEFT_OUT = "CASE WHEN direct = :skips OR topic = :hidden THEN NULL"
_RAW_COLUMNS = COLUMNS.format(body=_BODY.replace("CASE", _LEFT_OUT), direct="direct")
_CHOSEN = """(:topics IS NULL OR topic IN (SELECT value FROM json_each(:topics)))
    AND (:tags IS NULL OR tags IN (SELECT value FROM json_each(:tags)))
    AND direct IS NOT :skips AND topic <> :hidden AND (:only IS NULL OR direct = :only)"""
_FRESH = f"SELECT {_RAW_COLUMNS} FROM {{message}} WHERE id >= :head ORDER BY id LIMIT :limit"

_READ_ON = f"SELECT * FROM ({_HEAD_ROW}) UNION ALL SELECT * FROM ({_FRESH})"

_READ_ON_CHOSEN = f"""SELECT (SELECT count(*) FROM (SELECT 1 FROM {{message}} WHERE id >= :head LIMIT :limit)), NULL,
        {_SNAPSHOT}, '', NULL, NULL, NULL, NULL, {{now}}, NULL, NULL, NULL
    UNION ALL SELECT * FROM ({_FRESH}) WHERE {_CHOSEN}"""

_PAGE = f"""SELECT NULL AS id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {{now}}, NULL, NULL, NULL
    UNION ALL SELECT * FROM (SELECT {_COLUMNS} FROM {{message}}
        WHERE id > max(:after, :first - 1) AND id <= :upto AND id >= :head AND id < :target AND {_CHOSEN}
        ORDER BY id LIMIT :limit)"""

_EXTENT = """SELECT min(id), max(id), NULL, NULL FROM {message} WHERE id >= :head AND id < :target"""


def _commits_every_statement(driver: Any) -> bool:
    """Return whether the driver commits every statement: no transaction is open, and it would not begin one itself.

    In the driver's legacy mode it begins one before an INSERT if it has an isolation level. With `autocommit=False` a
    transaction is always open, unless a statement has ended it. With `autocommit=True` the driver begins none.
    """
    begins = _autocommit_of(driver) == _LEGACY and driver.isolation_level is not None
    return not begins and not driver.in_transaction


def _autocommit_of(driver: Any) -> Any:
    """Return the driver's `autocommit`, which Python has from 3.12 on: True, False, or `_LEGACY`."""
    # aiosqlite holds the driver's connection in a private attribute, which is None when closed.
    own = getattr(driver, "_connection", driver)
    try:
        return getattr(own, "autocommit", _LEGACY)
    except sqlite3.ProgrammingError:
        # The connection is closed, or is one of aiosqlite to a database in memory, which only its own thread may ask.
        return _LEGACY if own is driver else await_only(driver._execute(getattr, own, "autocommit"))


DIALECT = Dialect(
    name="sqlite",
    now="strftime('%Y-%m-%d %H:%M:%f', 'now')",
    later="strftime('%Y-%m-%d %H:%M:%f', {now}, ({seconds}) || ' seconds')",
    # Rounded, because differences of fractional days may come out a little too long; moments have milliseconds.
    seconds="round((julianday({until}) - julianday({since})) * 86400.0, 3)",
    among_numbers="{value} IN (SELECT value FROM json_each({list}))",
    among_texts="{value} IN (SELECT value FROM json_each({list}))",
    bind_list=json.dumps,
    bind_moment=_bind_moment,
    moment=_moment,
    messages=_messages,
    notifies=False,
    connect=SqliteChannel,
    transient=_transient,
    missing_table=lambda error: "no such table" in str(error),
    already_there=lambda error: any(words in str(error) for words in (" already ", "duplicate column")),
    incarnation="''",
    capture=f"SELECT {_SNAPSHOT}, '', NULL, {{now}}",
    read_on=_READ_ON,
    read_on_fresh=_READ_ON,
    read_on_chosen=_READ_ON_CHOSEN,
    page=_PAGE,
    page_late=_PAGE,
    extent=_EXTENT,
    append=_append,
    header="json_extract({headers}, '$.\"{name}\"')",
    from_milliseconds="strftime('%Y-%m-%d %H:%M:%f', CAST({value} AS integer) / 1000.0, 'unixepoch')",
    bind_uuid=lambda uuid: uuid.hex,
    chains_writes=False,
    outermost="TRUE",
    # `true` keeps a following ON CONFLICT from being read as the condition of a join.
    pairs="(SELECT json_extract(value, '$[0]') AS name, json_extract(value, '$[1]') AS id"
    " FROM json_each(:pairs) WHERE true) AS pairs",
    bind_pairs=lambda pairs: {"pairs": json.dumps([(name, id.hex) for name, id in pairs])},
    lock_keys=None,
    one_writer=True,
    waits_for_itself=_waits_for_itself,
    commits_every_statement=_commits_every_statement,
    is_aborted=lambda _driver: False,
    drivers=frozenset(("pysqlite", "aiosqlite")),
    location=_location,
    prepare_engine=_make_fit,
    check_now=None,
    share_lock="",
    skip_locked="",
    identity="SELECT NULL AS system_identifier, NULL AS database_oid",
    installation="lower(hex(randomblob(16)))",
    wal=None,
)
