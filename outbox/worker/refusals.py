"""Topics of parked messages that the destination does not accept: when each is tried again, and from where on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tenacity.wait import wait_exponential

from outbox.model.retry import seconds_to_wait
from outbox.store.subscriptions.parked import EVERYWHERE, Ready

#: Seconds between two probes of a topic that was refused. A probe costs one message. When the topic is accepted again,
#: its waiting messages go on within this time.
_PAUSE = wait_exponential(multiplier=0.5, min=0.5, max=5)


@dataclass(slots=True)
class _Refusal:
    """A topic that is refused until a moment. `failures`: in a row. `place`: up to there its messages were looked at in
    vain.
    """

    until: float = 0.0
    failures: int = 0
    place: int = 0


class Refusals:
    """The refused topics of one partition.

    A look reads at most a batch, and a batch may hold nothing but messages that are never accepted. So after a whole
    batch in vain the next look goes on behind it, and begins again when nothing is left. Else the first messages of a
    topic, or those of one key, would hide all others.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Refusal] = {}
        #: The last places of the topics in a whole batch.
        self._places: dict[str, int] = {}
        #: When the error of a topic's waiting messages is stored again; also for a topic that was accepted since.
        self._renew_at: dict[str, float] = {}

    def places(self) -> dict[str, int]:
        """Return, of each refused topic, the place up to which no message is tried now."""
        now = self._clock()
        return {topic: EVERYWHERE if each.until > now else each.place for topic, each in self._known.items()}

    def looked(self, ready: Sequence[Ready], places: Mapping[str, int], *, more: bool) -> bool:
        """Note what a look has found from `places` on; `more`: it may have left some out. Return whether a topic of
        which nothing is left begins again.
        """
        found = {each.message.topic: each.place for each in ready}
        self._places = found if more else {}
        again = False
        for topic, place in places.items():
            if place < EVERYWHERE and not (more or topic in found):
                if place:
                    self._known[topic].place, again = 0, True
                else:
                    del self._known[topic]
        return again

    def begin_again(self) -> None:
        """Look at all messages of each topic again, because some became due at a place that was passed."""
        for each in self._known.values():
            each.place = 0

    def note(self, refused: Collection[str], accepted: Collection[str]) -> None:
        """Note which topics were refused in this batch, and which were accepted."""
        for topic in refused:
            refusal = self._known.setdefault(topic, _Refusal())
            # Some messages of the topic are accepted, so it is only slow: its pauses do not grow.
            refusal.failures = 1 if topic in accepted else refusal.failures + 1
            refusal.until = self._clock() + seconds_to_wait(_PAUSE, refusal.failures)
            refusal.place = self._places.get(topic, 0)
        for topic in set(accepted).difference(refused):
            self._known.pop(topic, None)

    def to_store(self, errors: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
        """Yield topics with the error to store with their waiting messages. `errors`: the last ones."""
        for topic, error in errors.items():
            if error is not None and self._clock() >= self._renew_at.get(topic, 0.0):
                yield topic, error

    def stored(self, topic: str, renew_at: float) -> None:
        """Note that the error of a topic was stored, and when it is stored again."""
        self._renew_at[topic] = renew_at

    def moments(self) -> list[float]:
        """Return the moments to come when a topic is tried again."""
        now = self._clock()
        return [each.until for each in self._known.values() if each.until > now]
