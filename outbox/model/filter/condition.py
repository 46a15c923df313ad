"""A filter as users write it: its text, and the answer for a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from outbox.model.filter.expression import Expression
from outbox.model.filter.parser import parse
from outbox.model.message import Message

#: Properties that are no headers, as RocketMQ calls them (which has no TOPIC), and their columns.
SYSTEM_PROPERTIES = {"TAGS": "tags", "KEYS": "key", "TOPIC": "topic"}


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition on messages in RocketMQ's SQL92."""

    text: str
    expression: Expression

    @classmethod
    def of(cls, text: str) -> Filter:
        """Return the filter of a text.

        Raises:
            FilterError: the text is no condition, or too long or too deep; the error shows the place.
        """
        return _compiled(text)

    def matches(self, message: Message) -> bool:
        """Return True if the condition is true for the message, and not false or unknown."""
        headers: Mapping[str, object] | None = None

        def properties(name: str) -> str | None:
            nonlocal headers
            if name in SYSTEM_PROPERTIES:
                found: object = getattr(message, SYSTEM_PROPERTIES[name])
            else:
                # Decoded once, and not for a filter of tags, keys and topics.
                headers = _headers_of(message) if headers is None else headers
                found = headers.get(name)
            return found if isinstance(found, str) else None

        return self.expression.value(properties) is True


@lru_cache(maxsize=128)
def _compiled(text: str) -> Filter:
    return Filter(text, parse(text))


def chosen_filter(text: str | None) -> str | None:
    """Return a filter as stored; None: every message.

    Raises:
        FilterError: the text is no condition, or too long or too deep; the error shows the place.
    """
    return None if text is None else Filter.of(text).text


def _headers_of(message: Message) -> Mapping[str, object]:
    """Return the headers; none where a row of another hand holds no JSON object."""
    try:
        headers: object = message.headers
    except ValueError:
        return {}
    return headers if isinstance(headers, Mapping) else {}
