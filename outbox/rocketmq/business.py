"""Business transactions: hooks on their end, and the records of a business database that has no outbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from sqlalchemy import Connection, Engine

from outbox.errors import DatabaseError, MQClientError, NoTransactionError, VerdictStandsError
from outbox.rocketmq.connections import Connections
from outbox.store.database import Database, on_channel
from outbox.store.dialects.statements import Script, Statement, run
from outbox.store.half_messages.half import Half
from outbox.store.half_messages.op import Op
from outbox.store.half_messages.record import RecordDatabase, Records
from outbox.writing.handles import DriverConnection
from outbox.writing.transaction import Transactions

#: Seconds for which a checker that writes a verdict waits for a business transaction that is under way.
PATIENCE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The records of a transaction are in another business database; `mismatch` names both databases."""

    mismatch: str


class Business:
    """A business database and its records; `outbox db upgrade --record-only` makes their table."""

    #: Seconds for which `require` waits for a business transaction under way, before a rollback is refused.
    rollback_patience = 5.0

    def __init__(self, engine: Engine, *, connections: int) -> None:
        self.database = RecordDatabase(engine)
        self._records = Records(self.database)
        self._connections = Connections(self.database.open, connections)
        self.transactions = Transactions(self.database)

    @cached_property
    def identity(self) -> str | None:
        """The identity that half messages carry, so that no other database is asked for a record; None: it has none."""
        return self._connections.call(self.database.identity)

    def require_other_than(self, outbox: Database) -> None:
        """Raise if this is the outbox's own database, where no business transaction has left a record."""
        here = self.database.dialect.driving.location(self.database.engine)
        if here is not None and here == outbox.dialect.driving.location(outbox.engine):
            raise DatabaseError(
                f"the business database is the outbox's own ({here.name}): there a business transaction decides by"
                ' verdict="join", without a record'
            )

    def join(self, connection: Connection, transaction: str) -> None:
        """Write the record as part of a business transaction, which cannot be committed if another verdict stands."""
        with or_doomed(self.transactions, connection):
            stands = self.database.execute(connection, self._records.insert(transaction))
            if stands is not None:
                raise VerdictStandsError(transaction, stands, "business transaction")
        self.transactions.before_commit(connection, lambda: self._require_still_there(connection, transaction))

    def standing(self, transaction: str) -> Op | None:
        """Return the verdict that is recorded; None if there is none."""
        return self._connections.call(lambda channel: run(on_channel(channel), self._records.standing(transaction)))

    def fence(self, transaction: str, *, patience: float) -> Op | None:
        """Record a rollback unless the business has committed; return the verdict that stands.

        Afterwards the business cannot commit. Wait `patience` seconds for a business transaction under way, then raise.
        """
        return self._connections.call(lambda channel: self._records.fence(channel, transaction, patience=patience))

    def outcome(self, half: Half) -> Op | Elsewhere:
        """Return the verdict of a business transaction; record a rollback if it has none."""
        mismatch = self.mismatch(half.recorded_in)
        if mismatch is not None:
            return Elsewhere(mismatch)
        stands = self.fence(half.transaction, patience=PATIENCE_SECONDS)
        if stands is None:
            raise DatabaseError("the record that stood before is gone")
        return stands

    def mismatch(self, recorded_in: str | None) -> str | None:
        """Return an error text if a half message names another database than this one; None if it does not."""
        if recorded_in is None or recorded_in == self.identity:
            return None
        return f"its record is in another business database ({recorded_in}) than this one ({self.identity})"

    def require(self, transaction: str, op: Op, recorded_in: str | None) -> None:
        """Raise unless the records agree with a verdict; record a rollback first if nothing is recorded yet."""
        mismatch = self.mismatch(recorded_in)
        if mismatch is not None:
            raise MQClientError(f"transaction {transaction}: {mismatch}")
        stands = (
            self.standing(transaction) if op == "commit" else self.fence(transaction, patience=self.rollback_patience)
        )
        if stands is None:
            raise MQClientError(
                f"transaction {transaction} has no record of a commit in the business database: (1) the business"
                " transaction was rolled back, or has not ended: rollback() the transaction, or commit() after the end;"
                " or (2) nothing joined: call join(session) in the business transaction"
            )
        if stands != op:
            raise VerdictStandsError(transaction, stands, op)

    def close(self) -> None:
        """Close the connections; a later call opens others."""
        self._connections.close()

    def _require_still_there(self, connection: Connection, transaction: str) -> None:
        if self.database.execute(connection, self._records.standing(transaction)) != "commit":
            raise NoTransactionError(
                f"the record of transaction {transaction} was undone with a savepoint; join outside of every savepoint"
            )


@contextmanager
def or_doomed(transactions: Transactions, connection: DriverConnection) -> Iterator[None]:
    """Keep a business transaction from committing if this block raises, even if the application swallows the error.

    Every error counts: SQLite undoes only the statement that failed, and would commit without the verdict.
    """
    try:
        yield
    except Exception as error:

        def raise_again(error: Exception = error) -> None:
            raise error

        if isinstance(connection, Connection):
            transactions.before_commit(connection, raise_again)
        else:
            with suppress(Exception):
                transactions.database.execute(connection, _failing())
        raise


def _failing() -> Script[None]:
    """Run a failing statement, so that PostgreSQL answers the COMMIT of this transaction with a rollback."""
    yield Statement("SELECT 1 / 0", returns=True)
