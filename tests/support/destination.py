"""A destination that does what a test tells it: accepts, refuses, raises, hangs, or fails some messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tenacity import wait_fixed

from outbox import Consumer, Done, Message, Outbox, Reject, Relay, Retry, RetryPolicy, Unavailable, Verdict
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from outbox.worker.shared import SharedSender

Answer = Callable[[Message], Verdict]


def accepted(_message: Message) -> Verdict:
    """A healthy destination."""
    return DONE


class Destination:
    """Keeps what it accepts. `answer` decides per message and may raise; `hanging` holds every call back."""

    destination = "test"
    deadline: timedelta | None = None

    def __init__(self, answer: Answer = accepted) -> None:
        self.answer = answer
        self.hanging: Callable[[Sequence[Message]], bool] = lambda _messages: False
        self.messages: list[Message] = []
        self.calls = 0
        self._lock = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Ask `answer`; after the first of a key that is not done, the rest of the key is not asked about."""
        self.calls += 1
        while self.hanging(messages):
            time.sleep(0.01)
        verdicts: list[Verdict] = []
        stopped: set[str] = set()
        for message in messages:
            verdict = Unavailable("behind another one") if message.key in stopped else self.answer(message)
            if not isinstance(verdict, Done) and message.key is not None:
                stopped.add(message.key)
            verdicts.append(verdict)
        with self._lock:
            done = [m for m, verdict in zip(messages, verdicts, strict=True) if isinstance(verdict, Done)]
            self.messages += done
        return verdicts

    def close(self) -> None:
        """Nothing is open."""

    @property
    def bodies(self) -> list[bytes]:
        """What was accepted, in order."""
        return [message.body for message in self.messages]

    def of_key(self, key: str | None) -> list[bytes]:
        """What was accepted of one key, in order."""
        return [message.body for message in self.messages if message.key == key]


def failing(bodies: set[bytes], verdict: Verdict | Exception) -> Answer:
    """Accept all but some, which get a verdict or an exception."""

    def answer(message: Message) -> Verdict:
        if message.body not in bodies:
            return DONE
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    return answer


BAD: dict[str, Verdict | Exception] = {
    "retries": Retry("not now"),
    "rejects": Reject("never"),
    "raises": ValueError("cannot take this"),
}


#: No relay loses such a lease by itself, however busy the machine is.
LONG_LEASE = timedelta(minutes=5)


def briskly(*, lease: timedelta = LONG_LEASE) -> Settings:
    """The pace of a worker with short pauses, which loses its lease only to a statement: see `end_lease`."""
    return Settings(
        limits=Limits(rows=200),
        poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
        lease=lease,
        renew_every=timedelta(milliseconds=500),
    )


def relay_to(destination: Destination | SharedSender, outbox: Outbox, **options: Any) -> Relay:
    """A relay with short pauses and a long lease."""
    chosen: dict[str, object] = {
        "retry": RetryPolicy(attempts=3, wait=wait_fixed(0.05)),
        "settings": briskly(),
        **options,
    }
    return Relay(outbox, destination, **chosen)  # type: ignore[arg-type]  # the test knows the names


@contextmanager
def running(*workers: Relay | Consumer) -> Iterator[None]:
    """Relays and consumers work meanwhile, and try again after errors."""
    for each in workers:
        each.start()
    try:
        yield
    finally:
        for each in workers:
            each.stop()
        for each in workers:
            each.join(60)


def fill(outbox: Outbox, count: int, *, keys: int = 20, topics: int = 1, first: int = 0) -> None:
    """Append numbered messages, in portions; message n has key n % keys and topic n % topics."""
    for begin in range(first, first + count, 1000):
        with outbox.begin() as session:
            outbox.send_all(
                session,
                [
                    Message(f"topic{n % topics}", str(n), key=f"k{n % keys}")
                    for n in range(begin, min(begin + 1000, first + count))
                ],
            )


def expected(key: int, count: int, keys: int = 20) -> list[bytes]:
    """What `fill` appended for one key, in order."""
    return [str(n).encode() for n in range(key, count, keys)]


class Lines:
    """A destination that outlives its process: one line of the file for each message."""

    destination = "test"

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Write them down."""
        with self._path.open("a") as file:
            file.writelines(f"{message.body.decode()}\n" for message in messages)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Every line is written already."""
