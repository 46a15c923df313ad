"""A call that hangs may have arrived: nothing of its keys overtakes it, and it does not expire meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, RetryPolicy
from tests.fire.destination import Destination, relay_to
from tests.fire.parked import states
from tests.waiting import eventually

#: A call hangs after this time. Three times as long, and its relay begins anew.
DEADLINE = timedelta(seconds=2)


class Holding(Destination):
    """Takes a message `held`, and comes back with it when it is released."""

    def __init__(self, held: bytes = b"1") -> None:
        super().__init__()
        self.held: bytes | None = held
        self.hanging = lambda messages: any(message.body == self.held for message in messages)

    def release(self) -> None:
        """Let the call come back."""
        self.held = None


@contextmanager
def running(outbox: Outbox, destination: Holding, **options: object) -> Iterator[None]:
    relay = relay_to(destination, outbox, deadline=DEADLINE, **options)
    relay.start()
    try:
        yield
    finally:
        destination.release()
        relay.stop()
        relay.join(20)


def send(outbox: Outbox, *bodies: bytes, expires_at: datetime | None = None, **keys: bytes) -> None:
    """Messages without a key, and with one, as `a=b"1"`; in the order of their bodies."""
    pairs = sorted([(body, None) for body in bodies] + [(body, key) for key, body in keys.items()])
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body, key=key, expires_at=expires_at) for body, key in pairs])


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def test_a_key_waits_for_a_call_that_hangs(outbox):
    """Its message is set aside and the log goes on; when the call comes back its answer counts."""
    destination = Holding()
    send(outbox, b"4", a=b"1", b=b"2")
    send(outbox, a=b"3")
    with running(outbox, destination):
        assert eventually(lambda: destination.bodies == [b"2", b"4"])
        send(outbox, b"7", a=b"5", b=b"6")
        assert eventually(lambda: destination.bodies == [b"2", b"4", b"6", b"7"])
        destination.release()
        arrived = eventually(lambda: len(destination.messages) == 7 and states(outbox.engine) == {})

    assert arrived
    assert destination.of_key("a") == [b"1", b"3", b"5"]


def test_a_key_waits_for_a_call_that_hangs_although_dead_letters_let_it_go_on(outbox):
    """The message is a dead letter after its only attempt, and it may arrive yet."""
    destination = Holding()
    send(outbox, a=b"1", b=b"2")
    send(outbox, b"4", a=b"3", b=b"5")
    with running(outbox, destination, on_dead="continue", retry=RetryPolicy(attempts=1)):
        assert eventually(lambda: destination.bodies == [b"2", b"4", b"5"])
        destination.release()
        arrived = eventually(lambda: len(destination.messages) == 5)

    assert arrived
    assert destination.of_key("a") == [b"1", b"3"]


def expired(moment: datetime) -> Callable[[], bool]:
    return lambda: datetime.now(UTC) > moment + timedelta(milliseconds=100)


def test_what_hangs_does_not_expire(outbox):
    """It was handed over in time, and is done when the call comes back."""
    destination, moment = Holding(), datetime.now(UTC) + DEADLINE * 1.25
    send(outbox, b"1", expires_at=moment)
    with running(outbox, destination):
        assert eventually(expired(moment))
        destination.release()
        send(outbox, b"2")
        arrived = eventually(lambda: len(destination.messages) == 2)

    assert (arrived, destination.bodies, states(outbox.engine)) == (True, [b"1", b"2"], {})


def test_what_hangs_does_not_expire_when_it_was_set_aside(outbox):
    """Others are accepted meanwhile, so its attempt counts; what came of it is known when the call comes back."""
    destination, moment = Holding(), datetime.now(UTC) + DEADLINE * 1.25
    send(outbox, b"1", expires_at=moment)
    send(outbox, b"2")
    with running(outbox, destination):
        assert eventually(lambda: states(outbox.engine) == {"retry": 1})
        assert eventually(expired(moment))
        send(outbox, b"3")
        assert eventually(lambda: destination.bodies == [b"2", b"3"])
        aside = states(outbox.engine)
        destination.release()
        arrived = eventually(lambda: states(outbox.engine) != {"retry": 1})

    assert arrived
    assert aside == {"retry": 1}
    assert (destination.bodies, states(outbox.engine)) == ([b"2", b"3", b"1"], {})
