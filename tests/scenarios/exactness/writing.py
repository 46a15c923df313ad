"""The transactions of the state machine: several at once where the database lets them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from sqlalchemy import text

from outbox.store.operations.check import tables_of
from tests.scenarios.exactness.actors import WRITES, Open, Write
from tests.scenarios.exactness.model import Model, Sent
from tests.scenarios.exactness.worlds import World


class Writers(RuleBasedStateMachine):
    """What applications do to an outbox."""

    world: World
    model: Model
    open: list[Open]
    sent: int

    @rule(write=WRITES)
    def write(self, write: Write) -> None:
        """Something in one transaction."""
        self._write(write)

    def _write(self, write: Write) -> None:
        """In a transaction that is open, or in a new one; messages without a key may be delayed."""
        if not self.open or (write.which >= len(self.open) and self.world.concurrent):
            self.open.append(self._begin(write.early))
        transaction = self.open[write.which % len(self.open)]
        for key in write.keys:
            # The writers of a key take turns.
            if key is None or not any(key in other.keys for other in self.open if other is not transaction):
                delayed = {"delay": timedelta(seconds=write.delay)} if write.delay and not key else {}
                self._append(transaction, key, write.topic, **delayed)
        if write.then == "save":
            transaction.savepoints.append(transaction.connection.begin_nested())
            transaction.frames.append([])
        elif write.then != "stay":
            self.open.remove(transaction)
            self._end(transaction, commit=write.then == "commit")

    def _begin(self, early: bool) -> Open:
        """One more transaction; it may draw its number long before it does anything."""
        connection = self.world.engine.connect()
        connection.begin()
        if early and self.world.concurrent:
            connection.execute(text("SELECT pg_current_xact_id()"))
        return Open(connection)

    def _append(self, transaction: Open, key: str | None, topic: str, **more: Any) -> None:
        self.sent += 1
        connection, name = transaction.connection, f"m{self.sent}"
        message_id = self.world.outbox.send(connection, topic, name, key=key, **more)
        table = tables_of(self.world.database).message
        id = connection.execute(table.select().where(table.c.message_id == message_id)).one().id
        transaction.frames[-1].append(Sent(id, name, key, topic))
        transaction.keys |= {key} if key else set()

    @precondition(lambda self: any(each.savepoints for each in self.open))
    @rule(which=st.integers(0, 3), release=st.booleans())
    def end_savepoint(self, which: int, release: bool) -> None:
        """What was sent since goes on with the transaction, or is taken back."""
        inside = [each for each in self.open if each.savepoints]
        transaction = inside[which % len(inside)]
        savepoint, frame = transaction.savepoints.pop(), transaction.frames.pop()
        if release:
            savepoint.commit()
            transaction.frames[-1] += frame
        else:
            savepoint.rollback()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 3), commit=st.sampled_from([True, True, True, False]))
    def end(self, which: int, commit: bool) -> None:
        """In another order than the one in which they began."""
        self._end(self.open.pop(which % len(self.open)), commit=commit)

    def _end(self, transaction: Open, *, commit: bool) -> None:
        if commit:
            # Savepoints that are open are released with it.
            transaction.connection.commit()
            self.model.commit(message for frame in transaction.frames for message in frame)
        else:
            transaction.connection.rollback()
        transaction.connection.close()

    def _wait_for_writers(self) -> None:
        """Where only one may write at a time, a worker that has to write waits for its commit."""
        while self.open and not self.world.concurrent:
            self._end(self.open.pop(), commit=True)
