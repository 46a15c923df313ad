"""The statements that read whole tables, and parts of windows, outside of SQLAlchemy.

Values stand in the text, because parameters keep PostgreSQL's drivers from using COPY: whole numbers, and literals that
are quoted here. This module opens no connection and needs no driver: tasks of Spark run where psycopg is not
installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from outbox.store.dialects import part_of
from outbox.store.dialects.speech import Speech
from outbox.store.log.filtering import condition

Kind = Literal["long", "integer", "short", "boolean", "timestamp", "binary", "uuid", "string"]

MESSAGES = "messages"
_LONGEST_TOLD = 200

#: The columns of `messages`, in the order in which they are shown. Where the log has no `xact_id`, it is the id.
_OF_MESSAGES = (
    "id", "xact_id", "message_id", "topic", "key", "slot", "tags", "headers", "content_type", "body", "created_at",
    "deliver_at", "expires_at",
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
    """Return the readable tables: the log as `messages`, the others by their names without the prefix."""
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
    `created_at`. `where`: columns with their permitted values, as texts. `filter`: a condition in SQL92. `halves`: also
    half messages, whatever `topics` says; else half messages are read only if `topics` names their topic.
    """

    topics: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    created_from: datetime | None = None
    created_to: datetime | None = None
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()
    filter: str | None = None
    halves: bool = False

    def describe(self) -> dict[str, str]:
        """Return the conditions by the names of Spark's options: short texts, equal for equal choices."""
        found = {
            "topics": _listed(self.topics),
            "keys": _listed(self.keys),
            "createdFrom": _told(self.created_from),
            "createdTo": _told(self.created_to),
            "filter": self.filter or "",
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
    """Shorten a long text to the beginning and a digest, because each offset of a stream holds the text."""
    if len(text) <= _LONGEST_TOLD:
        return text
    return f"{text[:_LONGEST_TOLD]}… (digest {blake2b(text.encode(), digest_size=8).hexdigest()})"


#: Every message except half messages.
EVERYTHING = Narrowing()


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a window with ids from `first` to `last`: of the late transactions if `late`, else of the fresh part."""

    window: Window
    first: int
    last: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """A reading of one table in the order of the primary key; of `messages` all rows, or a span.

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
        """The columns of a statement: the wanted columns, then the columns of the key that are not among them."""
        return (*self.columns, *(name for name in key_of(self.table) if name not in self.columns))

    def statement(self, after: Sequence[object] | None = None) -> str:
        """Return the statement that reads the rows; with `after`, the key of a row, only the rows that follow."""
        speech = part_of(self.dialect, Speech)
        shown = ", ".join(f'{_shown(speech, self.table, name)} AS "{name}"' for name in self.selected)
        return self._rows(shown, after=after)

    def first_ids(self, limit: int) -> str:
        """Return the statement that reads the lowest ids, at most `limit`."""
        return f"{self._rows('r.id')} LIMIT {int(limit)}"

    def _rows(self, shown: str, *, after: Sequence[object] | None = None) -> str:
        speech = part_of(self.dialect, Speech)
        conditions = list(_narrowed(speech, self.table, self.narrowing))
        if self.span is not None:
            conditions += _in_span(speech, self.span)
        if after is not None:
            conditions.append(_after(speech, self.table, after))
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        order = ", ".join(f'r."{name}"' for name in key_of(self.table))
        return f"SELECT {shown} FROM {self._source(speech)}{where} ORDER BY {order}"

    def _source(self, speech: Speech) -> str:
        table = _qualified(self.schema, _stored(self.table))
        late = self.span.window.late if self.span is not None and self.span.late else ()
        if len(late) < 2:
            return f"{table} AS r"
        assert self.span is not None
        return speech.late.format(
            table=table, values=", ".join(f"({n})" for n in late), first=self.span.first, last=self.span.last
        )


def page(parts: Sequence[Extraction], limit: int) -> str:
    """Return the statement that counts the rows in the parts of a window, up to `limit` + 1.

    The second column is the id of the `limit`-th row, or of the last if there are fewer.
    """
    most = int(limit) + 1
    rows = " UNION ALL ".join(f"SELECT * FROM ({part.first_ids(most)}) AS p{i}" for i, part in enumerate(parts))
    numbered = f"SELECT id, row_number() OVER (ORDER BY id) AS nth FROM ({rows}) AS u ORDER BY id LIMIT {most}"
    return f"SELECT count(*), max(CASE WHEN nth <= {int(limit)} THEN id END) FROM ({numbered}) AS n"


def purged(schema: str | None) -> str:
    """Return the statement that reads the position of what purge has ever deleted."""
    return f"SELECT purged FROM {_meta(schema)}"


def server(dialect: str, schema: str | None) -> str:
    """Return the statement that reads the server's system identifier and timeline, and the outbox's installation.

    The timeline is NULL on a standby.
    """
    return f"SELECT s.*, m.installation FROM ({part_of(dialect, Speech).server}) AS s, {_meta(schema)} AS m"


def replayed(dialect: str, lsn: str) -> str:
    """Return the statement that reads True if a server has replayed the primary's log up to `lsn`, or is no standby."""
    found = part_of(dialect, Speech)
    return found.replayed.format(lsn=found.text(lsn))


def _meta(schema: str | None) -> str:
    return _qualified(schema, f"{PREFIX}meta")


def _qualified(schema: str | None, table: str) -> str:
    return f'"{schema}".{table}' if schema else table


def _shown(speech: Speech, table: str, name: str) -> str:
    """Return the expression for a column, of a type that a driver returns without types of the database's own."""
    if name in speech.replaced:
        return speech.replaced[name]
    return speech.show.get(columns_of(table)[name], "{c}").format(c=f'r."{name}"')


def _literal(speech: Speech, kind: Kind, value: object) -> str:
    """Return a value as a literal for comparison with a column of this kind."""
    if kind in ("long", "integer", "short"):
        return str(int(str(value)))
    if kind == "boolean":
        return "TRUE" if str(value).lower() == "true" else "FALSE"
    return speech.uuid(UUID(str(value))) if kind == "uuid" else speech.text(str(value))


def _narrowed(speech: Speech, table: str, narrowing: Narrowing) -> Iterable[str]:
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
        yield f"{column} IN ({', '.join(_literal(speech, kinds[name], value) for value in values)})"
    if narrowing.filter is not None:
        yield condition(narrowing.filter, speech.filtering, speech.text)


def _texts(speech: Speech, values: Iterable[str]) -> str:
    return ", ".join(speech.text(value) for value in values)


def _in_span(speech: Speech, span: Span) -> list[str]:
    ids = [f"r.id >= {int(span.first)}", f"r.id <= {int(span.last)}"]
    late = span.window.late
    if span.late:
        # With several late transactions `_source` itself looks up each one.
        return [f"r.xact_id = {int(late[0])}", *ids] if len(late) == 1 else []
    head, end = span.window.fresh
    open = ", ".join(str(int(n)) for n in span.window.fresh_open)
    fresh = [f"{speech.number} >= {int(head)}", f"{speech.number} < {int(end)}"]
    return [*ids, *fresh, *([f"{speech.number} NOT IN ({open})"] if open else [])]


def _after(speech: Speech, table: str, after: Sequence[object]) -> str:
    names, kinds = key_of(table), columns_of(table)
    values = [_literal(speech, kinds[name], value) for name, value in zip(names, after, strict=True)]
    if len(names) == 1:
        return f'r."{names[0]}" > {values[0]}'
    left = ", ".join(f'r."{name}"' for name in names)
    return f"({left}) > ({', '.join(values)})"


def split(span: Span, parts: int) -> list[Span]:
    """Divide a span into `parts` spans of nearly the same width; into fewer when it has fewer ids."""
    width = span.last - span.first + 1
    number = max(1, min(parts, width))
    bounds = [span.first + width * i // number for i in range(number + 1)]
    return [replace(span, first=first, last=end - 1) for first, end in pairwise(bounds)]
