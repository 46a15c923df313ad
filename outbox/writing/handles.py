"""Handles: the ways to hold a transaction in an application."""

from __future__ import annotations

import sqlite3
import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import psycopg
from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session


class AsyncpgConnection(Protocol):
    """asyncpg's `Connection`, also one of its pool."""

    def is_in_transaction(self) -> bool:
        """See asyncpg."""


if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    #: The connections of drivers that are awaited.
    AsyncDriver = psycopg.AsyncConnection[Any] | AsyncpgConnection
    #: The kinds of `Handle` that are awaited.
    AsyncHandle = AsyncSession | async_scoped_session[Any] | AsyncConnection | AsyncDriver

#: The connections of drivers that block.
Driver = psycopg.Connection[Any] | sqlite3.Connection
Handle = Session | scoped_session[Any] | Connection | Driver
#: The connection that a transaction runs on.
DriverConnection = Connection | Driver

_SYNC = "a Session, a scoped_session, a Connection, or a Connection of psycopg or sqlite3"
_ASYNCIO, _ASYNC_SESSIONS = "sqlalchemy.ext.asyncio", ("AsyncSession", "async_scoped_session")
_ASYNC = (
    "an AsyncSession, an async_scoped_session, an AsyncConnection, a psycopg AsyncConnection or an asyncpg Connection"
)


def is_async(handle: object) -> bool:
    """Return whether statements on the handle are awaited."""
    return is_async_driver(handle) or isinstance(handle, _kinds(_ASYNCIO, "AsyncConnection", *_ASYNC_SESSIONS))


def is_async_driver(handle: object) -> TypeGuard[AsyncDriver]:
    """Return whether the handle is a driver's own connection, and awaited."""
    # A connection that asyncpg's pool lends is a Connection, too.
    return isinstance(handle, (psycopg.AsyncConnection, *_kinds("asyncpg", "Connection")))


def is_driver(handle: object) -> TypeGuard[Driver]:
    """Return whether the handle is a driver's own connection, and blocks."""
    return isinstance(handle, psycopg.Connection | sqlite3.Connection)


def is_session(handle: object) -> bool:
    """Return whether `handle` is a session of SQLAlchemy's ORM, awaited or not."""
    return isinstance(handle, (Session, scoped_session, *_kinds(_ASYNCIO, *_ASYNC_SESSIONS)))


def of_scope(handle: Any) -> Any:
    """Return the session of a scoped session at this moment; return any other handle itself."""
    scopes: tuple[Any, ...] = (scoped_session, *_kinds(_ASYNCIO, "async_scoped_session"))
    return handle() if isinstance(handle, scopes) else handle


def _kinds(module_name: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module; none in a program that has not imported the module, and so has no object of them."""
    module = sys.modules.get(module_name)
    return () if module is None else tuple(getattr(module, name) for name in names)


def require_async(handle: object, verb: str) -> None:
    """Refuse a handle that cannot be awaited; `verb`: the called method."""
    if not is_async(handle):
        sync = is_driver(handle) or isinstance(handle, Session | scoped_session | Connection)
        fix = f"; for this handle call {verb[1:]}() without await" if sync else _hint(handle)
        raise TypeError(f"{verb} takes {_ASYNC}, not {_described(handle)}{fix}")


def refuse(handle: object, verb: str) -> TypeError:
    """Return the error about a handle of no use; `verb`: the called method."""
    fix = f"; for this handle: await a{verb}(…)" if is_async(handle) else _hint(handle)
    return TypeError(f"{verb} takes {_SYNC}, not {_described(handle)}{fix}")


def _described(handle: object) -> str:
    if isinstance(handle, type):
        return f"the class {handle.__name__}"
    kind = type(handle)
    # Several libraries have a Connection.
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}" if hasattr(handle, "cursor") else kind.__name__


def _hint(handle: object) -> str:
    """Return the fix for an object that makes handles or has a handle; an empty text if unknown."""
    if callable(handle) and "session" in type(handle).__name__.lower():
        return "; call it to get a session"
    if type(handle).__name__ in ("Engine", "AsyncEngine"):
        begin = "with" if type(handle).__name__ == "Engine" else "async with"
        return f"; begin a transaction: {begin} engine.begin() as connection"
    if hasattr(handle, "session"):
        return "; pass its .session"
    if hasattr(handle, "cursor"):
        return "; of the drivers' own connections only those of psycopg, asyncpg and sqlite3 can be used"
    return ""
