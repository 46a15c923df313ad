"""The newest messages of the log, for people. The cost does not grow with the log."""

from __future__ import annotations

from uuid import UUID

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS

#: So many of the newest messages are looked at.
MOST_SEEN = 10_000

_COLUMNS = COLUMNS.format(body="body")
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
#: Half messages apart, which share their id with the message. No index has the message ids: people ask rarely.
_ID_OF = """
    SELECT min(id) FROM (
        SELECT id FROM {parked} WHERE message_id = :message_id AND topic <> :half
        UNION ALL SELECT id FROM {message} WHERE message_id = :message_id AND topic <> :half) AS found
"""


def newest(channel: Channel, limit: int, topic: str | None, key: str | None) -> list[Message]:
    """Return at most `limit` messages of the newest `MOST_SEEN`, in the order of the log; half messages apart."""
    rows = channel.rows(_NEWEST, seen=MOST_SEEN, half=HALF_TOPIC, topic=topic, key=key, limit=limit)
    return list(channel.database.dialect.reads.messages(rows))


def message(channel: Channel, id: int) -> Message | None:
    """Return a message of the log; None: there is none under this id, or a half message."""
    rows = channel.rows(_ONE, id=id, half=HALF_TOPIC)
    return next(iter(channel.database.dialect.reads.messages(rows)), None)


def id_of(channel: Channel, message_id: UUID) -> int | None:
    """Return the id in the log of a message that is parked or in the log; None: there is none, or a half message.

    The cost grows with the log.
    """
    bound = channel.database.dialect.values.bind_uuid(message_id)
    found: int | None = channel.rows(_ID_OF, message_id=bound, half=HALF_TOPIC)[0][0]
    return found
