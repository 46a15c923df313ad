"""What is handled side by side: calls of a slow destination in one process, and partitions in several processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Protocol

from benchmarks.arrivals import Receiver, running
from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Place, Site
from outbox import Limits, Message, Outbox, Relay, Settings, Verdict, create_engine
from outbox.model.subscription import Declaration, Start
from outbox.model.verdict import DONE
from outbox.relay.life_cycle import LifeCycle
from outbox.store.subscriptions.subscriptions import Subscriptions

_PATIENCE = 300.0
_SHARED_PARTITIONS = 16
#: A filled table gives no hint, and each process is to notice it at once.
PACE = Settings(limits=Limits(rows=100), poll=(timedelta(milliseconds=20), timedelta(milliseconds=50)))
#: How many workers have partitions, and how many each of them has at least and at most.
_SHARES = """
    SELECT count(*), min(number), max(number)
    FROM (SELECT count(*) AS number FROM outbox_lease WHERE subscription = %s AND owner IS NOT NULL GROUP BY owner) AS w
"""


class Counting(Protocol):
    """Counts messages, and notes when the first call began and the last one ended."""

    count: int
    began: int
    ended: int


class SlowSender:
    """A sender whose calls take time, and which notes when the first began and the last ended."""

    destination = "sender:slow"

    def __init__(self, *, a_message: float, concurrency: int = 1) -> None:
        self.concurrency = concurrency
        self.count, self.began, self.ended = 0, 0, 0
        self._a_message = a_message
        self._lock = threading.Lock()

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """All of them are done when the time is over."""
        began = time.monotonic_ns()
        time.sleep(self._a_message * len(messages))
        with self._lock:
            self.began = self.began or began
            self.ended = time.monotonic_ns()
            self.count += len(messages)
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is held."""


def drain_8_calls(site: Site) -> list[Measurement]:
    """Messages a second of eight calls side by side against one at a time; each message takes 1 ms."""
    turns = Turns("drain_8_calls")
    with site.place() as place:
        place.fill(site.scale.shared)
        for number in range(site.scale.rounds):
            turns.add(*(_drain(place, site.scale.shared, calls, number) for calls in (8, 1)))
    return [Measurement(name=turns.name, goal=at_least(4), unit="msg/s", ours=turns.ours, other=turns.other)]


def _drain(place: Place, count: int, calls: int, number: int) -> float:
    sender = SlowSender(a_message=0.001, concurrency=calls)
    relay = Relay(Outbox(place.engine), sender, name=f"{calls}-calls-{number}", start="earliest")
    started = time.perf_counter()
    relay.until_empty()
    return _rate(sender.count, count, time.perf_counter() - started)


def scale_4_processes(site: Site) -> list[Measurement]:
    """Messages a second of four processes that share 16 partitions, against one; each message takes 1 ms."""
    turns = Turns("scale_4_processes")
    with site.place() as place:
        for number in range(site.scale.rounds):
            turns.add(*(_share(place, site.scale.shared, processes, number) for processes in (4, 1)))
    return [Measurement(name=turns.name, goal=at_least(3.5), unit="msg/s", ours=turns.ours, other=turns.other)]


def _share(place: Place, count: int, processes: int, number: int) -> float:
    name = f"{processes}-{number}"
    _declare(place, name, _SHARED_PARTITIONS, "latest")
    receiver = partial(_relay, name=name)
    return share(place, name, receiver, count, processes=processes, partitions=_SHARED_PARTITIONS)


def share(
    place: Place,
    name: str,
    receiver: Receiver,
    count: int,
    *,
    processes: int,
    partitions: int,
    keyed: bool = True,
) -> float:
    """Messages a second of processes that share a subscription, from the beginning of the first to the last.

    Each is to answer how many it has handled when it is asked; and at its end also when it began and ended.
    """
    with ExitStack() as stack:
        pipes = [stack.enter_context(running(receiver, place.url)) for _ in range(processes)]
        _wait_until_shared(place, name, processes, partitions // processes)
        place.fill(count, keyed=keyed)
        _wait_until_handled(pipes, count)
        for pipe in pipes:
            pipe.send("stop")
        found = [pipe.recv() for pipe in pipes]
    began, ended = min(each[1] for each in found if each[0]), max(each[2] for each in found)
    return _rate(sum(each[0] for each in found), count, (ended - began) / 1e9)


def _relay(url: str, pipe: Pipe, *, name: str) -> None:
    """A process with a relay. It says how many messages it has handled when it is asked, and more at its end."""
    sender = SlowSender(a_message=0.001)
    run_until_told(Relay(Outbox(create_engine(url)), sender, name=name, settings=PACE), sender, pipe)


def run_until_told(worker: LifeCycle, counting: Counting, pipe: Pipe) -> None:
    """Run, and answer through the pipe, as `share` asks."""

    def answer() -> None:
        while pipe.recv() != "stop":
            pipe.send(counting.count)
        worker.stop()

    threading.Thread(target=answer, daemon=True).start()
    worker.run()
    pipe.send((counting.count, counting.began, counting.ended))


def _declare(place: Place, name: str, partitions: int, start: Start) -> None:
    """Make a subscription with so many partitions, before any relay runs."""
    declared = Declaration(name=name, destination=SlowSender.destination, partitions=partitions)
    with closing(Outbox(place.engine).database.open()) as channel:
        Subscriptions(channel).declare(declared, start)


def _wait_until_shared(place: Place, name: str, processes: int, share: int) -> None:
    until = time.monotonic() + _PATIENCE
    with place.connect() as connection:
        connection.autocommit = True
        while connection.execute(_SHARES, (name,)).fetchone() != (processes, share, share):
            _require_time(until, "the partitions are not shared")


def _wait_until_handled(pipes: Sequence[Pipe], count: int) -> None:
    until = time.monotonic() + _PATIENCE
    handled = 0
    while handled < count:
        _require_time(until, f"{handled} of {count} messages are handled")
        for pipe in pipes:
            pipe.send("how many")
        handled = sum(pipe.recv() for pipe in pipes)


def _require_time(until: float, problem: str) -> None:
    if time.monotonic() > until:
        raise RuntimeError(problem)
    time.sleep(0.1)


def _rate(came: int, expected: int, seconds: float) -> float:
    if came != expected:
        raise RuntimeError(f"{came} messages came, {expected} were there")
    return came / seconds
