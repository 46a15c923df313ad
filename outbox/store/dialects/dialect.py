"""The answers in which databases differ, as one value per dialect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from sqlalchemy import URL, Connection, Engine, MetaData, Table

from outbox.model.lease import Partition
from outbox.store.dialects.filtering import Filtering
from outbox.store.dialects.finding import Finding
from outbox.store.dialects.statements import AsyncExecute, Execute, Parameters, Row, Script

#: The columns of a message, in the order in which `Reads.messages` takes them. `{body}` may leave the body out.
COLUMNS = "id, message_id, topic, key, tags, headers, {body}, content_type, created_at, deliver_at, expires_at"

#: Large bodies are left out, and fetched when their turn comes; this bounds a read in bytes.
_BODY = "CASE WHEN length(body) <= :inline THEN body END"
#: Half messages, which the reader leaves out at once, come without their bodies.
_LEFT_OUT = "CASE WHEN topic = :hidden THEN NULL"
LOG_COLUMNS = COLUMNS.format(body=_BODY)
RAW_COLUMNS = COLUMNS.format(body=_BODY.replace("CASE", _LEFT_OUT) + " AS body")
#: All of a message.
READ_COLUMNS = COLUMNS.format(body="body")

#: The column `slot` is one of those that a partition owns.
OF_SLOTS = "slot % :partitions = :partition"

#: The columns that an append writes of a message, in this order.
APPENDED = (
    "message_id", "topic", "key", "slot", "tags", "headers", "body", "content_type", "deliver_at", "delay",
    "expires_at",
)  # fmt: skip


class Hint(NamedTuple):
    """A wake-up. `pause`: for how many seconds none may follow, although more is committed."""

    pause: float = 0.0


class DriverChannel(Protocol):
    """A connection of our own, in the way of one driver; `Channel` fills in the statements."""

    def rows(self, statement: str, parameters: Parameters) -> list[Row]:
        """Run a statement and return its rows."""

    def run(self, statement: str, parameters: Parameters) -> int:
        """Run a statement and return how many rows it touched."""

    def rows_of_last(self, statements: Sequence[tuple[str, Parameters]]) -> list[Row]:
        """Run statements in one transaction, or in the open one, and return the rows of the last statement.

        Where statements cost round trips, all are sent together.
        """

    def transaction(self, *, patience: float | None = None) -> AbstractContextManager[None]:
        """Commit the statements inside together, or not at all. `patience`: how long to wait for a lock, in seconds."""

    def unlimited(self) -> None:
        """Let the statements of the open transaction take as long as they need."""

    fileno: int | None
    """A descriptor that becomes readable when a wake-up arrives; None where wake-ups do not reach other processes."""

    def listen(self) -> None:
        """Ask for wake-ups."""

    def hinted(self) -> Hint | None:
        """Return the hint of the wake-ups that have arrived since the last call; None: there were none."""

    def notify(self, pause: float = 0.0) -> None:
        """Wake the listeners of every process. `pause`: for how many seconds this process will not do so again."""

    def close(self) -> None:
        """Close the connection, whatever state it is in. Never raises."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a database: a name, and the servers, by host and port, of which one has the database."""

    name: str
    servers: frozenset[tuple[str, str]] = frozenset()

    def differs(self, other: Location) -> bool:
        """Return whether the other one is certainly another database: it has another name on the same server."""
        return self.name != other.name and (self.servers == other.servers or bool(self.servers & other.servers))


class Append(Protocol):
    """Appends messages, given as rows of `APPENDED`."""

    def __call__(self, names: Mapping[str, str], rows: Sequence[Row]) -> Script[None]:
        """Yield the statements that append the rows. `names`: the names of `Database.sql`."""


