"""A read model, kept by a consumer: totals by customer, from the orders that were committed.

    python read_model.py
    python read_model.py again

The second line builds the table anew from the whole log, under another name of the group; the first one may go on. In
production `outbox consume read_model:totals` runs until SIGTERM, in as many processes as there are partitions.
"""

import json
import sys

from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, create_engine, migrate

engine = create_engine("sqlite:///shop.db")
outbox = Outbox(engine)


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order, as the shop writes it."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


class Total(Base):
    """A row of the read model, in the generation that a group builds."""

    __tablename__ = "totals"

    generation: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int] = mapped_column(default=0)
    total: Mapped[int] = mapped_column(default=0)


generation = "totals-2" if sys.argv[1:] == ["again"] else "totals"
totals = outbox.consumer(generation, inbox=True)


@totals.on("orders")
def add_up(session: Session, message: Message) -> None:
    """Count an order once, however often the message comes: row and inbox are committed together."""
    order = json.loads(message.body)
    row = session.get(Total, (generation, order["customer"])) or Total(
        generation=generation, customer=order["customer"], orders=0, total=0
    )
    row.orders += 1
    row.total += order["total"]
    session.add(row)


@outbox.transactional
def place_order(session: Session, customer: str, total: int) -> None:
    """Write the order and its message in one transaction."""
    session.add(order := Order(customer=customer, total=total))
    session.flush()
    outbox.send(session, "orders", {"id": order.id, "customer": customer, "total": total}, key=customer)


def main() -> None:
    """Place orders, and show the read model."""
    migrate.upgrade(engine)
    Base.metadata.create_all(engine)
    if generation == "totals":
        for customer, total in (("ann", 42), ("bob", 7), ("ann", 8)):
            place_order(customer, total)
    totals.until_empty()
    with Session(engine) as session:
        rows = session.scalars(select(Total).where(Total.generation == generation).order_by(Total.customer))
        for row in rows:
            print(f"{row.generation}: {row.customer}, {row.orders} of {row.total} in all")


if __name__ == "__main__":
    main()
