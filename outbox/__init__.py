"""A transactional outbox: business code writes messages in its own transaction, a relay sends them after the commit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Engine

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

#: Loaded when they are asked for: the command line answers `--help` without SQLAlchemy, and errors need no driver.
_HOMES = {
    "Message": "outbox.message",
    "Outbox": "outbox.outbox",
    "Relay": "outbox.relay",
    "Sender": "outbox.sender",
    **dict.fromkeys(("Done", "Reject", "Retry", "RetryPolicy", "Unavailable", "Verdict"), "outbox.verdict"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "outbox.errors"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def create_engine(url: str, **options: Any) -> Engine:
    """SQLAlchemy's `create_engine`; on SQLite with WAL, durable commits, and a fair wait for the write lock."""
    import sqlalchemy

    from outbox.store.sqlite import configure

    engine = sqlalchemy.create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        configure(engine)
    return engine
