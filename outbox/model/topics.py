"""Topics as a selection names them: exact names, patterns such as `orders.*`, and exceptions such as `!orders.*`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outbox.errors import InvalidMessageError, SubscriptionError
from outbox.model.limits import HALF_TOPIC, checked_topic

#: Stands for any characters, dots too, or for none. No topic holds it, nor the mark of an exception.
ANYTHING = "*"
_EXCEPT = "!"
#: No topic holds it.
_UNKNOWN = "\0"


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics that a subscription reads: the `names`, and all matches of the `patterns`.

    Topics that match one of the `exceptions` (names or patterns) are left out. Half messages are read only if their
    topic is in `names`.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    exceptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, chosen: Iterable[str] | None) -> Topics:
        """Return the topics of a list in the form of `chosen_topics`; None: all."""
        parts = [ANYTHING] if chosen is None else list(chosen)
        exceptions = tuple(part.removeprefix(_EXCEPT) for part in parts if part.startswith(_EXCEPT))
        included = [part for part in parts if not part.startswith(_EXCEPT)]
        if exceptions and not included:
            included = [ANYTHING]
        return cls(*_sorted_out(included), exceptions)

    @property
    def everything(self) -> bool:
        """True if all messages are read, except half messages."""
        return self.any_name and not self.exceptions

    @property
    def any_name(self) -> bool:
        """True if only `exceptions` are left out."""
        return ANYTHING in self.patterns

    @property
    def halves(self) -> bool:
        """True if half messages are read."""
        return HALF_TOPIC in self.names

    @property
    def included(self) -> tuple[str, ...]:
        """The names and the patterns."""
        return (*self.names, *self.patterns)

    def chosen(self) -> tuple[str, ...] | None:
        """Return the list for these topics; None: all. The opposite of `of`."""
        if self.everything:
            return None
        included = () if self.any_name else self.included
        return tuple(sorted({*included, *(_EXCEPT + each for each in self.exceptions)}))

    def matches(self, topic: str) -> bool:
        """Return whether messages of a topic are read."""
        if topic == HALF_TOPIC:
            return self.halves
        taken = topic in self.names or any(_matches(each, topic) for each in self.patterns)
        return taken and not any(_matches(each, topic) for each in self.exceptions)

    def lacks(self, part: str) -> bool:
        """Return whether no match of `part`, a name or a pattern, is read."""
        left_out = any(covers(each, part) for each in self.exceptions)
        return left_out or not any(overlap(each, part) for each in self.included)

    def shares(self, other: Topics) -> bool:
        """Return whether both can read a common topic; yes if exceptions are hard to compare."""
        left_out = (*self.exceptions, *other.exceptions)
        return any(
            overlap(one, another) and not any(covers(each, one) or covers(each, another) for each in left_out)
            for one in self.included
            for another in other.included
        )

    def without(self, others: Sequence[str]) -> Topics:
        """Return these topics without the matches of `others`, which are names or patterns."""
        kept = [each for each in self.included if not any(covers(other, each) for other in others)]
        return _simplified(kept, [*self.exceptions, *others])

    def within(self, others: Sequence[str]) -> Topics | None:
        """Return the part of these topics that matches `others`, names or patterns; None: nothing.

        Raises:
            SubscriptionError: no list of names and patterns describes the part.
        """
        found: set[str] = set()
        for other in others:
            for each in self.included:
                if covers(each, other):
                    found.add(other)
                elif covers(other, each):
                    found.add(each)
                elif overlap(each, other):
                    raise SubscriptionError(
                        f"topics: {other!r} has only a part of the topics of {each!r} in common; take a pattern that"
                        " holds all of them, or names"
                    )
        try:
            return _simplified(found, self.exceptions)
        except SubscriptionError:
            return None


def chosen_topics(topics: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return chosen topics as stored: sorted, and simplified.

    None and `*` mean all topics. `orders.*` is a pattern, `!orders.*` an exception. Exceptions alone mean all other
    topics. Raise `SubscriptionError` if no message could come.
    """
    if topics is None:
        return None
    if isinstance(topics, str):
        raise SubscriptionError(f"topics: must be a list of topics, not one text; pass [{topics!r:.100}]")
    parts = [checked_part(part) for part in topics]
    if not parts:
        raise SubscriptionError("topics: must not be empty; pass None for all topics")
    included = [part for part in parts if not part.startswith(_EXCEPT)]
    excepted = [part.removeprefix(_EXCEPT) for part in parts if part.startswith(_EXCEPT)]
    return _simplified(included or [ANYTHING], excepted).chosen()


