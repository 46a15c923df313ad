"""No second process: the application sends its own messages, from a thread, as soon as they are committed.

    python embedded_relay.py

Several processes of an application may do the same; one of them at a time sends. Here the destination is a function;
`outbox.running("nats://localhost:4222")` takes a URL just as well.
"""

import threading

from sqlalchemy import Column, Integer, MetaData, String, Table, insert

from outbox import Message, Outbox, create_engine
from outbox.migrate import upgrade

metadata = MetaData()
invoices = Table("invoices", metadata, Column("id", Integer, primary_key=True), Column("customer", String))


def main() -> None:
    """Write three invoices, of which one is rolled back, and see the messages of the other two arrive."""
    engine = create_engine("sqlite:///embedded.db")
    upgrade(engine)
    metadata.create_all(engine)
    outbox = Outbox(engine)
    last = threading.Event()

    def deliver(message: Message) -> None:
        print(f"{message.topic}: {message.body.decode()}", flush=True)
        if message.tags == "last":
            last.set()

    with outbox.running(deliver, name="printer"):
        with engine.begin() as connection:
            connection.execute(insert(invoices).values(customer="ann"))
            outbox.send(connection, "invoices", {"customer": "ann"})
        with engine.connect() as connection:
            connection.execute(insert(invoices).values(customer="bob"))
            outbox.send(connection, "invoices", {"customer": "bob"})
            connection.rollback()
        with engine.begin() as connection:
            connection.execute(insert(invoices).values(customer="eve"))
            outbox.send(connection, "invoices", {"customer": "eve"}, tags="last")
        last.wait(30)


if __name__ == "__main__":
    main()
