"""The differences between databases, as one value per dialect, and the port for a connection of our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sqlalchemy import Connection, Engine, MetaData

from outbox.model.lease import Partition
from outbox.model.message import Message
from outbox.model.topics import Topics
from outbox.store.dialects.finding import Finding
from outbox.store.dialects.statements import Parameters, Row, Script

if TYPE_CHECKING:
    from uuid import UUID


#: The columns of a message, in the order in which `Dialect.messages` takes them. `{body}` may leave the body out;
#: copies that are parked have no `{direct}`.
COLUMNS = (
    "id, message_id, topic, key, tags, headers, {body}, content_type, created_at, deliver_at, expires_at, {direct}"
)

#: Whether the column `slot` is one of those that a partition owns.
OF_SLOTS = "slot % CAST(:partitions AS integer) = CAST(:partition AS integer)"

#: The columns that an append writes of a message, in this order.
APPENDED = (
    "message_id", "topic", "key", "slot", "tags", "headers", "body", "content_type", "deliver_at", "delay",
    "expires_at", "direct",
)  # fmt: skip


class Hint(NamedTuple):
    """A wake-up. `pause`: for how many seconds none may follow, although more is committed."""

    pause: float = 0.0


class DriverChannel(Protocol):
    """What a dialect says of a connection of our own; `Channel` makes its statements and uses it."""

    def rows(self, statement: str, parameters: Parameters) -> list[Row]:
        """Run a statement and return its rows."""

    def run(self, statement: str, parameters: Parameters) -> int:
        """Run a statement and return how many rows it touched."""

    def rows_of_last(self, statements: Sequence[tuple[str, Parameters]]) -> list[Row]:
        """Run statements in one transaction, or in the one that is open, and return the rows of the last one.

        Where statements cost round trips, they are sent together.
        """

    def transaction(self, *, patience: float | None = None) -> AbstractContextManager[None]:
        """Commit the statements inside together, or not at all. `patience`: how long to wait for a lock, in seconds."""

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
    """The place of a database: its name, and the servers, by host and port, of which one has it."""

    name: str
    servers: frozenset[tuple[str, str]] = frozenset()

    def differs(self, other: Location) -> bool:
        """Return whether the other one is certainly another database: it has another name on the same server."""
        return self.name != other.name and (self.servers == other.servers or bool(self.servers & other.servers))


class Append(Protocol):
    """Appends messages, given as rows of `APPENDED`."""

    def __call__(
        self, names: Mapping[str, str], rows: Sequence[Row], *, compensation: str | None = None
    ) -> Script[list[tuple[int, bool]]]:
        """Yield the statements that append the rows. `names`: what `Database.sql` fills in.

        `compensation`: a subscription; unless it exists, no message is marked as one that its writer sends. With it,
        return the ids, each with whether that message is marked; without it, return an empty list.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAheadLog:
    """Statements about the log from which a server recovers; a crash loses the part of it that is not on disk."""

    #: Reads the timeline, and the end of what has been written into the log so far.
    end: str
    #: Reads whether the log is on disk up to `:lsn`.
    flushed: str
    #: Commits without changing anything; when it returns, the log up to it is on disk.
    flush: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The SQL, the functions and the facts in which one database differs from the others.

    Statements are written once, with `:name` parameters, `{table}` names, and the parts below.
    """

    name: str
    #: Whether tables may be in a schema.
    schemas: bool
    #: Whether a position counts the server's transactions, by the column `xact_id`; otherwise it counts rows, by their
    #: ids, which are the file's own.
    transaction_ids: bool
    #: The database's clock as SQL: one value during one statement. Tests replace it.
    now: str
    #: That clock, moved by `{seconds}`.
    later: str
    #: The seconds between the moments `{since}` and `{until}`.
    seconds: str
    #: Conditions: `{value}` is in the list of whole numbers, or of texts, that is bound as `{list}`.
    among_numbers: str
    among_texts: str
    #: Whether the column `topic` is one of those that `bind_topics` returns as parameters; half messages apart. Names,
    #: patterns and exceptions are three parameters, so that a selection of names alone is compared as one list.
    of_topics: str
    bind_topics: Callable[[Topics], Parameters]
    #: Make a parameter of a list, for the two conditions of lists, and of a moment, for any use.
    bind_list: Callable[[Sequence[Any]], Any]
    bind_moment: Callable[[datetime], Any]
    #: Makes a moment of the value that the driver returned.
    moment: Callable[[Any], datetime | None]
    #: Makes messages of rows that begin with `COLUMNS`; if there is one more column, it is the attempt.
    messages: Callable[[Sequence[Row]], list[Message]]
    #: Whether hints reach other processes.
    notifies: bool
    #: Opens a channel, given an engine and the name of the wake-ups.
    connect: Callable[[Engine, str], DriverChannel]
    #: Whether an error of the driver means that the channel is gone, or busy, and a later try may work.
    transient: Callable[[Exception], bool]
    #: Whether an error of the driver means that another transaction had for too long what a statement needs.
    locked: Callable[[Exception], bool]
    #: Whether an error of the driver means that our tables are not there.
    missing_table: Callable[[Exception], bool]
    #: Whether an error of the driver means that a table, a column or an index cannot be made because it is there.
    already_there: Callable[[Exception], bool]
    #: An SQL expression that differs between this incarnation of the server and the one before a crash.
    incarnation: str
    #: The position of now: snapshot, incarnation, the reason why it must not be used (or null), clock.
    capture: str
    #: `capture`, and everything committed since a position, in one statement. `fresh`: for a position at which nothing
    #: was open. `chosen`: without the rows that the selection leaves out; the other two read them without their bodies.
    #: Where a selection applies, `{of_slots}` is one more condition on the slot of a row, or empty.
    read_on: str
    read_on_fresh: str
    read_on_chosen: str
    #: One page of a window; `page_late` also looks for transactions that finished late.
    page: str
    page_late: str
    #: First and last id of a window's fresh part, then of its late part.
    extent: str
    append: Append
    #: The header `{name}` out of the `{headers}` of a stored message, as text; null without it.
    header: str
    #: A moment out of the text `{value}`, which holds milliseconds since 1970.
    from_milliseconds: str
    #: Makes a parameter of a UUID.
    bind_uuid: Callable[[UUID], Any]
    #: Whether a statement that writes may be part of another one.
    chains_writes: bool
    #: In RETURNING: whether a row was inserted outside of every savepoint; true where the database cannot tell.
    outermost: str
    #: A table with the columns `name` and `id`, made of the parameters of `bind_pairs`.
    pairs: str
    bind_pairs: Callable[[Sequence[tuple[str, UUID]]], Parameters]
    #: Makes other writers of the keys in `:keys` wait until the transaction ends; None where only one can write.
    lock_keys: str | None
    #: SQL expressions that lock the text `{text}` until the transaction ends; `{seed}` keeps apart texts of different
    #: kinds. Many share the lock, or one has it alone. None where only one transaction can write.
    share_text: str | None
    own_text: str | None
    #: Whether one transaction at a time can write, so that a second one of the same thread would wait for ever.
    one_writer: bool
    #: Whether this thread or task has a transaction open on the engine, for which a connection of our own would wait.
    waits_for_itself: Callable[[Engine], bool]
    #: Whether a driver's connection commits every statement by itself, and whether it would answer COMMIT with a
    #: rollback.
    commits_every_statement: Callable[[Any], bool]
    is_aborted: Callable[[Any], bool]
    #: SQLAlchemy's name for this database with the driver that blocks, for threads of our own.
    blocking: str
    #: The drivers of SQLAlchemy for which those two can be told.
    drivers: frozenset[str]
    #: The place to which an engine, or a driver's own connection, leads; None where that cannot be told. Opens no
    #: connection.
    location: Callable[[Any], Location | None]
    #: Corrects how an engine begins and ends transactions; None where nothing is wrong.
    prepare_engine: Callable[[Engine], None] | None
    #: Sets up an engine of our own, given the arguments for its driver; None where nothing is to be done.
    configure_engine: Callable[[Engine, Mapping[str, Any]], None] | None
    #: Makes others wait who upgrade the tables of this name, until the transaction ends.
    serialize_upgrades: Callable[[Connection, str], None]
    #: Finds what is wrong with the tables in ways of this database only, given the names of those that are there; and
    #: with the ids that it will draw, given the column with the highest id, and that id.
    check_tables: Callable[[Connection, MetaData, Collection[str]], Iterator[Finding]]
    check_ids: Callable[[Connection, Mapping[str, str], str, int], Iterator[Finding]]
    #: Checks constraints at once that would otherwise be checked at the commit; None where no constraint can wait.
    check_now: str | None
    #: Makes others wait who declare or change subscriptions of the same tables, until the transaction ends. It draws no
    #: transaction id, so a position may be captured after it. None where a transaction has the write lock anyway.
    lock_subscriptions: str | None
    #: The message_id of the message `:last`, where a position counts ids, which may be given out again; else null.
    last_message: str
    #: A condition on the progress `p`: its last message is another one by now. None where a position counts no ids.
    given_again: str | None
    #: A clause that keeps a row as it is until the transaction ends, without writing a new version of it.
    share_lock: str
    #: A clause that locks the rows of a sub-select, and leaves out those that another transaction has locked.
    skip_locked: str
    #: Reads the system identifier and the oid of the database; nulls where there are none.
    identity: str
    #: An SQL expression that returns a random text, as the id of an outbox.
    installation: str
    #: None where no crash can make the database draw a number again that it drew before.
    wal: WriteAheadLog | None


def slots_of(partition: Partition | None) -> dict[str, int]:
    """Return the slots of a partition as parameters of `OF_SLOTS`; nothing if it owns all slots."""
    if partition is None or partition.partitions == 1:
        return {}
    return {"partitions": partition.partitions, "partition": partition.partition}


def driver_of(connection: Connection) -> Any:
    """Return the driver's own connection, also of a connection that was detached from its pool."""
    dbapi_connection = connection.connection.dbapi_connection
    return None if dbapi_connection is None else connection.dialect.get_driver_connection(dbapi_connection)


def connects_by_url(engine: Engine) -> bool:
    """Return whether an engine connects by its URL, and not by a `creator` function of the application."""
    return getattr(engine.pool._creator, "__module__", None) == "sqlalchemy.engine.create"