#: Given the names that `Database.sql` fills in, dedup keys with the ids of their messages, and for how many seconds
#: they count: writes each key that is not there, or has expired, and returns the keys that were written.
Claim = Callable[[Mapping[str, str], Sequence[tuple[str, UUID]], float], Script[set[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The database's clock, and moments in SQL."""

    #: The moment of now: one value during one statement. Tests replace it.
    now: str
    #: That moment, moved by `{seconds}`.
    later: str
    #: The seconds between the moments `{since}` and `{until}`.
    seconds: str
    #: A moment out of the text `{value}`, which holds milliseconds since 1970.
    from_milliseconds: str
    #: Makes a parameter of a moment, for any use.
    bind: Callable[[datetime], Any]
    #: Makes a moment of the value that the driver returned.
    read: Callable[[Any], datetime | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Types, lists and other values in SQL, and as parameters."""

    #: The names of types in CAST: `text`, `bigint`, `smallint`, `float`, `uuid`, `moment`.
    types: Mapping[str, str]
    #: Conditions: `{value}` is in the list of whole numbers, or of texts, that is bound as `{list}`.
    among_numbers: str
    among_texts: str
    #: As `among_texts`, for a long list and many rows: hashed, also in a plan that is made without the list.
    among_many: str
    #: Returns the table of rows that are bound, given the name of the parameter, and the columns with their types.
    records: Callable[[str, Mapping[str, str]], str]
    #: Makes parameters of rows, given that name, and the names of the columns.
    bind_records: Callable[[str, Sequence[str], Sequence[Row]], Parameters]
    #: Makes a parameter of a list, for these conditions.
    bind_list: Callable[[Sequence[Any]], Any]
    bind_uuid: Callable[[UUID], Any]
    #: The list of rows `{rows}` as the right side of IN.
    rows: str
    #: The column `topic` is one of the `Topics` that `bind_topics` returns as parameters; half messages apart. Names,
    #: patterns and exceptions are three parameters, so that a selection of names alone is compared as one list.
    of_topics: str
    bind_topics: Callable[[Any], Parameters]
    #: The header `{name}` out of the `{headers}` of a stored message, as text; null without it.
    header: str
    filtering: Filtering


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The statements that read the log by position."""

    #: True where a position counts the server's transactions, by the column `xact_id`; otherwise a position counts
    #: rows, by their ids, which are the file's own.
    transaction_ids: bool
    #: An SQL expression that differs between this incarnation of the server and the one before a crash.
    incarnation: str
    #: Who answers, as two columns of each read: the incarnation, and the reason why it must not answer (or null).
    who_answers: str
    #: The position of now: snapshot, incarnation, the reason why it must not be used (or null), clock.
    capture: str
    #: `capture`, and everything committed since a position, in one statement. `fresh`: for a position at which nothing
    #: was open. `chosen`: without the rows that the selection leaves out; the other two read them without their bodies.
    #: Where a selection applies, `{chosen}` is the condition on a row.
    read_on: str
    read_on_fresh: str
    read_on_chosen: str
    #: One page of a window, with who answers and the clock where `read_on` has them; `page_late` also looks for
    #: transactions that finished late.
    page: str
    page_late: str
    #: First and last id of a window's fresh part, then of its late part; then who answers.
    extent: str
    #: `{columns}` of the rows of the transactions in `:open`; None where none can commit late.
    late: str | None
    #: Makes a `Message` of each row; rows begin with `COLUMNS`; if there is one more column, it is the attempt.
    messages: Callable[[Sequence[Row]], list[Any]]
    #: The message_id of the message `:last`, where a position counts ids, which may be given out again; else null.
    last_message: str
    #: The number below the head of the position in `{column}`; None where a position counts no ids.
    below_head: str | None
    #: A condition on the progress `p`: its last message is another one by now. None where a position counts no ids.
    given_again: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The parts of statements that write. How many rows a statement has written can be told everywhere."""

    append: Append
    claim: Claim
    #: The beginning and the end of an INSERT that leaves out rows whose primary key is there.
    insert_once: str
    unless_there: str
    #: Set `{changes}` in the rows of `{table}` that `{source}` has by the condition `{joined}`.
    update_from: str
    #: The end of a statement that returns `{columns}` of the rows that it writes; None: these are read afterwards.
    returning: str | None
    #: Two statements that write, as one: `{second}` writes only where `{first}` has written, by the condition
    #: `EXISTS (SELECT 1 FROM first)`. None: statements cost no round trip, and are run one after the other.
    both: str | None
    #: A row was inserted outside of every savepoint, as one of these columns; None where the database cannot tell.
    outermost: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Locks:
    """Who waits for whom. A lock is None where a transaction that writes has the only lock anyway."""

    #: True if one transaction at a time can write, so that a second one of the same thread would wait for ever.
    one_writer: bool
    #: Returns whether this thread or task has a transaction open on the engine, for which our own would wait.
    waits_for_itself: Callable[[Engine], bool]
    #: Makes other writers of the keys in `:keys` wait until the transaction ends.
    keys: str | None
    #: SQL expressions that lock the text `{text}` until the transaction ends; `{seed}` keeps apart texts of different
    #: kinds. Many share the lock, or one has it alone.
    share_text: str | None
    own_text: str | None
    #: As `share_text`, without waiting: false where another transaction has the lock alone.
    try_share_text: str | None
    #: A statement: the transaction waits for locks for `:patience` at most from now on, such as "1s".
    patience: str | None
    #: Makes others wait who declare or change subscriptions of the same tables, until the transaction ends. It draws no
    #: transaction id, so a position may be captured after it.
    subscriptions: str | None
    #: Makes others wait who upgrade the tables of this name, until the transaction ends.
    upgrades: Callable[[Connection, str], None]
    #: Keeps all others from a table `{table}` until the transaction ends.
    table: str | None
    #: A clause that keeps a row as it is until the transaction ends, without writing a new version of it.
    share: str
    #: A clause that keeps a row from being deleted until the transaction ends.
    keep: str
    #: A clause that locks the rows of a sub-select, and leaves out those that another transaction has locked.
    skip_locked: str
    #: Checks constraints at once that would otherwise be checked at the commit; None where no constraint can wait.
    check_now: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driving:
    """The drivers of a database, and connections by them."""

    #: Makes an application's URL the URL of the driver for threads of our own, which blocks.
    blocking_url: Callable[[URL], URL]
    #: The drivers of SQLAlchemy that the next three functions know.
    names: frozenset[str]
    #: The modules whose own connections may be handles, without SQLAlchemy.
    own: frozenset[str]
    #: Return the function that executes statements on such a connection, which blocks or is awaited; None: none is.
    executor: Callable[[Any], Execute]
    async_executor: Callable[[Any], AsyncExecute] | None
    #: Return whether a driver's connection commits every statement by itself; whether it is in a transaction; and
    #: whether COMMIT will roll back.
    commits_every_statement: Callable[[Any], bool]
    in_transaction: Callable[[Any], bool]
    is_aborted: Callable[[Any], bool]
    #: Calls a function that commits a connection of SQLAlchemy's; returns False if the database has rolled back.
    commit: Callable[[Callable[[], None], Any], bool]
    #: Opens a channel, given an engine and the name of the wake-ups.
    connect: Callable[[Engine, str], DriverChannel]
    #: Opens a channel that changes no setting of its session, because a pooler may share the session with applications.
    connect_plainly: Callable[[Engine, str], DriverChannel]
    #: True if the statements of `rows_of_last` are sent at once, and are a transaction of their own.
    sends_together: bool
    #: True if hints reach other processes.
    notifies: bool
    #: The place to which an engine, or a driver's own connection, leads; None where it cannot be told. Opens no
    #: connection.
    location: Callable[[Any], Location | None]
    #: Corrects how an engine begins and ends transactions; None where nothing is wrong.
    prepare: Callable[[Engine], None] | None
    #: Sets up an engine of our own, given the arguments for its driver; None where nothing is to be done.
    configure: Callable[[Engine, Mapping[str, Any]], None] | None
    #: Ends a transaction of the session that stands idle for some seconds, as of a frozen process; None where no server
    #: could.
    impatient: str | None
    #: Gives all round trips of an engine of a command the client's deadline; None where no server can be silent.
    watch: Callable[[Engine], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The meanings of a driver's errors."""

    #: The channel is gone, or busy, and a later try may work.
    transient: Callable[[Exception], bool]
    #: Another transaction had for too long what a statement needs, or each of the two waited for the other.
    locked: Callable[[Exception], bool]
    #: Our tables are not there.
    missing_table: Callable[[Exception], bool]
    missing_column: Callable[[Exception], bool]
    #: The role lacks a right.
    lacks_right: Callable[[Exception], bool]
    #: An earlier statement of the transaction has failed.
    in_failed_transaction: Callable[[Exception], bool]
    #: A table, a column or an index cannot be made because it is there.
    already_there: Callable[[Exception], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAheadLog:
    """Statements about the log from which a server recovers; a crash loses the part that is not on disk."""

    #: Reads the timeline, and the end of what has been written into the log so far.
    end: str
    #: Reads whether the log is on disk up to `:lsn`.
    flushed: str
    #: Commits without changing anything; when it returns, the log up to it is on disk.
    flush: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Statements that give the rows of a copied log transaction ids of the new server."""

    #: Keeps writers and workers away.
    lock: str
    #: Counts the messages that the subscription `:name` would be sent again.
    again: str
    restamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The server or the file that holds an outbox."""

    #: Reads the system identifier and the oid of the database; nulls where there are none.
    identity: str
    #: An SQL expression that returns a random text, as the id of an outbox.
    installation: str
    #: None where no crash can make the database draw a number again that it drew before.
    wal: WriteAheadLog | None
    #: None where a copied log keeps the ids that it has.
    restore: Restore | None
    #: Returns why no outbox can be on the server, and the fix; None: it can. Given what reads the value of a query, and
    #: the name of the log.
    why_foreign: Callable[[Callable[[str], Any], str], tuple[str, str] | None]
    #: An SQL expression of the bytes of the log `{log}` with its indexes, or of the whole file.
    size: str
    #: Reads the process of the server that has the connection; None where there is no server.
    backend: str | None
    #: Finds why a new connection of an engine may lead to another server than the last; opens no connection.
    check_address: Callable[[Engine], Iterator[Finding]]
    #: Finds what is wrong with the server, its settings and other sessions.
    check_server: Callable[[Connection], Iterator[Finding]]
    #: Returns the SQL functions that write messages, for a schema and a number of slots; None where there are none.
    send_function: Callable[[str | None, int], str] | None
    #: Finds the rights that a role lacks for its tasks, in the schema of the tables; None where there are no roles.
    check_rights: Callable[[Connection, str | None, str, Sequence[str]], Iterator[Finding]] | None
    #: Finds what is wrong with the tables in ways of this database only, given the names of those that are there.
    check_tables: Callable[[Connection, MetaData, Collection[str]], Iterator[Finding]]
    #: Finds what is wrong with the ids that it will draw, given the column with the highest id, and that id.
    check_ids: Callable[[Connection, Mapping[str, str], str, int], Iterator[Finding]]
    #: Finds a log that takes a message whose slot is in no partition, given its table.
    check_slots: Callable[[Connection, Table], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The SQL, the functions and the facts in which databases differ.

    Statements are written once, with `:name` parameters, `{table}` names, and these parts.
    """

    name: str
    #: True if tables may be in a schema.
    schemas: bool
    clock: Clock
    values: Values
    reads: Reads
    writes: Writes
    locks: Locks
    driving: Driving
    errors: Errors
    home: Home


def wake_up_name(schema: str | None) -> str:
    """Return the name under which hints of an outbox are sent: one for `public`, whether it is named or not."""
    # PostgreSQL cuts longer names.
    return f"outbox_{schema}"[:63] if schema not in (None, "public") else "outbox"


def slots_of(partition: Partition | None) -> dict[str, int]:
    """Return the slots of a partition as parameters of `OF_SLOTS`; nothing if it owns all slots."""
    if partition is None or partition.partitions == 1:
        return {}
    return {"partitions": partition.partitions, "partition": partition.partition}


def driver_of(connection: Connection) -> Any:
    """Return the driver's connection, also of a connection that was detached from its pool; of asyncpg SQLAlchemy's.

    asyncpg's own connection learns of a transaction only with the first statement.
    """
    found = connection.connection.dbapi_connection
    if found is None or connection.dialect.driver == "asyncpg":
        return found
    return connection.dialect.get_driver_connection(found)


def connects_by_url(engine: Engine) -> bool:
    """Return whether an engine connects by its URL, and not by a `creator` function of the application."""
    return getattr(engine.pool._creator, "__module__", None) == "sqlalchemy.engine.create"
