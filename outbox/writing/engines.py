"""The engines and session factories by which an application reaches its database, awaited or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox.errors import DatabaseError, MissingExtraError
from outbox.store.database import dialect_of
from outbox.store.dialects.kinds import KINDS

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

    Bind = Engine | sessionmaker[Session] | AsyncEngine | async_sessionmaker[AsyncSession]


def engine_of(bind: Bind) -> Engine:
    """Return the engine that threads of our own may use.

    An AsyncEngine's connections belong to its event loop, so a blocking twin is made from its URL. The twin does not
    have what was given to `create_async_engine` besides the URL.

    Raises:
        DatabaseError: there is no engine in `bind`.
    """
    engine = own_engine_of(bind)
    if engine is None:
        raise DatabaseError(
            "an Engine, a sessionmaker bound to one, an AsyncEngine or an async_sessionmaker bound to one is needed,"
            f" not {type(bind).__name__}{_hint(bind)}"
        )
    if not engine.dialect.is_async:
        return engine
    url = engine.url.set(drivername=dialect_of(engine.dialect.name).driving.blocking)
    return sqlalchemy.create_engine(url, poolclass=NullPool)


def _hint(bind: object) -> str:
    if isinstance(bind, str):
        return "; pass create_engine(url)"
    return "; pass its .engine" if hasattr(bind, "engine") else ""


def own_engine_of(bind: Bind) -> Engine | None:
    """Return the engine that the application's transactions run on, if any; of an AsyncEngine the one inside it."""
    found: Any = bind if hasattr(bind, "sync_engine") else getattr(bind, "kw", {}).get("bind", bind)
    inner = getattr(found, "sync_engine", found)
    return inner if isinstance(inner, Engine) else None


def sessions_on(bind: Bind) -> Any:
    """Return a factory of sessions. One made here expires nothing at a commit, because objects are used after it."""
    if isinstance(bind, Engine):
        return sessionmaker(bind, expire_on_commit=False)
    if hasattr(bind, "sync_engine"):
        from sqlalchemy.ext.asyncio import async_sessionmaker

        return async_sessionmaker(cast("AsyncEngine", bind), expire_on_commit=False)
    return bind


def create_async_engine(url: str, **options: Any) -> AsyncEngine:
    """Return SQLAlchemy's async engine; on SQLite it is as from `create_engine`. Needs the extra `async`."""
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
    configure = dialect_of(engine.dialect.name).driving.configure if engine.dialect.name in KINDS else None
    if configure is not None:
        configure(engine, options.get("connect_args", {}))
