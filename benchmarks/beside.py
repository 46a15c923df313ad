"""How long good messages take while others of the same relay cannot be sent: the slowest of a hundred, against 2 s."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection as Pipe

from benchmarks.arrivals import BARE, Arrival, differences, quantile, relay_to, running, stop, warm_up, writer
from benchmarks.latency import evenly, write_by
from benchmarks.measure import Measurement, Scale, Turns, at_most
from benchmarks.site import Site
from outbox import Message, Outbox, Reject, Unavailable, Verdict
from outbox.model.verdict import DONE

#: Milliseconds within which the slowest of a hundred good messages arrives.
_MOST = 2_000.0
_GOOD = "orders"

#: Seconds from the first message of a topic that is away until it is accepted.
_OUTAGE = 18.0
#: Seconds until the last good messages have arrived, too.
_AT_LAST = 10.0
#: What a destination says after so many seconds of trouble.
Answer = Callable[[float], Verdict]
#: Writes messages that cannot be sent; at the end a few, until it is told to stop.
Trouble = Callable[[Outbox, Scale, threading.Event], None]


def beside_black_hole(site: Site) -> list[Measurement]:
    """Milliseconds of the slowest in a hundred, beside a topic for which no answer comes; against 2 s."""
    return _beside(site, "beside_black_hole", _a_black_hole, _never_answers)


def beside_unknown_topics(site: Site) -> list[Measurement]:
    """Milliseconds of the slowest in a hundred, beside thousands of topics that do not exist; against 2 s."""
    return _beside(site, "beside_unknown_topics", _unknown_topics, _refuses)


def beside_dead_key(site: Site) -> list[Measurement]:
    """Milliseconds of the slowest in a hundred, beside very many behind a dead letter of their key; against 2 s."""
    return _beside(site, "beside_dead_key", _a_dead_key, _rejects)


def beside_outage(site: Site) -> list[Measurement]:
    """Milliseconds of the slowest in a hundred, while a topic with very many waiting ones comes back; against 2 s."""
    return _beside(site, "beside_outage", _an_outage, _is_away_for_long)


class _Troubled(Arrival):
    """A destination that accepts one topic at once, and asks `answer` for what it says of all others in a call."""

    deadline = timedelta(seconds=5)

    def __init__(self, pipe: Pipe, answer: Answer) -> None:
        super().__init__(pipe)
        self._answer = answer
        self._troubled_since: float | None = None

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Accept, and answer alike for each of the others."""
        good = [each for each in messages if each.topic == _GOOD]
        super().send(good)
        if len(good) == len(messages):
            return [DONE] * len(messages)
        now = time.monotonic()
        self._troubled_since = self._troubled_since or now
        answer = self._answer(now - self._troubled_since)
        return [DONE if each.topic == _GOOD else answer for each in messages]


def _relay(answer: Answer, url: str, pipe: Pipe) -> None:
    relay_to(_Troubled(pipe, answer), url, pipe)


def _never_answers(_seconds: float) -> Verdict:
    time.sleep(_Troubled.deadline.total_seconds() * 2)
    return Unavailable("no answer")


def _refuses(_seconds: float) -> Verdict:
    return Unavailable("the topic does not exist")


def _rejects(_seconds: float) -> Verdict:
    return Reject("cannot be read")


def _is_away_for_long(seconds: float) -> Verdict:
    return DONE if seconds > _OUTAGE else Unavailable("away")


def _a_black_hole(outbox: Outbox, _scale: Scale, enough: threading.Event) -> None:
    while not enough.wait(0.1):
        _write(outbox, "hole", 1, keys=1_000)


def _unknown_topics(outbox: Outbox, scale: Scale, enough: threading.Event) -> None:
    topics = itertools.cycle(f"unknown-{number}" for number in range(scale.unknown_topics))
    while not enough.wait(0.05):
        with outbox.begin() as session:
            outbox.send_all(session, [Message(topic, b"") for topic in itertools.islice(topics, 50)])


def _a_dead_key(outbox: Outbox, scale: Scale, enough: threading.Event) -> None:
    _write(outbox, "dead", scale.troubled, keys=1)
    while not enough.wait(0.1):
        _write(outbox, "dead", 1, keys=1)


def _an_outage(outbox: Outbox, scale: Scale, _enough: threading.Event) -> None:
    _write(outbox, "away", scale.troubled, keys=1_000)


def _write(outbox: Outbox, topic: str, count: int, *, keys: int) -> None:
    for first in range(0, count, 1_000):
        with outbox.begin() as session:
            numbers = range(min(1_000, count - first))
            outbox.send_all(session, [Message(topic, b"", key=f"{topic}-{random.randrange(keys)}") for _ in numbers])


def _beside(site: Site, name: str, trouble: Trouble, answer: Answer) -> list[Measurement]:
    """Measure good messages once, after trouble has begun: the bound is a time, which needs no second round."""
    turns = Turns(name)
    with site.place() as place, running(partial(_relay, answer), place.url) as pipe:
        BARE.metadata.create_all(place.engine)
        outbox, enough = Outbox(place.engine), threading.Event()
        write = writer(outbox)
        warm_up(pipe, write)
        troubled = threading.Thread(target=trouble, args=(outbox, site.scale, enough), daemon=True)
        troubled.start()
        time.sleep(site.scale.trouble_seconds)
        committed = write_by(evenly(site.scale.latency_messages), write)
        enough.set()
        troubled.join()
        time.sleep(_AT_LAST)
        turns.add(quantile(differences(committed, stop(pipe)), 0.99), _MOST)
        outbox.close()
    return [Measurement(name=name, goal=at_most(1), unit="ms", ours=turns.ours, other=turns.other)]
