"""A business with orders, for tests of what an application does beside the outbox."""

import sqlalchemy
from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


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
