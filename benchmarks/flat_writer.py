"""Whether speed stays beside a transaction that has written and is kept open."""

from __future__ import annotations

import itertools
import time

from benchmarks.arrivals import BARE, Arrivals, differences, quantile, relay, running, stop, warm_up, writer
from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Site
from outbox import Message, Outbox

#: Beside an open writer: so many single messages, then a crowd.
_SINGLES, _BETWEEN_SINGLES = 10, 0.02
_CROWD, _AFTER_A_CROWD = 1_000, 0.3


def flat_writer(site: Site) -> list[Measurement]:
    """Beside a transaction that has written and stays open, from an empty log on: the last tenth against the first.

    The latency of single messages, and how fast a thousand go that are committed together. Nothing analyses the table
    meanwhile, so that the relay's statements stay planned as for an empty one.
    """
    drain, wait = Turns("flat_writer_drain"), Turns("flat_writer_latency")
    for _ in range(site.scale.rounds):
        (first_rate, first_wait), (last_rate, last_wait) = _beside_a_writer(site)
        drain.add(last_rate, first_rate)
        # Less is better: turned round, so that both have the same goal.
        wait.add(1 / last_wait, 1 / first_wait)
    return [
        Measurement(name=drain.name, goal=at_least(0.9), unit="msg/s", ours=drain.ours, other=drain.other),
        Measurement(name=wait.name, goal=at_least(0.9), unit="1/ms", ours=wait.ours, other=wait.other),
    ]


def _beside_a_writer(site: Site) -> tuple[tuple[float, float], tuple[float, float]]:
    """Messages a second and milliseconds, of the first tenth of the time and of the last."""
    seconds = site.scale.writer_seconds
    with site.place() as place, place.connect() as held:
        BARE.metadata.create_all(place.engine)
        place.execute("ALTER TABLE outbox_message SET (autovacuum_enabled = false)")
        outbox = Outbox(place.engine)
        with running(relay, place.url) as pipe:
            warm_up(pipe, writer(outbox))
            # As every installation begins: the relay's statements are planned while there is next to nothing.
            place.execute("ANALYZE outbox_message")
            held.execute("INSERT INTO bare (body) VALUES ('open')")
            singles, crowds = _write_both(outbox, seconds)
            arrived = stop(pipe)
        held.rollback()
    return _tenth(singles, crowds, arrived, 0), _tenth(singles, crowds, arrived, 9)


def _write_both(outbox: Outbox, seconds: float) -> tuple[list[Arrivals], list[Arrivals]]:
    """Single messages and crowds of them in turn, by tenths of the time: when each was committed."""
    write = writer(outbox)
    singles: list[Arrivals] = [{} for _ in range(10)]
    crowds: list[Arrivals] = [{} for _ in range(10)]
    started = time.monotonic()
    numbers = itertools.count()
    for tenth in range(10):
        # Once at least, however slow the machine is.
        while not crowds[tenth] or time.monotonic() - started < seconds * (tenth + 1) / 10:
            for _ in range(_SINGLES):
                body = b"single-%d" % next(numbers)
                singles[tenth][body] = write(body)
                time.sleep(_BETWEEN_SINGLES)
            bodies = [b"crowd-%d" % next(numbers) for _ in range(_CROWD)]
            with outbox.engine.begin() as connection:
                outbox.send_all(connection, [Message("orders", body) for body in bodies])
            # The last to arrive tells how long all of them took.
            crowds[tenth][bodies[-1]] = time.monotonic_ns()
            time.sleep(_AFTER_A_CROWD)
    return singles, crowds


def _tenth(singles: list[Arrivals], crowds: list[Arrivals], arrived: Arrivals, tenth: int) -> tuple[float, float]:
    of_crowds = quantile(differences(crowds[tenth], arrived), 0.5)
    return _CROWD / of_crowds * 1e3, quantile(differences(singles[tenth], arrived), 0.5)
