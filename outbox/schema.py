"""The tables: an append-only log, and the small tables of the readers.

The same definitions serve the migrations, an application's own Alembic (`metadata`, `include_name`) and the statements
in `store/`. Differences between databases are in `store/dialects/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.types import TypeEngine

from outbox.model.limits import HALF_TOPIC
from outbox.store.dialects import part_of
from outbox.store.dialects.kinds import KINDS
from outbox.store.dialects.native import Native

#: Stored with the tables, and raised by a revision after which older code must not use the tables. A revision that only
#: adds tables, indexes and columns with a default leaves the version, and older code goes on beside such tables.
VERSION = 6
PREFIX = "outbox_"
_KINDS = "relay, check, extract, consumer, broadcast or backfill"
#: The table that holds the revision of our tables. It is ours alone, apart from that of the application's own Alembic.
VERSION_TABLE = "outbox_alembic_version"

#: In UTC; SQLite keeps it as text that sorts by time.
_Moment = DateTime(timezone=True)


def _named() -> TypeEngine[str]:
    """Return the type of ids and keys, which serves every kind of database."""
    found: TypeEngine[str] = Text()
    for kind in KINDS:
        found = found.with_variant(part_of(kind, Native).name(), kind)
    return found


_Name = _named()


@dataclass(frozen=True)
class Tables:
    """The tables of one outbox."""

    metadata: MetaData
    message: Table
    subscription: Table
    lease: Table
    progress: Table
    parked: Table
    decision: Table
    dedup: Table
    inbox: Table
    withdrawal: Table
    op: Table
    worker: Table
    topic: Table
    group: Table
    client: Table
    meta: Table


@lru_cache
def tables(schema: str | None = None, dialect: str = "postgresql") -> Tables:
    """Return the tables for `schema` (None: the search path's first) on `dialect` ("postgresql" or "sqlite")."""
    return made_in(MetaData(schema=schema), part_of(dialect, Native))


def metadata(schema: str | None = None, dialect: str = "postgresql") -> MetaData:
    """Return the tables for an application's own Alembic or `create_all`; `outbox.migrate.seed` fills them.

    The table with the revision is included, so that an autogenerate does not propose a drop.

    Args:
        schema: PostgreSQL's schema for the tables, made by the application; None is the first of the search path.
        dialect: "postgresql" or "sqlite". The tables differ: only PostgreSQL's log holds transaction ids.
    """
    made = MetaData(schema=schema)
    made_in(made, part_of(dialect, Native))
    revision_table(made)
    return made


def record_metadata(schema: str | None = None) -> MetaData:
    """Return the one table of a business database without an outbox: the proofs of its commits."""
    made = MetaData(schema=schema)
    Table(
        "outbox_record",
        made,
        Column("transaction_id", _Name, primary_key=True),
        Column("verdict", Text, nullable=False, comment="commit, by its business transaction; or rollback"),
        Column("decided_at", _Moment, nullable=False),
        CheckConstraint("verdict IN ('commit', 'rollback')", name="outbox_record_verdict"),
        comment="proofs of commit; shrinks by hand",
    )
    return made


def inbox_metadata(schema: str | None = None) -> MetaData:
    """Return the one table of a consumer's database without an outbox: the handled messages."""
    made = MetaData(schema=schema)
    _inbox(made)
    return made


def made_in(metadata: MetaData, native: Native) -> Tables:
    """Make the tables in the metadata, with the parts of a kind of database."""
    return Tables(
        metadata=metadata,
        message=_message(metadata, native),
        subscription=_subscription(metadata),
        lease=_lease(metadata),
        progress=_progress(metadata, native),
        parked=_parked(metadata, native),
        decision=_decision(metadata, native),
        dedup=_dedup(metadata),
        inbox=_inbox(metadata),
        withdrawal=_withdrawal(metadata),
        op=_op(metadata),
        worker=_worker(metadata),
        topic=_topic(metadata),
        group=_group(metadata),
        client=_client(metadata),
        meta=_meta(metadata),
    )


def include_name(name: str | None, type_: str, _parents: Any) -> bool:
    """Keep Alembic's autogenerate away from our tables, as `context.configure(include_name=…)`."""
    return not (type_ == "table" and name is not None and name.startswith(PREFIX))


def _envelope() -> list[Column[Any]]:
    """Return the columns that the log and the parked copies have in common."""
    return [
        Column("message_id", Uuid, nullable=False),
        Column("topic", _Name, nullable=False),
        Column("key", _Name),
        Column("slot", SmallInteger, nullable=False),
        Column("tags", _Name),
        Column("headers", Text, comment="JSON object of strings"),
        Column("content_type", Text),
    ]


def _settled(native: Native) -> list[Column[Any]]:
    """Return the column of the number that tells whether a row is settled, where its own id does not."""
    number = native.transaction
    return [] if number is None else [Column("xact_id", BigInteger, nullable=False, server_default=text(number))]


def _body() -> Column[Any]:
    """Return the last column of a table, because SQLite reads through a large body to reach the columns behind it."""
    return Column("body", LargeBinary, nullable=False)


def _message(metadata: MetaData, native: Native) -> Table:
    """Return the log. Only purge removes rows from it; no row is ever updated."""
    by_position: list[Index | CheckConstraint] = []
    if native.transaction is not None:
        by_position.append(Index("outbox_message_xact_id", "xact_id", "id"))
        # A negative slot is in no partition. SQLite could only check it in a table that is made anew.
        by_position.append(CheckConstraint("slot >= 0", name="outbox_message_slot"))
    return Table(
        "outbox_message",
        metadata,
        native.id(),
        *_envelope(),
        Column("created_at", _Moment, nullable=False, server_default=text(native.now)),
        Column("deliver_at", _Moment),
        Column("expires_at", _Moment),
        Column("direct", _Name, comment="always null; writers of version 0.1.0 name it"),
        *_settled(native),
        *by_position,
        _partial(native, "outbox_message_half", f"topic = '{HALF_TOPIC}'", "key"),
        _partial(native, "outbox_message_delayed", "deliver_at IS NOT NULL", "message_id"),
        _body(),
        sqlite_autoincrement=True,
        comment="append-only log; shrinks by purge",
    )


def _subscription(metadata: MetaData) -> Table:
    return Table(
        "outbox_subscription",
        metadata,
        Column("name", _Name, primary_key=True),
        Column("topics", Text, comment="JSON list; null: all"),
        Column("destination", Text, comment="without credentials; null: not declared yet"),
        Column("on_dead", Text, comment="block or continue; null: not declared yet"),
        Column("partitions", Integer, nullable=False, server_default=text("1")),
        Column("generation", Integer, nullable=False, server_default=text("1")),
        Column("created_at", _Moment, nullable=False),
        Column("grace_ms", Integer, nullable=False, server_default=text("0"), comment="reads so long after the commit"),
        Column("kind", Text, nullable=False, server_default=text("'relay'"), comment=_KINDS),
        Column("tags", Text, comment="JSON list; null: all"),
        Column("filter", Text, comment="condition in SQL92; null: none"),
        Column("hold_ms", BigInteger, comment="of an extract: holds rows back so long after its last progress"),
        Column("stop_at", Text, comment="where all partitions meet before their number changes, or end"),
        Column("next_partitions", Integer, comment="their number after that"),
        Column("ordered", Boolean, nullable=False, server_default=text("true"), comment="keeps keys in order"),
        Column("compact", Boolean, nullable=False, server_default=text("false"), comment="newest of a key"),
        Column("pauses", Text, comment="JSON list of what people have paused; null: nothing"),
        comment="readers of the log; shrinks by hand",
    )


def _partition_key() -> list[Column[Any]]:
    return [
        Column("subscription", _Name, primary_key=True),
        Column("generation", Integer, primary_key=True),
        Column("partition", Integer, primary_key=True),
    ]


def _lease(metadata: MetaData) -> Table:
    """Return the table of leases. Each partition has one row; the epoch fences late owners."""
    return Table(
        "outbox_lease",
        metadata,
        *_partition_key(),
        Column("owner", Text),
        Column("epoch", BigInteger, nullable=False, server_default=text("0")),
        Column("renewals", BigInteger, nullable=False, server_default=text("0")),
        Column("lease_until", _Moment),
        Column("length_ms", BigInteger, comment="for how long the holder takes the lease each time"),
        Column("notice", Text, comment="why a worker does not work, as it says itself"),
        Column("noticed_at", _Moment),
        Column("version", Text, comment="of the holder's library"),
        Column("since", _Moment, comment="when the holder took the partition"),
        Column("attempts", Integer, comment="so many failures of a message its holder allows"),
        comment="a row per partition; shrinks with the subscription",
    )


def _progress(metadata: MetaData, native: Native) -> Table:
    """Return the table of progress. Rows are appended: an updated row grows dead versions under a pinned snapshot."""
    highest = Column("highest_id", BigInteger, comment="no message with a higher id was passed")
    return Table(
        "outbox_progress",
        metadata,
        *_partition_key(),
        Column("epoch", BigInteger, primary_key=True),
        Column("n", BigInteger, primary_key=True),
        Column("base", Text, nullable=False),
        Column("target", Text),
        Column("after_id", BigInteger),
        Column("settled_at", _Moment, nullable=False),
        Column("last_message", Uuid, comment="the last message that was passed, where positions are ids"),
        *([] if native.transaction is None else [highest]),
        comment="the newest row counts; older rows are deleted by the lease holder",
    )


def _parked(metadata: MetaData, native: Native) -> Table:
    """Return the table of parked copies, so that the position can move on.

    A unit is a key that is held. Its first row, the head, has a state; what stands behind the head has none.
    """
    return Table(
        "outbox_parked",
        metadata,
        Column("subscription", _Name, primary_key=True),
        Column("id", BigInteger, primary_key=True, autoincrement=False),
        *_envelope(),
        Column("created_at", _Moment, nullable=False),
        Column("deliver_at", _Moment),
        Column("expires_at", _Moment),
        Column("state", Text),
        Column("unit", _Name, comment="the key that is held; null: the message stands for itself"),
        Column("place", BigInteger, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("due_at", _Moment),
        Column("error", Text),
        Column("parked_at", _Moment, nullable=False),
        _body(),
        # Behind the body, because SQLite adds a column there. So it is read from its index alone.
        Column("dead_at", _Moment, comment="since when the message is a dead letter; null: it is none"),
        CheckConstraint(
            "coalesce(state IN ('delayed', 'waiting', 'retry', 'dead'), unit IS NOT NULL)",
            name="outbox_parked_state",
        ),
        _partial(native, "outbox_parked_due", "state IN ('delayed', 'waiting', 'retry')", "subscription", "due_at"),
        _partial(native, "outbox_parked_unit", "unit IS NOT NULL", "subscription", "unit", "place"),
        _one_head_a_unit(native),
        _partial(native, "outbox_parked_dead", "dead_at IS NOT NULL", "subscription", "dead_at", "id"),
        Index("outbox_parked_state", "subscription", "state", "id"),
        comment="copies of parked messages; shrinks by the lease holder",
    )


def _decision(metadata: MetaData, native: Native) -> Table:
    """Return the table of what people decided. A decision on messages is open until a lease holder has carried it out.

    The choice is last, because it may hold many ids.
    """
    return Table(
        "outbox_decision",
        metadata,
        native.id(),
        Column("at", _Moment, nullable=False),
        Column("by", Text, nullable=False),
        Column("verb", Text, nullable=False),
        Column("subscription", _Name, comment="null: of none"),
        Column("reason", Text),
        Column("count", BigInteger, comment="so many messages it was carried out on"),
        Column("done_at", _Moment, comment="null: not carried out yet"),
        Column("choice", Text, nullable=False, comment="JSON object: what was decided on"),
        _partial(native, "outbox_decision_open", "done_at IS NULL", "subscription", "id"),
        Index("outbox_decision_done_at", "done_at"),
        sqlite_autoincrement=True,
        comment="decisions of people; shrinks by lease holders",
    )


def _dedup(metadata: MetaData) -> Table:
    return Table(
        "outbox_dedup",
        metadata,
        Column("dedup_key", _Name, primary_key=True),
        Column("message_id", Uuid, nullable=False),
        Column("expires_at", _Moment, nullable=False),
        Index("outbox_dedup_expires_at", "expires_at"),
        comment="dedup keys of writers; shrinks by lease holders",
    )


def _inbox(metadata: MetaData) -> Table:
    return Table(
        "outbox_inbox",
        metadata,
        Column("consumer", _Name, primary_key=True),
        Column("message_id", Uuid, primary_key=True),
        Column("handled_at", _Moment, nullable=False),
        Column("expires_at", _Moment, nullable=False),
        Index("outbox_inbox_expires_at", "expires_at"),
        comment="what consumers have handled; shrinks by lease holders",
    )


def _withdrawal(metadata: MetaData) -> Table:
    return Table(
        "outbox_withdrawal",
        metadata,
        Column("message_id", Uuid, primary_key=True),
        Column("withdrawn", Boolean, nullable=False, comment="false: handed over before the message was due"),
        Column("at", _Moment, nullable=False),
        comment="delayed messages that writers took back; shrinks by purge",
    )


def _op(metadata: MetaData) -> Table:
    return Table(
        "outbox_op",
        metadata,
        Column("transaction_id", _Name, primary_key=True),
        Column("op", Text, nullable=False),
        Column("decided_by", Text, nullable=False),
        Column("decided_at", _Moment, nullable=False),
        CheckConstraint("op IN ('commit', 'rollback')", name="outbox_op_op"),
        comment="verdicts on transactions; shrinks by purge, after their half messages",
    )


def _worker(metadata: MetaData) -> Table:
    return Table(
        "outbox_worker",
        metadata,
        Column("subscription", _Name, primary_key=True),
        Column("id", Text, primary_key=True, comment="as in outbox_lease.owner"),
        Column("seen_at", _Moment, nullable=False),
        comment="workers of subscriptions with several partitions; shrinks by lease holders",
    )


def _topic(metadata: MetaData) -> Table:
    return Table(
        "outbox_topic",
        metadata,
        Column("name", _Name, primary_key=True),
        Column("type", Text, nullable=False, comment="NORMAL, FIFO, DELAY or TRANSACTION"),
        Column("created_at", _Moment, nullable=False),
        comment="topics of fronts; shrinks by hand",
    )


def _group(metadata: MetaData) -> Table:
    return Table(
        "outbox_group",
        metadata,
        Column("name", _Name, primary_key=True),
        Column("ordered", Boolean, nullable=False, comment="takes the messages of a key in order"),
        Column("attempts", Integer, nullable=False, comment="the most for a message"),
        Column("created_at", _Moment, nullable=False),
        comment="consumer groups of fronts; shrinks by hand",
    )


def _client(metadata: MetaData) -> Table:
    return Table(
        "outbox_client",
        metadata,
        Column("id", _Name, primary_key=True),
        Column("kind", Text, nullable=False, comment="in the words of the protocol"),
        Column("topics", Text, nullable=False, comment="JSON list"),
        Column("seen_at", _Moment, nullable=False),
        comment="clients of fronts; shrinks by fronts",
    )


def _partial(native: Native, name: str, condition: str, *columns: str) -> Index:
    """Return an index of the rows that fulfil a condition, or of all rows where a database has no such indexes."""
    return Index(name, *columns, **native.partial(condition))


def _one_head_a_unit(native: Native) -> Index:
    """Return the index that holds the rule, where a database can hold it."""
    partial = native.partial("unit IS NOT NULL AND state IS NOT NULL")
    return Index("outbox_parked_head", "subscription", "unit", unique=bool(partial), **partial)


def _meta(metadata: MetaData) -> Table:
    """Return the table with one row: the identity of the outbox, and how far purge has ever gone."""
    return Table(
        "outbox_meta",
        metadata,
        Column("one", Integer, primary_key=True, autoincrement=False),
        Column("version", Integer, nullable=False),
        Column("slots", Integer, nullable=False),
        Column("system_identifier", Text, comment="of the server that draws the ids; null where it has none"),
        Column("database_oid", BigInteger),
        Column("purged", Text, comment="position below which rows may be gone"),
        Column("purged_id", BigInteger, nullable=False, server_default=text("0")),
        Column("purged_at", _Moment, comment="end of the last purge"),
        Column("keep_ms", BigInteger, comment="messages older than this went with the last purge"),
        Column("installation", Text, comment="random id of the outbox, drawn with the tables"),
        Column(
            "keep_dead_ms",
            BigInteger,
            comment="dead letters older than this went with the last purge; null: all were kept",
        ),
        CheckConstraint("one = 1", name="outbox_meta_one"),
        comment="a single row, written by migrations, CLI and purge",
    )


def revision_table(metadata: MetaData) -> Table:
    """Return the table that holds the revision of the other tables, as Alembic would make it."""
    key = PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc")
    return Table(VERSION_TABLE, metadata, Column("version_num", String(32), nullable=False), key)
