"""A destination that is suddenly slow: its calls make progress, and nothing they have is sent beside them."""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Message, Outbox, Retry, Verdict
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.destination import Destination, briskly, expected, fill, relay_to
from tests.support.leases import epoch, lease_left
from tests.support.parked import states
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

COUNT, KEYS = 600, 5
DEADLINE = timedelta(seconds=0.1)
#: Longer than a call is waited for, however often, and however few messages it holds.
PAUSE = 11 * DEADLINE.total_seconds()


class Slow:
    """Takes one message after the other; `pause` between two of them, in seconds."""

    destination = "test"

    def __init__(self) -> None:
        self.pause = 0.0
        self.arrived: list[tuple[str | None, bytes]] = []
        self.longest = 0.0
        #: Keys of which a call had a message while another call had one, too.
        self.overlaps: list[str] = []
        self._under_way: list[str] = []
        self._lock = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, all of them."""
        began = time.monotonic()
        keys = {message.key for message in messages if message.key is not None}
        with self._lock:
            self.overlaps += sorted(keys.intersection(self._under_way))
            self._under_way += keys
        for message in messages:
            time.sleep(self.pause)
            with self._lock:
                self.arrived.append((message.key, message.body))
        with self._lock:
            self.longest = max(self.longest, time.monotonic() - began)
            for key in keys:
                self._under_way.remove(key)
        return [DONE] * len(messages)

    @property
    def is_at_work(self) -> bool:
        """Whether a message with a key is under way."""
        return bool(self._under_way)

    def close(self) -> None:
        """Nothing is open."""

    def of_key(self, key: str) -> list[bytes]:
        """What arrived of a key, in order."""
        return [body for each, body in self.arrived if each == key]


def was_slow(destination: Slow) -> bool:
    """Whether a call took many deadlines; from its second message on the destination is quick again."""
    began = eventually(lambda: len(destination.arrived) > 200)
    destination.pause = 0.0
    return began and eventually(lambda: destination.longest > 10 * DEADLINE.total_seconds())


def test_a_slow_destination_gets_nothing_twice_also_without_keys(engine):
    """No key holds them: they are held one by one."""
    outbox, destination = Outbox(engine), Slow()
    relay = relay_to(destination, outbox, deadline=DEADLINE)  # type: ignore[arg-type]
    relay.start()
    for pause in (0.0, PAUSE):
        destination.pause = pause
        with outbox.begin() as session:
            outbox.send_all(session, [Message("t", str(n)) for n in range(200)])
        assert eventually(lambda: len(destination.arrived) >= 200)
    slow = was_slow(destination)
    drained = eventually(lambda: len(destination.arrived) >= 400 and not states(engine))
    time.sleep(1)
    relay.stop()
    relay.join(60)

    assert (slow, drained) == (True, True)
    assert sorted(body for _, body in destination.arrived) == sorted(str(n).encode() for n in (*range(200),) * 2)


def test_what_is_held_stands_in_the_way_of_nothing_else_that_is_parked(engine):
    """They are as many as are looked at at once, and come first."""
    outbox, released = Outbox(engine), threading.Event()
    destination = Destination()
    destination.hanging = lambda messages: messages[0].topic == "held" and not released.is_set()
    settings = Settings(
        limits=Limits(rows=5),
        poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
        lease=timedelta(seconds=3),
        renew_every=timedelta(milliseconds=500),
    )
    relay = relay_to(destination, outbox, deadline=DEADLINE, settings=settings)
    relay.start()
    fill(outbox, 50)
    assert eventually(lambda: len(destination.messages) == 50)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("held", str(n)) for n in range(5)])
    assert eventually(lambda: states(engine) == {"waiting": 5})
    destination.answer = lambda message: Retry("not yet") if message.attempt == 1 else DONE
    with outbox.begin() as session:
        outbox.send(session, "retried", b"retried")
    beside = eventually(lambda: b"retried" in destination.bodies)
    destination.answer = lambda _: DONE
    released.set()
    drained = eventually(lambda: not states(engine))
    relay.stop()
    relay.join(60)

    assert (beside, drained) == (True, True)
    assert sorted(m.body for m in destination.messages if m.topic == "held") == [b"0", b"1", b"2", b"3", b"4"]


def test_a_slow_destination_gets_nothing_twice_and_in_order(engine):
    """Calls take many deadlines, with a relay of another process ready to take over."""
    destination = Slow()
    relays = [relay_to(destination, Outbox(engine), deadline=DEADLINE) for _ in range(2)]  # type: ignore[arg-type]
    outbox = Outbox(engine)
    for relay in relays:
        relay.start()
    fill(outbox, 200, keys=KEYS)
    assert eventually(lambda: len(destination.arrived) == 200)
    destination.pause = PAUSE
    fill(outbox, COUNT - 200, keys=KEYS, first=200)
    slow = was_slow(destination)
    drained = eventually(lambda: len(destination.arrived) >= COUNT and not states(engine))
    time.sleep(1)
    for relay in relays:
        relay.stop()
        relay.join(60)

    assert (slow, drained) == (True, True)
    assert len(destination.arrived) == COUNT
    assert destination.overlaps == []
    assert {key: destination.of_key(f"k{key}") for key in range(KEYS)} == {
        key: expected(key, COUNT, KEYS) for key in range(KEYS)
    }


def test_what_a_slow_call_has_is_held_over_a_lost_connection(pg_engine):
    """The relay reads it again from the stored position, while the call is under way still."""
    outbox, destination = Outbox(pg_engine), Slow()
    relay = relay_to(destination, outbox, deadline=DEADLINE)  # type: ignore[arg-type]
    destination.pause = 1.5
    fill(outbox, 9, keys=1)
    relay.start()
    assert eventually(lambda: len(destination.arrived) > 0)
    for _ in range(3):
        with pg_engine.connect() as connection:
            ours = "pid <> pg_backend_pid() AND datname = current_database()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}"))
        time.sleep(0.7)
    destination.pause = 0.0
    every = set(expected(0, 9, 1))
    arrived = eventually(lambda: {body for _, body in destination.arrived} == every and not states(pg_engine))
    taken = epoch(pg_engine)
    relay.stop()
    relay.join(60)

    assert arrived
    assert taken > 1, "the connection was never lost"
    assert destination.overlaps == []


def test_a_relay_that_stops_beside_a_slow_call_keeps_its_lease_meanwhile(engine):
    """Another one begins when the lease has run out, not beside the call that is under way."""
    destination = Slow()
    settings = briskly(lease=timedelta(seconds=3))
    first, second = (
        relay_to(destination, Outbox(engine), deadline=DEADLINE, settings=settings)  # type: ignore[arg-type]
        for _ in range(2)
    )
    destination.pause = 1.0
    fill(Outbox(engine), 4, keys=1)
    first.start()
    assert eventually(lambda: destination.is_at_work)
    second.start()
    first.stop()
    first.join(60)
    left = lease_left(engine)
    taken_over = eventually(lambda: epoch(engine) >= 2)
    drained = eventually(lambda: {body for _, body in destination.arrived} == {b"0", b"1", b"2", b"3"})
    second.stop()
    second.join(60)

    assert left > 0
    assert (taken_over, drained) == (True, True)
    assert destination.overlaps == []
