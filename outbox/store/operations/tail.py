"""The newest messages of the log, for people. The cost does not grow with the log."""

from __future__ import annotations

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS

#: So many of the newest messages are looked at.
MOST_SEEN = 10_000

_COLUMNS = COLUMNS.format(body="body", direct="NULL AS direct")
#: By primary key; bodies are read only of the messages that are returned.
_NEWEST = f"""
    SELECT {_COLUMNS} FROM {{message}} WHERE id IN (
        SELECT id FROM (
            SELECT id FROM (SELECT id, topic, key FROM {{message}} ORDER BY id DESC LIMIT :seen) AS seen
            WHERE topic <> :half AND topic = coalesce(:topic, topic) AND coalesce(key, '') = coalesce(:key, key, '')
            ORDER BY id DESC LIMIT :limit) AS chosen)
    ORDER BY id
"""
_ONE = f"SELECT {_COLUMNS} FROM {{message}} WHERE id = :id AND topic <> :half"


def newest(channel: Channel, limit: int, topic: str | None, key: str | None) -> list[Message]:
    """Return at most `limit` messages of the newest `MOST_SEEN`, in the order of the log; half messages apart."""
    rows = channel.rows(_NEWEST, seen=MOST_SEEN, half=HALF_TOPIC, topic=topic, key=key, limit=limit)
    return list(channel.database.dialect.reads.messages(rows))


def message(channel: Channel, id: int) -> Message | None:
    """Return a message of the log; None: there is none under this id, or a half message."""
    rows = channel.rows(_ONE, id=id, half=HALF_TOPIC)
    return next(iter(channel.database.dialect.reads.messages(rows)), None)
