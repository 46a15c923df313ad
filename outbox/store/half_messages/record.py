"""Records: rows that prove a commit, in a business database that has no outbox."""

from __future__ import annotations

from outbox.store.database import Channel, Database
from outbox.store.dialects.statements import Script, Statement
from outbox.store.half_messages.op import Op

_INSERT = """
    INSERT INTO {record} (transaction_id, verdict, decided_at)
    SELECT CAST(:transaction AS text), CAST(:verdict AS text), {now} WHERE TRUE
    ON CONFLICT (transaction_id) DO NOTHING RETURNING transaction_id
"""
_FIND = "SELECT verdict FROM {record} WHERE transaction_id = :transaction"


class RecordDatabase(Database):
    """A business database, which has only one of our tables: the one for records."""

    _needed, _only = "the table outbox_record is", " --record-only"
    described = "the producer's business database"
    elsewhere = "where the record has to be; join with a transaction of that one"

    def _command(self, verb: str) -> str:
        """Return a command that names this database, because commands take that of the outbox by default."""
        return f"{super()._command(verb)}{self._named}"

    def identity(self, channel: Channel) -> str | None:
        """Return a text that no other database has; None: databases of this kind have no identity."""
        system, oid = channel.rows(self.dialect.identity)[0]
        return None if system is None else f"{system}/{oid}"


class Records:
    """The records of one business database."""

    def __init__(self, database: Database) -> None:
        self._insert = database.sql(_INSERT)
        self._find = database.sql(_FIND)

    def insert(self, transaction: str) -> Script[Op | None]:
        """Write the commit as part of the business transaction; return None if it was written.

        Otherwise return the verdict that stands already. It belongs to another business transaction, even if it is a
        commit.
        """
        rows = yield Statement(self._insert, {"transaction": transaction, "verdict": "commit"}, returns=True)
        if rows:
            return None
        return (yield from self.standing(transaction)) or "rollback"

    def standing(self, transaction: str) -> Script[Op | None]:
        """Read which committed verdict stands; None: there is none."""
        rows = yield Statement(self._find, {"transaction": transaction}, returns=True)
        return rows[0][0] if rows else None

    def fence(self, channel: Channel, transaction: str, *, patience: float) -> Op | None:
        """Write a rollback, unless the business transaction has committed; return the verdict that stands.

        After that the business transaction cannot commit. If it has written its record and is still open, this waits
        `patience` seconds for its end, and raises the driver's error after that. None: no verdict can be read.
        """
        with channel.transaction(patience=patience):
            channel.run(self._insert, transaction=transaction, verdict="rollback")
        # A statement of its own: the insert's snapshot may be older than the row that it met.
        rows = channel.rows(self._find, transaction=transaction)
        return rows[0][0] if rows else None
