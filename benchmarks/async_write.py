"""What a message costs its writer on an AsyncSession, against the same INSERT written by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median

from sqlalchemy import URL, insert, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from benchmarks.measure import Measurement, Turns, at_most
from benchmarks.site import Site
from benchmarks.writers import BODY, ORDERS, row_by_hand
from outbox import Outbox
from outbox.store.operations.check import tables_of

#: Transactions of one side before it is the turn of the other.
_BLOCK = 25

Append = Callable[[AsyncSession], Awaitable[object]]


def async_write(site: Site) -> list[Measurement]:
    """One business INSERT and one keyless message on asyncio, against an `insert()`: microseconds a transaction."""
    return [_measured(site, "async_write", "psycopg")]


def async_write_asyncpg(site: Site) -> list[Measurement]:
    """The same with asyncpg: one business INSERT and one keyless message, against an `insert()`."""
    return [_measured(site, "async_write_asyncpg", "asyncpg")]


def _measured(site: Site, name: str, driver: str) -> Measurement:
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        turns = asyncio.run(_turns(site, name, make_url(place.url).set(drivername=f"postgresql+{driver}")))
    return Measurement(name=name, goal=at_most(1.10), unit="µs", ours=turns.ours, other=turns.other)


async def _turns(site: Site, name: str, url: URL) -> Turns:
    ours, theirs = create_async_engine(url), create_async_engine(url)
    outbox = Outbox(ours)
    statement = insert(tables_of(outbox.database).message)

    async def send(session: AsyncSession) -> None:
        await outbox.asend(session, "orders", BODY)

    async def insert_message(session: AsyncSession) -> None:
        await session.execute(statement, row_by_hand())

    for engine, append in ((ours, send), (theirs, insert_message)):
        await _microseconds(engine, append, site.scale.transactions // 10)
    turns = Turns(name)
    for _ in range(site.scale.rounds):
        blocks = [
            (await _microseconds(ours, send, _BLOCK), await _microseconds(theirs, insert_message, _BLOCK))
            for _ in range(site.scale.transactions // _BLOCK)
        ]
        turns.add(median(each for each, _ in blocks), median(each for _, each in blocks))
    outbox.close()
    await ours.dispose()
    await theirs.dispose()
    return turns


async def _microseconds(engine: AsyncEngine, append: Append, transactions: int) -> float:
    started = time.perf_counter()
    for number in range(transactions):
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(insert(ORDERS), {"customer": "c-1", "total": number})
            await append(session)
    return (time.perf_counter() - started) / transactions * 1e6
