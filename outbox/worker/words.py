"""What the log says of a subscription: that messages are sent to a destination, or half messages are decided on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outbox.model.message import Message
from outbox.model.subscription import Declaration
from outbox.runtime.text import counted


class Words(Protocol):
    """The sentences about one subscription; `topic` None: all topics."""

    def refused(self, topic: str | None) -> str:
        """Say that messages are not accepted."""

    def accepted(self, topic: str | None) -> str:
        """Say that they are accepted again."""

    def awaited(self, topic: str | None) -> str:
        """Say for what the worker waits."""

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Say that these, in their order, became dead letters, with the `error` of the first, and what to do."""


@dataclass(frozen=True, slots=True)
class Sending:
    """Of a subscription whose messages go to a destination."""

    subscription: str
    destination: str

    def refused(self, topic: str | None) -> str:
        """Name the destination, and the topic if it is about one."""
        if topic is None:
            return f"{self.destination} accepts nothing, messages wait"
        return f"{self.destination} does not accept topic {topic}, its messages wait"

    def accepted(self, topic: str | None) -> str:
        """Name the same."""
        return f"{self.destination} accepts {'messages' if topic is None else f'topic {topic}'} again"

    def awaited(self, topic: str | None) -> str:
        """Name the same."""
        return f"waits for {self.destination}{'' if topic is None else f' to accept topic {topic}'}"

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Name the first of them."""
        letters = counted(len(messages), "more dead letter")
        first = f"message {messages[0].id} of topic {messages[0].topic}"
        return f"{letters}, the first is {first}: {error}; to decide, run: outbox dead list --name {self.subscription}"


@dataclass(frozen=True, slots=True)
class CheckingBack:
    """Of the check-back on a producer group. Its half messages all have one topic, which is RocketMQ's own."""

    group: str

    def refused(self, topic: str | None) -> str:
        """Name the group."""
        return f"nothing is found out about half messages of producer group {self.group}, they wait"

    def accepted(self, topic: str | None) -> str:
        """Name the group."""
        return f"half messages of producer group {self.group} are decided on again"

    def awaited(self, topic: str | None) -> str:
        """Name the group."""
        return f"waits for an answer about half messages of producer group {self.group}"

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Name their transactions: a verdict is about one of these, whatever it has of half messages."""
        transactions = counted(len({each.key for each in messages}), "more transaction", ("was", "were"))
        decide = f"outbox half list --given-up --group {self.group}"
        return f"{transactions} given up, the first is {messages[0].key}: {error}; to decide, run: {decide}"


def words_of(declared: Declaration) -> Words:
    """Return the sentences for a subscription."""
    if declared.kind == "check" and declared.tags:
        return CheckingBack(declared.tags[0])
    return Sending(declared.name, declared.destination or "its destination")
