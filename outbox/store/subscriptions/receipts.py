"""Receipts: the right of whoever received parked messages to decide on them, until their time is over."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from datetime import timedelta
from typing import NamedTuple

from outbox.store.database import Channel
from outbox.store.subscriptions.parked import Parked

_ROWS = {"its_id": "bigint", "its_error": "text"}
#: By primary key. Each handing-out stores an error of its own, and a message that is due may be in other hands. What
#: was handed out behind the head of its key has no state.
_VALID = """
    subscription = :subscription AND {id_in_ids} AND coalesce(state, 'retry') = 'retry' AND due_at > {now}
    AND EXISTS (SELECT 1 FROM {rows} AS r WHERE r.its_id = id AND r.its_error = error)
"""
_OUT = """
    SELECT id FROM {parked}
    WHERE subscription = :subscription AND {id_in_ids} AND coalesce(state, 'behind') <> 'dead'
"""
_FIND = f"SELECT id, key FROM {{parked}} WHERE {_VALID}"
_ACK = f"DELETE FROM {{parked}} WHERE {_VALID}"
_POSTPONE = f"UPDATE {{parked}} SET due_at = {{later}} WHERE {_VALID}"
#: Nobody got it, so the delivery does not count.
_GIVE_BACK = f"UPDATE {{parked}} SET due_at = {{now}}, attempts = attempts - 1 WHERE {_VALID}"
#: It stands for itself, and holds nothing back.
_DEAD = f"""
    UPDATE {{parked}} SET state = 'dead', unit = NULL, due_at = NULL, dead_at = {{now}}, error = :error WHERE {_VALID}
"""


class Receipt(NamedTuple):
    """The receipt of a message: its log id and its key, and the error with which it was handed out this one time."""

    id: int
    key: str | None
    error: str | None


class Receipts:
    """The receipts of one subscription.

    Each verb takes any number of receipts, as one statement, and returns the log ids of those that were valid. Parked
    messages that nobody has received, and those whose time is over, are changed by lease holders and by pops alone.
    """

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription

    def ack(self, receipts: Collection[Receipt]) -> set[int]:
        """Delete messages that are done, and let the next ones of their keys be tried."""
        return self._use(_ACK, receipts, lets_go=True)

    def postpone(self, receipts: Collection[Receipt], wait: timedelta) -> set[int]:
        """Let messages be due after `wait` from now; the receipts stay valid until then."""
        return self._use(_POSTPONE, receipts, seconds=wait.total_seconds())

    def give_back(self, receipts: Collection[Receipt]) -> set[int]:
        """Hand messages out again at once, as if they had not been: nobody got them."""
        return self._use(_GIVE_BACK, receipts)

    def dead_letter(self, receipts: Collection[Receipt], error: str) -> set[int]:
        """Make messages dead letters, which hold no key, and let the next ones of their keys be tried."""
        return self._use(_DEAD, receipts, lets_go=True, error=error)

    def out(self, ids: Collection[int]) -> set[int]:
        """Return those of these messages that are parked, whoever has them, and are no dead letters."""
        bound = {"subscription": self._subscription, "ids": self._channel.database.bind(ids)}
        return {id for (id,) in self._channel.rows(_OUT, **bound)}

    def _use(self, write: str, receipts: Collection[Receipt], *, lets_go: bool = False, **more: object) -> set[int]:
        keyed = lets_go and any(each.key is not None for each in receipts)
        returning = self._channel.database.dialect.writes.returning
        # One statement is a transaction of its own.
        with nullcontext() if returning is not None and not keyed else self._channel.transaction():
            valid = self._run(write, returning, receipts, **more)
            if lets_go:
                # A receipt that was in strange hands may name another key than its row.
                Parked(self._channel, self._subscription).advance({key for key in valid.values() if key is not None})
        return {*valid}

    def _run(
        self, write: str, returning: str | None, receipts: Collection[Receipt], **more: object
    ) -> dict[int, str | None]:
        database = self._channel.database
        rows = [(each.id, each.error or "") for each in receipts]
        bound = {
            "subscription": self._subscription,
            "ids": database.bind(id for id, _ in rows),
            **database.bind_records("rows", rows, **_ROWS),
            **more,
        }
        source = database.records("rows", **_ROWS)
        if returning is not None:
            statement = database.sql(f"{write} {returning}", rows=source, columns="id, key")
            return dict(self._channel.rows(statement, **bound))
        valid: dict[int, str | None] = dict(self._channel.rows(database.sql(_FIND, rows=source), **bound))
        self._channel.run(database.sql(write, rows=source), **bound)
        return valid
