"""A call that hangs may have arrived: nothing of its keys overtakes it, and it does not expire meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, RetryPolicy
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import Destination, relay_to
from tests.support.parked import decide, states
from tests.support.waiting import eventually

#: A call hangs after this time. Three times as long, and what it has is parked.
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
def running(outbox: Outbox, destination: Holding, **options: Any) -> Iterator[None]:
    relay = relay_to(destination, outbox, deadline=DEADLINE, **options)
    relay.start()
    try:
        yield
    finally:
        destination.release()
        relay.stop()
        relay.join(60)


def send(outbox: Outbox, *bodies: bytes, expires_at: datetime | None = None, **keys: bytes) -> None:
    """Messages without a key, and with one, as `a=b"1"`; in the order of their bodies."""
    pairs = sorted([(body, None) for body in bodies] + [(body, key) for key, body in keys.items()])
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body, key=key, expires_at=expires_at) for body, key in pairs])


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def test_a_key_waits_for_a_call_that_hangs(outbox):
    """Its message is parked and the log goes on; when the call comes back its answer counts."""
    destination = Holding()
    send(outbox, b"4", a=b"1", b=b"2")
    send(outbox, a=b"3")
    with outbox.running(overdue_when_hanging(destination)):
        beside = eventually(lambda: destination.bodies == [b"2", b"4"])
        send(outbox, b"7", a=b"5", b=b"6")
        after = eventually(lambda: destination.bodies == [b"2", b"4", b"6", b"7"])
        destination.release()
        arrived = eventually(lambda: len(destination.messages) == 7 and states(outbox.engine) == {})

    assert (beside, after, arrived) == (True, True, True)
    assert destination.of_key("a") == [b"1", b"3", b"5"]


@pytest.mark.storm
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


@pytest.mark.storm
def test_what_hangs_does_not_expire(outbox):
    """It was handed over in time, and is done when the call comes back."""
    destination = Holding()
    with running(outbox, destination):
        send(outbox, b"0")
        assert eventually(lambda: destination.bodies == [b"0"])  # the next is handed over at once
        moment = datetime.now(UTC) + DEADLINE * 1.25
        send(outbox, b"1", expires_at=moment)
        assert eventually(expired(moment))
        destination.release()
        send(outbox, b"2")
        arrived = eventually(lambda: len(destination.messages) == 3 and not states(outbox.engine))

    assert (arrived, sorted(destination.bodies)) == (True, [b"0", b"1", b"2"])


@pytest.mark.storm
def test_what_hangs_does_not_expire_when_it_was_parked(outbox):
    """Others are accepted meanwhile, so its attempt counts; what came of it is known when the call comes back."""
    destination, moment = Holding(), datetime.now(UTC) + DEADLINE * 2.5
    send(outbox, b"1", expires_at=moment)
    send(outbox, b"2")
    with running(outbox, destination):
        assert eventually(lambda: states(outbox.engine) == {"retry": 1})
        assert eventually(expired(moment))
        send(outbox, b"3")
        assert eventually(lambda: destination.bodies == [b"2", b"3"])
        parked = states(outbox.engine)
        destination.release()
        arrived = eventually(lambda: states(outbox.engine) != {"retry": 1})

    assert arrived
    assert parked == {"retry": 1}
    assert (destination.bodies, states(outbox.engine)) == ([b"2", b"3", b"1"], {})


HASTY = timedelta(seconds=1.5)


@pytest.mark.storm
@pytest.mark.parametrize("on_dead", ["continue", "block"])
def test_other_keys_go_on_beside_a_call_that_hangs_whatever_came_of_its_message(engine, outbox, on_dead):
    """It is a dead letter while its call hangs, and later ones of its key wait for the call all the same."""
    destination = Holding()
    relay = relay_to(destination, outbox, deadline=HASTY, retry=RetryPolicy(attempts=1), on_dead=on_dead)
    relay.start()
    send(outbox, a=b"1", b=b"2")
    n = iter(range(100, 1000))

    def counted() -> bool:
        # A failure is counted while others are accepted, and when the parked messages are looked at.
        send(outbox, b=str(next(n)).encode())
        time.sleep(0.1)
        return states(engine).get("dead") == 1

    assert eventually(counted)
    if on_dead == "block":
        decide(engine, "discard")
        assert eventually(lambda: "dead" not in states(engine))
    send(outbox, a=b"3")
    send(outbox, c=b"4")
    flowed = eventually(lambda: b"4" in destination.bodies)
    held = destination.of_key("a")
    destination.release()
    drained = eventually(lambda: b"3" in destination.of_key("a"))
    relay.stop()
    relay.join(60)

    assert (flowed, held, drained) == (True, [], True)
    assert destination.of_key("a") == [b"1", b"3"]


@pytest.mark.storm
def test_what_stands_behind_a_held_key_stands_in_the_way_of_nothing_else_that_is_parked(engine, outbox):
    """They are more than are looked at at once, and come first."""
    destination = Holding()
    settings = Settings(
        limits=Limits(rows=5),
        poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
        lease=timedelta(seconds=3),
        renew_every=timedelta(milliseconds=500),
    )
    relay = relay_to(destination, outbox, deadline=HASTY, settings=settings)
    relay.start()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key="a") for n in range(1, 22)])
    assert eventually(lambda: sum(states(engine).values()) == 21)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"delayed", key="b", delay=timedelta(milliseconds=100))
    beside = eventually(lambda: b"delayed" in destination.bodies)
    destination.release()
    drained = eventually(lambda: not states(engine))
    relay.stop()
    relay.join(60)

    assert (beside, drained) == (True, True)
    assert destination.of_key("a") == [str(n).encode() for n in range(1, 22)]


@pytest.mark.storm
def test_a_relay_that_is_started_again_goes_on_beside_the_call_of_the_one_before(outbox):
    destination = Holding()
    outbox.start(destination, deadline=HASTY)
    send(outbox, a=b"1")
    assert eventually(lambda: destination.calls == 1)
    outbox.stop()
    outbox.start(destination, deadline=HASTY)
    send(outbox, a=b"2")
    send(outbox, b=b"3")
    beside = eventually(lambda: b"3" in destination.bodies)
    destination.release()
    drained = eventually(lambda: len(destination.bodies) == 3)
    outbox.stop()

    assert (beside, drained) == (True, True)
    assert (destination.of_key("a"), destination.calls) == ([b"1", b"2"], 3)
