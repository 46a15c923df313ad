"""A dialect without RETURNING, ON CONFLICT, lists as parameters that become rows, and indexes on some of the rows.

SQLite stands for its database.
"""

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, MetaData, event, text

from outbox import schema
from outbox.model.slots import SLOTS
from outbox.model.topics import ANYTHING, Topics
from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native
from outbox.store.dialects.sqlite.channel import SqliteChannel
from outbox.store.dialects.sqlite.dialect import DIALECT as SQLITE
from outbox.store.dialects.statements import Parameters, Row, Script, Statement
from outbox.store.identity import first_rows
from tests.support.dialects import varied

#: What this database does not understand, with what it has instead of arrays.
FORBIDDEN = re.compile(r"\bRETURNING\b|\bON CONFLICT\b|\bunnest\b|\bjson_each\b|= ANY\b|\bpg_\w+|::\w+", re.IGNORECASE)

_EXPIRED = """
    UPDATE {dedup} SET message_id = :id, expires_at = {later} WHERE dedup_key = :key AND expires_at <= {now}
"""
_UNKNOWN = "INSERT OR IGNORE INTO {dedup} (dedup_key, message_id, expires_at) VALUES (:key, :id, {later})"
_OF_TOPICS = """(:topics IS NULL OR topic REGEXP :topics)
    AND (:exceptions IS NULL OR NOT topic REGEXP :exceptions)"""
_AMONG = "instr({list}, ',' || hex({value}) || ',') > 0"


def _records(parameter: str, columns: Mapping[str, str]) -> str:
    """Count the rows, because no function makes rows of a list."""
    values = ", ".join(
        f"json_extract(:{parameter}, '$[' || n || '][{place}]') AS {c}" for place, c in enumerate(columns)
    )
    return f"""(
        WITH RECURSIVE counted(n) AS (
            SELECT 0 WHERE json_array_length(:{parameter}) > 0
            UNION ALL SELECT n + 1 FROM counted WHERE n + 1 < json_array_length(:{parameter}))
        SELECT {values} FROM counted)"""


def _bind_list(values: Sequence[Any]) -> str:
    return "," + "".join(f"{str(value).encode().hex().upper()}," for value in values)


def _bind_topics(topics: Topics) -> Parameters:
    chosen = (*topics.names, *topics.patterns)
    return {
        "topics": None if topics.any_name else _expression(chosen),
        "exceptions": _expression(topics.exceptions) if topics.exceptions else None,
    }


def _expression(patterns: Sequence[str]) -> str:
    return "|".join(re.escape(each).replace(re.escape(ANYTHING), ".*") for each in patterns) or "(?!)"


def _claim(names: Mapping[str, str], keys: Sequence[tuple[str, UUID]], seconds: float) -> Script[set[str]]:
    """Claim key by key: one that has expired, or one that is not there."""
    claimed = set()
    for key, id in sorted(keys):
        bound = {"key": key, "id": id.hex, "seconds": seconds}
        for statement in (_EXPIRED, _UNKNOWN):
            ((touched,),) = yield Statement(statement.format(**names), bound, counts=True)
            if touched:
                claimed.add(key)
                break
    return claimed


def refuse(statement: str) -> None:
    """Raise on a statement that this database does not understand."""
    found = FORBIDDEN.search(statement)
    assert found is None, f"{found[0]} is not understood: {statement}"


class PlainChannel(SqliteChannel):
    """A connection on which only plain statements are understood."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(engine, name)
        _match(self._driver)

    def rows(self, statement: str, parameters: Parameters) -> list[Row]:
        """As SQLite."""
        refuse(statement)
        return super().rows(statement, parameters)

    def run(self, statement: str, parameters: Parameters) -> int:
        """As SQLite."""
        refuse(statement)
        return super().run(statement, parameters)


def refusing(engine: Engine) -> None:
    """Make the connections of the application refuse the same."""
    event.listen(engine, "connect", lambda driver, _record: _match(driver))
    event.listen(engine, "before_cursor_execute", lambda _connection, _cursor, statement, *_: refuse(statement))


def _match(driver: sqlite3.Connection) -> None:
    driver.create_function("regexp", 2, lambda pattern, topic: re.fullmatch(pattern, topic, re.DOTALL) is not None)


def made(engine: Engine) -> None:
    """Make the tables, with indexes on all rows."""
    tables = schema.made_in(MetaData(), replace(part_of("sqlite", Native), partial=lambda _condition: {}))
    with engine.begin() as connection:
        tables.metadata.create_all(connection)
        for statement in first_rows(tables, connection.dialect, schema.VERSION, SLOTS):
            connection.execute(text(statement))


PLAIN = varied(
    SQLITE,
    among_numbers=_AMONG,
    among_texts=_AMONG,
    among_many=_AMONG,
    records=_records,
    bind_list=_bind_list,
    of_topics=_OF_TOPICS,
    bind_topics=_bind_topics,
    claim=_claim,
    insert_once="INSERT OR IGNORE INTO",
    unless_there="",
    connect=PlainChannel,
    connect_plainly=PlainChannel,
)
