"""The options of the source: texts, as Spark hands them over, checked and turned into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from difflib import get_close_matches
from typing import Literal, TypeVar, cast, get_args
from uuid import UUID

from outbox.errors import FilterError, InvalidMessageError, OptionError, PositionError
from outbox.model.filter.sql92 import chosen_filter
from outbox.model.limits import HALF_TOPIC, checked_topic
from outbox.spark.offset import Mark
from outbox.spark.place import Address, Place
from outbox.store.log.extraction import MESSAGES, Kind, Narrowing, columns_of, table_names

T = TypeVar("T")

Start = Literal["earliest", "latest"]

NAMES = (
    "url", "plannerUrl", "schema", "table", "columns", "topics", "keys", "createdFrom", "createdTo", "filter", "halves",
    "since", "until", "startingPosition", "partitions", "rowsPerPartition", "maxRowsPerTrigger", "pollIntervalMs",
    "retries", "onIdentityChange", "onSelectionChange", "failOnDataLoss", "reader",
)  # fmt: skip
_WHERE = "where."
#: The properties that Spark itself gives to a table of `create table`. Spark hands them over together with the options,
#: and each option a second time, with a prefix.
_RESERVED = ("owner", "provider", "comment", "location", "external", "is_managed_location", "collation")
_AGAIN = "option."
_OF_TABLES = (
    "Spark reads a table of `create table … using outbox` without the table's options: write select … from NAME with"
    " (url '…'), or use a view: create temporary view NAME using outbox options (url '…')"
)
#: Options that only batch reads have, and those that only streams have.
_OF_BATCHES = ("since", "until")
_OF_STREAMS = (
    "startingPosition", "maxRowsPerTrigger", "pollIntervalMs", "onIdentityChange", "onSelectionChange", "reader",
)  # fmt: skip


class Options:
    """The checked options of one read. Names are in upper or lower case, as everywhere in Spark.

    All that can be checked without a connection is checked here; an `OptionError` names the option, limit and fix.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._given = {_name_of(name): str(value) for name, value in options.items() if not _is_reserved(name)}
        self.table = self._choice("table", MESSAGES, table_names())
        if self.table != MESSAGES:
            self._require_no_window()
        self.place = self._place()
        self.columns = self._columns()
        self.narrowing = self._narrowing()
        self.since, self.until = self._mark("since"), self._mark("until")
        self.start = self._start()
        self.partitions = self._number("partitions", 1, 10_000)
        self.rows_per_partition = self._number("rowsPerPartition", 1, 1_000_000_000) or 500_000
        self.max_rows = self._number("maxRowsPerTrigger", 1, 1_000_000_000)
        milliseconds = self._number("pollIntervalMs", 0, 3_600_000)
        self.poll_seconds = 0.25 if milliseconds is None else milliseconds / 1000
        retries = self._number("retries", 0, 100)
        self.retries = 5 if retries is None else retries
        self.on_identity_change = self._choice("onIdentityChange", "fail", ("fail", "accept", "replay"))
        self.on_selection_change = self._choice("onSelectionChange", "fail", ("fail", "accept"))
        self.fail_on_data_loss = self._flag("failOnDataLoss", default=True)
        self.reader = self._given.get("reader")

    def require_batch(self) -> None:
        """Raise if an option is set that only a stream has."""
        self._refuse(_OF_STREAMS, "only for spark.readStream")

    def require_stream(self) -> None:
        """Raise if an option is set that only a batch read has, or a table other than `messages`."""
        self._refuse(_OF_BATCHES, "a stream begins at startingPosition and has no end")
        if self.table != MESSAGES:
            raise OptionError(f"table: only {MESSAGES} can be followed, not {self.table}; use spark.read")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in self._given:
                raise OptionError(f"{name}: {why}; leave the option out")

    def _place(self) -> Place:
        rows, planner = (
            Address(self._given[name], name) if name in self._given else None for name in ("url", "plannerUrl")
        )
        if rows is None:
            raise _error("url", "say where the database is", "give the option" if self._given else _OF_TABLES)
        return Place(rows=rows, planner=planner, schema=self._given.get("schema"))

    def _columns(self) -> tuple[str, ...]:
        columns = self._list("columns")
        for name in columns:
            self._require_column("columns", name)
        if len(set(columns)) < len(columns):
            raise _error("columns", "name a column twice", "name each column once")
        return columns or tuple(columns_of(self.table))

    def _narrowing(self) -> Narrowing:
        for option, column in (
            ("topics", "topic"),
            ("keys", "key"),
            ("createdFrom", "created_at"),
            ("createdTo", "created_at"),
            ("filter", "headers"),
        ):
            if option in self._given:
                self._require_column(option, column)
        created_from, created_to = self._moment("createdFrom"), self._moment("createdTo")
        if created_from is not None and created_to is not None and created_from >= created_to:
            raise _error("createdFrom", f"{created_from} is not before createdTo, {created_to}", "exchange them")
        return Narrowing(
            topics=self._topics(),
            keys=self._list("keys"),
            created_from=created_from,
            created_to=created_to,
            where=tuple(self._where()),
            filter=self._filter(),
            halves=self._flag("halves", default=False),
        )

    def _topics(self) -> tuple[str, ...]:
        topics = self._list("topics")
        for topic in topics:
            if topic == HALF_TOPIC:
                continue
            try:
                checked_topic(topic)
            except InvalidMessageError as error:
                raise _error(
                    "topics", f"one {error.limit}", "topics are whole names here; patterns are for relays"
                ) from None
        return topics

    def _where(self) -> list[tuple[str, tuple[str, ...]]]:
        found = []
        for name, text in self._given.items():
            if name.startswith(_WHERE):
                column = name.removeprefix(_WHERE)
                self._require_column(name, column)
                # Some columns hold empty texts, so a single empty value is no list with an empty part.
                values = self._list(name) if text else ("",)
                for value in values:
                    _check_value(name, columns_of(self.table)[column], value)
                found.append((column, values))
        return found

    def _filter(self) -> str | None:
        try:
            return chosen_filter(self._given.get("filter"))
        except FilterError as error:
            raise OptionError(str(error)) from None

    def _start(self) -> Start | Mark:
        text = self._given.get("startingPosition", "earliest")
        if text.lower() in get_args(Start):
            return cast("Start", text.lower())
        return self._mark("startingPosition") or "earliest"

    def _mark(self, name: str) -> Mark | None:
        if name not in self._given:
            return None
        try:
            return Mark.parse(self._given[name])
        except PositionError as error:
            raise OptionError(f"{name}: {error}") from error

    def _require_no_window(self) -> None:
        for name in ("since", "until", "halves", "partitions", "rowsPerPartition", *_OF_STREAMS):
            if name in self._given:
                raise _error(
                    name, f"means nothing for the table {self.table}", f"leave the option out, or read {MESSAGES}"
                )

    def _require_column(self, option: str, column: str) -> None:
        names = tuple(columns_of(self.table))
        if column not in names:
            raise _error(option, f"the table {self.table} has no column {column!r}", _did_you_mean(column, names))

    def _list(self, name: str) -> tuple[str, ...]:
        """Return the names in an option, separated by commas; a comma inside a name is written twice."""
        if name not in self._given:
            return ()
        if "\0" in self._given[name]:
            raise _error(name, "holds a NUL, which no column does", "correct the value")
        found = tuple(part.strip().replace("\0", ",") for part in self._given[name].replace(",,", "\0").split(","))
        if not all(found):
            raise _error(name, "has an empty part", "write names with a comma between two")
        return found

    def _moment(self, name: str) -> datetime | None:
        if name not in self._given:
            return None
        moment = self._read(name, datetime.fromisoformat, "write a time such as 2026-01-31T12:00:00Z")
        if moment.tzinfo is None:
            raise _error(name, f"{self._given[name]!r:.80} has no time zone", "append Z for UTC")
        return moment

    def _read(self, name: str, convert: Callable[[str], T], fix: str) -> T:
        try:
            return convert(self._given[name].strip())
        except ValueError:
            raise _error(name, f"{self._given[name]!r:.80} cannot be read", fix) from None

    def _number(self, name: str, least: int, most: int) -> int | None:
        if name not in self._given:
            return None
        fix = f"write a whole number from {least} to {most}"
        number = self._read(name, int, fix)
        if not least <= number <= most:
            raise _error(name, f"{self._given[name]!r:.80} is not allowed", fix)
        return number

    def _flag(self, name: str, *, default: bool) -> bool:
        return self._choice(name, str(default).lower(), ("true", "false")) == "true"

    def _choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self._given.get(name, default).strip().lower()
        if value not in allowed:
            fix = f"did you mean {close}?" if (close := _close(value, allowed)) else "choose from the list"
            raise _error(name, f"{value!r:.80} is none of {', '.join(allowed)}", fix)
        return value


