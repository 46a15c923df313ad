"""Logs that messages are not accepted: since when, why, and when that is over. Never a line for each message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.runtime.clock import clock as monotonic
from outbox.runtime.text import age, counted, one_line, without_server
from outbox.runtime.throttled_log import Throttle
from outbox.telemetry.events import Dead, DestinationAway, DestinationBack, Event, Outage, UpkeepRefused
from outbox.telemetry.failure_words import Words

logger = logging.getLogger("outbox")

_SAY_AGAIN_SECONDS = 60.0
#: At most so many topics are named at a time.
_MOST_LINES = 5
#: So many outages are kept in mind.
_MOST_TOPICS = 10_000


class FailureLog:
    """Listens to the failures of one subscription, over all its leases."""

    def __init__(self, subscription: str, words: Words, *, clock: Callable[[], float] = monotonic) -> None:
        """`words`: the sentences for this subscription."""
        self._subscription = subscription
        self._words = words
        self._throttle = Throttle(_SAY_AGAIN_SECONDS, clock=clock)
        #: The topics of the outages that the log has a line about; None: the destination accepts nothing at all.
        self._logged: set[str | None] = set()
        self._refused_upkeep: set[str] = set()

    def told(self, event: Event) -> None:
        """Log what an event says, if that is news."""
        match event:
            case DestinationAway(destination=destination, outages=outages):
                self._away(destination, outages)
            case DestinationBack(outage=outage) if outage.topic in self._logged:
                self._logged.discard(outage.topic)
                waited = counted(f"{event.waited} or more" if event.or_more else event.waited, "message")
                what = self._words.accepted(outage.topic)
                self._warn(f"{what} after {age(outage.seconds)}; {waited} had waited")
            case Dead(messages=messages):
                self._dead(messages)
            case UpkeepRefused(what=what, error=error) if what not in self._refused_upkeep:
                self._refused_upkeep.add(what)
                self._warn(f"cannot delete {what}, going on: {error}")
            case _:
                pass

    def _away(self, destination: str, outages: Sequence[Outage]) -> None:
        if len(self._logged) > _MOST_TOPICS:
            self._logged.clear()
        if None not in (outage.topic for outage in outages):
            self._logged.discard(None)
        news = [outage for outage in outages if self._throttle.allows(outage.topic)]
        self._logged.update(outage.topic for outage in news)
        for outage in news[:_MOST_LINES]:
            since = f" (since {age(outage.seconds)})" if outage.seconds >= 1 else ""
            why = one_line(without_server(outage.error, destination))
            self._warn(f"{self._words.refused(outage.topic)}{since}: {why}")
        if len(news) > _MOST_LINES:
            self._warn(f"nor does it accept {len(news) - _MOST_LINES} more topics")

    def _dead(self, messages: Sequence[tuple[Message, Parking]]) -> None:
        """Log dead letters, with one line for all of a settle."""
        dead = sorted(messages, key=lambda each: each[0].id or 0)
        error = one_line(dead[0][1].error or "no reason given")
        self._warn(self._words.given_up([message for message, _ in dead], error))

    def _warn(self, text: str) -> None:
        logger.warning("%s: %s", self._subscription, text)
