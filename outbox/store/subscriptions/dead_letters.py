"""Dead letters for people, and the requests of people, which the lease holder carries out."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal

from outbox.model.message import Message, stored_uuid
from outbox.store.database import Channel
from outbox.store.dialects.dialect import COLUMNS
from outbox.store.dialects.statements import Row

Verb = Literal["replay", "discard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """A choice of dead letters: of these ids, topic and key; None: any."""

    ids: tuple[int, ...] | None = None
    topic: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A parked message without the body, and the request of a person."""

    subscription: str
    id: int
    message_id: uuid.UUID
    topic: str
    key: str | None
    state: str
    attempts: int
    error: str | None
    created_at: datetime | None
    parked_at: datetime | None
    due_at: datetime | None
    request: str | None
    requested_by: str | None
    request_reason: str | None
    requested_at: datetime | None


_NAMES = tuple(each.name for each in fields(DeadLetter))
_MOMENTS = ("created_at", "parked_at", "due_at", "requested_at")
_FIELDS = ", ".join(_NAMES)
#: By (subscription, state, id); at most `limit` rows, in the order of the log.
_LIST = f"""
    SELECT {_FIELDS} FROM {{parked}}
    WHERE subscription = :subscription AND state = 'dead' AND id > :after AND {{chosen}}
    ORDER BY id LIMIT :limit
"""
_COUNT = "SELECT count(*) FROM {parked} WHERE subscription = :subscription AND state = 'dead' AND {chosen}"
#: By primary key, whatever the state: a person who looks for a message knows only its id.
_ONE = f"SELECT {_FIELDS} FROM {{parked}} WHERE subscription = :subscription AND id = :id"
_MESSAGE = f"""
    SELECT {COLUMNS.format(body="body", direct="NULL AS direct")}, attempts + 1
    FROM {{parked}} WHERE subscription = :subscription AND id = :id
"""
#: The last request counts. Nothing else of the row is touched: it belongs to the lease holder.
_REQUEST = """
    UPDATE {parked} SET request = :request, requested_by = :by, request_reason = :reason, requested_at = {now}
    WHERE subscription = :subscription AND state = 'dead' AND {chosen}
"""


class DeadLetters:
    """The dead letters of one subscription."""

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._database = channel.database
        self._common = {"subscription": subscription}

    def list(self, chosen: DeadLetterFilter, limit: int, after: int = -1) -> list[DeadLetter]:
        """Return at most `limit` dead letters with ids above `after`, in the order of the log."""
        condition, parameters = self._condition(chosen)
        statement = self._database.sql(_LIST, chosen=condition)
        rows = self._channel.rows(statement, **self._common, **parameters, after=after, limit=limit)
        return [self._of(row) for row in rows]

    def count(self, chosen: DeadLetterFilter) -> int:
        """Return how many of the chosen dead letters there are."""
        condition, parameters = self._condition(chosen)
        statement = self._database.sql(_COUNT, chosen=condition)
        return int(self._channel.rows(statement, **self._common, **parameters)[0][0])

    def find(self, id: int) -> tuple[DeadLetter, Message] | None:
        """Return a parked message in any state, with its body and headers; None: no message is parked under this id."""
        parameters = {**self._common, "id": id}
        rows = self._channel.rows(_ONE, **parameters)
        messages = self._database.dialect.reads.messages(self._channel.rows(_MESSAGE, **parameters))
        return (self._of(rows[0]), messages[0]) if rows and messages else None

    def request(self, chosen: DeadLetterFilter, verb: Verb, by: str, reason: str | None) -> int:
        """Write a request on dead letters; return on how many it was written."""
        condition, parameters = self._condition(chosen)
        statement = self._database.sql(_REQUEST, chosen=condition)
        return self._channel.run(statement, **self._common, **parameters, request=verb, by=by, reason=reason)

    def _condition(self, chosen: DeadLetterFilter) -> tuple[str, dict[str, Any]]:
        parts: list[str] = []
        parameters: dict[str, Any] = {}
        if chosen.ids is not None:
            parts.append(self._database.among("id", numbers="ids"))
            parameters["ids"] = self._database.bind(chosen.ids)
        for name, value in (("topic", chosen.topic), ("key", chosen.key)):
            if value is not None:
                parts.append(f"{name} = :{name}")
                parameters[name] = value
        return " AND ".join(parts) or "TRUE", parameters

    def _of(self, row: Row) -> DeadLetter:
        values = dict(zip(_NAMES, row, strict=True))
        moments = {name: self._database.dialect.clock.read(values[name]) for name in _MOMENTS}
        return DeadLetter(**{**values, **moments, "message_id": stored_uuid(values["message_id"])})
