"""Whether a relay stays fast while old messages are deleted beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

from benchmarks.drain import drain
from benchmarks.measure import Measurement, Turns, at_least, say
from benchmarks.site import Place, Site
from outbox import Outbox
from outbox.model.position import EARLIEST
from outbox.worker.maintenance import pause_after
from outbox.worker.subscription import retention_task


def keep_vs_drain(site: Site) -> list[Measurement]:
    """Messages a second of a relay while old ones are deleted beside it, against a relay alone.

    The relay itself deletes nothing while it has a backlog. So the batches are those of another one, with none.
    """
    count, turns = site.scale.drained, Turns("keep_vs_drain")
    with site.place() as place:
        place.fill(count)
        drain(place, count)
        for _ in range(site.scale.rounds):
            place.fill(count)
            with purging(place):
                beside = drain(place, count)
            place.fill(count)
            turns.add(beside, drain(place, count))
    return [Measurement(name="keep_vs_drain", goal=at_least(0.8), unit="msg/s", ours=turns.ours, other=turns.other)]


@contextmanager
def purging(place: Place) -> Iterator[None]:
    """Delete what is passed, as the maintenance of a relay does, at its pace."""
    ended, batches = threading.Event(), 0

    def purge() -> None:
        nonlocal batches
        with closing(Outbox(place.engine).database.open()) as channel:
            task = retention_task(channel, timedelta(milliseconds=1))
            while not ended.is_set():
                began = time.monotonic()
                batches += task.do(EARLIEST)
                ended.wait(pause_after(time.monotonic() - began))

    thread = threading.Thread(target=purge)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    say(f"keep_vs_drain: {batches} batches were deleted meanwhile")
