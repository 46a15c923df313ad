"""A program of version 0.1.0 over an upgrade: says what of it goes on, and how the rest ends.

Arguments: the database, and the folder of an archive. The program does its work once, says so in a line, and waits for
a line. Then it does its work again, and what only begins then. It prints an object: each part, and the error that it
ended with, if any.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from outbox import Inbox, Message, Outbox, Relay, create_engine, migrate
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.spark import job
from tests.scenarios.moving.states import Picky
from tests.spark.extracts import extracted, run_here


def send(outbox: Outbox) -> None:
    """Every way to write a message."""
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1", key="k", lock_key=True, headers={"a": "b"}, tags="t")
        outbox.send(session, "orders", b"2", key="k", dedup_key=str(uuid.uuid4()))
        outbox.send(session, "orders", b"later", key="later", delay=timedelta(hours=1))
        outbox.send_all(session, [Message("orders", str(n), key="k") for n in range(3, 100)])


def use_an_inbox(outbox: Outbox) -> None:
    """Handle a message once."""
    engine = outbox.database.engine
    with engine.begin() as connection:
        assert Inbox(engine, "mail").once(connection, uuid.uuid4())


def send_half_messages(outbox: Outbox) -> None:
    """A producer that begins now."""
    send_by(TransactionMQProducer("shop", outbox, lambda _message: TransactionResolution.UNKNOWN))


def send_by(producer: TransactionMQProducer) -> None:
    """Transactions whose outcome is given by word, and by a business transaction."""
    by_word, joined = producer.begin_transaction(), producer.begin_transaction(verdict="join")
    for name, each in {"by word": by_word, "joined": joined}.items():
        each.send("orders", name, key=name)
    by_word.commit()
    with opened.begin() as session:
        joined.join(session)


def relay(outbox: Outbox) -> None:
    """Send what waits."""
    Relay(outbox, Picky(), name="relay").until_empty()


def consume(outbox: Outbox) -> None:
    """Handle what waits."""
    consumer = outbox.consumer("billing", topics=["orders"])
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()


def extract(outbox: Outbox) -> None:
    """Add a window to an archive."""
    extracted(outbox.database.engine, Path(sys.argv[2]))


def ended(part: Callable[[], None]) -> str | None:
    """The error with which a part ended."""
    try:
        part()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    opened = Outbox(create_engine(sys.argv[1]))
    migrate.upgrade(opened.database.engine)
    producer = TransactionMQProducer("shop", opened, lambda _message: TransactionResolution.UNKNOWN)
    at_work = (
        partial(send, opened),
        partial(use_an_inbox, opened),
        partial(send_by, producer),
    )
    job.run = run_here
    for work in (*at_work, partial(extract, opened)):
        work()
    print("at work", flush=True)
    sys.stdin.readline()
    errors = {work.func.__name__: ended(work) for work in at_work}
    beginning = (send_half_messages, relay, consume, extract)
    print(json.dumps(errors | {part.__name__: ended(partial(part, opened)) for part in beginning}))
