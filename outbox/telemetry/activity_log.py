"""Logs once a minute the work of a worker: how many messages, how quickly, and how many wait."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from outbox.model.message import Message
from outbox.model.parking import States
from outbox.runtime.clock import clock as monotonic
from outbox.runtime.named import named
from outbox.runtime.text import age, counted
from outbox.telemetry.events import BatchRead, Event, Settled
from outbox.telemetry.lag import Lag

#: A logger of its own, because many people want to see these lines and few others.
activity_logger = logging.getLogger("outbox.activity")

#: Latencies are counted in steps of a tenth of a power of ten, 26 %; the shortest is a millisecond.
_STEPS = 10
_SHORTEST = 0.001
_SHARE = 0.99
_WAITING = (States.WAITING, States.RETRY, States.BEHIND)


class Activity:
    """Counts the messages that one subscription has done since the last log line.

    Counting costs a few look-ups for a batch, and nothing for a message.
    """

    def __init__(
        self, subscription: str, *, done: str = "sent", every: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """`done`: the word for the work on messages. `every`: seconds between two lines."""
        self._subscription = subscription
        self._done = done
        self._every = every
        self._clock = clock
        self._began = self._clock()
        self._number = 0
        #: How many messages took at most the time of a step.
        self._took: Counter[int] = Counter()
        self._lag = Lag(clock)

    def told(self, event: Event) -> None:
        """Count messages that are done; the time of the oldest counts for all of a settle."""
        match event:
            case BatchRead(now=now):
                self._lag.read(now)
            case Settled(messages=messages):
                self._count(messages)

    def _count(self, messages: Sequence[Message]) -> None:
        self._number += len(messages)
        seconds = self._lag.of(messages)
        if seconds is not None:
            self._took[_step(seconds)] += len(messages)

    def tell_if_due(self, parked_counts: Callable[[], Mapping[str, object]]) -> None:
        """Log a line when its time has come, unless nothing was done and nothing waits.

        `parked_counts`: returns how many messages are parked, by state.
        """
        seconds, number, took = self._clock() - self._began, self._number, self._took
        if seconds < self._every:
            return
        parked = parked_counts()
        self._began, self._number, self._took = self._clock(), 0, Counter()
        waiting = ", ".join(f"{parked[state]} {state}" for state in _WAITING if str(parked.get(state, 0)) != "0")
        if number or waiting:
            within = f", 99 % of them within {_shown(took)} of being written" if took else ""
            said = f"{counted(number, 'message')} {self._done} in {age(seconds)}{within}; {waiting or 'none waits'}"
            about = named("activity", subscription=self._subscription, messages=number, seconds=seconds)
            activity_logger.info("%s: %s", self._subscription, said, extra=about)


def _step(seconds: float) -> int:
    return math.ceil(math.log10(max(seconds, _SHORTEST) / _SHORTEST) * _STEPS)


def _shown(took: Counter[int]) -> str:
    enough, seen = math.ceil(sum(took.values()) * _SHARE), 0
    for step in sorted(took):
        seen += took[step]
        if seen >= enough:
            break
    seconds = _SHORTEST * 10 ** (step / _STEPS)
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else age(seconds)
