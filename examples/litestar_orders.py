"""Orders over HTTP with Litestar: a request is one transaction, with its order and the message about it.

    export OUTBOX_DATABASE=postgresql+psycopg://localhost/shop
    outbox db upgrade
    outbox relay --to nats://localhost:4222 &
    uvicorn --factory litestar_orders:create_app

Without a second process: `with outbox.running("nats://localhost:4222"):` around the `yield` of `lifespan`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from litestar import Litestar, post
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.exceptions import ClientException
from litestar.params import JSONBody
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import Outbox


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


@dataclass
class NewOrder:
    """What a customer asks for."""

    customer: str
    total: int


async def transaction(state: State) -> AsyncIterator[AsyncSession]:
    """Commits when the request's function has returned, and before the answer is sent; rolls back when it raised."""
    async with state.sessions.begin() as session:
        yield session


async def outbox_of(state: State) -> Outbox:
    """That of the application."""
    found: Outbox = state.outbox
    return found


@post("/orders")
async def place_order(
    data: JSONBody[NewOrder], session: NamedDependency[AsyncSession], outbox: NamedDependency[Outbox]
) -> dict[str, int]:
    """Take a new order, and tell everybody."""
    order = Order(customer=data.customer, total=data.total)
    session.add(order)
    await session.flush()  # the order gets its id
    await outbox.asend(session, "orders", {"id": order.id, "total": order.total}, key=f"order-{order.id}")
    if data.total > 1000:
        raise ClientException(status_code=409)  # neither the order nor its message stays
    return {"id": order.id}


def create_app(database: str | None = None) -> Litestar:
    """The application, on the database of this URL, or on that of the environment."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        engine = create_async_engine(database or os.environ["OUTBOX_DATABASE"])
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        app.state.sessions = async_sessionmaker(engine)
        app.state.outbox = outbox = Outbox(engine)
        yield
        outbox.close()
        await engine.dispose()

    dependencies = {"session": Provide(transaction), "outbox": Provide(outbox_of)}
    return Litestar([place_order], lifespan=[lifespan], dependencies=dependencies)
