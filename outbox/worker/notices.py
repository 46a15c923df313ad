"""What a worker says of messages that are not accepted: a line for a topic once in a while, never one for a message."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from outbox.message import Message
from outbox.store.failure import in_one_line
from outbox.store.parked import Aside

logger = logging.getLogger("outbox")

_SAY_AGAIN_SECONDS = 60.0
#: A destination that is away refuses every topic: so many are named at a time.
_MOST_LINES = 5
_MOST_TOPICS = 10_000
_MOST_TEXT = 500


class Notices:
    """The log lines of one subscription, over all its leases."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._said_at: dict[str, float] = {}
        self._refused_chores: set[str] = set()

    def refused(self, answers: Mapping[str, str]) -> None:
        """Topics whose messages wait, with what the destination said: at once, then once a minute while it lasts."""
        now = time.monotonic()
        news = [topic for topic in answers if now - self._said_at.get(topic, float("-inf")) >= _SAY_AGAIN_SECONDS]
        if len(self._said_at) + len(news) > _MOST_TOPICS:
            self._said_at.clear()
        self._said_at.update(dict.fromkeys(news, now))
        for topic in news[:_MOST_LINES]:
            logger.warning(
                "%s: topic %s is not accepted, its messages wait: %s", self._subscription, topic, _line(answers[topic])
            )
        if len(news) > _MOST_LINES:
            logger.warning("%s: nor are %d more topics", self._subscription, len(news) - _MOST_LINES)

    def chore_refused(self, chore: str, error: Exception) -> None:
        """A chore that the database does not allow: told once."""
        if chore not in self._refused_chores:
            self._refused_chores.add(chore)
            logger.warning("%s: cannot delete %s, going on: %s", self._subscription, chore, in_one_line(error)[0])

    def settled(self, fates: Iterable[tuple[Message, Aside]]) -> None:
        """What was set aside just now: dead letters are told, a line for all of a batch."""
        dead = [(message, fate) for message, fate in fates if fate.state == "dead"]
        if dead:
            message, fate = min(dead, key=lambda each: each[0].id or 0)
            logger.warning(
                "%s: %d more dead letters, the first is message %s of topic %s: %s",
                self._subscription,
                len(dead),
                message.id,
                message.topic,
                _line(fate.error or "no reason given"),
            )


def _line(text: str) -> str:
    """A destination's text as one line that can do nothing to a terminal."""
    line = " ".join(text.split())[:_MOST_TEXT]
    return line if line.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in line)
