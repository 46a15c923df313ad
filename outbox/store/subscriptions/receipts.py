"""Receipts: the right of whoever received parked messages to decide on them, until their time is over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from outbox.store.database import Channel
from outbox.store.subscriptions.parked import Parked

_ROWS = {"its_id": "bigint", "its_error": "text"}
#: By primary key. Each handing-out stores an error of its own, and a message that is due may be in other hands. What
#: was handed out behind the head of its key has no state.
_VALID = """
    subscription = :subscription AND {id_in_ids} AND coalesce(state, 'retry') = 'retry' AND due_at > {now}
    AND EXISTS (SELECT 1 FROM {rows} AS r WHERE r.its_id = id AND r.its_error = error) {which}
"""
#: Messages that hold nothing back.
_ALONE = "AND unit IS NULL"
_OUT = """
    SELECT id FROM {parked}
    WHERE subscription = :subscription AND {id_in_ids} AND coalesce(state, 'behind') <> 'dead'
"""
_FIND = f"SELECT id, key FROM {{parked}} WHERE {_VALID}"
_ACK = f"DELETE FROM {{parked}} WHERE {_VALID}"
_POSTPONE = f"UPDATE {{parked}} SET due_at = {{later}} WHERE {_VALID}"
_TIMES = f"SELECT id, error, due_at FROM {{parked}} WHERE {_VALID}"
#: By primary key. Whoever has given a message another time decides on it from then on. A clock that was set back would
#: leave all times far ahead.
_RENEW = {
    "changes": "due_at = CASE WHEN r.its_next > {far} THEN {later} ELSE r.its_next END",
    "joined": "subscription = :subscription AND {id_in_ids} AND id = r.its_id AND error = r.its_error"
    " AND coalesce(state, 'retry') = 'retry' AND due_at > {now} AND due_at = r.its_due",
}
#: So many times the time that a message gets are far ahead.
_FAR = 10
_RENEWS = {**_ROWS, "its_due": "moment", "its_next": "moment"}
#: Nobody got it, so the delivery does not count.
_GIVE_BACK = f"UPDATE {{parked}} SET due_at = {{now}}, attempts = attempts - 1 WHERE {_VALID}"
#: It stands for itself, and holds nothing back.
_DEAD = f"""
    UPDATE {{parked}} SET state = 'dead', unit = NULL, due_at = NULL, dead_at = {{now}}, error = :error WHERE {_VALID}
"""


class Receipt(NamedTuple):
    """The receipt of a message: its log id, and the error with which it was handed out this one time."""

    id: int
    error: str


class Receipts:
    """The receipts of one subscription.

    Each verb takes any number of receipts, as one statement, and most return the log ids of those that were valid.
    Parked messages that nobody has received, and those whose time is over, are changed by lease holders and by pops
    alone.
    """

    def __init__(self, channel: Channel, subscription: str) -> None:
        self._channel = channel
        self._subscription = subscription

    def ack(self, receipts: Collection[Receipt]) -> set[int]:
        """Delete messages that are done, and let the next ones of their keys be tried."""
        # Most stand for themselves: one statement, and no transaction around it.
        done = self._use(_ACK, receipts, which=_ALONE)
        left = [each for each in receipts if each.id not in done]
        return done | self._use(_ACK, left, lets_go=True) if left else done

    def postpone(self, receipts: Collection[Receipt], wait: timedelta) -> set[int]:
        """Let messages be due after `wait` from now; the receipts stay valid until then."""
        return self._use(_POSTPONE, receipts, seconds=wait.total_seconds())

    def times(self, receipts: Collection[Receipt]) -> dict[Receipt, datetime]:
        """Return until when messages are in hands, by the receipts that are valid."""
        database = self._channel.database
        statement = database.sql(_TIMES, rows=database.records("rows", **_ROWS), which="")
        rows = self._channel.rows(statement, **self._bound(receipts))
        found = {(id, error): database.moment(due) for id, error, due in rows}
        return {each: found[each.id, each.error] for each in receipts if (each.id, each.error) in found}

    def renew(self, times: Mapping[Receipt, tuple[datetime, datetime]], wait: timedelta) -> set[Receipt]:
        """Move the time of messages from one moment to another, but not if the time is a third one by now.

        Return the receipts of those that were moved. A moment that is far beyond `wait` from now becomes `wait` from
        now, for the last time.
        """
        database, bind = self._channel.database, self._channel.database.dialect.clock.bind
        rows = [(each.id, each.error, bind(due), bind(then)) for each, (due, then) in times.items()]
        parts = {"table": database.names["parked"], "source": f"{database.records('rows', **_RENEWS)} AS r"}
        parts |= {name: part.format(**database.names, far=database.later(":far")) for name, part in _RENEW.items()}
        update = database.sql(database.dialect.writes.update_from, **parts)
        bound = {**self._bound(times), **database.bind_records("rows", rows, **_RENEWS)}
        bound |= {"seconds": wait.total_seconds(), "far": _FAR * wait.total_seconds()}
        if self._channel.run(update, **bound) == len(rows):
            return {*times}
        # A call that is made again, because its answer was lost, has written already.
        return {each for each, due in self.times(times).items() if due == times[each][1]}

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

    def _use(
        self, write: str, receipts: Collection[Receipt], *, which: str = "", lets_go: bool = False, **more: object
    ) -> set[int]:
        returning = self._channel.database.dialect.writes.returning
        # One statement is a transaction of its own.
        with nullcontext() if returning is not None and not lets_go else self._channel.transaction():
            valid = self._run(write, returning, receipts, which, **more)
            if lets_go:
                Parked(self._channel, self._subscription).advance({key for key in valid.values() if key is not None})
        return {*valid}

    def _run(
        self, write: str, returning: str | None, receipts: Collection[Receipt], which: str, **more: object
    ) -> dict[int, str | None]:
        database = self._channel.database
        bound = self._bound(receipts) | more
        parts = {"rows": database.records("rows", **_ROWS), "which": which}
        if returning is not None:
            statement = database.sql(f"{write} {returning}", **parts, columns="id, key")
            return dict(self._channel.rows(statement, **bound))
        valid: dict[int, str | None] = dict(self._channel.rows(database.sql(_FIND, **parts), **bound))
        self._channel.run(database.sql(write, **parts), **bound)
        return valid

    def _bound(self, receipts: Collection[Receipt]) -> dict[str, Any]:
        database = self._channel.database
        rows = [(each.id, each.error) for each in receipts]
        ids = database.bind(id for id, _ in rows)
        return {"subscription": self._subscription, "ids": ids, **database.bind_records("rows", rows, **_ROWS)}
