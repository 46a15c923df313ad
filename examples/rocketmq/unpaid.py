"""An order that is not paid in time is closed: a delayed message asks, when the time is over.

    python unpaid.py

The message is sent in the transaction of the order, so there is no order without it. When it arrives, the order may be
paid by then: the listener looks, in the database, and closes the order only if it is not. Delayed messages hold nothing
back: "order paid" does not wait half an hour behind "close the order if it is not paid".

RocketMQ's delay level 16 is `delay="30m"`. Here it is level 1, one second.
"""

import time

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Inbox, Message, Outbox, create_engine, migrate
from outbox.rocketmq import (
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultMQProducer,
    DefaultMQPushConsumer,
    MessageExt,
    MessageListenerConcurrently,
)

engine = create_engine("sqlite:///shop.db")
outbox = Outbox(engine)
producer = DefaultMQProducer("shop", outbox)
inbox = Inbox(outbox, consumer="closing")


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order; `state` is open, paid or closed."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="open")


@outbox.transactional
def place(session: Session, id: int) -> None:
    """Place an order, and have it looked at when the time to pay is over."""
    session.add(Order(id=id))
    producer.send(Message("orders-unpaid", {"order": id}, delay="1s"))


@outbox.transactional
def pay(session: Session, id: int) -> None:
    """Pay an order, unless it is closed."""
    order = session.get_one(Order, id, with_for_update=True)
    if order.state == "open":
        order.state = "paid"


@inbox.idempotent
def close_if_unpaid(session: Session, message: Message) -> None:
    """Close an order that nobody has paid."""
    order = session.get_one(Order, message.json()["order"], with_for_update=True)
    if order.state == "open":
        order.state = "closed"


def consume(messages: list[MessageExt], _context: ConsumeConcurrentlyContext) -> ConsumeConcurrentlyStatus:
    """Look at the orders; what is raised makes the message come again later."""
    for each in messages:
        close_if_unpaid(each.message)
    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS


def states() -> dict[int, str]:
    """The orders and their states."""
    with Session(engine) as session:
        return {order.id: order.state for order in session.query(Order)}


def main() -> None:
    """Place two orders, and pay one."""
    migrate.upgrade(engine)
    Base.metadata.create_all(engine)
    consumer = DefaultMQPushConsumer("closing", outbox, consume_from_where=ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.subscribe("orders-unpaid")
    consumer.register_message_listener(MessageListenerConcurrently(consume))

    with consumer:
        place(1)
        place(2)
        pay(1)
        print(f"placed: {states()}")
        while "open" in states().values():
            time.sleep(0.1)
    print(f"a second later: {states()}")


if __name__ == "__main__":
    main()
