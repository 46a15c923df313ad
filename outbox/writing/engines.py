"""The engines and session factories by which an application reaches its database, awaited or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.pool import NullPool

from outbox.errors import DatabaseError, MissingExtraError
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.kinds import KINDS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    Bind = Engine | sessionmaker[Session] | AsyncEngine | async_sessionmaker[AsyncSession]


def engine_of(bind: Bind) -> Engine:
    """Return the engine for threads of our own.

    The connections of an AsyncEngine belong to its event loop, and workers know one driver of a database only. So a
    twin is made from the URL of another engine, without any other argument of `create_engine`.
    """
    engine = own_engine_of(bind)
    if engine is None:
        hint = "; pass create_engine(url)" if isinstance(bind, str) else ""
        hint = "; pass its .engine" if hasattr(bind, "engine") else hint
        raise DatabaseError(
            "an Engine, a sessionmaker bound to one, an AsyncEngine or an async_sessionmaker bound to one is needed,"
            f" not {type(bind).__name__}{hint}"
        )
    driving = part_of(engine.dialect.name, Dialect).driving
    url = driving.blocking_url(engine.url)
    # Of psycopg the awaited engine has the same driver as the blocking one.
    if not engine.dialect.is_async and engine.dialect.driver not in driving.names - {url.get_driver_name()}:
        return engine
    return sqlalchemy.create_engine(url, poolclass=NullPool)


def own_engine_of(bind: Bind) -> Engine | None:
    """Return the engine of the application's transactions, if any; of an AsyncEngine its inner engine."""
    found: Any = bind if hasattr(bind, "sync_engine") else getattr(bind, "kw", {}).get("bind", bind)
    inner = getattr(found, "sync_engine", found)
    return inner if isinstance(inner, Engine) else None


def scopes_on(bind: Bind) -> Callable[[], Any]:
    """Return a function that opens a session in a transaction, as the `begin()` of a sessionmaker does.

    Sessions made here expire no objects at the commit, because objects are used afterwards. The end of the block closes
    a session for good: by default a session would begin another transaction, without a commit.
    """
    found: Any = bind
    if isinstance(bind, Engine):
        # A command has no session, and this import takes a tenth of the time of `outbox status`.
        from sqlalchemy.orm import sessionmaker

        found = sessionmaker(bind, expire_on_commit=False)
    elif hasattr(bind, "sync_engine"):
        from sqlalchemy.ext.asyncio import async_sessionmaker

        found = async_sessionmaker(cast("AsyncEngine", bind), expire_on_commit=False)
    return lambda: found(close_resets_only=False)._maker_context_manager()


def create_async_engine(url: str, **options: Any) -> AsyncEngine:
    """Return SQLAlchemy's async engine, on SQLite configured as by `create_engine`. Needs the extra `async`."""
    try:
        from sqlalchemy.ext import asyncio
    except ImportError as error:
        raise MissingExtraError("asyncio needs greenlet: pip install 'outbox-log[async]'") from error

    engine = asyncio.create_async_engine(url, **options)
    _configure(engine.sync_engine, options)
    return engine


def create_engine(url: str, **options: Any) -> Engine:
    """Return SQLAlchemy's engine; on SQLite with WAL, durable commits, and a fair wait for the write lock."""
    engine = sqlalchemy.create_engine(url, **options)
    _configure(engine, options)
    return engine


def _configure(engine: Engine, options: dict[str, Any]) -> None:
    # An application may have engines on other databases.
    configure = part_of(engine.dialect.name, Dialect).driving.configure if engine.dialect.name in KINDS else None
    if configure is not None:
        configure(engine, options.get("connect_args", {}))