def _is_reserved(given: str) -> bool:
    return given.lower() in _RESERVED or given.lower().startswith(_AGAIN)


def _name_of(given: str) -> str:
    lower = given.lower()
    if lower.startswith(_WHERE):
        return lower
    for name in NAMES:
        if name.lower() == lower:
            return name
    if lower == "path":
        raise _error("path", "the source reads a database, no path", "call load() without an argument")
    raise _error(given, "there is no such option", _did_you_mean(given, NAMES))


def _check_value(name: str, kind: Kind, value: str) -> None:
    """Refuse a value that a column of this kind cannot have."""
    checks: dict[Kind, Callable[[str], object]] = {"long": int, "integer": int, "short": int, "uuid": UUID}
    if kind in ("binary", "timestamp"):
        raise _error(name, f"a column of type {kind} cannot be compared", "filter the DataFrame")
    if kind == "boolean" and value.lower() not in ("true", "false"):
        raise _error(name, f"{value!r:.80} is neither true nor false", "write true or false")
    try:
        checks.get(kind, str)(value)
    except ValueError:
        raise _error(name, f"{value!r:.80} is no value of type {kind}", "correct the value") from None


def _close(given: str, names: tuple[str, ...]) -> str | None:
    """Return the name most like the given text; None if no name is close."""
    close = get_close_matches(given.lower(), [name.lower() for name in names], n=1)
    return next((name for name in names if close and name.lower() == close[0]), None)


def _did_you_mean(given: str, names: tuple[str, ...]) -> str:
    found = _close(given, names)
    return f"did you mean {found}?" if found else f"choose from {', '.join(names)}"


def _error(option: str, limit: str, fix: str) -> OptionError:
    return OptionError(f"{option}: {limit}; {fix}")
