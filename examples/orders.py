"""An order service: each change of an order is one transaction, and the message about it is part of it.

    export OUTBOX_DATABASE=sqlite:///shop.db
    outbox db upgrade
    python orders.py ann 42
    outbox relay --to stdout: --until-empty

Without the last line nothing is lost: the message waits in the database, beside its order.
"""

import os
import sys

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Outbox, create_engine

engine = create_engine(os.environ.get("OUTBOX_DATABASE", "sqlite:///shop.db"))
outbox = Outbox(engine)


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order, as it stands after `version` changes."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]
    status: Mapped[str] = mapped_column(default="placed")
    version: Mapped[int] = mapped_column(default=1)


@outbox.transactional
def place_order(session: Session, customer: str, total: int) -> int:
    """Take a new order, and tell everybody."""
    order = Order(customer=customer, total=total)
    session.add(order)
    session.flush()  # the order gets its id
    body = {"id": order.id, "total": total, "status": "placed", "version": 1}
    outbox.send(session, "orders", body, key=f"order-{order.id}")
    return order.id


@outbox.transactional
def advance_order(session: Session, order_id: int) -> str:
    """Move an order on, from placed to paid to shipped, and tell everybody."""
    order = session.get_one(Order, order_id, with_for_update=True)
    if order.status != "shipped":
        order.status = {"placed": "paid", "paid": "shipped"}[order.status]
        order.version += 1
        body = {"id": order.id, "total": order.total, "status": order.status, "version": order.version}
        outbox.send(session, "orders", body, key=f"order-{order.id}")
    return order.status


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    customer, total = sys.argv[1:] or ("ann", "42")
    print(f"order {place_order(customer, int(total))} is placed")
