"""Delivers now the committed messages of a test: a relay in the calling thread, until no message is left."""

from __future__ import annotations

from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import Done
from outbox.relay.relay import Relay
from outbox.senders.opening import Destination
from outbox.telemetry.events import Event, HandedOver
from outbox.testing.scripted import ScriptedSender
from outbox.writing.bare import BareOutbox


def drain(
    outbox: BareOutbox, sender: Destination | None = None, *, name: str = "relay", **options: Any
) -> list[Message]:
    """Run a relay until no work is left, and return the messages that the destination stored, in order.

    The relay parks a failed message as in production, and tries again when the message is due, after the call.

    Args:
        outbox: the outbox with the messages.
        sender: a sender, a function of a message or a URL; None: every message is `Done`, and goes nowhere.
        name: the subscription, which begins with the earliest message; each name gets each message once.
        options: further options of `Relay`.
    """
    relay = Relay(outbox, ScriptedSender() if sender is None else sender, name=name, **options)
    stored: list[Message] = []

    @outbox.listeners.listen
    def note(event: Event) -> None:
        if isinstance(event, HandedOver) and event.subscription == name:
            answered = zip(event.messages, event.verdicts or (), strict=False)
            stored.extend(message for message, verdict in answered if isinstance(verdict, Done))

    try:
        relay.until_empty()
    finally:
        outbox.listeners.unlisten(note)
        # A sender of the caller's own stays open, for the next call.
        if isinstance(sender, str):
            relay.close()
    return stored
