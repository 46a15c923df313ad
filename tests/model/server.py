"""PostgreSQL in four facts: transaction ids rise, ids rise, a snapshot sees what has committed, and a row lock
serialises the writers of a key. A crash forgets the ids that were drawn and not flushed.
"""

from __future__ import annotations

from typing import NamedTuple

from outbox.model.position import Position


class Row(NamedTuple):
    """A message: the `nth` of its key in the order of the commits."""

    id: int
    xid: int
    key: str
    nth: int


class Open(NamedTuple):
    """A transaction that is under way, with what it has inserted."""

    xid: int
    rows: tuple[Row, ...] = ()


class Server(NamedTuple):
    """What the server knows. `flushed`: the transaction id and the id that it would give next after a crash."""

    next_xid: int = 1
    next_id: int = 1
    completed: int = 0
    open: tuple[Open, ...] = ()
    rows: tuple[Row, ...] = ()
    flushed: tuple[int, int] = (1, 1)
    incarnation: int = 1

    def position(self) -> Position:
        """Return the snapshot of now. Its end is the latest transaction that ended, and not the next one to begin."""
        return Position.of(self.completed + 1, (each.xid for each in self.open))

    def begin(self) -> Server:
        """Begin a transaction; its first write draws its id, long before it may wait for a lock."""
        return self._replace(next_xid=self.next_xid + 1, open=(*self.open, Open(self.next_xid)))

    def transaction(self, xid: int) -> Open:
        """Return a transaction that is under way."""
        return next(each for each in self.open if each.xid == xid)

    def locked(self, key: str) -> bool:
        """Return whether a transaction under way has written the row of this key."""
        return any(row.key == key for each in self.open for row in each.rows)

    def insert(self, xid: int, key: str) -> Server:
        """Lock the row of a key, then insert a message of it."""
        nth = 1 + sum(row.key == key for row in self.rows)
        row = Row(self.next_id, xid, key, nth)
        changed = tuple(Open(xid, (*each.rows, row)) if each.xid == xid else each for each in self.open)
        return self._replace(next_id=self.next_id + 1, open=changed)

    def commit(self, xid: int) -> Server:
        """Commit and flush: what is committed survives a crash, and so do the ids up to its own."""
        rows = self.transaction(xid).rows
        next_xid, next_id = self.flushed
        flushed = max(next_xid, xid + 1), max(next_id, *(row.id + 1 for row in rows)) if rows else next_id
        return self.roll_back(xid)._replace(rows=tuple(sorted((*self.rows, *rows))), flushed=flushed)

    def roll_back(self, xid: int) -> Server:
        """End a transaction; nothing is flushed."""
        left = tuple(each for each in self.open if each.xid != xid)
        return self._replace(open=left, completed=max(self.completed, xid))

    def write(self) -> Server:
        """Commit a transaction that writes, but no message."""
        return self.begin().commit(self.next_xid)

    def flush(self) -> Server:
        """Flush what was done until now: a crash forgets none of its ids."""
        return self._replace(flushed=(self.next_xid, self.next_id))

    def crash(self) -> Server:
        """Crash and recover: transactions under way are gone, and ids that were not flushed are given out again."""
        next_xid, next_id = self.flushed
        return self._replace(
            next_xid=next_xid, next_id=next_id, completed=next_xid - 1, open=(), incarnation=self.incarnation + 1
        )
