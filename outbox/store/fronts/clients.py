"""The clients of all fronts: a front that does not know a client yet finds here what the client is."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

from outbox.store.database import Channel

#: A row is kept for so long after the client was seen last. While the client is there, the row is written so often.
KEPT, AGAIN = timedelta(hours=1), timedelta(minutes=30)
#: A question about a client makes the row so much older than one that is due, and stays for so long.
_OLDER, _OPEN = timedelta(seconds=1), timedelta(minutes=1)

_COLUMNS = {"its_id": "text", "its_kind": "text", "its_topics": "text"}
_NEW = """
    {insert_once} {client} (id, kind, topics, seen_at)
    SELECT r.its_id, r.its_kind, r.its_topics, {now} FROM {rows} AS r WHERE TRUE {unless_there}
"""
_CHANGES = "kind = r.its_kind, topics = r.its_topics, seen_at = {now}"
_JOINED = "id = r.its_id AND (kind <> r.its_kind OR topics <> r.its_topics OR seen_at < {earlier})"
_ALIVE = "SELECT id FROM {client} WHERE {chosen} AND seen_at > {earlier}"
#: The row of a client that another front asks about is older than one that is due.
_ASK = "UPDATE {client} SET seen_at = {earlier} WHERE {chosen} AND seen_at > {earlier}"
_ASKED = "SELECT id FROM {client} WHERE seen_at <= {earlier} AND seen_at > {before}"
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
            "joined": _JOINED.format(earlier=self._ago(AGAIN)),
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
        return self._channel.run(self._channel.database.sql(_PRUNE, earlier=self._ago(KEPT)))

    def ask(self, ids: Collection[str], lately: timedelta) -> set[str]:
        """Return which clients were seen lately by a front, and let all fronts note anew those that are there."""
        database, chosen = self._channel.database, self._channel.database.among("id", texts="ids")
        bound = database.bind(sorted(ids))
        alive = self._channel.rows(database.sql(_ALIVE, chosen=chosen, earlier=self._ago(lately)), ids=bound)
        self._channel.run(database.sql(_ASK, chosen=chosen, earlier=self._ago(AGAIN + _OLDER)), ids=bound)
        return {id for (id,) in alive}

    def asked(self) -> list[str]:
        """Return the clients that a front asks about."""
        statement = self._channel.database.sql(_ASKED, earlier=self._ago(AGAIN), before=self._ago(AGAIN + _OPEN))
        return [id for (id,) in self._channel.rows(statement)]

    def _ago(self, time: timedelta) -> str:
        return self._channel.database.later(f"-{time.total_seconds()}")
