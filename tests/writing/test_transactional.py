"""`begin()` and `@transactional`: a transaction that commits at the end, and joins the one that is running."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, assert_type
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from outbox import DatabaseError, Inbox, NoTransactionError, Outbox
from tests.support.handles import awaited
from tests.support.orders import Order, customers
from tests.support.readers import bodies


def test_a_block_commits_at_its_end_and_rolls_back_when_it_raises(shop, engine):
    with shop.begin() as session:
        session.add(Order(customer="ann"))
        shop.send(session, "orders", b"1")
    with pytest.raises(ZeroDivisionError), shop.begin() as session:
        session.add(Order(customer="ben"))
        shop.send(session, "orders", b"2")
        _ = 1 / 0

    assert (bodies(engine), customers(engine)) == ([b"1"], ["ann"])


@pytest.mark.parametrize("made_by", [Engine, sessionmaker])
def test_a_session_sends_nothing_after_its_block(engine, made_by):
    """It would begin anew by itself: an id returned, nothing committed, and on SQLite the write lock kept."""
    shop = Outbox(engine if made_by is Engine else sessionmaker(engine))
    with shop.begin() as session:
        shop.send(session, "orders", b"1")

    with pytest.raises(NoTransactionError, match="is closed"):
        shop.send(session, "orders", b"2")

    with shop.begin() as other:
        shop.send(other, "orders", b"3")
    assert bodies(engine) == [b"1", b"3"]


@pytest.mark.parametrize("made_by", [AsyncEngine, async_sessionmaker])
def test_an_awaited_session_sends_nothing_after_its_block(engine, made_by):
    own = awaited(engine)
    shop = Outbox(own if made_by is AsyncEngine else async_sessionmaker(own))

    async def scenario() -> None:
        async with shop.abegin() as session:
            await shop.asend(session, "orders", b"1")
        with pytest.raises(NoTransactionError, match="is closed"):
            await shop.asend(session, "orders", b"2")

    asyncio.run(scenario())
    assert bodies(engine) == [b"1"]


def test_the_session_of_a_function_sends_nothing_after_its_return(shop, engine):
    @shop.transactional
    def place(session: Session) -> Session:
        shop.send(session, "orders", b"1")
        return session

    session = place()

    with pytest.raises(NoTransactionError, match="is closed"):
        shop.send(session, "orders", b"2")
    assert bodies(engine) == [b"1"]


def test_the_session_of_an_idempotent_handler_sends_nothing_after_its_return(shop, engine):
    sessions: list[Session] = []
    Inbox(shop, "mail").idempotent(lambda session, _message: sessions.append(session))(uuid4())

    with pytest.raises(NoTransactionError, match="is closed"):
        shop.send(sessions[0], "orders", b"1")
    assert bodies(engine) == []


def test_a_function_runs_in_a_transaction_and_returns_what_it_returns(shop: Outbox, engine):
    @shop.transactional
    def place_order(session: Session, customer: str, total: int, *, express: bool = False) -> tuple[str, int, bool]:
        """Place an order."""
        session.add(Order(customer=customer))
        shop.send(session, "orders", {"total": total}, key=customer)
        shop.send(session, "mail", b"...")
        return customer, total, express

    placed = place_order("ann", 42, express=True)

    assert_type(placed, tuple[str, int, bool])
    assert placed == ("ann", 42, True)
    assert (bodies(engine), customers(engine)) == ([b'{"total":42}', b"..."], ["ann"])
    assert (place_order.__name__, place_order.__doc__) == ("place_order", "Place an order.")
    with pytest.raises(TypeError):
        place_order(42)  # type: ignore[call-overload]  # the types are those of the function without its session


def test_a_function_that_raises_leaves_nothing(shop, engine):
    @shop.transactional
    def place_order(session: Session, customer: str) -> None:
        session.add(Order(customer=customer))
        shop.send(session, "orders", b"1")
        raise LookupError(customer)

    with pytest.raises(LookupError, match="ann"):
        place_order("ann")

    assert (bodies(engine), customers(engine)) == ([], [])


def test_a_function_joins_the_transaction_of_its_caller(shop, engine):
    sessions: list[Session] = []

    @shop.transactional
    def inner(session: Session, body: str) -> None:
        sessions.append(session)
        shop.send(session, "orders", body)

    @shop.transactional
    def outer(session: Session, *, fail: bool) -> None:
        sessions.append(session)
        inner("1")
        with shop.begin() as joined:
            sessions.append(joined)
            shop.send(joined, "orders", "2")
        assert bodies(engine) == []
        if fail:
            raise LookupError

    with pytest.raises(LookupError):
        outer(fail=True)
    assert bodies(engine) == []
    outer(fail=False)

    assert bodies(engine) == [b"1", b"2"]
    assert [session is sessions[0] for session in sessions] == [True] * 3 + [False] * 3


def test_after_a_transaction_the_next_one_is_another(shop, engine):
    with shop.begin() as first:
        shop.send(first, "orders", b"1")
    with pytest.raises(ZeroDivisionError), shop.begin():
        _ = 1 / 0
    with shop.begin() as second:
        shop.send(second, "orders", b"2")

    assert second is not first
    assert bodies(engine) == [b"1", b"2"]


def test_another_thread_has_a_transaction_of_its_own(pg_engine):
    outbox = Outbox(pg_engine)
    with pytest.raises(ZeroDivisionError), outbox.begin() as session:
        outbox.send(session, "orders", b"1")
        other = threading.Thread(target=send_one_body, args=(outbox, b"2"))
        other.start()
        other.join()
        _ = 1 / 0

    assert bodies(pg_engine) == [b"2"]


def send_one_body(outbox: Outbox, body: bytes) -> None:
    """Send in a transaction of its own."""
    with outbox.begin() as session:
        outbox.send(session, "orders", body)


def test_two_outboxes_have_transactions_of_their_own(pg_engine, sqlite_engine):
    one, other = Outbox(pg_engine), Outbox(sqlite_engine)
    with one.begin() as session, other.begin() as another:
        one.send(session, "orders", b"1")
        other.send(another, "orders", b"2")

    assert (bodies(pg_engine), bodies(sqlite_engine)) == ([b"1"], [b"2"])


def test_an_explicit_session_wins(shop, engine):
    @shop.transactional
    def place_order(session: Session, body: str) -> None:
        shop.send(session, "orders", body)

    with Session(engine) as session:
        place_order.__wrapped__(session, "1")
        session.rollback()
        place_order.__wrapped__(session, "2")
        session.commit()

    assert bodies(engine) == [b"2"]


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
        with pytest.raises(TypeError, match=r"which a method has for itself; use outbox\.begin\(\) in methods"):
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


def test_functions_without_a_place_for_the_session_are_refused(shop, engine):
    def takes_none() -> None:
        """Gets nothing."""

    nothing: Any = takes_none
    for wrap, what in ((shop.transactional, "a transactional function"), (Inbox(engine, "b").idempotent, "a handler")):
        with pytest.raises(TypeError, match=f"^{what} gets its session as its first argument; .*takes_none"):
            wrap(nothing)


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
