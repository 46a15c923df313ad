"""What an application does in a transaction, and beside it which orders exist then: as rows, and as messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.exc import DBAPIError

from outbox import Message, NoTransactionError, TransactionAbortedError
from tests.matrix.held import BusinessError

SESSIONS = frozenset(("Session", "scoped_session", "AsyncSession", "async_scoped_session"))
CONNECTIONS = frozenset(("Connection", "AsyncConnection"))
DRIVERS = frozenset(("psycopg", "psycopg_async"))
SQLALCHEMY = SESSIONS | CONNECTIONS
ALL = SQLALCHEMY | DRIVERS

POSTGRESQL = frozenset(("postgresql",))
#: As SQLAlchemy opens it by itself, where the driver begins on its own.
PLAIN_SQLITE = frozenset(("plain_sqlite",))
SQLITE = PLAIN_SQLITE | {"sqlite"}
EVERYWHERE = POSTGRESQL | SQLITE


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done with a handle, the handles and databases it is for, and the orders that are left."""

    play: Callable[[Any], Awaitable[None]]
    rows: tuple[str, ...]
    handles: frozenset[str]
    databases: frozenset[str]
    #: What the handle is opened for, if it is not for an ordinary transaction.
    setting: str

    @property
    def name(self) -> str:
        """Its sentence."""
        return getattr(self.play, "__name__", "?")

    @property
    def expected(self) -> dict[str, list[str]]:
        """Both tables hold the same orders."""
        return {"messages": sorted(self.rows), "orders": sorted(self.rows)}


SCENARIOS: list[Scenario] = []


