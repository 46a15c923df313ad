"""Logs that messages are not accepted: since when, why, and when that is over. Never a line for each message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from outbox.model.message import Message
from outbox.model.parking import Parking
from outbox.runtime.clock import clock as monotonic
from outbox.runtime.text import age, one_line
from outbox.runtime.throttled_log import Throttle
from outbox.store.failure import in_one_line, without_server
from outbox.worker.failure_words import Sending, Words

logger = logging.getLogger("outbox")

_SAY_AGAIN_SECONDS = 60.0
#: At most so many topics are named at a time.
_MOST_LINES = 5
_MOST_TOPICS = 10_000
#: A shorter pause is written to the log of the process, but not to the database.
_NOTE_SECONDS = 1.0


@dataclass(slots=True)
class _Outage:
    """A time in which the destination, or one topic of it, accepts nothing. `logged`: the log has a line about it."""

    since: float
    error: str
    logged: bool = False


class FailureLog:
    """Tells of the failures of one subscription, over all its leases.

    It writes to the log; and to the database, when the worker pauses.
    """

    def __init__(
        self,
        subscription: str,
        destination: str | None = None,
        *,
        words: Words | None = None,
        note: Callable[[str, float], None] = lambda _text, _seconds: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`words`: the sentences for this subscription, if it sends nothing to a destination. `note` writes what the
        worker waits for, and for how many seconds already, to where `outbox status` reads it.
        """
        self._subscription = subscription
        self._destination = destination or "its destination"
        self._words: Words = words or Sending(subscription, self._destination)
        self._note = note
        #: By topic; None: the destination accepts nothing at all.
        self._outages: dict[str | None, _Outage] = {}
        self._clock = clock
        self._throttle = Throttle(_SAY_AGAIN_SECONDS, clock=clock)
        self._noted = False
        self._refused_chores: set[str] = set()

    @property
    def in_trouble(self) -> bool:
        """True when the destination, or one of its topics, has refused messages and not accepted any since."""
        return bool(self._outages)

    def refused(self, answers: Mapping[str, str], *, by_all: str | None = None) -> None:
        """Log which topics are not accepted, with the destination's error: at once, then once a minute.

        `by_all`: why the destination accepts nothing at all, if that is so.
        """
        at = self._clock()
        known = self._outages.get(None)
        if by_all is None and known is not None and all(error == known.error for error in answers.values()):
            by_all = known.error
        refused: dict[str | None, str] = {None: by_all} if by_all is not None else dict(answers.items())
        if by_all is None:
            self._outages.pop(None, None)
        if len(self._outages) + len(refused) > _MOST_TOPICS:
            self._outages.clear()
            self._throttle.forget()
        for place, error in refused.items():
            self._outages.setdefault(place, _Outage(at, error)).error = error
        news = [each for each in refused if self._throttle.allows(each)]
        for place in news:
            self._outages[place].logged = True
        self._tell(news, at)

    def _tell(self, news: list[str | None], at: float) -> None:
        for place in news[:_MOST_LINES]:
            outage = self._outages[place]
            since = f" (since {age(at - outage.since)})" if at - outage.since >= 1 else ""
            why = one_line(without_server(outage.error, self._destination))
            logger.warning("%s: %s%s: %s", self._subscription, self._words.refused(place), since, why)
        if len(news) > _MOST_LINES:
            logger.warning("%s: nor does it accept %d more topics", self._subscription, len(news) - _MOST_LINES)

    def paused(self) -> None:
        """Tell `outbox status` what the worker waits for, once for each pause."""
        if self._noted or not self._outages:
            return
        place, outage = min(self._outages.items(), key=lambda each: each[1].since)
        seconds = self._clock() - outage.since
        if seconds >= _NOTE_SECONDS:
            self._noted = True
            why = one_line(without_server(outage.error, self._destination))
            self._note(f"{self._words.awaited(place)}: {why}", seconds)

    def went_on(self) -> None:
        """Note that the pause is over, so that the next pause is told again."""
        self._noted = False

    def accepted(self, topics: Collection[str], waited: Callable[[str | None], str]) -> None:
        """Log which outages are over, now that messages of these topics were accepted.

        `waited`: returns how many messages have waited for a topic, or for the destination.
        """
        at = self._clock()
        for place in [each for each in self._outages if each is None or each in topics]:
            outage = self._outages.pop(place)
            if outage.logged:
                lasted = age(at - outage.since)
                logger.warning(
                    "%s: %s after %s; %s had waited",
                    self._subscription, self._words.accepted(place), lasted, waited(place),
                )  # fmt: skip

    def chore_refused(self, chore: str, error: Exception) -> None:
        """Log that the database does not allow a chore, once for each chore."""
        if chore not in self._refused_chores:
            self._refused_chores.add(chore)
            logger.warning("%s: cannot delete %s, going on: %s", self._subscription, chore, in_one_line(error)[0])

    def settled(self, parkings: Iterable[tuple[Message, Parking]]) -> None:
        """Log the dead letters among messages that were parked now, with one line for all of a batch."""
        dead = sorted(
            ((m, parking) for m, parking in parkings if parking.state == "dead"), key=lambda each: each[0].id or 0
        )
        if dead:
            error = one_line(dead[0][1].error or "no reason given")
            told = self._words.given_up([message for message, _ in dead], error)
            logger.warning("%s: %s", self._subscription, told)
