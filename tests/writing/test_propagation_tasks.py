"""A transaction belongs to its thread and its task: what these start joins nothing by accident."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import DatabaseError, NoTransactionError, Outbox
from outbox.writing.scopes import Propagation
from tests.support.handles import awaited
from tests.support.orders import Base, aorder, left, order


def test_async_functions_join_return_and_roll_back(async_shop, engine):
    @async_shop.transactional
    async def inner(session: AsyncSession, customer: str) -> str:
        await aorder(async_shop, session, customer)
        return customer.upper()

    @async_shop.transactional
    async def outer(session: AsyncSession, *, fail: bool) -> list[str]:
        """Three deep."""
        await aorder(async_shop, session, "a")
        async with async_shop.abegin() as joined:
            assert joined is session
            returned = await inner("b")
        if fail:
            raise LookupError
        return [returned]

    with pytest.raises(LookupError):
        asyncio.run(outer(fail=True))
    assert left(engine) == []

    assert (asyncio.run(outer(fail=False)), left(engine)) == (["B"], ["a", "b"])
    assert (outer.__name__, outer.__doc__) == ("outer", "Three deep.")


def test_async_propagation(async_shop, engine):
    new = pytest.raises(DatabaseError, match="one writer") if engine.dialect.name == "sqlite" else None

    @async_shop.transactional(propagation="mandatory")
    async def part(session: AsyncSession, customer: str) -> None:
        await aorder(async_shop, session, customer)

    async def scenario() -> None:
        with pytest.raises(NoTransactionError):
            await part("1")
        with pytest.raises(LookupError):
            async with async_shop.abegin() as session:
                await part("2")
                if new is not None:
                    with new:
                        await async_shop.abegin("requires_new").__aenter__()
                else:
                    async with async_shop.abegin("requires_new") as other:
                        assert other is not session
                        await aorder(async_shop, other, "3")
                raise LookupError
        async with AsyncSession(awaited(engine)) as given, given.begin():
            await part(given, "4")

    asyncio.run(scenario())
    assert left(engine) == (["4"] if new else ["3", "4"])


def test_tasks_have_transactions_of_their_own(async_shop, engine):
    """A context is copied into a new task, a transaction is not."""

    @async_shop.transactional
    async def place(session: AsyncSession, number: int) -> AsyncSession:
        await aorder(async_shop, session, str(number))
        await asyncio.sleep(0)
        if number % 2:
            raise LookupError(number)
        return session

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(place(number) for number in range(8)), return_exceptions=True)

    results = asyncio.run(scenario())

    sessions = [result for result in results if isinstance(result, AsyncSession)]
    assert [str(result) for result in results if isinstance(result, LookupError)] == ["1", "3", "5", "7"]
    assert len({id(session) for session in sessions}) == 4
    assert left(engine) == ["0", "2", "4", "6"]


async def _in_a_task(function: Callable[[], Awaitable[None]]) -> None:
    await asyncio.create_task(_called(function))


async def _in_gather(function: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(_called(function))


async def _called(function: Callable[[], Awaitable[None]]) -> None:
    # `wait_for` of Python 3.11 makes a task, later ones do not.
    await function()


@pytest.mark.parametrize("started", [_in_a_task, _in_gather])
@pytest.mark.parametrize("propagation", ["required", "mandatory"])
def test_a_task_inside_of_a_transaction_neither_joins_nor_commits_by_itself(
    async_shop, engine, started, propagation: Propagation
):
    """A commit of its own would stay although the transaction around it is rolled back."""

    @async_shop.transactional(propagation=propagation)
    async def place(session: AsyncSession, customer: str) -> None:
        await aorder(async_shop, session, customer)

    async def scenario() -> None:
        async with async_shop.abegin() as session:
            await aorder(async_shop, session, "1")
            with pytest.raises(NoTransactionError, match=r"runs in another task or thread, .*: pass the session"):
                await started(lambda: place("2"))
            await started(lambda: place(session, "3"))

    asyncio.run(scenario())
    assert left(engine) == ["1", "3"]


def test_wait_for_does_not_decide_what_is_rolled_back(async_shop, engine):
    """On Python 3.11 it makes a task, on later ones it does not: there is an error, or one transaction."""

    @async_shop.transactional
    async def place(session: AsyncSession, customer: str) -> None:
        await aorder(async_shop, session, customer)

    async def scenario() -> None:
        with pytest.raises((NoTransactionError, LookupError)):
            async with async_shop.abegin() as session:
                await aorder(async_shop, session, "1")
                await asyncio.wait_for(place("2"), 60)
                raise LookupError

    asyncio.run(scenario())
    assert left(engine) == []


def test_tasks_of_a_transaction_have_new_transactions_where_they_ask_for_them(pg_engine):
    """The transaction that starts them neither waits for them nor takes them along."""
    Base.metadata.create_all(pg_engine)
    shop = Outbox(awaited(pg_engine))

    @shop.transactional(propagation="requires_new")
    async def place(session: AsyncSession, customer: str) -> None:
        await aorder(shop, session, customer)
        async with shop.abegin() as joined:
            await aorder(shop, joined, f"{customer} too")

    async def scenario() -> None:
        with pytest.raises(LookupError):
            async with shop.abegin() as session:
                await aorder(shop, session, "1")
                await asyncio.gather(place("2"), place("3"))
                raise LookupError

    asyncio.run(scenario())
    assert left(pg_engine) == ["2", "2 too", "3", "3 too"]


def test_a_task_that_outlives_the_transaction_has_one_of_its_own(async_shop, engine):
    async def place(over: asyncio.Event) -> None:
        await over.wait()
        async with async_shop.abegin() as session:
            await aorder(async_shop, session, "2")

    async def scenario() -> None:
        over = asyncio.Event()
        async with async_shop.abegin() as session:
            await aorder(async_shop, session, "1")
            task = asyncio.create_task(place(over))
        over.set()
        await task

    asyncio.run(scenario())
    assert left(engine) == ["1", "2"]


def test_a_cancelled_task_leaves_nothing(async_shop, engine):
    @async_shop.transactional
    async def place(session: AsyncSession) -> None:
        await aorder(async_shop, session, "1")
        await asyncio.sleep(60)

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(place(), 0.5)
        async with async_shop.abegin() as session:
            await aorder(async_shop, session, "2")

    asyncio.run(scenario())
    assert left(engine) == ["2"]


def test_a_thread_inside_of_a_transaction_neither_joins_nor_commits_by_itself(shop, engine):
    """`asyncio.to_thread` copies the context of the task; the transaction that runs there stays there."""

    @shop.transactional
    def place(session: Session, customer: str) -> None:
        order(shop, session, customer)

    async def scenario() -> None:
        with shop.begin() as session:
            order(shop, session, "1")
            with pytest.raises(NoTransactionError, match="runs in another task or thread"):
                await asyncio.to_thread(place, "2")
            place("3")

    asyncio.run(scenario())
    assert left(engine) == ["1", "3"]


def test_threads_of_a_transaction_have_new_transactions_where_they_ask_for_them(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)

    @shop.transactional(propagation="requires_new")
    def place(session: Session, customer: str) -> None:
        order(shop, session, customer)

    async def scenario() -> None:
        with pytest.raises(LookupError), shop.begin() as session:
            order(shop, session, "1")
            await asyncio.gather(asyncio.to_thread(place, "2"), asyncio.to_thread(place, "3"))
            raise LookupError

    asyncio.run(scenario())
    assert left(pg_engine) == ["2", "3"]


def test_blocks_of_tasks_that_take_turns_do_not_meet(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)

    async def place(number: int) -> None:
        with shop.begin() as session:
            order(shop, session, str(number))
            await asyncio.sleep(0.01)
            with shop.begin() as joined:
                assert joined is session
            if number % 2:
                raise LookupError

    async def scenario() -> None:
        await asyncio.gather(*map(place, range(6)), return_exceptions=True)

    asyncio.run(scenario())
    assert left(pg_engine) == ["0", "2", "4"]
