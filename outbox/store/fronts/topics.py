"""The topics of fronts, each with a type."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from outbox.store.database import Channel

_ALL = "SELECT name, type FROM {topic} ORDER BY name"
_ADD = "{insert_once} {topic} (name, type, created_at) VALUES (:name, :type, {now}) {unless_there}"
_NAMED = "SELECT name, type FROM {topic} WHERE {chosen}"
_DROP = "DELETE FROM {topic} WHERE name = :name"

_SEED = zlib.crc32(b"half messages and topics of fronts")


def topic_lock(template: str | None, parameter: str) -> str | None:
    """Return the SQL that takes the lock on the topic in a parameter, which half messages of the topic share.

    A drop has the lock alone. None where only one transaction can write.
    """
    return None if template is None else template.format(text=f":{parameter}", seed=_SEED)


class TopicRows:
    """The topics of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def all(self) -> dict[str, str]:
        """Return the types by the names of the topics, sorted."""
        return dict(self._channel.rows(_ALL))

    def named(self, names: Collection[str]) -> dict[str, str]:
        """Return the types of those of some topics that are there, by name."""
        database = self._channel.database
        statement = database.sql(_NAMED, chosen=database.among("name", texts="names"))
        return dict(self._channel.rows(statement, names=database.bind(names)))

    def type_of(self, name: str) -> str | None:
        """Return the type of a topic; None: it is not there."""
        return self.named([name]).get(name)

    def add(self, name: str, type_: str) -> str:
        """Add a topic unless it is there; return its type."""
        self._channel.run(_ADD, name=name, type=type_)
        return self.type_of(name) or type_

    @contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """Begin a transaction beside which no half message of a topic is stored; those that came before are there."""
        lock = topic_lock(self._channel.database.dialect.locks.own_text, "name")
        with self._channel.transaction():
            if lock is not None:
                self._channel.rows(f"SELECT {lock}", name=name)
            yield

    def drop(self, name: str) -> bool:
        """Delete a topic; return False if it is not there."""
        return bool(self._channel.run(_DROP, name=name))
