"""How long a message takes from its commit to the sender's call, against a bare NOTIFY, LISTEN and SELECT."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import insert

from benchmarks.arrivals import (
    BARE,
    Arrival,
    Arrivals,
    Receiver,
    Writer,
    differences,
    quantile,
    relay,
    running,
    stop,
    warm_up,
    writer,
)
from benchmarks.measure import Measurement, Turns, at_most
from benchmarks.site import Place, Site
from outbox import Outbox, create_engine

_PAUSE = (0.010, 0.030)
#: When each message is to be written, in seconds from the start.
Schedule = Sequence[float]


def latency(site: Site) -> list[Measurement]:
    """Milliseconds from commit to the sender's call at 50 a second, against a bare NOTIFY, LISTEN and SELECT."""
    medians, tails = Turns("latency_p50"), Turns("latency_p99")
    with site.place() as place:
        BARE.metadata.create_all(place.engine)
        for _ in range(site.scale.rounds):
            ours = _milliseconds(place, relay, writer(Outbox(place.engine)), evenly(site.scale.latency_messages))
            bare = _milliseconds(place, _listener, _bare_writer(place), evenly(site.scale.latency_messages))
            medians.add(quantile(ours, 0.5), quantile(bare, 0.5))
            tails.add(quantile(ours, 0.99), quantile(bare, 0.99))
    return [
        Measurement(name="latency_p50", goal=at_most(1.5), unit="ms", ours=medians.ours, other=medians.other),
        Measurement(name="latency_p99", goal=at_most(2), unit="ms", ours=tails.ours, other=tails.other),
    ]


def latency_random(site: Site, a_second: int) -> list[Measurement]:
    """Milliseconds from commit to the sender's call, at random commits, against the same bare round trip."""
    medians, tails = Turns(f"latency_random_{a_second}_p50"), Turns(f"latency_random_{a_second}_p99")
    count = round(a_second * site.scale.random_seconds)
    with site.place() as place:
        BARE.metadata.create_all(place.engine)
        for number in range(site.scale.rounds):
            schedule = _at_random(random.Random(number), a_second, count)
            ours = _milliseconds(place, relay, writer(Outbox(place.engine)), schedule)
            bare = _milliseconds(place, _listener, _bare_writer(place), schedule)
            medians.add(quantile(ours, 0.5), quantile(bare, 0.5))
            tails.add(quantile(ours, 0.99), quantile(bare, 0.99))
    return [
        Measurement(name=medians.name, goal=at_most(1.5), unit="ms", ours=medians.ours, other=medians.other),
        Measurement(name=tails.name, goal=at_most(2), unit="ms", ours=tails.ours, other=tails.other),
    ]


def embedded_latency(site: Site) -> list[Measurement]:
    """Milliseconds from commit to the sender's call of a relay in the writer's own process, against another process."""
    medians = Turns("embedded_latency_p50")
    with site.place() as embedded, site.place() as relayed:
        for place in (embedded, relayed):
            BARE.metadata.create_all(place.engine)
        for _ in range(site.scale.rounds):
            ours = _embedded_milliseconds(embedded, evenly(site.scale.latency_messages))
            other = _milliseconds(relayed, relay, writer(Outbox(relayed.engine)), evenly(site.scale.latency_messages))
            medians.add(quantile(ours, 0.5), quantile(other, 0.5))
    return [Measurement(name=medians.name, goal=at_most(1), unit="ms", ours=medians.ours, other=medians.other)]


def _embedded_milliseconds(place: Place, schedule: Schedule) -> list[float]:
    """The latency of each message, which a relay in a thread of its writer's process sends."""
    ours, theirs = multiprocessing.Pipe()
    arrival = Arrival(theirs)
    outbox = Outbox(place.engine)
    with outbox.running(arrival):
        write = writer(outbox)
        warm_up(ours, write)
        committed = write_by(schedule, write)
    outbox.close()
    return differences(committed, arrival.at)


def _milliseconds(place: Place, receiver: Receiver, write: Writer, schedule: Schedule) -> list[float]:
    """The latency of each message, written by a schedule while the receiver runs in another process."""
    with running(receiver, place.url) as pipe:
        warm_up(pipe, write)
        committed = write_by(schedule, write)
        arrived = stop(pipe)
    return differences(committed, arrived)


def evenly(count: int) -> Schedule:
    """50 messages a second, and none at a regular distance."""
    pauses = random.Random(count)
    return list(itertools.accumulate(pauses.uniform(*_PAUSE) for _ in range(count)))


def _at_random(dice: random.Random, a_second: int, count: int) -> Schedule:
    """As customers come: each moment is as good as any other."""
    return list(itertools.accumulate(dice.expovariate(a_second) for _ in range(count)))


def write_by(schedule: Schedule, write: Writer) -> Arrivals:
    """When each message was committed; one whose moment has passed is written at once."""
    committed: Arrivals = {}
    started = time.monotonic()
    for number, moment in enumerate(schedule):
        time.sleep(max(0.0, started + moment - time.monotonic()))
        body = b"%d" % number
        committed[body] = write(body)
    time.sleep(1)
    return committed


def _bare_writer(place: Place) -> Writer:
    notifier = place.connect()
    notifier.autocommit = True

    def write(body: bytes) -> int:
        with place.engine.connect() as connection:
            connection.execute(insert(BARE), {"body": b"business"})
            connection.execute(insert(BARE), {"body": body})
            connection.commit()
            at = time.monotonic_ns()
        notifier.execute("NOTIFY bare")
        return at

    return write


def _listener(url: str, pipe: Pipe) -> None:
    """A process that listens, and selects what is new whenever it is told."""
    place = Place(create_engine(url), url)
    connection = place.connect()
    connection.autocommit = True
    connection.execute("LISTEN bare")
    cursor = connection.cursor(binary=True)
    connection.prepare_threshold = 0
    arrived: Arrivals = {}
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM bare").fetchone() or (0,)
    while not pipe.poll():
        if list(connection.notifies(timeout=1, stop_after=1)):
            rows = cursor.execute("SELECT id, body FROM bare WHERE id > %s ORDER BY id", (last,)).fetchall()
            now = time.monotonic_ns()
            if rows and not arrived:
                pipe.send("ready")
            arrived.update((body, now) for _, body in rows)
            last = rows[-1][0] if rows else last
    pipe.send(arrived)
