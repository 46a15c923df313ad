"""Outages: since when the destination of a subscription accepts nothing, or nothing of a topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from outbox.runtime.clock import clock as monotonic
from outbox.telemetry.events import Outage
from outbox.telemetry.teller import Teller

#: So many topics are kept in mind.
_MOST_TOPICS = 10_000


class Outages:
    """The outages of one subscription, over all its leases. Listeners are told of them."""

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

        `by_all`: why the destination accepts nothing at all, if that is so. `pauses`: the worker waits now. Then, if
        there are no errors, it waits for the outages that are known.
        """
        topics = self._noted(errors, by_all) if errors else [*self._known] if pauses else []
        if topics:
            found = [self._outage(topic) for topic in topics]
            self._teller.destination_away(self._destination, found, pauses=pauses)

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

    def over(self, topics: Collection[str]) -> list[Outage]:
        """Return the outages that are over, now that messages of these topics were accepted, and forget them."""
        ended = [topic for topic in self._known if topic is None or topic in topics]
        found = [self._outage(topic) for topic in ended]
        for topic in ended:
            del self._known[topic]
        return found

    def back(self, outage: Outage, waited: int, *, or_more: bool) -> None:
        """Tell that an outage is over. `waited`: how many messages have waited for that, or more."""
        self._teller.destination_back(self._destination, outage, waited, or_more=or_more)

    def _outage(self, topic: str | None) -> Outage:
        since, error = self._known[topic]
        return Outage(topic=topic, error=error, seconds=self._clock() - since)
