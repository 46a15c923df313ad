"""Orders over HTTP with FastAPI: a request is one transaction, with its order and the message about it.

    export OUTBOX_DATABASE=postgresql+psycopg://localhost/shop
    outbox db upgrade
    outbox relay --to kafka://localhost:9092/shop &
    uvicorn --factory fastapi_orders:create_app

Without a second process: `with outbox.running("kafka://localhost:9092/shop"):` around the `yield` of `lifespan`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
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


class NewOrder(BaseModel):
    """What a customer asks for."""

    customer: str
    total: int


async def transaction(request: Request) -> AsyncIterator[AsyncSession]:
    """Commits when the request's function has returned, rolls back when it raised."""
    async with request.app.state.sessions.begin() as session:
        yield session


def outbox_of(request: Request) -> Outbox:
    """That of the application; a test may put another in its place by `app.dependency_overrides`."""
    found: Outbox = request.app.state.outbox
    return found


# The scope makes it commit before the answer is sent: by default a customer may read "201" of what then fails.
Transaction = Annotated[AsyncSession, Depends(transaction, scope="function")]
TheOutbox = Annotated[Outbox, Depends(outbox_of)]

router = APIRouter()


@router.post("/orders", status_code=201)
async def place_order(new: NewOrder, session: Transaction, outbox: TheOutbox) -> dict[str, int]:
    """Take a new order, and tell everybody."""
    order = Order(customer=new.customer, total=new.total)
    session.add(order)
    await session.flush()  # the order gets its id
    await outbox.asend(session, "orders", {"id": order.id, "total": order.total}, key=f"order-{order.id}")
    if new.total > 1000:
        raise HTTPException(409, "that is more than there is")  # neither the order nor its message stays
    return {"id": order.id}


def create_app(database: str | None = None) -> FastAPI:
    """The application, on the database of this URL, or on that of the environment."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = create_async_engine(database or os.environ["OUTBOX_DATABASE"])
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        app.state.sessions = async_sessionmaker(engine)
        app.state.outbox = outbox = Outbox(engine)
        yield
        outbox.close()
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    return app
