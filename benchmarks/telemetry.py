"""What it costs that somebody could listen to events while nobody does, and what it costs to read metrics."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from sqlalchemy import Connection

from benchmarks.drain import drain
from benchmarks.measure import Measurement, Turns, at_least, at_most
from benchmarks.site import Place, Site
from benchmarks.write import compared, on_core
from benchmarks.writers import BODY, ORDERS
from outbox import Outbox
from outbox.admin.gauges import Looks
from outbox.cli.http import serving
from outbox.relay.supervisor import Supervisor
from outbox.telemetry.events import Teller
from outbox.writing.transaction import Transactions

#: In place of listeners: nothing that could ever listen, so that no line of code that tells an event is reached.
_NOBODY: Any = ()
_READ = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep(1)
"""


def telemetry_write(site: Site) -> list[Measurement]:
    """One business INSERT and one message while nobody listens, against the same without events: µs a transaction.

    Both sides have one engine and one connection: where the system runs a connection's process costs it more than this.
    """
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        outbox, silent = Outbox(place.engine), Outbox(place.engine)
        silent.transactions = Transactions(silent.database, silent.notifier.committed, listeners=_NOBODY)

        def send(outbox: Outbox, connection: Connection, _number: int) -> None:
            outbox.send(connection, "orders", BODY)

        sides = (partial(on_core, place.engine, partial(send, each)) for each in (outbox, silent))
        return [compared("telemetry_write", site.scale, at_most(1.01), *sides)]


def telemetry_drain(site: Site) -> list[Measurement]:
    """Messages a second of a relay while nobody listens, against the same where nothing is told."""
    count, turns = site.scale.flat_drained, Turns("telemetry_drain")
    with site.place() as place:
        place.fill(count)
        drain(place, count, "first")
        for number in range(site.scale.rounds):
            told: list[float] = []
            silent: list[float] = []
            for turn in range(site.scale.business_turns):
                told.append(drain(place, count, f"told-{number}-{turn}"))
                with _nothing_told():
                    silent.append(drain(place, count, f"silent-{number}-{turn}"))
            turns.add(median(told), median(silent))
    return [Measurement(name=turns.name, goal=at_least(0.99), unit="msg/s", ours=turns.ours, other=turns.other)]


def metrics_cost(site: Site) -> list[Measurement]:
    """CPU time of a relay whose metrics are read every second, against the same without metrics: µs a message."""
    count, turns = site.scale.drained, Turns("metrics_cost")
    with site.place() as place:
        place.fill(count)
        drain(place, count, "first")
        for number in range(site.scale.rounds):
            unread = _used(place, count, f"unread-{number}")
            with _metrics_read(place):
                turns.add(_used(place, count, f"read-{number}"), unread)
    return [Measurement(name=turns.name, goal=at_most(1.02), unit="µs", ours=turns.ours, other=turns.other)]


def _used(place: Place, count: int, name: str) -> float:
    """CPU time of this process while a relay drains the log, in µs a message."""
    before = time.process_time()
    drain(place, count, name)
    return (time.process_time() - before) / count * 1_000_000


@contextmanager
def _metrics_read(place: Place) -> Iterator[None]:
    """Let another process read the metrics of this one every second."""
    looks = Looks({"place": Outbox(place.engine).admin.look})
    with serving("127.0.0.1", 0, Supervisor([]), looks) as port:
        reader = subprocess.Popen([sys.executable, "-c", _READ, f"http://127.0.0.1:{port}/metrics"])
        try:
            yield
        finally:
            reader.kill()
            reader.wait()


@contextmanager
def _nothing_told() -> Iterator[None]:
    """Let workers tell nothing of their batches, not even what their own log lines need."""
    verbs = ("tell", "tell_settled")
    former = [getattr(Teller, verb) for verb in verbs]
    for verb in verbs:
        setattr(Teller, verb, _silent)
    try:
        yield
    finally:
        for verb, told in zip(verbs, former, strict=True):
            setattr(Teller, verb, told)


def _silent(*_: object, **__: object) -> None: ...
