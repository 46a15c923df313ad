"""A relay does one thing at a time: otherwise it would take its own lease away from itself, without end."""

import os
import signal
import threading

import pytest

from outbox import Message, Outbox, Relay, SubscriptionError
from outbox.runtime.stop import Stop
from outbox.worker.calls import Call
from tests.support.destination import Destination, relay_to
from tests.support.waiting import eventually

WORKS = {
    "run": lambda relay: relay.run(signals=False),
    "work": lambda relay: relay.work("stopped", Stop()),
    "until_empty": lambda relay: relay.until_empty(),
    "once": lambda relay: relay.once(),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_a_relay_that_runs_in_the_background_does_nothing_else(engine, work):
    """And goes on as if nobody had asked."""
    outbox, destination = Outbox(engine), Destination()
    with outbox.running(destination) as relay:
        assert eventually(relay._at_work.locked)
        with pytest.raises(SubscriptionError, match="at work already"):
            work(relay)
        relay.start()
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", b"%d" % number, key="k") for number in range(100)])
        assert eventually(lambda: len(destination.messages) == 100)

    assert destination.bodies == [b"%d" % number for number in range(100)]


def test_nothing_is_started_beside_what_works_otherwise(engine):
    relay = relay_to(Destination(), Outbox(engine))
    other = threading.Thread(target=relay.run, daemon=True)
    other.start()
    assert eventually(relay._at_work.locked)

    with pytest.raises(SubscriptionError, match="at work still"):
        relay.start()
    relay.stop()
    other.join(60)

    assert not other.is_alive()


def test_a_relay_that_is_stopping_has_to_be_joined_first(engine):
    outbox, destination, released = Outbox(engine), Destination(), threading.Event()
    destination.hanging = lambda _: not released.is_set()
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    relay = relay_to(destination, outbox)
    relay.start()
    assert eventually(lambda: destination.calls == 1)
    relay.stop()

    with pytest.raises(SubscriptionError, match="join it"):
        relay.start()
    released.set()
    relay.join(60)
    relay.start()
    with outbox.begin() as session:
        outbox.send(session, "orders", b"2")
    assert eventually(lambda: destination.bodies == [b"1", b"2"])
    relay.stop()
    relay.join(60)


def test_a_stop_of_what_had_ended_is_forgotten_at_the_next_start(engine):
    outbox, destination = Outbox(engine), Destination()
    relay = relay_to(destination, outbox)
    for body in (b"1", b"2"):
        relay.start()
        with outbox.begin() as session:
            outbox.send(session, "orders", body)
        assert eventually(lambda: body in destination.bodies)  # noqa: B023
        relay.stop()
        relay.join(60)
        relay.stop()

    assert destination.bodies == [b"1", b"2"]


def test_a_fork_in_the_middle_of_a_call_leaves_the_child_its_own_turn(pg_engine):
    """What the parent's threads hold nobody gives back in the child."""
    outbox, destination = Outbox(pg_engine), Destination()
    destination.hanging = lambda _: True
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    relay = Relay(outbox, destination)
    relay.start()
    assert eventually(lambda: destination.calls == 1)
    child = os.fork()
    if not child:
        # Not even an error may leave it: the tests would go on in two processes.
        try:
            signal.alarm(10)
            destination.hanging = lambda _: False
            call = Call([Message("orders", b"of the child")])
            with relay._alone():
                job = relay._worker._subscriptions[0].job
                job.caller.begin(call, job.handler)
                assert eventually(lambda: call.finished)
                os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    destination.hanging = lambda _: False
    relay.stop()
    relay.join(60)

    assert status == 0
