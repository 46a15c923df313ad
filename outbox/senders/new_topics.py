"""New topics of messages at a destination, by whole names and by patterns such as `orders.*` to `orders-*`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from outbox.errors import InvalidMessageError, SenderError
from outbox.model.limits import checked_topic
from outbox.model.topics import ANYTHING, covers, overlap
from outbox.model.verdict import Reject, Unavailable, Verdict


class NewTopics:
    """Gives topics new names: by a whole name, else by the first pattern that matches.

    What the star of a pattern stands for is kept. No two topics get one name by patterns: two patterns must not make
    the same topic, and a topic without a rule may not have a name that a pattern makes. Whole names may join topics,
    because somebody has written both down.

    Raises:
        SenderError: a name or a pattern cannot be meant, or two patterns may make the same topic.
    """

    def __init__(self, rename: Mapping[str, str]) -> None:
        if not isinstance(rename, Mapping):
            raise SenderError(f"rename: must be a mapping of topics to topics, not {type(rename).__name__}")
        self._names: dict[str, str] = {}
        self._patterns: list[_Pattern] = []
        for old, new in rename.items():
            for topic in (old, new):
                check_option("rename", topic.replace(ANYTHING, "x") if isinstance(topic, str) else topic)
            stars = old.count(ANYTHING), new.count(ANYTHING)
            if stars == (0, 0):
                self._names[old] = new
            elif stars == (1, 1):
                self._patterns.append(_Pattern(old, new))
            else:
                raise SenderError(
                    f"rename: {old!r:.100} = {new!r:.100}: a pattern has one star on each side;"
                    ' write rename = {"orders.*" = "orders-*"}'
                )
        for one, other in combinations(self._patterns, 2):
            if overlap(one.new, other.new):
                raise SenderError(
                    f"rename: {one.old!r:.100} and {other.old!r:.100} may make the same topic, of {one.new!r:.100} and"
                    f" {other.new!r:.100}; let the new names begin or end differently"
                )

    def __bool__(self) -> bool:
        return bool(self._names or self._patterns)

    def of(self, topic: str) -> str:
        """Return the new topic; raise `ValueError` if a pattern gives the name of this topic to another one."""
        if topic in self._names:
            return self._names[topic]
        for pattern in self._patterns:
            if covers(pattern.old, topic):
                return pattern.new.replace(ANYTHING, _kept(pattern.old, topic))
        for pattern in self._patterns:
            if covers(pattern.new, topic):
                other = pattern.old.replace(ANYTHING, _kept(pattern.new, topic))
                raise ValueError(
                    f"the topic {topic!r} has the name that rename gives to {other!r}; to let both have it, add"
                    f' "{topic}" = "{topic}" to rename in the route'
                )
        return topic


class _Pattern(NamedTuple):
    old: str
    new: str


def without_name(topic: str, problem: str) -> Verdict:
    """Return the verdict on a topic that gets no name at a destination: its messages wait for another configuration.

    A topic that no message can have is rejected: somebody else has written the row, and no configuration mends it.
    """
    try:
        checked_topic(topic)
    except InvalidMessageError:
        return Reject(problem)
    return Unavailable(problem)


def too_narrow(topic: str, problem: str, fitting: str) -> Verdict:
    """Return the verdict on a topic whose name a destination cannot have, with the line that mends it.

    `fitting`: a name that the destination can have. The line has a pattern if the two differ in one dot.
    """
    old, new = topic, fitting
    first, dot, rest = topic.partition(".")
    if dot and fitting == f"{first}-{rest}":
        old, new = f"{first}.{ANYTHING}", f"{first}-{ANYTHING}"
    return without_name(topic, f'{problem}; write in the route of outbox.toml: rename = {{"{old}" = "{new}"}}')


def check_option(option: str, topic: str) -> None:
    """Refuse an option that makes a topic that no message can have."""
    try:
        checked_topic(topic)
    except InvalidMessageError as error:
        raise SenderError(f"{option}: makes a topic that {error.limit}; write other characters, or fewer") from None


def _kept(pattern: str, topic: str) -> str:
    """Return what the star of a pattern stands for in a topic that it matches."""
    first, _, last = pattern.partition(ANYTHING)
    return topic[len(first) : len(topic) - len(last)]
