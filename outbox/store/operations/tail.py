"""The newest messages of the log, for people. The cost does not grow with the log."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS
from outbox.store.log.log import ids_before

#: The version of message ids that begin with a moment in milliseconds, and the bits behind the moment.
_TIMED, _BITS_BEHIND = 7, 80
#: Some thousand years from now; a `datetime` ends in the year 9999.
_END_OF_TIME = 2**47
#: So long before its moment, by the clock of the database, and so long after it, a message is looked for first.
_EARLIER, _LATER = timedelta(minutes=1), timedelta(minutes=5)
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
#: A message id tells when it was made, by the clock of its writer: the message is looked for among those of that time.
_NEAR = """
    SELECT min(id) FROM {message} WHERE id > :after AND id <= :upto AND message_id = :message_id AND topic <> :half
"""
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

    The cost grows with the log where the message is not there, or the id does not tell the moment of writing.
    """
    asked = {"message_id": channel.database.dialect.values.bind_uuid(message_id), "half": HALF_TOPIC}
    found: int | None = None
    milliseconds = message_id.int >> _BITS_BEHIND
    if message_id.version == _TIMED and milliseconds < _END_OF_TIME:
        made = datetime.fromtimestamp(milliseconds / 1000, UTC)
        after, upto = (ids_before(channel, made + distance)[1] for distance in (-_EARLIER, _LATER))
        found = channel.rows(_NEAR, **asked, after=after, upto=upto)[0][0]
    return channel.rows(_ID_OF, **asked)[0][0] if found is None else found
