"""Consumer groups of fronts that are not as every group is: in order, or with another number of attempts."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from outbox.store.database import Channel
from outbox.store.dialects.statements import Row

_ALL = "SELECT name, ordered, attempts FROM {group} ORDER BY name"
_NAMED = "SELECT name, ordered, attempts FROM {group} WHERE {chosen}"
_ADD = """
    {insert_once} {group} (name, ordered, attempts, created_at) VALUES (:name, :ordered, :attempts, {now})
    {unless_there}
"""
_CHANGE = "UPDATE {group} SET ordered = :ordered, attempts = :attempts WHERE name = :name"
_DROP = "DELETE FROM {group} WHERE name = :name"


class ConsumerGroup(NamedTuple):
    """A consumer group. `ordered`: takes the messages of a key in order. `attempts`: the most for a message."""

    name: str
    ordered: bool
    attempts: int


class GroupRows:
    """The consumer groups of one outbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def all(self) -> dict[str, ConsumerGroup]:
        """Return the groups by their names, sorted."""
        return {row[0]: _of(row) for row in self._channel.rows(_ALL)}

    def named(self, names: Collection[str]) -> dict[str, ConsumerGroup]:
        """Return those of some groups that are there, by name."""
        database = self._channel.database
        statement = database.sql(_NAMED, chosen=database.among("name", texts="names"))
        return {row[0]: _of(row) for row in self._channel.rows(statement, names=database.bind(names))}

    def find(self, name: str) -> ConsumerGroup | None:
        """Return the group of a name; None: there is none."""
        return self.named([name]).get(name)

    def add(self, group: ConsumerGroup) -> bool:
        """Add a group; return False if a group of the name is there, which stays as it is."""
        return bool(self._channel.run(_ADD, **group._asdict()))

    def change(self, group: ConsumerGroup) -> None:
        """Give the group of this name other properties."""
        self._channel.run(_CHANGE, **group._asdict())

    def drop(self, name: str) -> bool:
        """Delete a group; return False if it is not there."""
        return bool(self._channel.run(_DROP, name=name))


def _of(row: Row) -> ConsumerGroup:
    return ConsumerGroup(row[0], bool(row[1]), row[2])
