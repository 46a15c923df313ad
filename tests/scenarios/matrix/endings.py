"""Scenarios: how transactions, savepoints and blocks end, and what of a session and of dedup keys ends with them."""

import pytest
import sqlalchemy

from outbox import Message
from tests.scenarios.matrix.held import BusinessError
from tests.scenarios.matrix.table import SESSIONS, leaves

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
