"""Points for payments: a message may say what has to happen, not ask whether it may.

    python points.py

*Granting* points after a payment is a good message: nothing can be said against it, and an inbox makes it happen once,
however often it comes.

*Taking* points is not, because the points service may have to refuse: the customer may have too few. When a message
about a payment arrives, the payment is committed, and nobody is left to refuse to. So what may be refused comes first,
while everything can still be called off: the points are *reserved*, by a call that answers. What follows cannot be
refused any more and is a message again: the reservation is spent when the payment was made. If it was not, the
compensation gives the points back.

The payments are in a database of their own, not in the one with the messages. That is where half messages are of use:
`verdict="record"` writes a row beside each payment, by which check-back tells whether it was made.
"""

import time
from datetime import timedelta

from sqlalchemy import CheckConstraint, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Inbox, Message, Outbox, Relay, create_engine, migrate
from outbox.rocketmq import CheckPolicy, TransactionMQProducer, TransactionResolution
from outbox.schema import record_metadata

messages = create_engine("sqlite:///messages.db")
payments = create_engine("sqlite:///payments.db")
points = create_engine("sqlite:///points.db")
outbox = Outbox(messages)
# RocketMQ's 6 s would be long to wait for.
producer = TransactionMQProducer(
    "payments", outbox, business=payments, policy=CheckPolicy(transaction_timeout=timedelta(seconds=1))
)
inbox = Inbox(points, consumer="points")


# The payment service


class Base(DeclarativeBase):
    """The tables of the payment service."""


class Payment(Base):
    """A payment, in money or in points."""

    __tablename__ = "payments"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[int] = mapped_column(CheckConstraint("amount <= 200"))


def pay(customer: str, euros: int) -> None:
    """Take a payment, for which the customer gets a point for each euro."""
    with producer.begin_transaction(verdict="record") as transaction:
        transaction.send("points-earned", {"customer": customer, "points": euros}, key=customer)
        with Session(payments) as session, session.begin():
            transaction.join(session)
            session.add(Payment(customer=customer, amount=euros))


def pay_with_points(customer: str, number: int) -> bool:
    """Pay something with points, unless there are too few of them."""
    with producer.begin_transaction(verdict="record") as transaction:
        transaction.send("points-spent", {"reservation": transaction.id}, key=customer)
        if not reserve(customer, number, transaction.id):
            transaction.rollback()
            return False
        with Session(payments) as session, session.begin():
            transaction.join(session)
            session.add(Payment(customer=customer, amount=number))
    return True


def compensate() -> list[str]:
    """Give back what was reserved for payments that were not made, by a service that was killed, say; run it at times.

    A payment of which nothing is known is waited for: check-back finds out. Age alone would prove nothing.
    """
    unpaid = [id for id in reserved() if verdict_on(id) is TransactionResolution.ROLLBACK]
    for reservation in unpaid:
        give_back(reservation)
    return unpaid


def verdict_on(transaction: str) -> TransactionResolution:
    """Ask for the verdict that stands; to end a transaction with UNKNOWN changes nothing."""
    return producer.end_transaction(transaction, TransactionResolution.UNKNOWN)


# The points service


class Points(DeclarativeBase):
    """The tables of the points service."""


class Account(Points):
    """The points of a customer."""

    __tablename__ = "accounts"

    customer: Mapped[str] = mapped_column(primary_key=True)
    points: Mapped[int]


class Reservation(Points):
    """Points that are taken from an account until they are spent or given back."""

    __tablename__ = "reservations"

    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    points: Mapped[int]


@inbox.idempotent
def handle(session: Session, message: Message) -> None:
    """Do what a message says; there is nothing in it that could be refused."""
    said = message.json()
    if message.topic == "points-earned":
        account = session.get(Account, said["customer"], with_for_update=True) or Account(
            customer=said["customer"], points=0
        )
        account.points += said["points"]
        session.add(account)
    elif message.topic == "points-spent":
        session.delete(session.get_one(Reservation, said["reservation"]))


def reserve(customer: str, number: int, reservation: str) -> bool:
    """Set points aside, or refuse; in real life a call over the network."""
    with Session(points) as session, session.begin():
        account = session.get(Account, customer, with_for_update=True)
        if account is None or account.points < number:
            return False
        account.points -= number
        session.add(Reservation(id=reservation, customer=customer, points=number))
        return True


def give_back(reservation: str) -> None:
    """Undo a reservation; may be repeated."""
    with Session(points) as session, session.begin():
        found = session.get(Reservation, reservation, with_for_update=True)
        if found is not None:
            session.get_one(Account, found.customer, with_for_update=True).points += found.points
            session.delete(found)


def reserved() -> list[str]:
    """The reservations that are neither spent nor given back."""
    with Session(points) as session:
        return list(session.scalars(select(Reservation.id)))


def points_of(customer: str) -> int:
    """How many points a customer can spend."""
    with Session(points) as session:
        return session.get_one(Account, customer).points


def deliver(message: Message) -> None:
    """Hand a message to the points service, twice: at least once is what is promised."""
    handle(message)
    handle(message)


def main() -> None:
    """Earn points, spend some, ask for too many, and fail to pay after points were reserved."""
    migrate.upgrade(messages)
    migrate.upgrade(points)
    record_metadata().create_all(payments)
    Base.metadata.create_all(payments)
    Points.metadata.create_all(points)
    relay = Relay(outbox, deliver, name="points")

    pay("ann", 150)
    pay("ann", 150)
    relay.until_empty()
    print(f"ann paid 300 euros and has {points_of('ann')} points")

    for number in (30, 500):
        print(f"ann pays with {number} points: {'done' if pay_with_points('ann', number) else 'refused'}")
    relay.until_empty()
    print(f"ann has {points_of('ann')} points")

    try:
        pay_with_points("ann", 250)
    except IntegrityError:
        print(f"the payment failed, and ann has {points_of('ann')} points: the others are reserved")
    with producer:  # checks back
        while not compensate():
            time.sleep(0.1)
    relay.until_empty()
    print(f"they are given back: ann has {points_of('ann')} points")


if __name__ == "__main__":
    main()
