"""The deadline of a call has one owner, the sender, and relays go by it."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from outbox import Message, Outbox, Relay, RetryPolicy, Route, Settings, Verdict
from outbox.cli.options import Target
from outbox.cli.relaying import Pace, relayings_of, supervisor_of
from outbox.model.subscription import Declaration
from outbox.senders.function import FunctionSender
from outbox.senders.nats import NatsSender
from outbox.senders.opening import open_sender
from outbox.senders.port import deadline_of
from outbox.worker.shared import SharedSender
from tests.support.destination import Destination, relay_to

HALF_A_MINUTE = timedelta(seconds=30)
#: Longer than a call may take by default.
LONG = 5.5


def patient(seconds: float, destination: Destination | None = None) -> Destination:
    """A destination that says how long a call may take."""
    destination = destination or Destination()
    destination.deadline = timedelta(seconds=seconds)
    return destination


def late(seconds: float) -> Any:
    """Holds each call back for so long."""
    until: list[float] = []

    def hanging(_messages: Sequence[Message]) -> bool:
        if not until:
            until.append(time.monotonic() + seconds)
        return time.monotonic() < until[0]

    return hanging


def print_slowly(message: Message) -> Verdict | None:
    """A destination that is a function."""


print_slowly.deadline = HALF_A_MINUTE  # type: ignore[attr-defined]  # as its users may write it


@pytest.mark.parametrize(
    ("sender", "seconds"),
    [
        (open_sender("nats://localhost:1?timeout=30"), 30),
        (open_sender("nats://localhost:1"), 5),
        (NatsSender("nats://localhost:1", timeout=timedelta(seconds=1.5)), 1.5),
        (open_sender("stdout:"), 5),
        (Destination(), 5),
        (patient(7), 7),
        (SharedSender(open_sender(patient(7))), 7),
        (FunctionSender(print_slowly), 30),
        (FunctionSender(lambda message: None), 5),
    ],
)
def test_a_sender_says_how_long_a_call_may_take_or_it_is_five_seconds(sender, seconds):
    assert deadline_of(sender) == timedelta(seconds=seconds)


@pytest.mark.parametrize("deadline", [30, 0.5, "5s", timedelta(0), timedelta(seconds=-1)])
def test_a_deadline_that_is_no_length_of_time_is_refused(sqlite_engine, deadline):
    destination = Destination()
    destination.deadline = deadline

    with pytest.raises(TypeError, match=r"the deadline of Destination must be a timedelta greater than 0, not .*write"):
        Relay(Outbox(sqlite_engine), destination)


@pytest.mark.timed("a call takes longer than the deadline by default")
def test_a_call_within_its_deadline_does_not_look_hung(sqlite_engine, caplog):
    caplog.set_level(logging.WARNING, "outbox")
    destination, outbox = patient(20), Outbox(sqlite_engine)
    destination.hanging = late(LONG)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")

    relay_to(destination, outbox).until_empty()

    assert destination.bodies == [b"1"]
    assert "did not come back in time" not in caplog.text


def test_a_deadline_of_the_relay_wins(sqlite_engine, caplog):
    caplog.set_level(logging.WARNING, "outbox")
    destination = patient(300)
    destination.hanging = lambda _messages: "did not come back in time" not in caplog.text
    with Outbox(sqlite_engine).begin() as session:
        Outbox(sqlite_engine).send(session, "orders", b"1")

    relay_to(destination, Outbox(sqlite_engine), deadline=timedelta(seconds=1)).until_empty()

    assert "a call with 1 message did not come back in time" in caplog.text
    assert destination.bodies == [b"1"]


@pytest.mark.parametrize(
    ("url", "given", "seconds"),
    [
        ("nats://localhost:1?timeout=30", None, 30),
        ("nats://localhost:1?timeout=30", timedelta(seconds=2), 2),
        ("nats://localhost:1", None, 5),
        ("stdout:", None, 5),
    ],
)
def test_on_the_command_line_it_is_the_destinations_unless_it_is_given(url, given, seconds):
    pace = Pace(start="earliest", retry=RetryPolicy(), settings=Settings(), patience=timedelta.max)
    targets = [Target("sqlite:////tmp/a.db"), Target("sqlite:////tmp/b.db")]
    plan = [(Route(to=url, deadline=given), Declaration(name="relay", destination=None))]

    relayings = relayings_of(targets, plan, pace)
    supervisor = supervisor_of(relayings, pace)

    assert [each.deadline for each in relayings] == [timedelta(seconds=seconds)] * 2
    assert supervisor._drain == timedelta(seconds=seconds + 10)
