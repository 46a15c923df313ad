"""The deadline of a call has one owner, the sender: relays, direct sends and their compensation go by it."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from outbox import Message, Outbox, Relay, RetryPolicy, Route, Settings, Verdict
from outbox.cli.options import Target
from outbox.cli.relaying import Pace, relayings_of, supervisor_of
from outbox.direct import delivery
from outbox.model.subscription import Declaration
from outbox.senders.function import FunctionSender
from outbox.senders.nats import NatsSender
from outbox.senders.opening import open_sender
from outbox.senders.port import deadline_of
from outbox.worker.shared import SharedSender
from tests.support.command_line import outbox as command
from tests.support.destination import Destination, relay_to
from tests.support.direct import declare_compensation, stored_acks
from tests.support.directly import at_rest, marked, promises, send, writing_directly
from tests.support.waiting import eventually

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
    """What direct sends have to leave behind meanwhile, because it is not their turn, comes as well, once."""
    caplog.set_level(logging.WARNING, "outbox")
    destination = patient(20)
    destination.hanging = late(LONG)
    with writing_directly(sqlite_engine, destination, patient=False) as outbox, outbox.running():
        with outbox.begin() as session:
            outbox.send(session, "orders", b"relayed", key="k")
        assert eventually(lambda: destination.calls == 1)
        with outbox.begin() as session:
            send(outbox, session, b"direct")
        assert eventually(lambda: len(destination.bodies) == 2, 120)

    assert destination.bodies == [b"relayed", b"direct"]
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


@pytest.mark.timed("a call takes almost its deadline")
def test_a_compensation_waits_for_the_longest_call(pg_engine, monkeypatch):
    """A call that is slow, and ends within its deadline, is no failure: what it sends comes once."""
    monkeypatch.setattr(delivery, "GRACE_SECONDS", 3.0)
    slow, other = patient(5), Destination()
    slow.hanging = late(4.5)
    with writing_directly(pg_engine, slow) as outbox:
        relay = relay_to(other, Outbox(pg_engine))
        relay.start()
        with outbox.begin() as session:
            send(outbox, session, b"1")
        assert eventually(lambda: at_rest(outbox) and slow.bodies == [b"1"])
        # It goes when the compensation has passed what it acknowledges.
        assert eventually(lambda: stored_acks(pg_engine) == [])
        relay.stop()
        relay.join(60)

    assert (slow.bodies, other.bodies) == ([b"1"], [])


@pytest.mark.parametrize("as_url", [True, False])
def test_the_timeout_of_a_nats_url_reaches_the_grace(engine, nats, as_url):
    url = f"{nats.url}?timeout=30"
    opened = url if as_url else open_sender(url)
    with writing_directly(engine, opened, patient=False), engine.connect() as connection:
        graces = connection.execute(text("SELECT name, grace_ms FROM outbox_subscription ORDER BY name")).all()

    assert graces == [("relay", 0), ("relay:compensation", 35_000)]


def test_a_writer_uses_what_a_shorter_grace_leaves(engine):
    """It may begin to send for the two seconds that a call does not need."""
    declare_compensation(engine, timedelta(seconds=10))

    with writing_directly(engine, patient(7)) as outbox:
        assert outbox._direct is not None
        assert outbox._direct._dispatcher is not None
        assert outbox._direct._dispatcher._delivery.right == 2


def test_a_grace_that_leaves_nothing_leaves_all_to_the_relay_and_it_is_said_how_to_mend_that(engine, caplog):
    declare_compensation(engine, timedelta(seconds=10))
    destination = patient(30)
    outbox = Outbox(engine, sender=destination, direct="relay")
    assert not promises(outbox)
    said = eventually(lambda: "direct sends of relay go by the relay meanwhile" in caplog.text)
    with outbox.begin() as session:
        send(outbox, session, b"1")
    outbox.close()
    relay_to(destination, Outbox(engine)).until_empty()

    advice = "outbox subscriptions alter relay:compensation --grace 35s"
    assert (said, marked(engine), destination.bodies) == (True, [], [b"1"])
    assert "sends what it finds 10 s after a commit, and one call to test may take 30 s; give" in caplog.text
    assert advice in caplog.text
    assert command(engine, *advice.split()[1:]).code == 0
    with writing_directly(engine, destination) as again:
        assert promises(again)
