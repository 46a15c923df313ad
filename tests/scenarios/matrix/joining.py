"""A Session inside of somebody else's transaction on a Connection, in each of the ways in which it may join that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, get_args

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.scenarios.matrix.held import Core, Orm, settled
from tests.scenarios.matrix.table import CONNECTIONS, EVERYWHERE, Scenario

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]
End = Literal["commit", "rollback", "close"]
OuterEnd = Literal["commit", "rollback"]

#: The connection writes order 0, then perhaps a savepoint is begun, then the session writes order 1 and ends; then the
#: connection commits. What is left, by how the session ended.
LEFT: dict[tuple[JoinMode, bool], dict[End, str]] = {
    # mode, and whether there is a savepoint around
    ("conditional_savepoint", False): {"commit": "0 1", "rollback": "", "close": "0 1"},
    ("conditional_savepoint", True): {"commit": "0 1", "rollback": "0", "close": "0"},
    ("rollback_only", False): {"commit": "0 1", "rollback": "", "close": "0 1"},
    ("rollback_only", True): {"commit": "0 1", "rollback": "0", "close": "0 1"},
    ("control_fully", False): {"commit": "0 1", "rollback": "", "close": ""},
    ("control_fully", True): {"commit": "0 1", "rollback": "0", "close": "0"},
    ("create_savepoint", False): {"commit": "0 1", "rollback": "0", "close": "0"},
    ("create_savepoint", True): {"commit": "0 1", "rollback": "0", "close": "0"},
}


def left(mode: JoinMode, end: End, outer_end: OuterEnd, *, savepoint: bool) -> tuple[str, ...]:
    """What is left; a connection that rolls back takes everything along, unless the session has really committed."""
    really_committed = (mode, end, savepoint) == ("control_fully", "commit", False)
    return tuple(LEFT[mode, savepoint][end].split()) if outer_end == "commit" or really_committed else ()


def joining(mode: JoinMode, end: End, outer_end: OuterEnd, *, savepoint: bool) -> Callable[[Core], Awaitable[None]]:
    """What is done there."""

    async def play(t: Core) -> None:
        outer = await settled(t.raw.begin())
        await t.order("0")
        if savepoint:
            await t.savepoint("around")
        await end_a_session(t, mode, end)
        if outer.is_active:
            await settled(getattr(outer, outer_end)())

    around = "_in_a_savepoint" if savepoint else ""
    play.__name__ = f"{mode}{around}_session_{end}_connection_{outer_end}"
    return play


async def end_a_session(t: Core, mode: JoinMode, end: End) -> None:
    """A session on this connection writes its order, with a savepoint of its own, and ends."""
    make: Any = AsyncSession if t.awaited else Session
    session = Orm(make(bind=t.raw, join_transaction_mode=mode), t.outbox, awaited=t.awaited)
    await session.savepoint("a")
    await session.order("1")
    await session.release("a")
    await getattr(session, end)()
    await session.close()


JOININGS = [
    Scenario(
        joining(mode, end, outer_end, savepoint=savepoint),
        left(mode, end, outer_end, savepoint=savepoint),
        CONNECTIONS,
        EVERYWHERE,
        "",
    )
    for mode, savepoint in LEFT
    for end in get_args(End)
    for outer_end in get_args(OuterEnd)
]
