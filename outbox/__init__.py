"""A transactional outbox: business code writes messages in its own transaction, a relay sends them after the commit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

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
        StandbyError,
        SubscriptionError,
        TransactionAbortedError,
    )
    from outbox.inbox import Inbox
    from outbox.message import Message
    from outbox.outbox import Outbox
    from outbox.relay import Relay
    from outbox.relays import Relays
    from outbox.sender import Sender
    from outbox.verdict import Done, Reject, Retry, RetryPolicy, Unavailable, Verdict

__all__ = [
    "DatabaseError",
    "Done",
    "HungHandlerError",
    "Inbox",
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
    "Relays",
    "Retry",
    "RetryPolicy",
    "SchemaError",
    "Sender",
    "SenderError",
    "StandbyError",
    "SubscriptionError",
    "TransactionAbortedError",
    "Unavailable",
    "Verdict",
    "create_async_engine",
    "create_engine",
]

#: Loaded when they are asked for: the command line answers `--help` without SQLAlchemy, and errors need no driver.
_HOMES = {
    "Inbox": "outbox.inbox",
    "Message": "outbox.message",
    "Outbox": "outbox.outbox",
    "Relay": "outbox.relay",
    "Relays": "outbox.relays",
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


def create_async_engine(url: str, **options: Any) -> AsyncEngine:
    """SQLAlchemy's `create_async_engine`; on SQLite as in `create_engine`. Needs the extra `async`."""
    try:
        from sqlalchemy.ext import asyncio
    except ImportError as error:
        from outbox.errors import MissingExtraError

        raise MissingExtraError("asyncio needs greenlet: pip install 'outbox-log[async]'") from error

    engine = asyncio.create_async_engine(url, **options)
    _configure(engine.sync_engine, options)
    return engine


def create_engine(url: str, **options: Any) -> Engine:
    """SQLAlchemy's `create_engine`; on SQLite with WAL, durable commits, and a fair wait for the write lock."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(url, **options)
    _configure(engine, options)
    return engine


def _configure(engine: Engine, options: dict[str, Any]) -> None:
    from outbox.store.sqlite import configure, require_legacy_control

    if engine.dialect.name == "sqlite":
        require_legacy_control(options.get("connect_args", {}))
        configure(engine)
