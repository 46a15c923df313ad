"""Bookings that happen exactly once, although the process is killed between its commit and the end of its work.

    python booking.py killed || echo "the process is gone"
    python booking.py

The first line books a transfer and is killed right after the commit, before the position of the group has moved. The
second line gets the same message again, and books nothing: with `inbox=True` the id of the message was committed
together with the booking.
"""

import json
import os
import signal
import sys

from sqlalchemy import func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, create_engine, migrate
from outbox.telemetry.events import Event, HandedOver

engine = create_engine("sqlite:///bank.db")
outbox = Outbox(engine)
ledger = outbox.consumer("ledger", inbox=True)


class Base(DeclarativeBase):
    """The tables of the bank."""


class Entry(Base):
    """A line of the ledger."""

    __tablename__ = "entries"

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    amount: Mapped[int]


@ledger.on("transfers")
def book(session: Session, message: Message) -> None:
    """Write both lines of a transfer in the transaction that the library has opened, and commits."""
    transfer = json.loads(message.body)
    session.add(Entry(account=transfer["from"], amount=-transfer["amount"]))
    session.add(Entry(account=transfer["to"], amount=transfer["amount"]))
    print(f"booked {transfer['amount']} from {transfer['from']} to {transfer['to']}", flush=True)


def kill_after_commit(event: Event) -> None:
    """Be killed when a call has come back, and nothing is settled yet: no `except` and no `finally` runs."""
    if isinstance(event, HandedOver):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Order a transfer in the first run, book what is there, and show the balances."""
    migrate.upgrade(engine)
    Base.metadata.create_all(engine)
    if sys.argv[1:] == ["killed"]:
        with outbox.begin() as session:
            outbox.send(session, "transfers", {"from": "ann", "to": "bob", "amount": 42}, key="ann")
        outbox.listen(kill_after_commit)
    ledger.until_empty()
    with Session(engine) as session:
        balances = select(Entry.account, func.sum(Entry.amount)).group_by(Entry.account).order_by(Entry.account)
        for account, balance in session.execute(balances):
            print(f"{account}: {balance}")


if __name__ == "__main__":
    main()
