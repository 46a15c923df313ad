"""What differs between databases, as one value per dialect; and a connection of our own, as a small port."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sqlalchemy import Connection, Engine

from outbox.model.message import Message
from outbox.store.dialects.statements import Parameters, Row, Script

if TYPE_CHECKING:
    from uuid import UUID


#: The columns of a message, in the order in which `Dialect.messages` takes them. `{body}` may leave the body out;
#: copies that were set aside have no `{direct}`.
COLUMNS = (
    "id, message_id, topic, key, tags, headers, {body}, content_type, created_at, deliver_at, expires_at, {direct}"
)

#: What an append gives of a message, in this order.
APPENDED = (
    "message_id", "topic", "key", "slot", "tags", "headers", "body", "content_type", "deliver_at", "delay",
    "expires_at", "direct",
)  # fmt: skip


class Hint(NamedTuple):
    """A wake-up. `pause`: for how many seconds none may follow, although more is committed."""

    pause: float = 0.0


class Channel(Protocol):
    """A connection of our own, outside of the application's pool and in nobody's transaction.

    Every statement is a transaction unless `transaction()` holds it together with others. When it is lost, its user
    drops whatever it remembers of the database.
    """

    def rows(self, statement: str, parameters: Parameters = ...) -> list[Row]:
        """What a statement returns."""

    def run(self, statement: str, parameters: Parameters = ...) -> int:
        """How many rows a statement touched."""

    def transaction(self, *, patience: float | None = None) -> AbstractContextManager[None]:
        """Statements inside commit together, or not at all. `patience`: how long to wait for a lock, in seconds."""

    fileno: int | None
    """A descriptor that becomes readable when a wake-up arrives; None where nothing crosses processes."""

    def listen(self) -> None:
        """Ask for wake-ups."""

    def hinted(self) -> Hint | None:
        """What the wake-ups say that have arrived since the last call; None: there were none."""

    def notify(self, pause: float = 0.0) -> None:
        """Wake the listeners of every process. `pause`: for how many seconds this process will not do so again."""

    def close(self) -> None:
        """Give the connection up, whatever state it is in. Never raises."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a database is: its name, and the servers of which one has it, by host and port."""

    name: str
    servers: frozenset[tuple[str, str]] = frozenset()

    def differs(self, other: Location) -> bool:
        """Whether the other one is surely another database: of another name in the same place."""
        return self.name != other.name and (self.servers == other.servers or bool(self.servers & other.servers))


