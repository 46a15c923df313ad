"""An outbox with something of everything that a dashboard shows, written by strangers who mean no good."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import Engine

from outbox import Done, Message, Outbox, Reject, Relay, Retry, Verdict
from tests.rocketmq.halves import ask, begun

SCRIPT = "<script>alert(document.domain)</script>"
#: A key, an error and a reason of a stranger. The mark in the middle turns the direction of what follows.
HOSTILE = f"{SCRIPT}<img src=x onerror=alert(1)>\"'javascript:alert(1) \u202egnp.exe {{{{7*7}}}}"
#: More than a number of JavaScript holds.
NUMBERS = '{"id": 9223372036854775807, "amount": 1.10, "rate": 1e-400}'
BODIES: Mapping[str, bytes] = {
    "script": f"<html><body>{SCRIPT}<a href='javascript:alert(1)'>x</a>".encode(),
    "numbers": NUMBERS.encode(),
    "large": json.dumps({SCRIPT: "x" * (4 * 1024**2 - 1024)}).encode(),
    "nul": b"a\x00b" + "\u202e".encode() + b"c" * 100,
    "bytes": bytes(range(256)) * 40,
    "empty": b"",
}


class Poison:
    """A destination that answers by topic, until it is mended."""

    destination = "nats://events.example:4222"

    def __init__(self) -> None:
        self.mended = False
        self.bodies: list[bytes] = []

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Refuse, put off or accept each message; after a failure of a key, its later ones as well."""
        failed: dict[str | None, Verdict] = {}
        answers = list[Verdict]()
        for each in messages:
            answer = failed.get(each.key) or self._of(each)
            if each.key is not None and not isinstance(answer, Done):
                failed[each.key] = answer
            answers.append(answer)
        self.bodies += [each.body for each, answer in zip(messages, answers, strict=True) if isinstance(answer, Done)]
        return answers

    def close(self) -> None:
        """Nothing is open."""

    def _of(self, message: Message) -> Verdict:
        if self.mended or message.topic == "payments":
            return Done()
        if message.topic == "retries":
            return Retry("HTTP 503", after=timedelta(hours=1))
        return Reject(HOSTILE if message.topic == "strange" else f"HTTP 422: order {message.key} has no currency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Furnished:
    """The outbox, and the log ids of what is in it by name: those of `BODIES`, `dead`, `behind`, `retry`, `delayed`."""

    outbox: Outbox
    poison: Poison
    ids: Mapping[str, int]


def relayed(outbox: Outbox, poison: Poison) -> None:
    """Send what can be sent, and carry decisions out."""
    Relay(outbox, poison).until_empty()


def furnished(engine: Engine) -> Furnished:
    """Furnish an empty outbox."""
    outbox, poison, written = Outbox(engine), Poison(), dict[str, UUID]()
    headers = {"trace": HOSTILE.replace("\u202e", ""), "authorization": "Bearer 0123456789abcdef"}
    with outbox.begin() as session:
        written["passed"] = outbox.send(session, "payments", b"1", key="payment-1")
        for name, body in BODIES.items():
            written[name] = outbox.send(session, "strange", body, key=f"{name} {HOSTILE}", headers=headers)
        numbers = NUMBERS.encode()
        written["dead"] = outbox.send(session, "orders", numbers, key="order-7", content_type="application/json")
        written["behind"] = outbox.send(session, "orders", b"behind", key="order-7")
        written["retry"] = outbox.send(session, "retries", b"later", key="order-8")
        written["delayed"] = outbox.send(session, "payments", b"due", deliver_at=datetime.now(UTC) + timedelta(hours=2))
        for number in range(20):
            outbox.send(session, "orders", b"{}", key=f"order-{100 + number}")
    found = Furnished(outbox=outbox, poison=poison, ids={name: _log_id(outbox, id) for name, id in written.items()})
    relayed(outbox, poison)
    begun(engine, "orders", group="shop-2")
    begun(engine, "payments")
    ask(engine)
    outbox.admin.create("audit", topics=["payments"], destination="nats://audit.example:4222")
    outbox.admin.pause("audit", reason=HOSTILE, by=HOSTILE[:100])
    outbox.admin.pause("relay", key="order-7", by="ada")
    outbox.admin.replay(found.ids["script"], name="relay", by=HOSTILE[:100], reason=HOSTILE)
    relayed(outbox, poison)
    return found


def _log_id(outbox: Outbox, id: UUID) -> int:
    found = outbox.admin.trace(id)
    assert found is not None
    return found.id
