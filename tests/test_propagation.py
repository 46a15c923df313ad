"""How a transaction meets the one that is running: it joins it, is one of its own, or demands that there is one."""

import asyncio
import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_type
from uuid import UUID

import pytest
import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox import DatabaseError, NoTransactionError, Outbox
from tests.handles import awaited
from tests.orders import Base, Order, customers
from tests.readers import bodies


@pytest.fixture
def shop(engine: Engine) -> Iterator[Outbox]:
    """An outbox beside a business table."""
    Base.metadata.create_all(engine)
    outbox = Outbox(engine)
    yield outbox
    outbox.close()


@pytest.fixture
def async_shop(engine: Engine) -> Iterator[Outbox]:
    """The same on an AsyncEngine."""
    Base.metadata.create_all(engine)
    outbox = Outbox(awaited(engine))
    yield outbox
    outbox.close()


def order(outbox: Outbox, session: Session, customer: str) -> UUID:
    """A row, and a message."""
    session.add(Order(customer=customer))
    session.flush()
    return outbox.send(session, "orders", customer)


async def aorder(outbox: Outbox, session: AsyncSession, customer: str) -> UUID:
    """A row, and a message."""
    session.add(Order(customer=customer))
    await session.flush()
    return await outbox.asend(session, "orders", customer)


def left(engine: Engine) -> list[str]:
    """The orders that are there, as rows and as messages alike."""
    messages = sorted(body.decode() for body in bodies(engine))
    # A reader that waits for no writer, which one of our own engines on SQLite would do.
    assert messages == sorted(customers(sqlalchemy.create_engine(engine.url, poolclass=NullPool)))
    return messages


# required


