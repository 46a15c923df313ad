"""The business of the crash suite: an effect is a row, and listeners say what became of one."""

from __future__ import annotations

import random
from pathlib import Path

from sqlalchemy import Engine, NullPool, create_engine, select, text
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox import Message
from outbox.model.limits import HALF_TOPIC
from outbox.rocketmq import LocalTransactionState
from outbox.schema import record_metadata

_COMMIT, _ROLLBACK, _UNKNOWN = LocalTransactionState


class Base(DeclarativeBase):
    """The business table."""


class Effect(Base):
    """What a business transaction did. `messages`: how many belong to it; None: a checker has kept it from happening,
    because the business inserts the same key.
    """

    __tablename__ = "effect"

    transaction_id: Mapped[str] = mapped_column(primary_key=True)
    messages: Mapped[int | None]


def set_up(engine: Engine, business: Engine) -> None:
    """Make the tables, where the outbox is and in a database without one."""
    for each in (engine, business):
        Base.metadata.create_all(each)
    record_metadata().create_all(business)


def effects(*engines: Engine) -> dict[str, int]:
    """What took effect: the transactions, each with its number of messages."""
    question = select(Effect.transaction_id, Effect.messages).where(Effect.messages.is_not(None))
    found: dict[str, int] = {}
    for engine in engines:
        with engine.connect() as connection:
            found |= {transaction: messages or 0 for transaction, messages in connection.execute(question)}
    return found


def reading(url: str) -> Engine:
    """An engine whose transactions wait for no writer on SQLite, which those of an outbox's engine do."""
    return create_engine(url, poolclass=NullPool)


def undecided(engine: Engine) -> int:
    """How many half messages have no verdict."""
    without = "NOT EXISTS (SELECT 1 FROM outbox_op WHERE transaction_id = key)"
    question = f"SELECT count(*) FROM outbox_message WHERE topic = '{HALF_TOPIC}' AND {without}"
    with engine.connect() as connection:
        return int(connection.execute(text(question)).scalar_one())


def decided(engine: Engine, transaction: str) -> bool:
    """Whether a transaction has a verdict."""
    question = text("SELECT count(*) FROM outbox_op WHERE transaction_id = :transaction")
    with engine.connect() as connection:
        return bool(connection.execute(question, {"transaction": transaction}).scalar_one())


class NaiveListener:
    """Takes an effect that is not there for one that was rolled back."""

    def __init__(self, url: str, asked: Path) -> None:
        """`asked`: a folder for the names of the transactions that were asked about."""
        # A question waits for nobody who is at it.
        patience = {"timeout": 0.2} if url.startswith("sqlite") else {"options": "-c lock_timeout=200"}
        self._engine = create_engine(url, connect_args=patience)
        self._asked = asked

    def check_local_transaction(self, message: Message) -> LocalTransactionState:
        """Look for the effect."""
        assert message.transaction_id is not None
        (self._asked / message.transaction_id).touch()
        return self._answer(message.transaction_id)

    def _answer(self, transaction: str) -> LocalTransactionState:
        with self._engine.connect() as connection:
            found = select(Effect.messages).where(Effect.transaction_id == transaction)
            return _ROLLBACK if connection.execute(found).scalar() is None else _COMMIT


class FencingListener(NaiveListener):
    """Keeps the business from committing before it says that it has not; now and then it does not know."""

    def _answer(self, transaction: str) -> LocalTransactionState:
        if random.random() < 0.1:
            raise LookupError("the business does not answer")
        if random.random() < 0.1:
            return _UNKNOWN
        insert = postgresql_insert if self._engine.dialect.name == "postgresql" else sqlite_insert
        with self._engine.begin() as connection:
            connection.execute(insert(Effect).values(transaction_id=transaction).on_conflict_do_nothing())
        # After that commit: what is there now stays.
        return super()._answer(transaction)
