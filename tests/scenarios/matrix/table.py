"""The table of scenarios: what is done, and beside it which orders exist then, as rows and as messages alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

SESSIONS = frozenset(("Session", "scoped_session", "AsyncSession", "async_scoped_session"))
CONNECTIONS = frozenset(("Connection", "AsyncConnection"))
DRIVERS = frozenset(("psycopg", "psycopg_async", "asyncpg"))
SQLALCHEMY = SESSIONS | CONNECTIONS
ALL = SQLALCHEMY | DRIVERS

POSTGRESQL = frozenset(("postgresql",))
#: As SQLAlchemy opens it by itself, where the driver begins on its own.
PLAIN_SQLITE = frozenset(("plain_sqlite",))
SQLITE = PLAIN_SQLITE | {"sqlite"}
EVERYWHERE = POSTGRESQL | SQLITE


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done with a handle, the handles and databases it is for, and the orders that are left."""

    play: Callable[[Any], Awaitable[None]]
    rows: tuple[str, ...]
    handles: frozenset[str]
    databases: frozenset[str]
    #: What the handle is opened for, if it is not for an ordinary transaction.
    setting: str

    @property
    def name(self) -> str:
        """Its sentence."""
        return getattr(self.play, "__name__", "?")

    @property
    def expected(self) -> dict[str, list[str]]:
        """Both tables hold the same orders."""
        return {"messages": sorted(self.rows), "orders": sorted(self.rows)}


WRITTEN: list[Scenario] = []


def leaves(
    *rows: str,
    handles: frozenset[str] = ALL,
    databases: frozenset[str] = EVERYWHERE,
    setting: str = "",
) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Any], Awaitable[None]]]:
    """A line of the table: exactly these orders are left by what follows."""

    def added(play: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        WRITTEN.append(Scenario(play, rows, handles, databases, setting))
        return play

    return added
