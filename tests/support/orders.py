"""A business with orders, for tests of what an application does beside the outbox."""

from uuid import UUID

import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from outbox import Outbox
from tests.support.readers import bodies


class Base(DeclarativeBase):
    """The tables of the business."""


class Order(Base):
    """What the business is about."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(unique=True)


def customers(engine: Engine) -> list[str]:
    """What the business knows."""
    with Session(engine) as session:
        return list(session.scalars(sqlalchemy.select(Order.customer).order_by(Order.id)))


def order(outbox: Outbox, session: Session, customer: str) -> UUID:
    """A row, and a message."""
    session.add(Order(customer=customer))
    session.flush()
    return outbox.send(session, "orders", customer)


async def aorder(outbox: Outbox, session: AsyncSession, customer: str) -> UUID:
    """A row, and a message."""
    session.add(Order(customer=customer))
    await session.flush()
    return await outbox.asend(session, "orders", customer)


def left(engine: Engine) -> list[str]:
    """The orders that are there, as rows and as messages alike."""
    messages = sorted(body.decode() for body in bodies(engine))
    # A reader that waits for no writer, which one of our own engines on SQLite would do.
    assert messages == sorted(customers(sqlalchemy.create_engine(engine.url, poolclass=NullPool)))
    return messages
