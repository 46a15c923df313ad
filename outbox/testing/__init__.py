"""The test kit: fixtures for applications that send, and a suite for new senders.

An application's tests get fixtures from the pytest plugin, or use the same by hand:

- `Capture` (fixture `outbox_capture`): the sent messages, also if the test rolls everything back.
- `drain` (fixture `outbox_drain`): deliver now the committed messages.
- `ScriptedSender` (fixture `scripted_sender`): a destination that fails, rejects, raises or hangs as the test says.

A good sender passes the suite: subclass `sender_contract.SenderContract` with a fixture `destination`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.testing.capture import ANY, Capture
    from outbox.testing.draining import drain
    from outbox.testing.scripted import ScriptedSender

__all__ = ["ANY", "Capture", "ScriptedSender", "drain"]

#: Loaded at the first use: the plugin must cost nothing where no test uses it.
_HOMES = {"ANY": "capture", "Capture": "capture", "ScriptedSender": "scripted", "drain": "draining"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
