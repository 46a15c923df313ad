"""Records: the proof of a commit, in a business database that has no outbox."""

from __future__ import annotations

from sqlalchemy import URL

from outbox.store.database import Database
from outbox.store.dialects.dialect import Channel
from outbox.store.dialects.statements import Script, Statement
from outbox.store.transactions.op import Op

_INSERT = """
    INSERT INTO {record} (transaction_id, verdict, decided_at)
    SELECT CAST(:transaction AS text), CAST(:verdict AS text), {now} WHERE TRUE
    ON CONFLICT (transaction_id) DO NOTHING RETURNING transaction_id
"""
_FIND = "SELECT verdict FROM {record} WHERE transaction_id = :transaction"


class RecordDatabase(Database):
    """A business database: of our tables it has the one for records."""

    _needed, _only = "the table outbox_record is", " --record-only"
    described = "the producer's business database"
    elsewhere = "where the record has to be; join with a transaction of that one"

    def _command(self, verb: str) -> str:
        """Name the database as well: the outbox's own is the one that commands take by default."""
        url = self.engine.url
        # Without user and password, which belong into the environment.
        plain = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=url.database)
        return f"{super()._command(verb)} --database {plain.render_as_string()}"

    def identity(self, channel: Channel) -> str | None:
        """Return what no other database has; None: it has nothing of that kind."""
        system, oid = channel.rows(self.dialect.identity)[0]
        return None if system is None else f"{system}/{oid}"


class Records:
    """The records of one business database."""

    def __init__(self, database: Database) -> None:
        self._insert = database.sql(_INSERT)
        self._find = database.sql(_FIND)

    def insert(self, transaction: str) -> Script[Op | None]:
        """Write the commit as part of the business transaction; None: it is written. Else return which verdict stands
        already: also the same one would be of another business transaction.
        """
        rows = yield Statement(self._insert, {"transaction": transaction, "verdict": "commit"}, returns=True)
        if rows:
            return None
        return (yield from self.standing(transaction)) or "rollback"

    def standing(self, transaction: str) -> Script[Op | None]:
        """Find out which verdict stands, as far as it is committed."""
        rows = yield Statement(self._find, {"transaction": transaction}, returns=True)
        return rows[0][0] if rows else None

    def fence(self, channel: Channel, transaction: str, *, patience: float) -> Op | None:
        """Write a rollback, unless the business has committed; return what stands, None where nothing can be said.

        From then on the business cannot commit. Waits for one that is at it, for `patience` seconds, and raises then.
        """
        with channel.transaction(patience=patience):
            channel.run(self._insert, {"transaction": transaction, "verdict": "rollback"})
        # A statement of its own: the insert's snapshot may be older than the row that it met.
        rows = channel.rows(self._find, {"transaction": transaction})
        return rows[0][0] if rows else None
