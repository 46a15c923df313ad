"""The clients of all fronts: a front that does not know a client yet finds here what the client is."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

from outbox.store.database import Channel

#: A row is kept for so long after the client was seen last. While the client is there, the row is written so often.
KEPT, AGAIN = timedelta(hours=1), timedelta(minutes=30)

_COLUMNS = {"its_id": "text", "its_kind": "text", "its_topics": "text"}
_NEW = """
    {insert_once} {client} (id, kind, topics, seen_at)
    SELECT r.its_id, r.its_kind, r.its_topics, {now} FROM {rows} AS r WHERE TRUE {unless_there}
"""
_CHANGES = "kind = r.its_kind, topics = r.its_topics, seen_at = {now}"
_JOINED = "id = r.its_id AND (kind <> r.its_kind OR topics <> r.its_topics OR seen_at < {earlier})"
_FIND = "SELECT id, kind, topics FROM {client} WHERE {chosen}"
_PRUNE = "DELETE FROM {client} WHERE seen_at < {earlier}"


class ClientRow(NamedTuple):
    """A client: its id, its kind in RocketMQ's words, and its topics."""

    id: str
    kind: str
    topics: frozenset[str]


class ClientRows:
    """The clients of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def seen(self, clients: Collection[ClientRow]) -> None:
        """Note clients: one statement where none was there before. A client that was seen lately writes no row."""
        database = self._channel.database
        # Sorted, because two fronts that lock in different orders could wait for each other.
        rows = [(each.id, each.kind, json.dumps(sorted(each.topics))) for each in sorted(clients)]
        source = database.records("rows", **_COLUMNS)
        bound = database.bind_records("rows", rows, **_COLUMNS)
        if self._channel.run(database.sql(_NEW, rows=source), **bound) == len(rows):
            return
        parts = {
            "table": database.names["client"],
            "changes": _CHANGES.format(**database.names),
            "source": f"{source} AS r",
            "joined": _JOINED.format(earlier=database.later(f"-{AGAIN.total_seconds()}")),
        }
        self._channel.run(database.sql(database.dialect.writes.update_from, **parts), **bound)

    def find(self, ids: Collection[str]) -> list[ClientRow]:
        """Return the clients of these ids that are there."""
        database = self._channel.database
        statement = database.sql(_FIND, chosen=database.among("id", texts="ids"))
        rows = self._channel.rows(statement, ids=database.bind(ids))
        return [ClientRow(id, kind, frozenset(json.loads(topics))) for id, kind, topics in rows]

    def prune(self) -> int:
        """Delete the clients that were not seen for long; return how many."""
        database = self._channel.database
        return self._channel.run(database.sql(_PRUNE, earlier=database.later(f"-{KEPT.total_seconds()}")))
