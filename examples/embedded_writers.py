"""Three processes take orders, and each sends its mails by a relay inside; one is killed, and no mail is lost.

    python embedded_writers.py

The relays share the customers by three partitions. The killed process has a lease for two more seconds. Then the others
send what it left.
"""

import os
import signal
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, String, Table, func, insert, select

from outbox import Message, Outbox, Settings, create_engine
from outbox.migrate import upgrade

URL, MAILS = "sqlite:///writers.db", Path("mails.txt")
WRITERS, ORDERS = 3, 20
SETTINGS = Settings(lease=timedelta(seconds=2), renew_every=timedelta(seconds=0.5))

metadata = MetaData()
orders = Table("orders", metadata, Column("id", Integer, primary_key=True), Column("customer", String))


def mail(message: Message) -> None:
    """Write one mail; all processes append to the same file."""
    with MAILS.open("a") as file:
        file.write(f"{message.key}: {message.body.decode()}\n")


def take_orders(writer: int) -> None:
    """Take orders, and stay until all mails are sent; the first writer is killed right after a commit."""
    outbox = Outbox(create_engine(URL))
    with outbox.running(mail, partitions=WRITERS, settings=SETTINGS):
        for number in range(ORDERS):
            customer = f"customer-{writer}-{number % 5}"
            with outbox.begin() as session:
                session.execute(insert(orders).values(customer=customer))
                outbox.send(session, "mails", f"order {number}", key=customer)
            if (writer, number) == (0, ORDERS // 2):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
        while sent() < placed(outbox):
            time.sleep(0.1)


def placed(outbox: Outbox) -> int:
    """Return how many orders were committed."""
    with outbox.begin() as session:
        return session.scalar(select(func.count()).select_from(orders)) or 0


def sent() -> int:
    """Return how many mails were sent, copies apart."""
    return len(set(MAILS.read_text().splitlines())) if MAILS.exists() else 0


def main() -> None:
    """Start the writers, and compare orders and mails at the end."""
    engine = create_engine(URL)
    upgrade(engine)
    metadata.create_all(engine)
    writers = [get_context("spawn").Process(target=take_orders, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    killed = sum(writer.exitcode == -signal.SIGKILL for writer in writers)
    print(f"{placed(Outbox(engine))} orders, {sent()} mails, {killed} writer killed")


if __name__ == "__main__":
    main()
