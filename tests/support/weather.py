"""Bad weather between a sender and its destination: what it breaks, and what must hold all the same."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from outbox.model.message import Message
from outbox.model.verdict import Done
from outbox.senders.port import Sender
from outbox.testing.sender_contract import Destination, a_message


def rage(destination: Destination, *, seconds: float) -> None:
    """Break something every now and then, and mend it."""
    chance = random.Random(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice((destination.disappear, destination.fall_silent, destination.lose_next_answer))()
        time.sleep(chance.uniform(0, 1))
        destination.recover()
        time.sleep(chance.uniform(0, 0.5))


def send_through(sender: Sender, storm: Callable[[], None], *, topics: Sequence[str] = ("orders",)) -> list[Message]:
    """Send messages with 20 keys, and some without, while the storm lasts; return them when all are `Done`."""
    sent: list[Message] = []
    with ThreadPoolExecutor(1) as pool:
        raging = pool.submit(storm)
        while not raging.done():
            numbers = range(len(sent), len(sent) + 200)
            part = [a_message(topics[n % len(topics)], n, key=f"k{n % 20}" if n % 4 else None) for n in numbers]
            sent += part
            while part:
                verdicts = sender.send(part)
                part = [one for one, verdict in zip(part, verdicts, strict=True) if not isinstance(verdict, Done)]
                time.sleep(0.02 if part else 0)
        raging.result()
    return sent
