"""Topics that the destination does not accept: a topic pauses, and is probed after each pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from tenacity.wait import wait_exponential

from outbox.model.retry import seconds_to_wait
from outbox.worker.policy import MOST_PROBES

#: Seconds between two probes of a topic that was refused. A probe costs one message. When the topic is accepted again,
#: its waiting messages go on within this time.
_PAUSE = wait_exponential(multiplier=0.5, min=0.5, max=5)
#: So many seconds pass between two looks with probes: any number of refused topics costs the others no more than that.
_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class _Refusal:
    """A topic that pauses until a moment. `failures`: in a row. `partly`: some of its messages are accepted."""

    error: str | None = None
    until: float = 0.0
    failures: int = 0
    partly: bool = False


class Refusals:
    """The refused topics of one partition.

    A probe is the message of a topic that is due for longest. A refused probe is due for the shortest time; so one
    message that is never accepted hides no other.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Refusal] = {}
        #: When the error of a topic's waiting messages is stored again; also for a topic that was accepted since.
        self._renew_at: dict[str, float] = {}

    def paused(self) -> Mapping[str, str]:
        """Return the topics of which no message is tried now, with the last error."""
        if not self._known:
            return {}
        now, probed = self._clock(), self.probed()
        wait = {topic: each for topic, each in self._known.items() if each.until > now or not each.partly}
        return {topic: each.error or "not accepted" for topic, each in wait.items() if topic not in probed}

    def probed(self) -> Collection[str]:
        """Return the topics of which one message is tried now: those whose pause is over for longest."""
        now = self._clock()
        over = [(each.until, topic) for topic, each in self._known.items() if each.until <= now and not each.partly]
        return {topic for _, topic in sorted(over)[:MOST_PROBES]}

    def note(self, refused: Mapping[str, str | None], accepted: Collection[str]) -> None:
        """Note which topics were refused in this batch, and which were accepted."""
        for topic, error in refused.items():
            refusal = self._known.setdefault(topic, _Refusal())
            refusal.error, refusal.partly = error or refusal.error, topic in accepted
            # A topic of which some messages are accepted is only slow: its pauses do not grow.
            refusal.failures = 1 if refusal.partly else refusal.failures + 1
            refusal.until = self._clock() + seconds_to_wait(_PAUSE, refusal.failures)
        for topic in set(accepted).difference(refused) if self._known else ():
            self._known.pop(topic, None)

    def missed(self, topics: Collection[str], *, nothing_due: bool) -> None:
        """Let topics pause again of which a look found no message for a probe; forget them if nothing at all is due."""
        for topic in topics:
            if nothing_due:
                self._known.pop(topic, None)
            elif (refusal := self._known.get(topic)) is not None:
                refusal.until = self._clock() + seconds_to_wait(_PAUSE, refusal.failures)

    def to_store(self, errors: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
        """Yield topics with the error to store with their waiting messages. `errors`: the last ones."""
        for topic, error in errors.items():
            if error is not None and self._clock() >= self._renew_at.get(topic, 0.0):
                yield topic, error

    def stored(self, topic: str, renew_at: float) -> None:
        """Note that the error of a topic was stored, and when it is stored again."""
        self._renew_at[topic] = renew_at

    def next(self) -> float | None:
        """Return the moment when a topic is tried again, by our clock; None: no topic is refused."""
        soon = self._clock() + _LOOK_SECONDS
        return max(soon, min(each.until for each in self._known.values())) if self._known else None
