"""The order of sending within one call, with a limit on the messages under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable, Verdict

Order = Literal["each", "first", "none", "never"]
#: The verdict on a message that stands behind one of its key that is not `Done`.
EARLIER = Unavailable("an earlier message of its key was not stored")


def in_order(messages: Sequence[Message], handle: Callable[[Message], Verdict]) -> list[Verdict]:
    """Handle one message after the other, but none behind a message of the key without `Done`; return the verdicts."""
    verdicts: list[Verdict] = []
    stopped: set[str] = set()
    for message in messages:
        verdict = EARLIER if message.key is not None and message.key in stopped else handle(message)
        if message.key is not None and not isinstance(verdict, Done):
            stopped.add(message.key)
        verdicts.append(verdict)
    return verdicts


def send_again(
    messages: Sequence[Message], verdicts: Sequence[Verdict], send: Callable[[list[Message]], Sequence[Verdict]]
) -> list[Verdict]:
    """Send the messages without `Done` by `send`; return all verdicts, old and new."""
    left = [index for index, verdict in enumerate(verdicts) if verdict is not DONE]
    merged = list(verdicts)
    for index, verdict in zip(left, send([messages[index] for index in left]), strict=True):
        merged[index] = verdict
    return merged


class Chains:
    """The messages of one call by index. Messages of one key form a chain; a message without a key stands alone.

    `take` offers a message once the messages before it are `Done`; the message is under way until `settle`. Any other
    verdict settles the waiting ones as `Unavailable`. At most `most` messages are under way, and none is offered while
    `most_bytes` of bodies are under way.

    `order` says which messages of the key come before a message:

    - "each": the previous message.
    - "first": the first message in this call; others of the topic may be under way together.
    - "none": no message of the topic.
    - "never": no message at all.

    Where a key changes the topic, the previous message comes before ("never" apart), because no destination with topics
    keeps an order between topics.
    """

    __slots__ = (
        "_bytes",
        "_followers",
        "_messages",
        "_most",
        "_most_bytes",
        "_not_asked",
        "_ready",
        "_under_way",
        "_verdicts",
        "left",
        "overlap",
    )

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        most: float = float("inf"),
        most_bytes: float = float("inf"),
        order: Order = "each",
    ) -> None:
        self.left = len(messages)
        #: True when messages of one key may be under way together.
        self.overlap = False
        self._messages = messages
        self._most = most
        self._most_bytes = most_bytes
        self._verdicts: list[Verdict | None] = [None] * len(messages)
        self._under_way: set[int] = set()
        self._bytes = 0
        self._ready: deque[int] = deque()
        self._not_asked: Verdict = Unavailable("not handed over")
        #: The messages that wait for a message.
        self._followers: dict[int, list[int]] = {}
        keys = [message.key for message in messages if message.key is not None]
        if order == "never" or len({*keys}) == len(keys):
            self._ready.extend(range(len(messages)))
            return
        first: dict[str, int] = {}
        newest: dict[str, int] = {}
        chained: set[str] = set()
        for index, message in enumerate(messages):
            key = message.key
            if key is None:
                self._ready.append(index)
                continue
            before, newest[key] = newest.get(key), index
            if before is None:
                self._ready.append(index)
                first[key] = index
            elif order == "each" or key in chained or message.topic != messages[before].topic:
                chained.add(key)
                self._followers.setdefault(before, []).append(index)
            else:
                self.overlap = True
                if order == "none":
                    self._ready.append(index)
                else:
                    self._followers.setdefault(first[key], []).append(index)

    def take(self) -> int | None:
        """Return the index of a message to send now, if there is any and not too much is under way."""
        if not self._ready or len(self._under_way) >= self._most or self._bytes >= self._most_bytes:
            return None
        index = self._ready.popleft()
        self._under_way.add(index)
        self._bytes += len(self._messages[index].body)
        return index

    def take_all(self) -> list[int]:
        """Return the indexes of all messages to send now, as `take` offers them."""
        return list(iter(self.take, None))

    def settle(self, index: int, verdict: Verdict) -> None:
        """Store the verdict on a message under way. A second answer changes nothing."""
        if index not in self._under_way:
            return
        self._under_way.remove(index)
        self._bytes -= len(self._messages[index].body)
        self._verdicts[index] = verdict
        self.left -= 1
        followers = self._followers.pop(index, None)
        if followers is None:
            return
        if isinstance(verdict, Done):
            self._ready.extend(followers)
            return
        while followers:
            follower = followers.pop()
            self._verdicts[follower] = EARLIER
            self.left -= 1
            followers += self._followers.pop(follower, ())

    def settle_all(self, indexes: Iterable[int], verdict: Verdict) -> None:
        """Store the same verdict on several messages under way."""
        if verdict is not DONE or self._followers:
            for index in indexes:
                self.settle(index, verdict)
            return
        done = self._under_way.intersection(indexes)
        self._under_way -= done
        self.left -= len(done)
        for index in done:
            self._verdicts[index] = DONE
            self._bytes -= len(self._messages[index].body)

    def give_up(self, error: str, *, everything: bool = True) -> None:
        """Settle all messages without a verdict as `Unavailable`, because the destination is away, or a part of it."""
        verdict = Unavailable(error, everything=everything)
        for index in self.under_way():
            self.settle(index, verdict)
        self._not_asked = verdict
        self._ready.clear()
        self.left = 0

    def take_back(self, indexes: Collection[int], verdict: Verdict) -> None:
        """Replace verdicts, and stop later messages of the same keys. Nothing is under way any more."""
        stopped: set[str | None] = set()
        for index, message in enumerate(self._messages):
            if index in indexes:
                self._verdicts[index] = verdict
                stopped |= {message.key} - {None}
            elif message.key in stopped:
                self._verdicts[index] = EARLIER

    @property
    def number_under_way(self) -> int:
        """The number of messages under way."""
        return len(self._under_way)

    def under_way(self) -> list[int]:
        """Return the indexes of the messages under way, sorted."""
        return sorted(self._under_way)

    def verdicts(self) -> list[Verdict]:
        """Return one verdict per message; `Unavailable` for messages not handed over."""
        return [verdict or self._not_asked for verdict in self._verdicts]
