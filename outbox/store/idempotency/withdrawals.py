"""Withdrawals: delayed messages that their writer takes back before they are due. The log keeps the message.

A withdrawal is a row of its own, written in the writer's transaction, and readers ask for such rows before they hand
delayed messages over. The writer locks the id for the rest of the transaction, and only then looks whether the message
is due. A reader only hands over what is due, and leaves alone what a writer has locked. So whoever comes second knows
what the other one did.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from outbox.model.message import Message
from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Parameters, Script, Statement

#: Among the advisory locks of a database.
_SEED = zlib.crc32(b"outbox withdrawal")
#: By the index of delayed messages. The moment is that of the statement, after the lock.
_WITHDRAW = """
    {insert_once} {withdrawal} (message_id, withdrawn, at)
    SELECT m.message_id, TRUE, {now} FROM {message} AS m WHERE m.message_id = :id AND m.deliver_at IS NOT NULL
    GROUP BY m.message_id HAVING min(m.deliver_at) > {now} {unless_there}
"""
_STANDS = "SELECT withdrawn FROM {withdrawal} WHERE message_id = :id"
_TRY = "SELECT t.id FROM {tried} AS t WHERE NOT {share}"
#: By primary key.
_AMONG = """
    SELECT t.id FROM {tried} AS t JOIN {withdrawal} AS w ON w.message_id = CAST(t.id AS {uuid}) WHERE w.withdrawn
"""
#: The writer would take the message for one that is not due.
_EARLY = """
    {insert_once} {withdrawal} (message_id, withdrawn, at)
    SELECT CAST(t.id AS {uuid}), FALSE, {now} FROM {tried} AS t WHERE TRUE {unless_there}
"""
#: By primary key.
_AT_AMONG = """
    SELECT t.id, w.at FROM {tried} AS t JOIN {withdrawal} AS w ON w.message_id = CAST(t.id AS {uuid}) WHERE w.withdrawn
"""
#: By primary key.
_AT = "SELECT at FROM {withdrawal} WHERE message_id = :id AND withdrawn"


def withdrawn_at(channel: Channel, message_id: UUID) -> datetime | None:
    """Return the moment at which a message was taken back by its writer; None: the message was not."""
    rows = channel.rows(_AT, id=channel.database.dialect.values.bind_uuid(message_id))
    return channel.database.moment(rows[0][0]) if rows else None


def withdrawals_among(channel: Channel, message_ids: Iterable[UUID]) -> dict[UUID, datetime]:
    """Return the moments at which writers took messages back, of these, by message id."""
    database = channel.database
    given = {str(database.dialect.values.bind_uuid(each)): each for each in message_ids}
    bound = database.bind_records("ids", [(name,) for name in sorted(given)], id="text")
    rows = channel.rows(database.sql(_AT_AMONG, tried=database.records("ids", id="text")), **bound) if given else ()
    return {given[name]: database.moment(at) for name, at in rows}


class Withdrawing:
    """Takes messages back, in the transaction of whoever calls."""

    def __init__(self, database: Database) -> None:
        self._database = database
        own = database.dialect.locks.own_text
        self._lock = None if own is None else database.sql(f"SELECT {own.format(text=':name', seed=_SEED)}")
        self._bind_uuid = database.dialect.values.bind_uuid
        self._withdraw, self._stands = database.sql(_WITHDRAW), database.sql(_STANDS)

    def withdraw(self, message_id: UUID) -> Script[bool]:
        """Take a delayed message back; return whether it was in time: nobody gets the message if this commits."""
        bound = {"id": self._bind_uuid(message_id)}
        if self._lock is not None:
            yield Statement(self._lock, {"name": str(message_id)}, returns=True)
        yield Statement(self._withdraw, bound)
        rows = yield Statement(self._stands, bound, returns=True)
        return bool(rows and rows[0][0])


@dataclass(frozen=True, slots=True)
class Recalled:
    """Messages that are `free` to be handed over, that are `withdrawn`, and whose writer is about to decide: `open`."""

    free: list[Message]
    withdrawn: list[Message] = field(default_factory=list)
    open: list[Message] = field(default_factory=list)


class Withdrawals:
    """Asked by a reader before delayed messages are handed over."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._database = database = channel.database
        share = database.dialect.locks.try_share_text
        tried = database.records("ids", id="text")
        self._try = share and database.sql(_TRY, tried=tried, share=share.format(text="t.id", seed=_SEED))
        self._among, self._early = (database.sql(each, tried=tried) for each in (_AMONG, _EARLY))

    def of(self, messages: list[Message], *, in_order: bool = False, inside: bool = False) -> Recalled:
        """Return which of these messages were taken back. The others are too late to be taken back from now on.

        `in_order`: what is behind an open message of its key is neither free, nor withdrawn or open. Some messages may
        be handed over before they are due: a person has replayed them, or a clock has stepped back. `inside`: of a
        transaction.
        """
        delayed = [message for message in messages if message.deliver_at is not None]
        if not delayed:
            return Recalled(messages)
        with nullcontext() if inside else self._channel.transaction():
            withdrawn, open = self._look(delayed)
        recalled, waiting = Recalled([]), set[str]()
        for message in messages:
            if message.message_id in withdrawn:
                recalled.withdrawn.append(message)
            elif message.message_id in open:
                recalled.open.append(message)
                waiting |= {message.key} if in_order and message.key is not None else set()
            elif message.key not in waiting:
                recalled.free.append(message)
        return recalled

    def _look(self, delayed: Sequence[Message]) -> tuple[set[UUID], set[UUID]]:
        """Return the ids of messages that are withdrawn, and of those that their writers have locked."""
        given = {self._name(message): message for message in delayed}
        locked = self._chosen(self._try, given) if self._try else set[str]()
        free = given.keys() - locked
        # A statement of its own: it has to see what was committed before the locks were had.
        withdrawn = self._chosen(self._among, free)
        now = self._channel.now()
        early = [name for name in free - withdrawn if (given[name].deliver_at or now) > now]
        if early:
            self._channel.run(self._early, **self._bound(early))
        return {given[name].message_id for name in withdrawn}, {given[name].message_id for name in locked}

    def _name(self, message: Message) -> str:
        return str(self._database.dialect.values.bind_uuid(message.message_id))

    def _chosen(self, statement: str, names: Iterable[str]) -> set[str]:
        return {name for (name,) in self._channel.rows(statement, **self._bound(names))}

    def _bound(self, names: Iterable[str]) -> Parameters:
        return self._database.bind_records("ids", [(name,) for name in sorted(names)], id="text")
