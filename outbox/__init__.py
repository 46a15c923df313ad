"""A transactional outbox: business code writes messages in its own transaction, a relay sends them after the commit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.admin.admin import Admin
    from outbox.admin.half import HalfVerdict, Resumed, TransactionDetail
    from outbox.admin.results import (
        Decided,
        Finding,
        HeldKey,
        KeyDetail,
        Look,
        ParkedCount,
        ParkedDetail,
        Passage,
        Proposal,
        Removal,
        SplitResult,
        SubscriptionDetails,
        Thresholds,
        Trace,
    )
    from outbox.consumer.consumer import Consumer
    from outbox.consumer.inbox import Inbox
    from outbox.errors import (
        DatabaseError,
        FilterError,
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
    from outbox.model.decision import Decision
    from outbox.model.encoding import Tombstone
    from outbox.model.message import Message
    from outbox.model.retry import RetryPolicy
    from outbox.model.status import (
        History,
        HistoryStep,
        PartitionStatus,
        Status,
        TransactionsStatus,
        TroubleStatus,
        WorkerStatus,
    )
    from outbox.model.verdict import Done, Reject, Retry, Unavailable, Verdict
    from outbox.outbox import Outbox
    from outbox.relay.relay import Relay, routes
    from outbox.relay.routes import Route
    from outbox.relay.supervisor import Relays
    from outbox.senders.opening import Destination
    from outbox.senders.port import Sender
    from outbox.store.half_messages.pending import HalfTransaction
    from outbox.store.log.log import Limits
    from outbox.store.subscriptions.parked_messages import ParkedMessage
    from outbox.worker.settings import Settings
    from outbox.writing.engines import create_async_engine, create_engine

__all__ = [
    "Admin", "Consumer", "DatabaseError", "Decided", "Decision", "Destination", "Done", "FilterError", "Finding",
    "HalfTransaction", "HalfVerdict", "HeldKey", "History", "HistoryStep", "HungHandlerError", "Inbox",
    "InvalidMessageError", "KeyDetail", "LeaseLostError", "Limits", "Look", "Message", "MissingExtraError",
    "NoTransactionError", "Outbox", "OutboxError", "ParkedCount", "ParkedDetail", "ParkedMessage", "PartitionStatus",
    "Passage", "PositionError", "Proposal", "Reject", "Relay", "Relays", "Removal", "Resumed", "Retry", "RetryPolicy",
    "Route", "SchemaError", "Sender", "SenderError", "Settings", "SplitResult", "StandbyError", "Status",
    "SubscriptionDetails", "SubscriptionError", "Thresholds", "Tombstone", "Trace", "TransactionAbortedError",
    "TransactionDetail", "TransactionsStatus", "TroubleStatus", "Unavailable", "Verdict", "WorkerStatus",
    "create_async_engine", "create_engine", "routes",
]  # fmt: skip

#: Loaded when they are asked for: the command line answers `--help` without SQLAlchemy, and errors need no driver.
_HOMES = {
    "Tombstone": "outbox.model.encoding",
    "Admin": "outbox.admin.admin",
    "Decision": "outbox.model.decision",
    "Destination": "outbox.senders.opening",
    "Consumer": "outbox.consumer.consumer",
    **dict.fromkeys(("History", "HistoryStep"), "outbox.model.status"),
    "HalfTransaction": "outbox.store.half_messages.pending",
    "Inbox": "outbox.consumer.inbox",
    "Limits": "outbox.store.log.log",
    "Message": "outbox.model.message",
    "Outbox": "outbox.outbox",
    "ParkedMessage": "outbox.store.subscriptions.parked_messages",
    "Relay": "outbox.relay.relay",
    "Relays": "outbox.relay.supervisor",
    "RetryPolicy": "outbox.model.retry",
    "Route": "outbox.relay.routes",
    "Sender": "outbox.senders.port",
    "Settings": "outbox.worker.settings",
    "routes": "outbox.relay.relay",
    **dict.fromkeys(("Decided", "Finding", "Look", "ParkedDetail", "Removal", "SplitResult"), "outbox.admin.results"),
    **dict.fromkeys(("HeldKey", "KeyDetail", "Passage", "SubscriptionDetails"), "outbox.admin.results"),
    **dict.fromkeys(("ParkedCount", "Proposal", "Thresholds", "Trace"), "outbox.admin.results"),
    **dict.fromkeys(("HalfVerdict", "Resumed", "TransactionDetail"), "outbox.admin.half"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Status")), "outbox.model.status"),
    **dict.fromkeys(("create_async_engine", "create_engine"), "outbox.writing.engines"),
    **dict.fromkeys(("Done", "Reject", "Retry", "Unavailable", "Verdict"), "outbox.model.verdict"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "outbox.errors"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
