"""A shop: each change of an order is one transaction with its message, and the message says which version it is.

python shop.py 200
"""

import os
import random
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
    version: Mapped[int] = mapped_column(default=1)


@outbox.transactional
def place(session: Session, customer: str, total: int) -> int:
    """Take an order."""
    order = Order(customer=customer, total=total)
    session.add(order)
    session.flush()  # the order gets its id
    tell(session, order)
    return order.id


@outbox.transactional
def change(session: Session, order_id: int, total: int) -> None:
    """Change what an order costs. The lock on its row makes the order of messages that of commits."""
    order = session.get_one(Order, order_id, with_for_update=True)
    order.total = total
    order.version += 1
    tell(session, order)


def tell(session: Session, order: Order) -> None:
    """Send an order as it is now."""
    body = {"id": order.id, "customer": order.customer, "total": order.total, "version": order.version}
    outbox.send(session, "orders", body, key=f"order-{order.id}")


def trade(orders: int, seed: int = 1) -> None:
    """Have a busy day."""
    Base.metadata.create_all(engine)
    dice = random.Random(seed)
    for _ in range(orders):
        order_id = place(dice.choice(("ann", "bob", "eve")), dice.randint(5, 500))
        if dice.random() < 0.3:
            change(order_id, dice.randint(5, 500))


if __name__ == "__main__":
    trade(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
    outbox.close()
