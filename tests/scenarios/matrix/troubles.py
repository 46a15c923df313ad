"""Scenarios: statements and listeners that fail, transactions that are none, two phases, forks."""

import pytest
from sqlalchemy.exc import DBAPIError

from outbox import NoTransactionError, TransactionAbortedError
from tests.scenarios.matrix.held import BusinessError
from tests.scenarios.matrix.table import (
    CONNECTIONS,
    DRIVERS,
    PLAIN_SQLITE,
    POSTGRESQL,
    SESSIONS,
    SQLALCHEMY,
    SQLITE,
    leaves,
)

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
