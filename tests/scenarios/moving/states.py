"""A program of version 0.1.0: tables with everything in them that an upgrade has to keep. Argument: the database.

Prints the id of a transaction that is pending.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text

from outbox import Done, Message, Outbox, Reject, Relay, Retry, Unavailable, Verdict, create_engine, migrate
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.waiting import eventually

LATER = timedelta(hours=1)
ROWS = 10
#: So many messages are more than a read, and the worker dies in the middle of them.
BACKLOG = 40
_DIES_AT = b"backlog 24"


class Picky:
    """A destination that refuses messages by what they say."""

    destination = "test"

    def send(self, messages: Sequence[Message]) -> list[Verdict]:
        """Answer; die in the middle of the backlog."""
        if any(message.body == _DIES_AT for message in messages):
            os._exit(0)
        stopped, verdicts = set[str](), list[Verdict]()
        for message in messages:
            verdict = Unavailable("behind another one") if message.key in stopped else _answer(message)
            if not isinstance(verdict, Done) and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        return verdicts

    def close(self) -> None:
        """Nothing is open."""


def _answer(message: Message) -> Verdict:
    if message.topic == "away":
        return Unavailable("the topic is away")
    if message.body.startswith(b"dead"):
        return Reject("never")
    return Retry("not now", after=LATER) if message.body.startswith(b"retry") else Done()


def write(outbox: Outbox) -> None:
    """Messages of which each gets another state."""
    with outbox.begin() as session:
        outbox.send(session, "orders", b"sent", key="sent", dedup_key="once")
        outbox.send(session, "orders", b"dead 1", key="dead")
        outbox.send(session, "orders", b"behind 2", key="dead")
        outbox.send(session, "orders", b"retry 1", key="retry")
        outbox.send(session, "orders", b"behind 2", key="retry")
        outbox.send(session, "orders", b"delayed", key="delayed", delay=LATER)
        outbox.send(session, "away", b"waiting", key="waiting")


def write_transactions(outbox: Outbox) -> str:
    """Half messages: of a transaction that is committed, of one that is rolled back, and of a pending one."""
    producer = TransactionMQProducer("shop", outbox, lambda _message: TransactionResolution.UNKNOWN)
    committed, rolled_back, pending = (producer.begin_transaction() for _ in range(3))
    for name, each in {"committed": committed, "rolled back": rolled_back, "pending": pending}.items():
        each.send("orders", name, key="transactions")
    committed.commit()
    rolled_back.rollback()
    return pending.id


def write_directly(outbox: Outbox) -> None:
    """One message that its writer has sent and acknowledged, and one that it leaves behind."""

    def has_sent_one() -> bool:
        with outbox.begin() as session:
            outbox.send(session, "orders", b"direct")
            return bool(session.scalar(text("SELECT count(*) FROM outbox_ack")))

    assert eventually(has_sent_one)
    with outbox.begin() as session:
        outbox.send(session, "away", b"left behind")


def consume(outbox: Outbox) -> None:
    """A consumer that has handled the first messages, with an inbox."""
    consumer = outbox.consumer("billing", topics=["orders"], inbox=True)
    consumer.on("orders")(lambda _session, _message: None)
    consumer.until_empty()


if __name__ == "__main__":
    engine = create_engine(sys.argv[1])
    migrate.upgrade(engine)
    plain = Outbox(engine)
    write(plain)
    settings = Settings(limits=Limits(rows=ROWS), poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)))
    Relay(plain, Picky(), name="relay", settings=settings).once()
    print(write_transactions(plain), flush=True)
    consume(plain)
    direct = Outbox(engine, sender=Picky(), direct="relay")  # type: ignore[call-arg]  # 0.1.0 has it
    write_directly(direct)
    direct.close()
    with plain.begin() as session:
        plain.send_all(session, [Message("orders", f"backlog {n:02}", key="backlog") for n in range(BACKLOG)])
    Relay(plain, Picky(), name="relay", settings=settings).run()  # until it dies
