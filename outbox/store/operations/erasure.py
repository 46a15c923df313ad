"""The erasure: deletes messages of chosen keys or ids from the log, however young, once every subscription has passed.

The position of the purge stays where it is: with the position moved, readers outside of the database would report other
messages as lost, and would no longer notice a purge of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.model.limits import HALF_TOPIC
from outbox.store.database import Channel
from outbox.store.half_messages.half import RESTORED
from outbox.store.operations.purge import IS_DECIDED, stored_bases

BATCH = 10_000

#: By primary key, a batch at a time: no index has the keys.
_SPAN = "SELECT max(id) FROM (SELECT id FROM {message} WHERE id > :after ORDER BY id LIMIT :rows) AS span"
#: Chosen messages, also those inside of half messages; and whether a verdict is missing.
_CHOSEN = f"""
    SELECT id, {{number}}, topic = '{HALF_TOPIC}' AND NOT {IS_DECIDED}
    FROM {{message}} WHERE id > :after AND id <= :upto AND ({{chosen}})
"""
_DELETE = "DELETE FROM {message} WHERE {id_in_ids}"
#: A transaction that sends again with such a key has a lock on the key until it ends.
_FREE_KEYS = """
    DELETE FROM {dedup} WHERE dedup_key IN (
        SELECT dedup_key FROM {dedup} WHERE message_id IN (SELECT message_id FROM {message} WHERE {id_in_ids}) {skip})
"""
_KEPT = "SELECT id FROM {message} WHERE {id_in_ids} AND message_id IN (SELECT message_id FROM {dedup})"
_PARKED = "SELECT subscription, id, state FROM {parked} WHERE {chosen} ORDER BY subscription, id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The number of messages that went from the log, and of dead letters that were discarded.

    `waiting`: how many messages stay, by the subscription that has still to deliver or discard them. `undecided`: how
    many half messages stay until their transaction has a verdict. `repeated`: how many messages stay because an open
    transaction sends again with their dedup key.
    """

    rows: int
    dead_letters: int
    waiting: Mapping[str, int]
    undecided: int
    repeated: int


class Erasure:
    """Finds and deletes the messages with one of these keys or message ids."""

    def __init__(
        self, channel: Channel, *, keys: Sequence[str], message_ids: Sequence[UUID], batch: int = BATCH
    ) -> None:
        self._channel = channel
        self._batch = batch
        #: The ids of the messages that `run` has found.
        self.found = set[int]()
        database = channel.database
        key_of_half = database.header("headers", RESTORED["key"][0])
        ids = {f"message_{n}": database.dialect.values.bind_uuid(id) for n, id in enumerate(message_ids)}
        chosen = [
            database.among("key", texts="keys"),
            f"topic = '{HALF_TOPIC}' AND {database.among(key_of_half, texts='keys')}",
            *(f"message_id = :{name}" for name in ids),
        ]
        self._parameters: dict[str, Any] = {"keys": database.bind(keys), **ids}
        self._chosen = database.sql(_CHOSEN, chosen=" OR ".join(chosen))
        self._parked = database.sql(_PARKED, chosen=" OR ".join(chosen))

    def run(self, waiting: dict[str, set[int]], *, rehearsal: bool = False) -> tuple[int, int, int]:
        """Delete the messages that every subscription has passed; a rehearsal counts them.

        Args:
            waiting: the ids of parked copies that stay, by subscription. Their messages stay in the log, too. The ids
                that a subscription has not passed are added.
            rehearsal: delete nothing.

        Returns:
            The number of deleted messages, of half messages that stay until their transaction has a verdict, and of
            messages whose dedup key an open transaction has.
        """
        copies = set().union(*waiting.values())
        rows = undecided = after = 0
        repeated: list[int] = []
        while (upto := self._channel.rows(_SPAN, after=after, rows=self._batch)[0][0]) is not None:
            found = self._channel.rows(self._chosen, after=after, upto=upto, **self._parameters)
            # The bases are read after the rows: a base sees later what it saw before.
            bases = stored_bases(self._channel) if found else []
            passed = []
            self.found.update(id for id, *_ in found)
            for id, number, is_undecided in found:
                behind = {name for name, base in bases if not base.sees(number)}
                for name in behind:
                    waiting.setdefault(name, set()).add(id)
                undecided += bool(is_undecided)
                if not is_undecided and not behind and id not in copies:
                    passed.append(id)
            repeated += self._delete(passed) if passed and not rehearsal else ()
            rows += len(passed)
            after = upto
        left = self._delete_one_by_one(repeated)
        return rows - left, undecided, left

    def _delete(self, ids: Sequence[int], *, waits: bool = False) -> list[int]:
        """Delete messages with their dedup keys; return the ids whose key is locked. `waits`: wait for the lock."""
        database, bound = self._channel.database, self._channel.database.bind(ids)
        skip = "" if waits else database.dialect.locks.skip_locked
        self._channel.run(database.sql(_FREE_KEYS, skip=skip), ids=bound)
        kept = [id for (id,) in self._channel.rows(_KEPT, ids=bound)]
        self._channel.run(_DELETE, ids=database.bind([id for id in ids if id not in {*kept}]))
        return kept

    def _delete_one_by_one(self, ids: Sequence[int]) -> int:
        """Delete messages whose dedup keys were locked, until one lock lasts too long; return how many are left."""
        for done, id in enumerate(ids):
            try:
                self._delete([id], waits=True)
            except Exception as error:
                if not self._channel.database.locked(error):
                    raise
                return len(ids) - done
        return 0

    def parked(self) -> list[tuple[str, int, str]]:
        """Return the parked copies of the messages: subscription, id in the log, and state."""
        return [(name, id, state) for name, id, state in self._channel.rows(self._parked, **self._parameters)]
