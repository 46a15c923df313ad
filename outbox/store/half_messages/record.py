"""Records: rows that prove a commit, in a business database without an outbox."""

from __future__ import annotations

from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement
from outbox.store.half_messages.op import Op

_INSERT = """
    {insert_once} {record} (transaction_id, verdict, decided_at) VALUES (:transaction, :verdict, {now}) {unless_there}
"""
_FIND = "SELECT verdict FROM {record} WHERE transaction_id = :transaction"


class RecordDatabase(Database):
    """A business database, which has only one of our tables: the records."""

    _needed, _only = "the table outbox_record is", ("--record-only",)
    described = "the producer's business database"
    elsewhere = "where the record has to be; join with a transaction of that one"

    def identity(self, channel: Channel) -> str | None:
        """Return a text that no other database has; None: such databases have no identity."""
        system, oid = channel.rows(self.dialect.home.identity)[0]
        return None if system is None else f"{system}/{oid}"


class Records:
    """The records of one business database."""

    def __init__(self, database: Database) -> None:
        self._insert = database.sql(_INSERT)
        self._find = database.sql(_FIND)

    def insert(self, transaction: str) -> Script[Op | None]:
        """Write the commit as part of the business transaction; return None if it was written.

        Otherwise return the verdict that stands: of another business transaction, even if the verdict is a commit.
        """
        ((new,),) = yield Statement(self._insert, {"transaction": transaction, "verdict": "commit"}, counts=True)
        if new:
            return None
        return (yield from self.standing(transaction)) or "rollback"

    def standing(self, transaction: str) -> Script[Op | None]:
        """Read which committed verdict stands; None: there is none."""
        rows = yield Statement(self._find, {"transaction": transaction}, returns=True)
        return rows[0][0] if rows else None

    def fence(self, channel: Channel, transaction: str, *, patience: float) -> Op | None:
        """Write a rollback, unless the business transaction has committed; return the verdict that stands.

        A later commit of the business transaction fails. If the record is written and the business transaction still
        open, wait `patience` seconds for the end, then raise the driver's error. None: no verdict can be read.
        """
        with channel.transaction(patience=patience):
            channel.run(self._insert, transaction=transaction, verdict="rollback")
        # A statement of its own: the insert's snapshot may be older than the row that it met.
        rows = channel.rows(self._find, transaction=transaction)
        return rows[0][0] if rows else None
