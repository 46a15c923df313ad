"""Gauges: what waits, as metrics, from looks at databases."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from outbox.admin.results import Look
from outbox.errors import DatabaseError
from outbox.model.parking import States
from outbox.runtime.latest import Latest
from outbox.telemetry.metrics import (
    DEAD,
    FINDINGS,
    HALF,
    HALF_COMMITTED,
    HALF_ROLLED_BACK,
    LOG_AGE,
    LOG_BYTES,
    LOG_ROWS,
    UNSENT,
    UNSENT_AGE,
    Sample,
)

#: A scrape waits at most so long for a database.
_SECONDS = 3.0


class Looks:
    """The newest looks at databases, taken when somebody asks, at most once a second and for 0.5 % of a processor."""

    def __init__(self, looks: Mapping[str, Callable[[], Look]]) -> None:
        """`looks`: by the label of the database."""
        self._latest = {label: Latest(look) for label, look in looks.items()}

    def all(self) -> dict[str, Look | Exception]:
        """Return the looks, or why there is none, by the label of the database; wait for at most 3 s together."""
        until, found = time.monotonic() + _SECONDS, dict[str, Look | Exception]()
        for each in self._latest.values():
            each.begin()
        for label, each in self._latest.items():
            try:
                found[label] = each.get(until)
            except TimeoutError:
                found[label] = DatabaseError(f"{label} has not answered within {_SECONDS:g} s")
            except Exception as error:
                found[label] = error
        return found

    def samples(self) -> Iterator[Sample]:
        """Yield the values of all gauges; a database without an answer has none."""
        for label, look in self.all().items():
            if isinstance(look, Look):
                yield from _samples(label, look)


def _samples(database: str, look: Look) -> Iterator[Sample]:
    for each in look.subscriptions:
        waiting = {"log": each.backlog, **each.parked}
        yield Sample(DEAD, waiting.pop(States.DEAD), (database, each.name))
        yield from (Sample(UNSENT, number, (database, each.name, state)) for state, number in waiting.items())
        yield Sample(UNSENT_AGE, each.lag_seconds, (database, each.name))
    kinds = Counter((each.subscription or "", each.kind) for each in look.findings)
    yield from (Sample(FINDINGS, number, (database, *found)) for found, number in kinds.items())
    if look.log is not None:
        yield Sample(LOG_ROWS, look.log.rows, (database,))
        yield Sample(LOG_BYTES, look.log.bytes, (database,))
        oldest = look.log.oldest or look.at
        yield Sample(LOG_AGE, max(0.0, (look.at - oldest).total_seconds()), (database,))
    for metric, name in ((HALF, "half"), (HALF_COMMITTED, "committed"), (HALF_ROLLED_BACK, "rolled_back")):
        yield from (Sample(metric, number, (database, topic)) for topic, number in look.by_topic(name).items())