def test_required_joins_three_deep_and_commits_once(shop, engine):
    @shop.transactional
    def inner(session: Session) -> Session:
        order(shop, session, "3")
        return session

    @shop.transactional(propagation="required")
    def middle(session: Session) -> list[Session]:
        order(shop, session, "2")
        return [session, inner()]

    with shop.begin() as session:
        order(shop, session, "1")
        sessions = [session, *middle()]
        before = left(engine)

    assert [each is session for each in sessions] == [True] * 3
    assert (before, left(engine)) == ([], ["1", "2", "3"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_exception_from_any_depth_takes_everything_along(shop, engine, depth):
    @shop.transactional
    def nested(session: Session, level: int) -> None:
        order(shop, session, str(level))
        if level == depth:
            raise LookupError(level)
        nested(level + 1)

    with pytest.raises(LookupError, match=str(depth)):
        nested(1)

    assert left(engine) == []


def test_an_exception_that_is_caught_on_the_way_is_the_catcher_s_affair(shop, engine):
    """One transaction has one end; what may fail by itself goes into a savepoint, or into a transaction of its own."""

    @shop.transactional
    def risky(session: Session, customer: str) -> None:
        order(shop, session, customer)
        raise LookupError

    with shop.begin() as session:
        order(shop, session, "1")
        with pytest.raises(LookupError), session.begin_nested():
            risky("2")
        with pytest.raises(LookupError):
            risky("3")

    assert left(engine) == ["1", "3"]


def test_what_follows_a_transaction_joins_nothing(shop, engine):
    with pytest.raises(LookupError), shop.begin() as first:
        order(shop, first, "1")
        raise LookupError
    with shop.begin() as second:
        order(shop, second, "2")
    with pytest.raises(NoTransactionError), shop.begin("mandatory"):
        pass

    assert first is not second
    assert left(engine) == ["2"]


def test_a_scope_that_is_over_is_joined_by_nobody(shop, engine):
    """A copy of the context outlives it, and may run later in the same thread."""
    pool, later = ThreadPoolExecutor(1), []

    def place() -> None:
        with shop.begin() as session:
            order(shop, session, "1")
            later.append(contextvars.copy_context())

    @shop.transactional
    def audit(session: Session) -> None:
        order(shop, session, "2")

    pool.submit(place).result()
    pool.submit(later[0].run, audit).result()

    assert left(engine) == ["1", "2"]


# requires_new


def test_requires_new_commits_on_its_own_whatever_becomes_of_the_other(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)

    @shop.transactional(propagation="requires_new")
    def audit(session: Session, what: str) -> None:
        order(shop, session, what)
        with shop.begin() as joined:
            order(shop, joined, f"{what} too")

    with pytest.raises(LookupError), shop.begin() as session:
        order(shop, session, "1")
        audit("2")
        between = left(pg_engine)
        with shop.begin() as joined:
            order(shop, joined, "3")
        raise LookupError

    assert (joined is session, between, left(pg_engine)) == (True, ["2", "2 too"], ["2", "2 too"])


def test_a_new_transaction_that_fails_leaves_the_running_one_alone(pg_engine):
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)
    with shop.begin() as session:
        order(shop, session, "1")
        with pytest.raises(LookupError), shop.begin("requires_new") as other:
            order(shop, other, "2")
            raise LookupError
        with shop.begin("requires_new") as second, shop.begin("requires_new") as third:
            order(shop, second, "3")
            order(shop, third, "4")

    assert left(pg_engine) == ["1", "3", "4"]


def test_a_new_transaction_beside_a_running_one_is_refused_on_sqlite(sqlite_engine):
    """It would wait for the write lock of the transaction that waits for it."""
    Base.metadata.create_all(sqlite_engine)
    shop = Outbox(sqlite_engine)
    with shop.begin("requires_new") as session:
        order(shop, session, "1")
        with pytest.raises(DatabaseError, match=r"one writer at a time.* use 'required', or a savepoint"):
            shop.begin("requires_new").__enter__()
        order(shop, session, "2")

    assert left(sqlite_engine) == ["1", "2"]


# mandatory


def test_mandatory_demands_a_transaction(shop, engine):
    @shop.transactional(propagation="mandatory")
    def part(session: Session, customer: str) -> str:
        order(shop, session, customer)
        return customer

    with pytest.raises(NoTransactionError, match=r"call it inside of outbox\.begin\(\) or of a transactional function"):
        part("1")
    with shop.begin():
        assert part("2") == "2"
    with Session(engine) as session, session.begin():
        assert part(session, "3") == "3"

    assert left(engine) == ["2", "3"]


@pytest.mark.parametrize("propagation", ["nested", "REQUIRED", "", "never"])
def test_an_unknown_propagation_is_refused_where_it_is_written(shop, propagation: Any):
    with pytest.raises(ValueError, match="is none of required, requires_new, mandatory"):
        shop.transactional(propagation=propagation)(lambda session: None)
    with pytest.raises(ValueError, match="is none of"):
        shop.begin(propagation).__enter__()


# An explicit session wins


@pytest.mark.parametrize("propagation", ["required", "requires_new", "mandatory"])
def test_an_explicit_session_wins_and_is_joined_by_what_is_called(shop, engine, propagation):
    @shop.transactional
    def inner(session: Session) -> Session:
        order(shop, session, "inner")
        return session

    @shop.transactional(propagation=propagation)
    def outer(session: Session) -> list[Session]:
        order(shop, session, "outer")
        return [session, inner()]

    with Session(engine) as given:
        sessions = outer(given)
        before = left(engine)
        given.rollback()
        outer(given)
        given.commit()

    assert [session is given for session in sessions] == [True, True]
    assert (before, left(engine)) == ([], ["inner", "outer"])


# Async


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


def test_tasks_of_a_transaction_have_transactions_of_their_own(pg_engine):
    """The transaction that starts them neither waits for them nor takes them along."""
    Base.metadata.create_all(pg_engine)
    shop = Outbox(awaited(pg_engine))

    @shop.transactional
    async def place(session: AsyncSession, customer: str) -> None:
        await aorder(shop, session, customer)

    async def scenario() -> None:
        with pytest.raises(LookupError):
            async with shop.abegin() as session:
                await aorder(shop, session, "1")
                await asyncio.gather(place("2"), place("3"))
                await place("4")
                raise LookupError

    asyncio.run(scenario())
    assert left(pg_engine) == ["2", "3"]


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


def test_threads_have_transactions_of_their_own(pg_engine):
    """`asyncio.to_thread` copies the context of the task; the transaction that runs there stays there."""
    Base.metadata.create_all(pg_engine)
    shop = Outbox(pg_engine)

    @shop.transactional
    def place(session: Session, customer: str) -> None:
        order(shop, session, customer)

    async def scenario() -> None:
        with pytest.raises(LookupError), shop.begin() as session:
            order(shop, session, "1")
            await asyncio.gather(asyncio.to_thread(place, "2"), asyncio.to_thread(place, "3"))
            place("4")
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


# What cannot be transactional


def test_methods_are_refused_and_told_what_to_do(shop):
    class Checkout:
        def place(self, session: Session) -> None:
            """A method's first argument is itself."""

        async def place_later(self, session: AsyncSession) -> None:
            """And so is that of one that is awaited."""

        @classmethod
        def of_the_class(cls, session: Session) -> None:
            """And so is that of a class method."""

    methods: list[Any] = [Checkout.place, Checkout.place_later, Checkout.__dict__["of_the_class"].__func__]
    for method in methods:
        with pytest.raises(TypeError, match=r"a method's is itself; use outbox\.begin\(\) in methods"):
            shop.transactional(method)


def test_generators_are_refused_and_told_what_to_do(shop):
    def numbers(session: Session) -> Iterator[int]:
        yield 1

    async def later(session: AsyncSession):
        yield 1

    generators: list[Any] = [numbers, later]
    for generator in generators:
        with pytest.raises(TypeError, match=r"cannot be a generator: .* use outbox\.begin\(\) inside of it"):
            shop.transactional(generator)


def test_blocking_and_awaited_are_not_mixed(shop, async_shop):
    async def later(session: AsyncSession) -> None:
        """Needs an AsyncEngine."""

    def now(session: Session) -> None:
        """Needs an Engine."""

    async def enter(outbox: Outbox) -> None:
        async with outbox.abegin():
            pass

    with pytest.raises(DatabaseError, match="an Engine that blocks; use a function without async, or a second Outbox"):
        shop.transactional(later)
    with pytest.raises(DatabaseError, match="made on an AsyncEngine; use async def, or a second Outbox"):
        async_shop.transactional(now)
    with pytest.raises(DatabaseError, match=r"use with outbox\.begin\(\)"):
        asyncio.run(enter(shop))
    with pytest.raises(DatabaseError, match=r"use async with outbox\.abegin\(\)"), async_shop.begin():
        pass


# Types, as a type checker sees them


def test_what_a_function_returns_and_takes_is_typed(shop: Outbox, engine: Engine) -> None:
    @shop.transactional
    def plain(session: Session, customer: str, *, total: int = 0) -> tuple[str, int]:
        return customer, total

    @shop.transactional(propagation="requires_new")
    def with_options(session: Session, customer: str) -> str:
        return customer

    with shop.begin("required") as session:
        assert_type(session, Session)
    with Session(engine) as given:
        assert_type(plain(given, "ann", total=1), tuple[str, int])
    assert_type(plain("ann", total=42), tuple[str, int])
    assert_type(with_options("ann"), str)

    assert (plain("ann", total=42), with_options("ann")) == (("ann", 42), "ann")
    with pytest.raises(TypeError):
        plain("ann", sum=42)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        with_options()  # type: ignore[call-overload]


def test_what_an_async_function_returns_and_takes_is_typed(engine: Engine) -> None:
    bound = awaited(engine)
    outbox = Outbox(async_sessionmaker(bound, expire_on_commit=False))

    @outbox.transactional
    async def plain(session: AsyncSession, customer: str) -> list[str]:
        return [customer]

    @outbox.transactional(propagation="required")
    async def with_options(session: AsyncSession, customer: str) -> str:
        return customer

    async def scenario() -> tuple[list[str], str]:
        async with outbox.abegin() as session:
            assert_type(session, AsyncSession)
            assert_type(await plain(session, "ann"), list[str])
        assert_type(await plain("ann"), list[str])
        assert_type(await with_options("ann"), str)
        return await plain("ann"), await with_options("ann")

    assert asyncio.run(scenario()) == (["ann"], "ann")
