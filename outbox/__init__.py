"""A transactional outbox: business code writes messages in its own transaction, a relay sends them after the commit."""

from typing import Any

from sqlalchemy import Engine
from sqlalchemy import create_engine as _create_engine

from outbox.errors import (
    DatabaseError,
    HungHandlerError,
    InvalidMessageError,
    LeaseLostError,
    MissingExtraError,
    NoTransactionError,
    OutboxError,
    PositionError,
    SchemaError,
    SenderError,
    SubscriptionError,
    TransactionAbortedError,
)
from outbox.message import Message
from outbox.outbox import Outbox
from outbox.relay import Relay
from outbox.sender import Sender
from outbox.store.sqlite import configure as _configure_sqlite
from outbox.verdict import Done, Reject, Retry, RetryPolicy, Unavailable, Verdict

__all__ = [
    "DatabaseError",
    "Done",
    "HungHandlerError",
    "InvalidMessageError",
    "LeaseLostError",
    "Message",
    "MissingExtraError",
    "NoTransactionError",
    "Outbox",
    "OutboxError",
    "PositionError",
    "Reject",
    "Relay",
    "Retry",
    "RetryPolicy",
    "SchemaError",
    "Sender",
    "SenderError",
    "SubscriptionError",
    "TransactionAbortedError",
    "Unavailable",
    "Verdict",
    "create_engine",
]


def create_engine(url: str, **options: Any) -> Engine:
    """SQLAlchemy's `create_engine`; on SQLite with WAL, durable commits, and a fair wait for the write lock."""
    engine = _create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        _configure_sqlite(engine)
    return engine
