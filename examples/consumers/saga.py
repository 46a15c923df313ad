"""A saga of two services, each with a database and a log of its own: an order is paid, or cancelled.

    python saga.py

The payment service consumes the log of the order service, and the other way round; there is no broker. Each step is one
transaction in the service's own database: the inbox row, the change, and the message for the next step.
"""

import json

from sqlalchemy import Engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Inbox, Message, Outbox, create_engine, migrate


class Orders(DeclarativeBase):
    """The tables of the order service."""


class Payments(DeclarativeBase):
    """The tables of the payment service."""


class Order(Orders):
    """An order: placed, then paid or cancelled."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]
    status: Mapped[str] = mapped_column(default="placed")


class Account(Payments):
    """The credit of a customer."""

    __tablename__ = "accounts"

    customer: Mapped[str] = mapped_column(primary_key=True)
    credit: Mapped[int]


orders, payments = create_engine("sqlite:///orders.db"), create_engine("sqlite:///payments.db")
order_log, payment_log = Outbox(orders), Outbox(payments)

# The order service


@order_log.transactional
def place(session: Session, customer: str, total: int) -> None:
    """Begin the saga."""
    session.add(order := Order(customer=customer, total=total))
    session.flush()
    body = {"order": order.id, "customer": customer, "total": total}
    order_log.send(session, "order-placed", body, key=f"order-{order.id}")


outcomes = payment_log.consumer("orders")


@outcomes.on("paid", "refused")
@Inbox(order_log, "payments").idempotent
def conclude(session: Session, message: Message) -> None:
    """End the saga: the order is paid, or its place is given back."""
    order = session.get_one(Order, json.loads(message.body)["order"])
    order.status = "paid" if message.topic == "paid" else "cancelled"


# The payment service

requests = order_log.consumer("payments")


@requests.on("order-placed")
@Inbox(payment_log, "orders").idempotent
def pay(session: Session, message: Message) -> None:
    """Take the money if there is enough, and tell the outcome in the same transaction."""
    asked = json.loads(message.body)
    account = session.get_one(Account, asked["customer"])
    enough = account.credit >= asked["total"]
    if enough:
        account.credit -= asked["total"]
    payment_log.send(session, "paid" if enough else "refused", {"order": asked["order"]}, key=message.key)


def set_up(engine: Engine, tables: type[DeclarativeBase]) -> None:
    """Make the tables of a service, and those of its outbox."""
    migrate.upgrade(engine)
    tables.metadata.create_all(engine)


def main() -> None:
    """Place orders, and let both services work until nothing is left to do."""
    set_up(orders, Orders)
    set_up(payments, Payments)
    with Session(payments) as session, session.begin():
        session.add(Account(customer="ann", credit=50))
    for total in (42, 42):
        place("ann", total)
    requests.until_empty()
    outcomes.until_empty()
    with Session(orders) as session:
        for order in session.scalars(select(Order).order_by(Order.id)):
            print(f"order {order.id} over {order.total} is {order.status}")


if __name__ == "__main__":
    main()
