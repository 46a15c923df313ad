"""The inbox of a consumer that awaits: the same promises, with an a before the verb."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from outbox import Inbox, Message, Retry
from tests.support.effects import effects


@pytest.fixture
def awaited(engine: Engine, inbox: Inbox) -> AsyncEngine:
    """The same database for an application that awaits; `inbox` has made the table of effects."""
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}
    # Without a pool no connection outlives the event loop that it belongs to.
    return create_async_engine(engine.url.set(drivername=drivers[engine.dialect.name]), poolclass=NullPool)


@asynccontextmanager
async def an_async_session(engine: AsyncEngine) -> AsyncIterator[Any]:
    async with AsyncSession(engine) as session, session.begin():
        yield session


@asynccontextmanager
async def an_async_connection(engine: AsyncEngine) -> AsyncIterator[Any]:
    async with engine.begin() as connection:
        yield connection


@asynccontextmanager
async def a_driver_connection(engine: AsyncEngine) -> AsyncIterator[Any]:
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection


async def twice(awaited: AsyncEngine, message: Message, handle: Any) -> list[bool]:
    """What two deliveries are answered, each in a transaction of its own."""
    inbox, answers = Inbox(awaited, "billing"), []
    for _ in range(2):
        async with handle(awaited) as each:
            answers.append(await inbox.aonce(each, message))
    return answers


@pytest.mark.parametrize("handle", [an_async_session, an_async_connection], ids=lambda handle: handle.__name__)
def test_every_handle_that_asend_takes_will_do(awaited, message, handle):
    assert asyncio.run(twice(awaited, message, handle)) == [True, False]


def test_an_async_connection_of_the_driver_will_do(pg_engine, message):
    awaited = create_async_engine(pg_engine.url, poolclass=NullPool)

    assert asyncio.run(twice(awaited, message, a_driver_connection)) == [True, False]


def test_handles_that_block_and_handles_that_are_awaited_have_a_verb_each(engine, awaited, inbox, message):
    async def mixed_up() -> None:
        async with AsyncSession(awaited) as session:
            with pytest.raises(TypeError, match="await aonce"):
                inbox.once(session, message)
        with Session(engine) as blocking, pytest.raises(TypeError, match="once\\(\\) without await"):
            await inbox.aonce(blocking, message)

    asyncio.run(mixed_up())


def test_an_async_handler_takes_effect_once_and_its_verdict_counts(engine, awaited, message):
    answers = iter([Retry("later"), None])

    @Inbox(awaited, "billing").idempotent
    async def book(session: AsyncSession, message: Message) -> Any:
        await session.execute(text("INSERT INTO effect (what) VALUES ('booked')"))
        return next(answers)

    async def deliver() -> list[Any]:
        return [await book(message) for _ in range(3)]

    assert asyncio.run(deliver()) == [Retry("later"), None, None]
    assert effects(engine) == ["booked"]
