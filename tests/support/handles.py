"""The ways in which an application holds a transaction."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, closing, contextmanager
from typing import Any

import asyncpg
import psycopg
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox import create_engine


@contextmanager
def a_session(engine: Engine, **options: Any) -> Iterator[Session]:
    """A session of its own."""
    with Session(engine, **options) as session:
        yield session


@contextmanager
def a_scoped_session(engine: Engine, **options: Any) -> Iterator[scoped_session[Session]]:
    """The session of a scope, as web frameworks hand it out."""
    session = scoped_session(sessionmaker(engine, **options))
    try:
        yield session
    finally:
        session.remove()


@contextmanager
def a_connection(engine: Engine) -> Iterator[Connection]:
    """A connection, without any ORM."""
    with engine.connect() as connection:
        yield connection


def a_psycopg_connection(engine: Engine, **options: Any) -> AbstractContextManager[psycopg.Connection]:
    """The driver's own connection, to the same database."""
    return closing(psycopg.connect(conninfo_of(engine.url), **options))


@asynccontextmanager
async def an_async_session(engine: AsyncEngine, **options: Any) -> AsyncIterator[AsyncSession]:
    """A session of its own, awaited."""
    async with AsyncSession(engine, **options) as session:
        yield session


@asynccontextmanager
async def an_async_scoped_session(
    engine: AsyncEngine, **options: Any
) -> AsyncIterator[async_scoped_session[AsyncSession]]:
    """The session of a task."""
    session = async_scoped_session(async_sessionmaker(engine, **options), asyncio.current_task)
    try:
        yield session
    finally:
        await session.remove()


@asynccontextmanager
async def an_async_connection(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A connection, without any ORM, awaited."""
    async with engine.connect() as connection:
        yield connection


@asynccontextmanager
async def an_async_psycopg_connection(engine: AsyncEngine, **options: Any) -> AsyncIterator[psycopg.AsyncConnection]:
    """The driver's own connection, awaited."""
    connection = await psycopg.AsyncConnection.connect(conninfo_of(engine.url), **options)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def an_asyncpg_connection(engine: AsyncEngine, **_: Any) -> AsyncIterator[asyncpg.Connection]:
    """The other driver's own connection, awaited; without a transaction, since that is how it begins."""
    url = engine.url.set(drivername="postgresql")
    connection = await asyncpg.connect(url.render_as_string(hide_password=False))
    try:
        yield connection
    finally:
        await connection.close()


def awaited(engine: Engine) -> AsyncEngine:
    """An engine to the same database that is awaited; without a pool, so that any event loop may use it."""
    drivers = {"postgresql": "postgresql+psycopg_async", "sqlite": "sqlite+aiosqlite"}
    url = engine.url.set(drivername=drivers[engine.dialect.name])
    return AsyncEngine(create_engine(url.render_as_string(hide_password=False), poolclass=NullPool))


def conninfo_of(url: URL) -> str:
    """The URL as libpq takes it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


#: On every database, blocking.
HANDLES: dict[str, Callable[[Engine], AbstractContextManager[Any]]] = {
    "Session": a_session,
    "scoped_session": a_scoped_session,
    "Connection": a_connection,
}
#: The same, awaited.
ASYNC_HANDLES: dict[str, Callable[[AsyncEngine], AbstractAsyncContextManager[Any]]] = {
    "AsyncSession": an_async_session,
    "async_scoped_session": an_async_scoped_session,
    "AsyncConnection": an_async_connection,
}