def exact_topics(topics: Iterable[str] | None) -> tuple[str, ...] | None:
    """Do as `chosen_topics`, for a reader that takes whole names only."""
    parts = None if topics is None or isinstance(topics, str) else list(topics)
    require_names(parts or ())
    return chosen_topics(topics if isinstance(topics, str) else parts)


def require_names(topics: Iterable[str]) -> None:
    """Refuse patterns and exceptions, where topics are whole names."""
    for part in topics:
        if isinstance(part, str) and (ANYTHING in part or part.startswith(_EXCEPT)):
            raise SubscriptionError(
                f"topics: {part!r:.100} is a pattern or an exception; here topics are whole names, and patterns are for"
                " relays"
            )


def checked_part(part: str) -> str:
    """Return a topic, a pattern or an exception; refuse what no topic of a message can match."""
    bare = part.removeprefix(_EXCEPT) if isinstance(part, str) else part
    # A pattern is in order if its shortest match is: stars stand for nothing, or for a letter if nothing is left.
    shortest = bare.replace(ANYTHING, "") if isinstance(bare, str) and ANYTHING in bare else bare
    try:
        checked_topic("x" if shortest in ("", ".", "..") and shortest != bare else shortest)
    except InvalidMessageError as error:
        # The limit begins with the verb.
        raise SubscriptionError(
            f"topics: one {error.limit}; {error.fix}, or write a pattern such as 'orders.*', an exception such as"
            " '!orders.*'"
        ) from None
    return str.__str__(part)


def covers(pattern: str, other: str) -> bool:
    """Return whether `pattern` matches all topics of `other`; both are names or patterns."""
    # A star in `other` can only be matched by a star in `pattern`.
    return _matches(pattern, other.replace(ANYTHING, _UNKNOWN))


def _matches(pattern: str, topic: str) -> bool:
    first, *between = pattern.split(ANYTHING)
    if not between:
        return pattern == topic
    last = between.pop()
    at, end = len(first), len(topic) - len(last)
    if at > end or not topic.startswith(first) or not topic.endswith(last):
        return False
    for part in between:
        at = topic.find(part, at, end) + len(part)
        if at < len(part):
            return False
    return True


def overlap(one: str, other: str) -> bool:
    """Return whether a topic can match both names or patterns."""
    # The places in `other` reached by the letters of `one` so far: a topic that matches both leads from 0 to the end.
    reached = _past_stars({0}, other)
    for letter in one:
        if letter == ANYTHING:
            reached = set(range(min(reached), len(other) + 1)) if reached else reached
        else:
            reached = {at if other[at] == ANYTHING else at + 1 for at in reached if other[at : at + 1] in (letter, "*")}
            reached = _past_stars(reached, other)
    return len(other) in reached


def _past_stars(places: set[int], pattern: str) -> set[int]:
    """Return the places, and the places after stars that stand for nothing."""
    found = set(places)
    for at in places:
        stars = len(pattern) - at - len(pattern[at:].lstrip(ANYTHING))
        found.update(range(at, at + stars + 1))
    return found


def _simplified(included: Iterable[str], excepted: Iterable[str]) -> Topics:
    """Return topics in their simplest form, as far as it is easy to find; refuse topics that leave nothing."""
    exceptions = _widest(excepted)
    left = [each for each in _widest(included) if not any(covers(other, each) for other in exceptions)]
    if not left:
        raise SubscriptionError("topics: the exceptions leave none of them; pass topics that messages can have")
    kept = tuple(sorted(each for each in exceptions if any(overlap(each, other) for other in left)))
    return Topics(*_sorted_out(sorted(left)), kept)


def _sorted_out(included: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, patterns = (tuple(part for part in included if (ANYTHING in part) is is_one) for is_one in (False, True))
    return names, patterns


def _widest(parts: Iterable[str]) -> list[str]:
    found: list[str] = []
    for part in sorted({re.sub(r"\*+", ANYTHING, each) for each in parts}):
        if not any(covers(each, part) for each in found):
            found = [each for each in found if not covers(part, each)] + [part]
    return found
