"""The test kit: for applications that send, for senders and dialects of one's own, and for what can go wrong.

An application's tests get fixtures from the pytest plugin, or use the same by hand:

- `Capture` (fixture `outbox_capture`): what was sent, also where the test rolls everything back; `assert_sent(…)`.
- `drain` (fixture `outbox_drain`): deliver now what the test has committed.
- `ScriptedSender` (fixture `scripted_sender`): a destination that fails, rejects, raises or hangs as it is told.

A sender or a dialect is good when it passes its suite:

- `sender_contract.SenderContract`: subclass it with a fixture `destination`.
- `dialect_contract.DialectContract`: subclass it with a fixture `engine`.

For tests of what happens in a failure, with real processes:

- `faults.arm_kill`, `faults.arm_stop`: this process dies, or stops, at a named point of writer or relay.
- `servers`: private PostgreSQL, NATS, Kafka, RabbitMQ and Redis. They never outlive the tests, and can crash.
- `servers.proxy.TcpProxy`: a network that refuses, drops, cuts or swallows, on demand.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.capture import ANY, Capture
    from outbox.testing.draining import drain
    from outbox.testing.scripted import ScriptedSender

__all__ = ["ANY", "Capture", "ScriptedSender", "drain"]

#: Loaded when they are asked for: the plugin must cost nothing where it is not used.
_HOMES = {"ANY": "capture", "Capture": "capture", "ScriptedSender": "scripted", "drain": "draining"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
