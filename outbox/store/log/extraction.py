"""The text of the statements by which whole tables, and parts of windows, are read outside of SQLAlchemy.

Values stand in the text, because parameters keep PostgreSQL's drivers from using COPY. They are whole numbers, and
literals that are quoted here. This module opens no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, Column, DateTime, LargeBinary, SmallInteger, Uuid
from sqlalchemy.types import Integer, TypeEngine

from outbox.model.limits import HALF_TOPIC
from outbox.model.position import Window
from outbox.schema import PREFIX, tables
from outbox.store.dialects.sql import Sql

Kind = Literal["long", "integer", "short", "boolean", "timestamp", "binary", "uuid", "string"]

MESSAGES = "messages"
_LONGEST_TOLD = 200

#: The columns of `messages`, in the order in which they are shown. Where the log has no `xact_id`, it is the id.
_OF_MESSAGES = (
    "id", "xact_id", "message_id", "topic", "key", "slot", "tags", "headers", "content_type", "body", "created_at",
    "deliver_at", "expires_at", "direct",
)  # fmt: skip
#: The first match counts, because some of these types are subclasses of others.
_KINDS: tuple[tuple[type[TypeEngine[Any]], Kind], ...] = (
    (SmallInteger, "short"),
    (BigInteger, "long"),
    (Integer, "integer"),
    (Boolean, "boolean"),
    (DateTime, "timestamp"),
    (LargeBinary, "binary"),
    (Uuid, "uuid"),
)


def table_names() -> tuple[str, ...]:
    """Return the tables that can be read: the log as `messages`, the others by their names without the prefix."""
    others = (name.removeprefix(PREFIX) for name in tables().metadata.tables)
    return (MESSAGES, *sorted(name for name in others if name != "message"))


@lru_cache
def columns_of(table: str) -> Mapping[str, Kind]:
    """Return the columns of a table, each with its kind."""
    found = {column.name: _kind_of(column) for column in tables().metadata.tables[_stored(table)].columns}
    order = _OF_MESSAGES if table == MESSAGES else found
    return MappingProxyType({name: found[name] for name in order})


@lru_cache
def key_of(table: str) -> tuple[str, ...]:
    """Return the columns of a table's primary key; rows are read in their order."""
    return tuple(column.name for column in tables().metadata.tables[_stored(table)].primary_key)


def _stored(table: str) -> str:
    return f"{PREFIX}{'message' if table == MESSAGES else table}"


def _kind_of(column: Column[object]) -> Kind:
    return next((kind for type_, kind in _KINDS if isinstance(column.type, type_)), "string")


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """A choice of rows.

    `topics` and `keys`: only these; empty: all. `created_from` (included) and `created_to` (excluded) bound
    `created_at`. `where`: columns, each with the values of which it must have one, as texts. `halves`: half messages as
    well, whatever `topics` says; without it they are read only if `topics` names their topic.
    """

    topics: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    created_from: datetime | None = None
    created_to: datetime | None = None
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    halves: bool = False

    def describe(self) -> dict[str, str]:
        """Return the conditions by the names of Spark's options: short texts, equal for equal choices."""
        found = {
            "topics": _listed(self.topics),
            "keys": _listed(self.keys),
            "createdFrom": _told(self.created_from),
            "createdTo": _told(self.created_to),
            **{f"where.{name}": _listed(values) for name, values in sorted(self.where)},
        }
        if self.halves:
            found["halves"] = "true"
        return {name: _shortened(text) for name, text in found.items() if text or name.startswith("where.")}


def _listed(values: Iterable[str]) -> str:
    """Return values in the form of Spark's options; a comma inside a value is written twice."""
    return ",".join(sorted({value.replace(",", ",,") for value in values}))


