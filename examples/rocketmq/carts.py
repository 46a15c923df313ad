"""An order is placed, and another service clears the customer's cart; the order service is killed in between.

    python carts.py listener ann
    python carts.py listener bob killed || echo "the order service is gone"
    python carts.py listener

The first line places an order. The second one does, too, but its process is killed after the commit of the order and
before the end of the transaction of the message, so that nobody has said what became of it. The third line starts the
order service again: check-back asks it, it finds the order, and the message goes to the cart service.

`listener` is the shape of RocketMQ's 4.x clients, `checker` that of its 5.x clients. With `join` in their place the
orders are in the database of the outbox: the commit of the order is the verdict, a kill has nothing to come between,
and nobody is asked. (Then a plain `outbox.send(session, …)` does the same with less: see `../orders.py`.)
"""

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Inbox, Message, Outbox, create_engine, migrate
from outbox.rocketmq import CheckPolicy, LocalTransactionState, TransactionMQProducer, TransactionResolution

messages = create_engine("sqlite:///messages.db")  # what RocketMQ has its broker for
orders = create_engine("sqlite:///orders.db")
carts = create_engine("sqlite:///carts.db")
outbox = Outbox(messages)
inbox = Inbox(carts, consumer="carts")


# The order service


class Base(DeclarativeBase):
    """The tables of the order service."""


class Order(Base):
    """An order; a checker finds it by the id of the transaction that it was placed in."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    transaction_id: Mapped[str] = mapped_column(unique=True)


def is_placed(transaction_id: str | None) -> bool:
    """Look for the order of a transaction."""
    with Session(orders) as session:
        return session.scalar(select(Order.id).where(Order.transaction_id == transaction_id)) is not None


def kill_if_asked() -> None:
    """Be killed, if the command line says so: no `except`, no `finally` and no `atexit` runs."""
    if sys.argv[3:] == ["killed"]:
        os.kill(os.getpid(), signal.SIGKILL)


# 1. With a listener, as in RocketMQ's 4.x clients


class OrderListener:
    """Places an order when its half message is stored, and says later whether it is placed."""

    def execute_local_transaction(self, message: Message, arg: str) -> LocalTransactionState:
        """Place the order of customer `arg`."""
        with Session(orders) as session, session.begin():
            session.add(Order(customer=arg, transaction_id=message.transaction_id))
        kill_if_asked()
        return LocalTransactionState.COMMIT_MESSAGE

    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Look for the order. There may be none because its transaction is not committed *yet*: no rollback, then."""
        return (
            LocalTransactionState.COMMIT_MESSAGE if is_placed(message.transaction_id) else LocalTransactionState.UNKNOW
        )


def place_with_listener(producer: TransactionMQProducer, customer: str) -> None:
    """Have the producer call the listener."""
    producer.send_message_in_transaction(Message("orders", {"customer": customer}, key=customer), customer)


# 2. With a checker, as in RocketMQ's 5.x clients


class OrderChecker:
    """Says whether an order is placed."""

    def check(self, message: Message) -> TransactionResolution:
        """Look for the order, and take care with what is not there, as above."""
        return TransactionResolution.COMMIT if is_placed(message.transaction_id) else TransactionResolution.UNKNOWN


def place_with_checker(producer: TransactionMQProducer, customer: str) -> None:
    """Send first, then do the business, then commit, which leaving the block does; any number of messages."""
    with producer.begin_transaction() as transaction:
        transaction.send("orders", {"customer": customer}, key=customer)
        with Session(orders) as session, session.begin():
            session.add(Order(customer=customer, transaction_id=transaction.id))
        kill_if_asked()


# 3. Co-located: the orders are in the database of the outbox


def place_joined(producer: TransactionMQProducer, customer: str) -> None:
    """Make the commit of the order the verdict: that is written first, and the messages last, in its transaction."""
    with producer.begin_transaction(verdict="join") as transaction:
        transaction.send("orders", {"customer": customer}, key=customer)
        with Session(messages) as session, session.begin():
            transaction.join(session)
            session.add(Order(customer=customer, transaction_id=transaction.id))
        kill_if_asked()


# The cart service


class Carts(DeclarativeBase):
    """The tables of the cart service."""


class Article(Carts):
    """Something in a cart."""

    __tablename__ = "articles"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


@inbox.idempotent
def clear_cart(session: Session, message: Message) -> None:
    """Empty the cart of an order; once, because the customer may have gone on shopping when the message comes again."""
    session.execute(delete(Article).where(Article.customer == message.json()["customer"]))


def full_carts() -> list[str]:
    """The customers who have something in their cart."""
    with Session(carts) as session:
        return sorted(session.scalars(select(Article.customer).distinct()))


# RocketMQ's 6 s would be long to wait for.
producer_of = partial(
    TransactionMQProducer, outbox=outbox, policy=CheckPolicy(transaction_timeout=timedelta(seconds=1))
)
STYLES = {
    "listener": (partial(producer_of, "orders-listener", listener=OrderListener()), place_with_listener, orders),
    "checker": (partial(producer_of, "orders-checker", listener=OrderChecker()), place_with_checker, orders),
    "join": (partial(producer_of, "orders-join"), place_joined, messages),
}


def main(style: str, customer: str | None = None) -> None:
    """Place an order, if there is a customer; then serve until all carts are empty."""
    migrate.upgrade(messages)
    migrate.upgrade(carts)
    make, place, engine = STYLES[style]
    Base.metadata.create_all(engine)
    Carts.metadata.create_all(carts)
    producer = make()
    if customer is not None:
        with Session(carts) as session, session.begin():
            session.add(Article(customer=customer))
        place(producer, customer)
        print(f"{customer}'s order is placed")
    with producer, outbox.running(clear_cart, name="carts"):
        while full_carts():
            time.sleep(0.1)
    print("all carts are empty")


if __name__ == "__main__":
    main(*sys.argv[1:3])
