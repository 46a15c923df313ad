"""Captures the messages that the code under test sends, also if the test rolls everything back.

    def test_order(outbox_capture):
        place_order("ann", 42)
        outbox_capture.assert_sent("orders", key="order-1", body={"id": 1})

Without pytest: `with Capture() as capture:`. No relay and no destination is needed; the INSERTs are real ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypedDict, Unpack, overload

from outbox.model.message import Message
from outbox.testing.entries import Entries, Entry

_SHOWN_BODY = 120
_SHOWN_MESSAGES = 20


class _Any:
    """Stands for any value, because a test can ask for `None`."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any()


class Description(TypedDict, total=False):
    """The description that a message must match.

    `key`, `tags`: the exact text; `None`: a message without. `body`: the body as given to `send`; JSON is compared as
    values, everything else as bytes. `headers`: the message may have more. `where`: a function that is true of the
    message.
    """

    key: str | _Any | None
    tags: str | _Any | None
    body: object
    headers: Mapping[str, str] | None
    where: Callable[[Message], object] | None


class Capture:
    """Collects every message that any `Outbox` of this process appends while the capture is active, in order.

    A message counts from `send` on, committed or not, until a savepoint or the transaction is rolled back.

    A test may keep all work inside a single transaction, for example with a Session bound to a Connection. Then a
    message counts if the application "commits" the Session, whichever `join_transaction_mode` the Session has; a later
    rollback by the test does not matter. A raw psycopg connection is asked for the rows that exist, before its COMMIT
    or after.
    """

    def __init__(self) -> None:
        self._captured = Entries()
        self._first = 0

    def __enter__(self) -> Self:
        self._captured.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._captured.stop()

    @property
    def messages(self) -> list[Message]:
        """The sent messages, in order."""
        return [entry.message for entry in self._entries() if not entry.rolled_back]

    @property
    def committed(self) -> list[Message]:
        """The committed messages: none, in a test that rolls everything back."""
        return [entry.message for entry in self._entries() if entry.committed]

    @property
    def rolled_back(self) -> list[Message]:
        """The messages that were rolled back, with a savepoint or a transaction."""
        return [entry.message for entry in self._entries() if entry.rolled_back]

    def of(self, topic: str) -> list[Message]:
        """Return the messages sent to a topic, in order."""
        return [message for message in self.messages if message.topic == topic]

    def clear(self) -> None:
        """Forget the messages captured so far."""
        self._first = len(self._captured.all)

    @overload
    def assert_sent(self, topic: str, *, count: None = ..., **description: Unpack[Description]) -> Message: ...
    @overload
    def assert_sent(self, topic: str, *, count: int, **description: Unpack[Description]) -> list[Message]: ...
    def assert_sent(
        self, topic: str, *, count: int | None = None, **description: Unpack[Description]
    ) -> Message | list[Message]:
        """Require a message of a description, and return the first match; with `count`, require and return so many.

        Args:
            topic: the message's topic.
            count: how many messages match; 0 for none.
            description: see `Description`.

        Raises:
            AssertionError: no message matches, or another number; the text shows the messages sent instead.
        """
        __tracebackhide__ = True
        wanted = _Wanted(topic, **description)
        found = [message for message in self.messages if not wanted.differences(message)]
        if count is None and found:
            return found[0]
        if count is not None and len(found) == count:
            return found
        none = "no message was" if count is None or count < 2 else f"none of {count} messages was"
        number = none if not found else f"{_counted(len(found))}"
        unlike = "" if count is None or not found else f", not {count},"
        raise AssertionError(f"{number} sent{unlike} {wanted}\n{self._told(wanted)}")

    def assert_nothing_sent(self, topic: str | None = None) -> None:
        """Require that no message was sent, to a topic or at all.

        Raises:
            AssertionError: a message was sent; the text shows the messages.
        """
        __tracebackhide__ = True
        found = self.messages if topic is None else self.of(topic)
        if found:
            where = "" if topic is None else f" to {topic!r}"
            raise AssertionError(f"{_counted(len(found))} sent{where}:\n{_listed(map(_shown, found))}")

    def _entries(self) -> list[Entry]:
        self._captured.settle()
        return self._captured.all[self._first :]

    def _told(self, wanted: _Wanted) -> str:
        """Return, as text, the messages sent instead, the wanted topic first, and the messages rolled back."""
        sent = sorted(self.messages, key=lambda message: message.topic != wanted.topic)
        gone = self.rolled_back
        text = f"what was sent:\n{_listed(map(wanted.compared, sent))}" if sent else "nothing was sent"
        return f"{text}\nwhat was rolled back:\n{_listed(map(_shown, gone))}" if gone else text


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The description of a message."""

    topic: str
    key: str | _Any | None = ANY
    tags: str | _Any | None = ANY
    body: object = ANY
    headers: Mapping[str, str] | None = None
    where: Callable[[Message], object] | None = None

    def differences(self, message: Message) -> list[str]:
        """Return the names of the fields that differ; for another topic only `topic`."""
        if message.topic != self.topic:
            return ["topic"]
        headers = message.headers
        equal = {
            "key": self.key is ANY or message.key == self.key,
            "tags": self.tags is ANY or message.tags == self.tags,
            "headers": all(headers.get(name) == value for name, value in (self.headers or {}).items()),
            "body": self.body is ANY or _same_body(message, self.body),
        }
        found = [name for name, same in equal.items() if not same]
        return found or ([] if self.where is None or self.where(message) else ["where"])

    def compared(self, message: Message) -> str:
        """Return a message as text, with the fields that differ."""
        differing = [name for name in self.differences(message) if name != "topic"]
        if not differing:
            return _shown(message)
        what = "where is false" if differing == ["where"] else f"not the same: {', '.join(differing)}"
        return f"{_shown(message)}   ({what})"

    def __str__(self) -> str:
        fields = {"key": self.key, "tags": self.tags, "body": self.body, "headers": self.headers or ANY}
        parts = [f"{name}={value!r:.{_SHOWN_BODY}}" for name, value in fields.items() if value is not ANY]
        if self.where is not None:
            parts.append(f"where={getattr(self.where, '__qualname__', repr(self.where))}")
        return f"to {self.topic!r}" + (f" with {', '.join(parts)}" if parts else "")


def _same_body(message: Message, expected: object) -> bool:
    if isinstance(expected, bytes | bytearray | memoryview):
        return message.body == bytes(expected)
    wanted = Message(message.topic, expected)
    if message.body == wanted.body:
        return True
    try:
        return wanted.content_type == "application/json" and bool(json.loads(message.body) == json.loads(wanted.body))
    except ValueError:
        return False


def _shown(message: Message) -> str:
    fields: dict[str, Any] = {"key": message.key, "tags": message.tags, "headers": message.headers or None}
    parts = [f"{name}={value!r}" for name, value in fields.items() if value is not None]
    return " ".join([repr(message.topic), *parts, f"body={_shown_body(message.body)}"])


def _shown_body(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return f"{body[:_SHOWN_BODY]!r}{_more(len(body))}"
    shown = text if text.isprintable() and text else repr(text)
    return f"{shown[:_SHOWN_BODY]}{_more(len(shown))}"


def _more(length: int) -> str:
    return f"… ({length} in all)" if length > _SHOWN_BODY else ""


def _listed(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = [f"… and {len(lines) - _SHOWN_MESSAGES} more"] if len(lines) > _SHOWN_MESSAGES else []
    return "\n".join(f"  {line}" for line in [*lines[:_SHOWN_MESSAGES], *more])


def _counted(number: int) -> str:
    return "1 message was" if number == 1 else f"{number} messages were"
