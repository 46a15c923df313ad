"""Deliver now what a test has committed: a relay in this thread, which ends when nothing is left."""

from __future__ import annotations

from typing import Any

from outbox.model.message import Message
from outbox.model.subscription import compensation_of
from outbox.model.verdict import Done
from outbox.outbox import Outbox
from outbox.relay.relay import Relay
from outbox.senders.opening import Destination
from outbox.telemetry.events import Event, HandedOver
from outbox.testing.scripted import ScriptedSender


def drain(outbox: Outbox, sender: Destination | None = None, *, name: str = "relay", **options: Any) -> list[Message]:
    """Run a relay until it has nothing left to do, and return what its destination stored, in order.

    A message that failed is parked by the relay as in production. It is tried again when it is due, not in this call.

    Args:
        outbox: the outbox whose messages are delivered.
        sender: a sender, a function of one message or a URL; without one every message is `Done`, and goes nowhere.
        name: the subscription, which begins with the earliest message; each name gets each message once.
        options: other options of `Relay`.
    """
    relay = Relay(outbox, ScriptedSender() if sender is None else sender, name=name, **options)
    stored: list[Message] = []

    @outbox.listen
    def note(event: Event) -> None:
        if isinstance(event, HandedOver) and event.subscription in (name, compensation_of(name)):
            answered = zip(event.messages, event.verdicts or (), strict=False)
            stored.extend(message for message, verdict in answered if isinstance(verdict, Done))

    try:
        relay.until_empty()
    finally:
        outbox.unlisten(note)
        # A sender of the caller's own stays open: it may be used again.
        if isinstance(sender, str):
            relay.close()
    return stored
