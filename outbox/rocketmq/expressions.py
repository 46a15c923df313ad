"""Subscriptions of a consumer group: an expression for each topic, joined to the one selection that a group has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from outbox.errors import FilterError, MQClientError
from outbox.model.filter.sql92 import chosen_filter
from outbox.model.filter.tags import chosen_tags
from outbox.model.subscription import Selection
from outbox.rocketmq.limits import checked_subscribed


@dataclass(frozen=True, slots=True)
class MessageSelector:
    """A choice of the messages of a topic: by tags, or by a condition on properties in SQL92."""

    tags: tuple[str, ...] | None = None
    filter: str | None = None

    @classmethod
    def by_tag(cls, expression: str | None) -> MessageSelector:
        """Choose by an expression such as "TagA || TagB"; None, "" and "*" are all messages.

        Raises:
            FilterError: the expression names no tag.
        """
        return cls(tags=chosen_tags(expression))

    @classmethod
    def by_sql(cls, condition: str) -> MessageSelector:
        """Choose by a condition such as "region = 'eu' AND amount > 100".

        Raises:
            FilterError: the text is no condition; the error shows the place.
        """
        if not condition:
            raise MQClientError("Expression can't be null! SQL92")
        return cls(filter=chosen_filter(condition))


#: The expression of a topic; a text is one of tags.
Expression = MessageSelector | str | None


def subscribed_to(subscriptions: Mapping[str, Expression]) -> dict[str, MessageSelector]:
    """Return the choice for each topic."""
    return {
        checked_subscribed(topic): each if isinstance(each, MessageSelector) else MessageSelector.by_tag(each)
        for topic, each in subscriptions.items()
    }


def selection_of(subscribed: Mapping[str, MessageSelector]) -> Selection:
    """Return the selection of a group, whose members share one position in the log.

    Topics with different choices are joined to one filter that names the topics.
    """
    if not subscribed:
        raise MQClientError("subscription is null: subscribe to a topic before the start")
    topics, choices = tuple(sorted(subscribed)), set(subscribed.values())
    if len(choices) == 1:
        (choice,) = choices
        return Selection(topics=topics, tags=choice.tags, filter=choice.filter)
    parts = {topic: _of_topic(topic, subscribed[topic]) for topic in topics}
    for topic, part in parts.items():
        # Beside the topic a condition is deeper and longer than alone.
        with _named(f"topic {topic}"):
            chosen_filter(part)
    with _named(f"the conditions of {', '.join(topics)} together"):
        return Selection(topics=topics, filter=chosen_filter(" OR ".join(parts.values())))


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except FilterError as error:
        raise FilterError(f"{what}: {error}") from None


def _of_topic(topic: str, choice: MessageSelector) -> str:
    own, condition = f"TOPIC = {_quoted(topic)}", choice.filter
    if choice.tags is not None:
        condition = f"TAGS IN ({', '.join(map(_quoted, choice.tags))})"
    # A line break, because a comment at the end of the condition would hide the bracket.
    return own if condition is None else f"({own} AND ({condition}\n))"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
