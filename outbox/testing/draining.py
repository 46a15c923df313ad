"""Deliver now what a test has committed: a relay in this thread, which ends when nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox.model.message import Message
from outbox.model.verdict import Done, Verdict
from outbox.outbox import Outbox
from outbox.relay.relay import Relay
from outbox.senders.opening import Destination, OpenedSender, open_sender
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
    destination = ScriptedSender() if sender is None else sender
    recorder = _Recorder(open_sender(destination))
    try:
        Relay(outbox, recorder, name=name, **options).until_empty()
    finally:
        # A sender of the caller's own stays open: it may be used again.
        if isinstance(destination, str):
            recorder.close()
    return recorder.stored


class _Recorder(OpenedSender):
    """Calls a sender, and keeps the messages that it stored."""

    def __init__(self, sender: OpenedSender) -> None:
        super().__init__(sender, sender.destination)
        self.stored: list[Message] = []

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        verdicts = super().send(messages)
        self.stored += [m for m, verdict in zip(messages, verdicts, strict=False) if isinstance(verdict, Done)]
        return verdicts
