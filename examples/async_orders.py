"""Coroutines in a transaction: each gets an AsyncSession, and those that it calls join what it has begun.

    export OUTBOX_DATABASE=sqlite:///async.db
    outbox db upgrade
    python async_orders.py ann 42 7
    outbox relay --to stdout: --until-empty

On PostgreSQL the application's URL and the worker's are the same, `postgresql+psycopg://…`.
"""

import asyncio
import os
import sys

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import Outbox

database = os.environ.get("OUTBOX_DATABASE", "sqlite:///async.db")
engine = create_async_engine(database.replace("sqlite://", "sqlite+aiosqlite://"))
outbox = Outbox(engine)


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


@outbox.transactional
async def place_order(session: AsyncSession, customer: str, total: int) -> int:
    """Take a new order, and tell everybody: called by itself, one transaction."""
    order = Order(customer=customer, total=total)
    session.add(order)
    await session.flush()  # the order gets its id
    await outbox.asend(session, "orders", {"id": order.id, "total": total}, key=f"order-{order.id}")
    return order.id


@outbox.transactional
async def check_out(session: AsyncSession, customer: str, totals: list[int]) -> list[int]:
    """Take all orders of a basket or none, because their transactions are this one."""
    placed = [await place_order(customer, total) for total in totals]
    await outbox.asend(session, "mail", f"Thank you for {len(placed)} orders!", headers={"to": customer})
    return placed


async def main(customer: str, totals: list[int]) -> None:
    """Check out once."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    print(f"orders {await check_out(customer, totals)} are placed")
    outbox.close()
    await engine.dispose()


if __name__ == "__main__":
    customer, *totals = sys.argv[1:] or ("ann", "42", "7")
    asyncio.run(main(customer, [int(total) for total in totals]))
