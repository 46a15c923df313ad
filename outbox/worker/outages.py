"""Outages: since when the destination of a subscription accepts nothing, or nothing of a topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from outbox.runtime.clock import clock as monotonic
from outbox.telemetry.events import DestinationAway, DestinationBack, Outage, Teller

#: So many topics are kept in mind.
_MOST_TOPICS = 10_000


class Outages:
    """The outages of one subscription, over all leases. Listeners are told of each."""

    def __init__(self, teller: Teller, destination: str, *, clock: Callable[[], float] = monotonic) -> None:
        self._teller = teller
        self._destination = destination
        self._clock = clock
        #: By topic, since when and why; None: the destination accepts nothing at all.
        self._known: dict[str | None, tuple[float, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def refused(self, errors: Mapping[str, str], *, by_all: str | None = None, pauses: bool = False) -> None:
        """Note which topics are not accepted, with the destination's error.

        `by_all`: why the destination accepts nothing at all, if so. `pauses`: the worker waits now, without errors for
        the known outages.
        """
        topics = self._noted(errors, by_all) if errors else [*self._known] if pauses else []
        if topics:
            found = [self._outage(topic) for topic in topics]
            self._teller.tell(DestinationAway, destination=self._destination, outages=found, pauses=pauses)

    def _noted(self, errors: Mapping[str, str], by_all: str | None) -> list[str | None]:
        known = self._known.get(None)
        if by_all is None and known is not None and all(error == known[1] for error in errors.values()):
            by_all = known[1]
        refused: dict[str | None, str] = {None: by_all} if by_all is not None else dict(errors.items())
        if by_all is None:
            self._known.pop(None, None)
        if len(self._known) + len(refused) > _MOST_TOPICS:
            self._known.clear()
        now = self._clock()
        for topic, error in refused.items():
            self._known[topic] = (self._known[topic][0] if topic in self._known else now, error)
        return [*refused]

    def accepted(self, topics: Collection[str]) -> None:
        """Tell which outages are over, now that messages of these topics were accepted, and forget them."""
        for topic in [each for each in self._known if topics and (each is None or each in topics)]:
            self._teller.tell(DestinationBack, destination=self._destination, outage=self._outage(topic))
            del self._known[topic]

    def _outage(self, topic: str | None) -> Outage:
        since, error = self._known[topic]
        return Outage(topic=topic, error=error, seconds=self._clock() - since)