class Append(Protocol):
    """Appends messages, given as rows of `APPENDED`."""

    def __call__(
        self, names: Mapping[str, str], rows: Sequence[Row], *, compensation: str | None = None
    ) -> Script[list[tuple[int, bool]]]:
        """The statements that do it; `names`: what `Database.sql` fills in.

        `compensation`: the subscription without which no message may be marked as one that its writer sends; given
        it, the ids are returned, each with whether that message is marked.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteAheadLog:
    """Statements about the log from which a server recovers: a crash loses what of it is not on disk."""

    #: Timeline, and the end of what has been written into the log so far.
    end: str
    #: Whether the log is on disk up to `:lsn`.
    flushed: str
    #: A commit that is on disk when it returns, with all that came before it. Changes nothing.
    flush: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One database's way of saying things.

    Statements are written once, with `:name` parameters, `{table}` names, and the parts below.
    """

    name: str
    #: The database's clock as SQL: one answer within one statement. Tests replace it.
    now: str
    #: That clock, moved by `{seconds}`.
    later: str
    #: Seconds between the moments `{since}` and `{until}`.
    seconds: str
    #: Whether `{value}` is in the list of whole numbers, or of texts, bound as `{list}`.
    among_numbers: str
    among_texts: str
    #: How a list is bound for those two, and a moment anywhere.
    bind_list: Callable[[Sequence[Any]], Any]
    bind_moment: Callable[[datetime], Any]
    #: A moment as the driver returned it.
    moment: Callable[[Any], datetime | None]
    #: Messages of rows that begin with `COLUMNS`; one more column is the attempt.
    messages: Callable[[Sequence[Row]], list[Message]]
    #: Whether hints reach other processes.
    notifies: bool
    #: A channel, given an engine and the name that wake-ups go by.
    connect: Callable[[Engine, str], Channel]
    #: Whether an error of the driver means that the channel is gone, or busy, and a later try may work.
    transient: Callable[[Exception], bool]
    #: Whether an error of the driver means that our tables are not there.
    missing_table: Callable[[Exception], bool]
    #: Whether an error of the driver means that a table, a column or an index is to be made that is there.
    already_there: Callable[[Exception], bool]
    #: Tells this incarnation of the server from the one before a crash.
    incarnation: str
    #: The position of now: snapshot, incarnation, whether the answer is forbidden and why, clock.
    capture: str
    #: `capture`, and everything committed since a position, in one statement. `fresh`: one at which nothing was open.
    #: `chosen`: without what the selection leaves out; else rows that it skips come along, without their bodies.
    read_on: str
    read_on_fresh: str
    read_on_chosen: str
    #: One page of a window; `page_late` also looks for transactions that finished late.
    page: str
    page_late: str
    #: First and last id of a window's fresh part, then of its late part.
    extent: str
    append: Append
    #: The header of a stored message by `{name}`, as text, out of its `{headers}`; null without it.
    header: str
    #: A moment out of the text `{value}`: milliseconds since 1970.
    from_milliseconds: str
    #: A UUID as a parameter.
    bind_uuid: Callable[[UUID], Any]
    #: Whether a statement that writes may be part of another one.
    chains_writes: bool
    #: In RETURNING: whether a row was inserted outside of every savepoint; true where nobody can tell.
    outermost: str
    #: Two columns `name` and `id` out of what `bind_pairs` binds.
    pairs: str
    bind_pairs: Callable[[Sequence[tuple[str, UUID]]], Parameters]
    #: Makes other writers of the keys bound as `keys` wait until the transaction ends; None where only one can write.
    lock_keys: str | None
    #: Whether one transaction at a time can write, so that a second one of the same thread would wait for ever.
    one_writer: bool
    #: Whether this thread or task has a transaction open on the engine, for which a connection of our own would wait.
    waits_for_itself: Callable[[Engine], bool]
    #: Whether a driver's connection commits every statement by itself, or would answer COMMIT with a rollback.
    commits_every_statement: Callable[[Any], bool]
    is_aborted: Callable[[Any], bool]
    #: Drivers of SQLAlchemy that can tell that.
    drivers: frozenset[str]
    #: Where an engine, or a driver's own connection, leads to; None where that cannot be told. Connects to nothing.
    location: Callable[[Any], Location | None]
    #: Mends what an engine gets wrong about transactions.
    prepare_engine: Callable[[Engine], None] | None
    #: Has constraints that wait for the commit checked now; None where they cannot wait.
    check_now: str | None
    #: Keeps a row as it is until the transaction ends, without writing a new version of it.
    share_lock: str
    #: Locks the rows of a sub-select that nobody else has locked, and leaves the others out.
    skip_locked: str
    #: System identifier and database oid; nulls where there are none.
    identity: str
    #: An SQL expression that returns a random text, as the id of an outbox.
    installation: str
    #: None where numbers that were drawn are never drawn again, whatever crashes.
    wal: WriteAheadLog | None


def driver_of(connection: Connection) -> Any:
    """The driver's own connection, also of one that was detached from its pool."""
    dbapi_connection = connection.connection.dbapi_connection
    return None if dbapi_connection is None else connection.dialect.get_driver_connection(dbapi_connection)


def connects_by_url(engine: Engine) -> bool:
    """Whether an engine connects by what its URL says, and not by a `creator` of the application's."""
    return getattr(engine.pool._creator, "__module__", None) == "sqlalchemy.engine.create"