def leaves(
    *rows: str,
    handles: frozenset[str] = ALL,
    databases: frozenset[str] = EVERYWHERE,
    setting: str = "",
) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Any], Awaitable[None]]]:
    """A line of the table: exactly these orders are left by what follows."""

    def added(play: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        SCENARIOS.append(Scenario(play, rows, handles, databases, setting))
        return play

    return added


# Commit, rollback, and going away


@leaves("1", "2")
async def commit(t):
    await t.order("1")
    await t.order("2")
    await t.commit()


@leaves()
async def rollback(t):
    await t.order("1")
    await t.rollback()


@leaves("2", "3")
async def one_transaction_after_the_other(t):
    await t.order("1")
    await t.rollback()
    await t.order("2")
    await t.commit()
    await t.order("3")
    await t.commit()
    await t.order("4")
    await t.rollback()


@leaves()
async def close(t):
    await t.order("1")
    await t.close()


@leaves("1")
async def close_after_a_commit(t):
    await t.order("1")
    await t.commit()
    await t.order("2")
    await t.close()


@leaves()
async def nothing_but_the_end_of_the_program(t):
    await t.order("1")


@leaves("1")
async def the_message_before_the_row(t):
    await t.send("1")
    await t.book("1")
    await t.commit()


@leaves("1", "2", "3")
async def several_at_once(t):
    messages = [Message("orders", body, key=key) for body, key in (("1", None), ("2", "order-2"), ("3", None))]
    for customer in ("1", "2", "3"):
        await t.book(customer)
    ids = await t.send_all(messages)
    await t.commit()
    assert ids == [message.message_id for message in messages]


# Dedup keys: a claim is part of the transaction as well


@leaves("1")
async def a_dedup_key_is_written_once(t):
    await t.book("1")
    first = await t.send("1", dedup_key="order-1")
    again = await t.send("1", dedup_key="order-1")
    await t.commit()
    later = await t.send("1", dedup_key="order-1")
    await t.commit()
    assert (again, later) == (first, first)


@leaves("1")
async def a_dedup_key_of_a_transaction_that_was_rolled_back_is_free(t):
    await t.book("1")
    first = await t.send("1", dedup_key="order-1")
    await t.rollback()
    await t.book("1")
    second = await t.send("1", dedup_key="order-1")
    await t.commit()
    assert first != second


@leaves("1")
async def a_dedup_key_of_a_savepoint_that_was_rolled_back_is_free(t):
    await t.savepoint("a")
    await t.book("1")
    await t.send("1", dedup_key="order-1")
    await t.roll_back_to("a")
    await t.savepoint("b")
    await t.book("1")
    await t.send("1", dedup_key="order-1")
    await t.release("b")
    await t.commit()


# Savepoints


@leaves("1", "2", "3")
async def savepoint_released(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.release("a")
    await t.order("3")
    await t.commit()


@leaves("1", "3")
async def savepoint_rolled_back(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.roll_back_to("a")
    await t.order("3")
    await t.commit()


@leaves("1")
async def savepoint_first_and_released(t):
    await t.savepoint("a")
    await t.order("1")
    await t.release("a")
    await t.commit()


@leaves()
async def savepoint_first_and_released_then_rollback(t):
    """The release of a savepoint that nothing was begun before must not commit."""
    await t.savepoint("a")
    await t.order("1")
    await t.release("a")
    await t.rollback()


@leaves()
async def savepoint_released_then_close(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.release("a")
    await t.close()


@leaves("4")
async def savepoints_of_a_transaction_that_was_rolled_back(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.release("a")
    await t.savepoint("b")
    await t.order("3")
    await t.rollback()
    await t.order("4")
    await t.commit()


@leaves("1", "2", "3", "4", "5", "6", "7")
async def three_deep_all_released(t):
    for depth, name in enumerate("abc", start=1):
        await t.order(str(depth))
        await t.savepoint(name)
    await t.order("4")
    for depth, name in enumerate("cba", start=5):
        await t.release(name)
        await t.order(str(depth))
    await t.commit()


@leaves("1", "2", "3", "5", "6", "7")
async def three_deep_the_inner_rolled_back(t):
    for depth, name in enumerate("abc", start=1):
        await t.order(str(depth))
        await t.savepoint(name)
    await t.order("4")
    await t.roll_back_to("c")
    await t.order("5")
    await t.release("b")
    await t.order("6")
    await t.release("a")
    await t.order("7")
    await t.commit()


@leaves("1", "2", "5", "6")
async def three_deep_the_middle_rolled_back(t):
    for depth, name in enumerate("abc", start=1):
        await t.order(str(depth))
        await t.savepoint(name)
    await t.order("4")
    await t.release("c")
    await t.roll_back_to("b")
    await t.order("5")
    await t.release("a")
    await t.order("6")
    await t.commit()


@leaves("1", "5")
async def three_deep_the_outer_rolled_back(t):
    for depth, name in enumerate("abc", start=1):
        await t.order(str(depth))
        await t.savepoint(name)
    await t.order("4")
    await t.release("c")
    await t.release("b")
    await t.roll_back_to("a")
    await t.order("5")
    await t.commit()


@leaves()
async def three_deep_all_released_then_rollback(t):
    for name in "abc":
        await t.savepoint(name)
    await t.order("1")
    for name in "cba":
        await t.release(name)
    await t.rollback()


@leaves("1", "2", "3", "4")
async def three_deep_committed_from_within(t):
    """A commit ends what is open inside of it."""
    for depth, name in enumerate("abc", start=1):
        await t.order(str(depth))
        await t.savepoint(name)
    await t.order("4")
    for name in "cba":
        await t.release(name)
    await t.commit()


# Blocks


@leaves("1")
async def a_block(t):
    await t.enter()
    await t.order("1")
    await t.leave()


@leaves("2")
async def a_block_that_raises(t):
    await t.enter()
    await t.order("1")
    with pytest.raises(BusinessError):
        await t.raises_out()
    await t.enter()
    await t.order("2")
    await t.leave()


@leaves("1", "2", "4")
async def blocks_three_deep_the_innermost_raises(t):
    await t.enter()
    await t.order("1")
    await t.enter()
    await t.order("2")
    await t.enter()
    await t.order("3")
    with pytest.raises(BusinessError):
        await t.raises_out()
    await t.leave()
    await t.order("4")
    await t.leave()


@leaves("1", "4")
async def blocks_three_deep_the_middle_raises(t):
    await t.enter()
    await t.order("1")
    await t.enter()
    await t.order("2")
    await t.enter()
    await t.order("3")
    await t.leave()
    with pytest.raises(BusinessError):
        await t.raises_out()
    await t.order("4")
    await t.leave()


@leaves()
async def blocks_three_deep_the_outermost_raises(t):
    for depth in ("1", "2", "3"):
        await t.enter()
        await t.order(depth)
    await t.leave()
    await t.leave()
    with pytest.raises(BusinessError):
        await t.raises_out()


# What a session does with its objects is nothing to its messages


@leaves("1", handles=SESSIONS)
async def expunge_all(t):
    await t.order("1")
    await t.expunge_all()
    await t.commit()


@leaves("2", handles=SESSIONS)
async def reset(t):
    await t.order("1")
    await t.reset()
    await t.order("2")
    await t.commit()


@leaves(handles=SESSIONS)
async def invalidate(t):
    await t.order("1")
    await t.invalidate()


@leaves("2", handles=SESSIONS)
async def a_session_goes_on_after_its_close(t):
    await t.order("1")
    await t.close()
    await t.order("2")
    await t.commit()


@leaves("1", handles=SESSIONS)
async def a_keyed_message_takes_its_object_along(t):
    """The object is in the database when its message is, whatever becomes of it in the session."""
    t.add("1")
    await t.send("1", key="order-1")
    await t.expunge_all()
    await t.commit()


@leaves("1", "2", handles=SESSIONS)
async def objects_that_wait_for_their_flush(t):
    t.add("1")
    await t.send("1", key="order-1")
    t.add("2")
    await t.send("2")
    await t.commit()


@leaves("1", handles=SESSIONS)
async def objects_that_wait_for_their_flush_in_a_savepoint(t):
    t.add("1")
    await t.savepoint("a")
    await t.send("1")
    t.add("2")
    await t.send("2", key="order-2")
    await t.roll_back_to("a")
    await t.send("1")
    await t.commit()


@leaves("1", handles=SESSIONS)
async def a_flush_that_fails(t):
    """Nothing is sent of what cannot be written."""
    await t.order("1")
    await t.commit()
    t.add("1")
    with pytest.raises(sqlalchemy.exc.IntegrityError):
        await t.send("2", key="order-2")
    await t.rollback()


# Statements that fail


@leaves("1", "3")
async def a_statement_fails_in_a_savepoint(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.fail()
    await t.roll_back_to("a")
    await t.order("3")
    await t.commit()


@leaves("2")
async def a_statement_fails_and_is_rolled_back(t):
    await t.order("1")
    await t.fail()
    await t.rollback()
    await t.order("2")
    await t.commit()


@leaves("2", handles=SQLALCHEMY, databases=POSTGRESQL)
async def a_failed_transaction_does_not_pretend_to_commit(t):
    """PostgreSQL answers COMMIT with ROLLBACK there, and no driver tells."""
    await t.order("1")
    await t.fail()
    with pytest.raises(TransactionAbortedError, match="roll back, or use a savepoint around what may fail"):
        await t.commit()
    await t.rollback()
    await t.order("2")
    await t.commit()


@leaves("2", handles=SQLALCHEMY, databases=POSTGRESQL)
async def a_failed_block_does_not_pretend_to_commit(t):
    await t.enter()
    await t.order("1")
    await t.fail()
    with pytest.raises(TransactionAbortedError, match="roll back, or use a savepoint around what may fail"):
        await t.leave()
    await t.enter()
    await t.order("2")
    await t.leave()


@leaves(handles=SQLALCHEMY, databases=POSTGRESQL)
async def a_failed_savepoint_is_not_released(t):
    await t.order("1")
    await t.savepoint("a")
    await t.order("2")
    await t.fail()
    with pytest.raises(DBAPIError):
        await t.release("a")
    await t.rollback()


@leaves("2", handles=DRIVERS, databases=POSTGRESQL)
async def a_failed_transaction_of_the_driver_leaves_nothing(t):
    """The driver's own commit says nothing there: a row and its message are lost together."""
    await t.order("1")
    await t.fail()
    await t.commit()
    await t.order("2")
    await t.commit()


@leaves("1", "2", databases=SQLITE)
async def a_failed_statement_ends_nothing_on_sqlite(t):
    await t.order("1")
    await t.fail()
    await t.order("2")
    await t.commit()


@leaves(databases=POSTGRESQL)
async def a_failed_transaction_takes_no_message(t):
    await t.order("1")
    await t.fail()
    with pytest.raises(TransactionAbortedError, match="nothing can be written in it any more; roll back, or use a"):
        await t.send("2")
    await t.rollback()


# Commits of every statement by itself


@leaves(setting="autocommit", databases=POSTGRESQL | PLAIN_SQLITE)
async def autocommit_is_refused(t):
    with pytest.raises(NoTransactionError, match="use an engine without isolation_level='AUTOCOMMIT', or begin"):
        await t.send("1")


@leaves("1", setting="autocommit", handles=DRIVERS, databases=POSTGRESQL)
async def a_transaction_of_the_driver_within_autocommit_is_one(t):
    await t.enter()
    await t.order("1")
    await t.leave()
    await t.enter()
    await t.order("2")
    with pytest.raises(BusinessError):
        await t.raises_out()
    with pytest.raises(NoTransactionError, match="or begin a transaction"):
        await t.send("3")


# Two phases


@leaves("1", "3", "4", setting="two_phase", databases=POSTGRESQL)
async def two_phases(t):
    await t.begin_two_phase()
    await t.order("1")
    await t.prepare()
    await t.commit()
    await t.begin_two_phase()
    await t.order("2")
    await t.prepare()
    await t.rollback()
    await t.begin_two_phase()
    await t.order("3")
    await t.savepoint("a")
    await t.order("4")
    await t.release("a")
    await t.commit()


@leaves("2", setting="two_phase", databases=POSTGRESQL)
async def two_phases_rolled_back_in_the_first(t):
    await t.begin_two_phase()
    await t.order("1")
    await t.rollback()
    await t.begin_two_phase()
    await t.order("2")
    await t.prepare()
    await t.commit()


@leaves(setting="two_phase", databases=POSTGRESQL, handles=SQLALCHEMY)
async def a_failed_transaction_is_not_prepared(t):
    await t.begin_two_phase()
    await t.order("1")
    await t.fail()
    with pytest.raises(TransactionAbortedError, match="roll back"):
        await t.prepare()
    await t.rollback()


@leaves(setting="two_phase", databases=SQLITE, handles=SQLALCHEMY)
async def sqlite_has_no_two_phases(t):
    with pytest.raises(NotImplementedError):
        await t.begin_two_phase()
        await t.order("1")


# Forks


@leaves("1", "2", "3", setting="fork")
async def a_child_has_a_transaction_of_its_own(t):
    await t.order("1")
    await t.commit()
    t.in_a_child("2")
    await t.order("3")
    await t.commit()


@leaves("2", "3", databases=POSTGRESQL, setting="fork")
async def a_child_of_an_open_transaction(t):
    await t.order("1")
    t.in_a_child("2")
    await t.rollback()
    await t.order("3")
    await t.commit()


# Listeners that raise


@leaves("2", handles=SESSIONS)
async def a_listener_raises_before_the_commit(t):
    t.raise_in("before_commit")
    await t.order("1")
    with pytest.raises(BusinessError):
        await t.commit()
    await t.rollback()
    await t.order("2")
    await t.commit()


@leaves("1", "2", handles=SESSIONS)
async def a_listener_raises_after_the_commit(t):
    """It is too late: what is committed stays."""
    t.raise_in("after_commit")
    await t.order("1")
    with pytest.raises(BusinessError):
        await t.commit()
    await t.close()
    await t.order("2")
    await t.commit()


@leaves("2", handles=SESSIONS)
async def a_listener_of_the_engine_raises_at_the_commit_of_a_session(t):
    t.raise_in("commit")
    await t.order("1")
    with pytest.raises(BusinessError):
        await t.commit()
    await t.rollback()
    await t.order("2")
    await t.commit()


@leaves(handles=CONNECTIONS)
async def a_listener_of_the_engine_raises_at_the_commit_of_a_connection(t):
    t.raise_in("commit")
    await t.order("1")
    with pytest.raises(BusinessError):
        await t.commit()
    await t.close()


@leaves("1", "2", handles=SQLALCHEMY)
async def our_own_listeners_raise(t):
    """A hint that cannot be given costs a moment, never a message, and is nobody's error."""
    t.break_hints()
    await t.order("1")
    await t.commit()
    await t.order("2")
    await t.commit()
