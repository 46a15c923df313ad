"""Messages that are written here and arrive in another process: when each was committed, and when it came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import Column, Identity, Integer, LargeBinary, MetaData, Table, insert

from benchmarks.site import PROCESSES
from outbox import Message, Outbox, Relay, Verdict, create_engine
from outbox.model.verdict import DONE

_PATIENCE = 60.0

BARE = Table(
    "bare",
    MetaData(),
    Column("id", Integer, Identity(), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

#: What a process on the receiving side brings home: when it had which message, by the clock that all processes share.
Arrivals = dict[bytes, int]
Receiver = Callable[[str, Pipe], None]
#: Writes one message; returns when its commit had come back.
Writer = Callable[[bytes], int]


@contextmanager
def running(receiver: Receiver, url: str) -> Iterator[Pipe]:
    """A process that receives, and the pipe to it; it ends with the block."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=receiver, args=(url, theirs), daemon=True)
    process.start()
    try:
        yield ours
        process.join(_PATIENCE)
    finally:
        process.kill()
        process.join()


def warm_up(pipe: Pipe, write: Writer) -> None:
    """Write until the first message arrives."""
    until = time.monotonic() + _PATIENCE
    number = 0
    while not pipe.poll(0.1):
        if time.monotonic() > until:
            raise RuntimeError("no message arrives")
        write(b"warm-up %d" % number)
        number += 1
    pipe.recv()


def writer(outbox: Outbox) -> Writer:
    """Writes business and a message in one transaction."""

    def write(body: bytes) -> int:
        with outbox.engine.connect() as connection:
            connection.execute(insert(BARE), {"body": b"business"})
            outbox.send(connection, "orders", body)
            connection.commit()
            return time.monotonic_ns()

    return write


class Arrival:
    """A sender that notes when it was given what, and tells when the first came."""

    destination = "sender:arrival"

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self.at: Arrivals = {}

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """All of them have arrived."""
        now = time.monotonic_ns()
        if messages and not self.at:
            self._pipe.send("ready")
        self.at.update((message.body, now) for message in messages)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is held."""


def relay(url: str, pipe: Pipe) -> None:
    """A process with a relay."""
    relay_to(Arrival(pipe), url, pipe)


def relay_to(arrival: Arrival, url: str, pipe: Pipe) -> None:
    """Relay to a sender until the other process says stop."""
    relay = Relay(Outbox(create_engine(url)), arrival)

    def stop_when_told() -> None:
        pipe.recv()
        relay.stop()

    threading.Thread(target=stop_when_told, daemon=True).start()
    relay.run()
    pipe.send(arrival.at)


def stop(pipe: Pipe) -> Arrivals:
    """Stop the receiver; what it had when."""
    pipe.send("stop")
    if not pipe.poll(_PATIENCE):
        raise RuntimeError("the receiver does not answer")
    arrived: Arrivals = pipe.recv()
    return arrived


def differences(committed: Arrivals, arrived: Arrivals) -> list[float]:
    """Milliseconds from commit to arrival, of each message."""
    return [(arrived[body] - at) / 1e6 for body, at in committed.items()]


def quantile(values: list[float], share: float) -> float:
    """The value below which such a share of all lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