def _told(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(UTC).isoformat()


def _shortened(text: str) -> str:
    """Shorten a long text to its beginning and a digest of all of it, because each offset of a stream holds it."""
    if len(text) <= _LONGEST_TOLD:
        return text
    return f"{text[:_LONGEST_TOLD]}… (digest {blake2b(text.encode(), digest_size=8).hexdigest()})"


#: Every message except half messages.
EVERYTHING = Narrowing()


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a window with ids from `first` to `last`: of its late transactions if `late`, else of its fresh ones."""

    window: Window
    first: int
    last: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """A reading of one table in the order of its primary key; of `messages` all rows, or those of one span.

    `dialect` is "postgresql" or "sqlite".
    """

    dialect: str
    schema: str | None = None
    table: str = MESSAGES
    columns: tuple[str, ...] = ()
    narrowing: Narrowing = EVERYTHING
    span: Span | None = None

    @property
    def selected(self) -> tuple[str, ...]:
        """The columns that a statement returns: those that are wanted, then the columns of the key not among them."""
        return (*self.columns, *(name for name in key_of(self.table) if name not in self.columns))

    def statement(self, after: Sequence[object] | None = None) -> str:
        """Return the statement that reads the rows; with `after`, the key of a row, only those that come after it."""
        speech = _SPEECHES[self.dialect]
        shown = ", ".join(f'{speech.shown(self.table, name)} AS "{name}"' for name in self.selected)
        return self._rows(shown, after=after)

    def first_ids(self, limit: int) -> str:
        """Return the statement that reads the lowest ids, at most `limit`."""
        return f"{self._rows('r.id')} LIMIT {int(limit)}"

    def _rows(self, shown: str, *, after: Sequence[object] | None = None) -> str:
        speech = _SPEECHES[self.dialect]
        conditions = list(_narrowed(speech, self.table, self.narrowing))
        if self.span is not None:
            conditions += _in_span(speech, self.span)
        if after is not None:
            conditions.append(_after(speech, self.table, after))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        order = ", ".join(f'r."{name}"' for name in key_of(self.table))
        return f"SELECT {shown} FROM {self._source(speech)}{where} ORDER BY {order}"

    def _source(self, speech: _Speech) -> str:
        table = _qualified(self.schema, _stored(self.table))
        late = self.span.window.late if self.span is not None and self.span.late else ()
        if len(late) < 2:
            return f"{table} AS r"
        assert self.span is not None
        return speech.late.format(
            table=table, values=", ".join(f"({n})" for n in late), first=self.span.first, last=self.span.last
        )


def page(parts: Sequence[Extraction], limit: int) -> Sql:
    """Return the statement that counts the rows in the parts of a window, up to `limit` + 1.

    It also reads the id of the `limit`-th row, or of the last one if there are fewer.
    """
    most = int(limit) + 1
    rows = " UNION ALL ".join(f"SELECT * FROM ({part.first_ids(most)}) AS p{i}" for i, part in enumerate(parts))
    numbered = f"SELECT id, row_number() OVER (ORDER BY id) AS nth FROM ({rows}) AS u ORDER BY id LIMIT {most}"
    return Sql(f"SELECT count(*), max(CASE WHEN nth <= {int(limit)} THEN id END) FROM ({numbered}) AS n")


def ends(schema: str | None) -> Sql:
    """Return the statement that reads the first and the last id of the log, each by one probe of the primary key."""
    table = _qualified(schema, _stored(MESSAGES))
    return Sql(f"SELECT (SELECT min(id) FROM {table}), (SELECT max(id) FROM {table})")


def purged(schema: str | None) -> str:
    """Return the statement that reads the position of what purge has ever deleted."""
    return f"SELECT purged FROM {_meta(schema)}"


def patience(dialect: str) -> str | None:
    """Return the statement that allows longer statements than a worker's connection does; None: there is no limit.

    They need longer because one statement looks at a whole window.
    """
    return _SPEECHES[dialect].patience


def settings(dialect: str) -> tuple[str, ...]:
    """Return the statements that a connection executes once before it reads, so that rows come by the primary key.

    The planner estimates that few rows fulfil the conditions on transactions. It would read the whole table and sort
    it, for a long log on disk. Parallel workers and jit are off because they would take CPU from the application.
    """
    return _SPEECHES[dialect].settings


def server(dialect: str, schema: str | None) -> str:
    """Return the statement that reads the server's system identifier and timeline, and the outbox's installation.

    The timeline is NULL on a standby.
    """
    return f"SELECT s.*, m.installation FROM ({_SPEECHES[dialect].server}) AS s, {_meta(schema)} AS m"


def replayed(lsn: str) -> str:
    """Return the statement that reads whether a PostgreSQL server has replayed its primary's log up to `lsn`.

    It reads true on a server that is no standby.
    """
    position = f"CAST({_quoted_by_postgresql(lsn)} AS pg_lsn)"
    return f"SELECT NOT pg_is_in_recovery() OR coalesce(pg_last_wal_replay_lsn() >= {position}, false) AS replayed"


def _meta(schema: str | None) -> str:
    return _qualified(schema, f"{PREFIX}meta")


def _qualified(schema: str | None, table: str) -> str:
    return f'"{schema}".{table}' if schema else table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speech:
    """The SQL in which one database differs from the others."""

    #: The expression that shows a column, by kind; a column of any other kind is shown as it is.
    show: Mapping[str, str]
    #: Expressions for columns that this database does not have, by name.
    replaced: Mapping[str, str]
    text: Callable[[str], str]
    uuid: Callable[[UUID], str]
    moment: Callable[[datetime], str]
    #: The number that tells whether a row is settled, written so that the planner still walks the primary key.
    number: str
    #: The rows of several late transactions: `{values}`, with ids from `{first}` to `{last}`.
    late: str
    server: str
    settings: tuple[str, ...]
    patience: str | None

    def shown(self, table: str, name: str) -> str:
        """Return the expression for a column, of a type that a driver returns without types of the database's own."""
        if name in self.replaced:
            return self.replaced[name]
        return self.show.get(columns_of(table)[name], "{c}").format(c=f'r."{name}"')

    def literal(self, kind: Kind, value: object) -> str:
        """Return a value as a literal that a column of this kind can be compared with."""
        if kind in ("long", "integer", "short"):
            return str(int(str(value)))
        if kind == "boolean":
            return "TRUE" if str(value).lower() == "true" else "FALSE"
        return self.uuid(UUID(str(value))) if kind == "uuid" else self.text(str(value))


def _narrowed(speech: _Speech, table: str, narrowing: Narrowing) -> Iterable[str]:
    kinds = columns_of(table)
    if narrowing.topics:
        halves = (HALF_TOPIC,) if narrowing.halves else ()
        yield f"r.topic IN ({_texts(speech, (*narrowing.topics, *halves))})"
    elif table == MESSAGES and not narrowing.halves:
        yield f"r.topic <> '{HALF_TOPIC}'"
    if narrowing.keys:
        yield f'r."key" IN ({_texts(speech, narrowing.keys)})'
    if narrowing.created_from is not None:
        yield f"r.created_at >= {speech.moment(narrowing.created_from)}"
    if narrowing.created_to is not None:
        yield f"r.created_at < {speech.moment(narrowing.created_to)}"
    for name, values in narrowing.where:
        column = speech.replaced.get(name, f'r."{name}"')
        yield f"{column} IN ({', '.join(speech.literal(kinds[name], value) for value in values)})"


def _texts(speech: _Speech, values: Iterable[str]) -> str:
    return ", ".join(speech.text(value) for value in values)


def _in_span(speech: _Speech, span: Span) -> list[str]:
    ids = [f"r.id >= {int(span.first)}", f"r.id <= {int(span.last)}"]
    late = span.window.late
    if span.late:
        # With several late transactions `_source` itself looks up each one.
        return [f"r.xact_id = {int(late[0])}", *ids] if len(late) == 1 else []
    head, end = span.window.fresh
    open = ", ".join(str(int(n)) for n in span.window.fresh_open)
    fresh = [f"{speech.number} >= {int(head)}", f"{speech.number} < {int(end)}"]
    return [*ids, *fresh, *([f"{speech.number} NOT IN ({open})"] if open else [])]


def _after(speech: _Speech, table: str, after: Sequence[object]) -> str:
    names, kinds = key_of(table), columns_of(table)
    values = [speech.literal(kinds[name], value) for name, value in zip(names, after, strict=True)]
    if len(names) == 1:
        return f'r."{names[0]}" > {values[0]}'
    left = ", ".join(f'r."{name}"' for name in names)
    return f"({left}) > ({', '.join(values)})"


def _quoted_by_postgresql(text: str) -> str:
    """Return a text as a literal that means the same with any settings of the server, and holds no colon.

    Where a statement of ours takes parameters, the word after a colon would be read as one.
    """
    quoted = text.replace("'", "''")
    if "\\" not in text and ":" not in text:
        return f"'{quoted}'"
    return "E'" + quoted.replace("\\", "\\\\").replace(":", "\\x3a") + "'"


def _quoted_by_sqlite(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _moment_of_sqlite(moment: datetime) -> str:
    """Return a moment as a literal that sorts by time among the stored texts.

    They are written to the millisecond or to the microsecond; of two with the same beginning the shorter sorts lower.
    """
    written = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    return f"'{written.removesuffix('000')}'"


_POSTGRESQL = _Speech(
    show=MappingProxyType({"uuid": "CAST({c} AS text)"}),
    replaced=MappingProxyType({}),
    text=_quoted_by_postgresql,
    uuid=lambda value: f"CAST('{value}' AS uuid)",
    moment=lambda moment: f"CAST('{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}+00' AS timestamptz)",
    # `+ 0` keeps the planner off the index (xact_id, id), which would sort the whole window.
    number="r.xact_id + 0",
    # One probe of (xact_id, id) each; OFFSET 0 keeps the planner from making a join of it.
    late="(SELECT m.* FROM (VALUES {values}) AS late(n) CROSS JOIN LATERAL (SELECT * FROM {table}"
    " WHERE xact_id = late.n AND id >= {first} AND id <= {last} ORDER BY xact_id, id OFFSET 0) AS m) AS r",
    server="SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system, CASE WHEN NOT"
    " pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END AS timeline",
    settings=(
        "SET enable_seqscan = off",
        "SET enable_bitmapscan = off",
        "SET jit = off",
        "SET max_parallel_workers_per_gather = 0",
    ),
    patience="SET statement_timeout = '10min'",
)
_SQLITE = _Speech(
    show=MappingProxyType(
        {
            "uuid": "substr({c}, 1, 8) || '-' || substr({c}, 9, 4) || '-' || substr({c}, 13, 4) || '-'"
            " || substr({c}, 17, 4) || '-' || substr({c}, 21)",
            # Microseconds since 1970; zeros are added to a moment that is stored to the millisecond.
            "timestamp": "CAST(strftime('%s', {c}) AS integer) * 1000000"
            " + CAST(substr(substr({c}, 21) || '000000', 1, 6) AS integer)",
        }
    ),
    replaced=MappingProxyType({"xact_id": "r.id"}),
    text=_quoted_by_sqlite,
    uuid=lambda value: f"'{value.hex}'",
    moment=_moment_of_sqlite,
    number="r.id",
    late="",
    server="SELECT NULL AS system, NULL AS timeline",
    settings=(),
    patience=None,
)
_SPEECHES: Mapping[str, _Speech] = MappingProxyType({"postgresql": _POSTGRESQL, "sqlite": _SQLITE})


def split(span: Span, parts: int) -> list[Span]:
    """Divide a span into `parts` spans of nearly the same width; into fewer when it has fewer ids."""
    width = span.last - span.first + 1
    number = max(1, min(parts, width))
    bounds = [span.first + width * i // number for i in range(number + 1)]
    return [replace(span, first=first, last=end - 1) for first, end in pairwise(bounds)]
