"""A destination that is suddenly slow: its calls make progress, and nothing they have is sent beside them."""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from outbox import Message, Outbox, Verdict
from outbox.verdict import DONE
from tests.fire.destination import expected, fill, relay_to
from tests.fire.parked import states
from tests.leases import epoch, lease_left
from tests.waiting import eventually

COUNT, KEYS = 600, 5
DEADLINE = timedelta(seconds=0.1)


class Slow:
    """Takes one message after the other; `pause` between two of them, in seconds."""

    destination = "test"

    def __init__(self) -> None:
        self.pause = 0.0
        self.arrived: list[tuple[str | None, bytes]] = []
        self.longest = 0.0
        self._lock = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, all of them."""
        began = time.monotonic()
        for message in messages:
            time.sleep(self.pause)
            with self._lock:
                self.arrived.append((message.key, message.body))
        self.longest = max(self.longest, time.monotonic() - began)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is open."""

    def of_key(self, key: str) -> list[bytes]:
        """What arrived of a key, in order."""
        return [body for each, body in self.arrived if each == key]


def test_a_slow_destination_gets_nothing_twice_and_in_order(engine):
    """Calls take many deadlines, with a relay of another process ready to take over."""
    destination = Slow()
    relays = [relay_to(destination, Outbox(engine), deadline=DEADLINE) for _ in range(2)]  # type: ignore[arg-type]
    outbox = Outbox(engine)
    for relay in relays:
        relay.start()
    fill(outbox, 200, keys=KEYS)
    assert eventually(lambda: len(destination.arrived) == 200, 20)
    destination.pause = 0.02
    fill(outbox, COUNT - 200, keys=KEYS, first=200)
    slow = eventually(lambda: destination.longest > 10 * DEADLINE.total_seconds(), 60)
    destination.pause = 0.0
    drained = eventually(lambda: len(destination.arrived) >= COUNT and not states(engine), 60)
    time.sleep(1)
    for relay in relays:
        relay.stop()
        relay.join(20)

    assert (slow, drained) == (True, True)
    assert len(destination.arrived) == COUNT
    assert {key: destination.of_key(f"k{key}") for key in range(KEYS)} == {
        key: expected(key, COUNT, KEYS) for key in range(KEYS)
    }


def test_a_relay_that_stops_beside_a_slow_call_keeps_its_lease_meanwhile(engine):
    """Another one begins when the lease has run out, not beside the call that is under way."""
    destination = Slow()
    first, second = (relay_to(destination, Outbox(engine), deadline=DEADLINE) for _ in range(2))  # type: ignore[arg-type]
    destination.pause = 0.5
    fill(Outbox(engine), 4, keys=1)
    first.start()
    time.sleep(0.3)
    second.start()
    first.stop()
    first.join(20)
    left = lease_left(engine)
    taken_over = eventually(lambda: epoch(engine) == 2, 20)
    drained = eventually(lambda: {body for _, body in destination.arrived} == {b"0", b"1", b"2", b"3"}, 30)
    second.stop()
    second.join(20)

    assert left > 0
    assert (taken_over, drained) == (True, True)
