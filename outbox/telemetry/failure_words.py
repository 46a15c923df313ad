"""The sentences of the log about a subscription: it sends messages to a destination, or decides on half messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
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
        """Say what the worker waits for."""

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Say that these, in their order, became dead letters; with the `error` of the first, and what to do."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The sentences about a subscription whose messages go to a destination."""

    subscription: str
    destination: str

    def refused(self, topic: str | None) -> str:
        """Say that the destination does not accept messages, or not those of the topic."""
        if topic is None:
            return f"{self.destination} accepts nothing, messages wait"
        return f"{self.destination} does not accept topic {topic}, its messages wait"

    def accepted(self, topic: str | None) -> str:
        """Say that the destination accepts messages again, or those of the topic."""
        return f"{self.destination} accepts {'messages' if topic is None else f'topic {topic}'} again"

    def awaited(self, topic: str | None) -> str:
        """Say that the worker waits for the destination, or for it to accept the topic."""
        return f"waits for {self.destination}{'' if topic is None else f' to accept topic {topic}'}"

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Say how many became dead letters, which is the first, and how to decide on them."""
        letters = counted(len(messages), "more dead letter")
        first = f"message {messages[0].id} of topic {messages[0].topic}"
        decide = f"outbox dead list --name {quote(self.subscription)}"
        return f"{letters}, the first is {first}: {error}; to decide, run: {decide}"


@dataclass(frozen=True, slots=True)
class CheckingBack:
    """The sentences about the check-back on a producer group.

    They name no topic, because all half messages have one topic, which is RocketMQ's own.
    """

    group: str

    def refused(self, topic: str | None) -> str:
        """Say that half messages of the group are not decided on."""
        return f"nothing is found out about half messages of producer group {self.group}, they wait"

    def accepted(self, topic: str | None) -> str:
        """Say that half messages of the group are decided on again."""
        return f"half messages of producer group {self.group} are decided on again"

    def awaited(self, topic: str | None) -> str:
        """Say that the worker waits for an answer about half messages of the group."""
        return f"waits for an answer about half messages of producer group {self.group}"

    def given_up(self, messages: Sequence[Message], error: str) -> str:
        """Say how many transactions were given up, which is the first, and how to decide on them.

        It counts transactions, because a verdict is about a transaction, however many half messages that has.
        """
        transactions = counted(len({each.key for each in messages}), "more transaction", ("was", "were"))
        decide = f"outbox half list --given-up --group {quote(self.group)}"
        return f"{transactions} given up, the first is {messages[0].key}: {error}; to decide, run: {decide}"


def words_of(declared: Declaration) -> Words:
    """Return the sentences for a subscription."""
    if declared.kind == "check" and declared.tags:
        return CheckingBack(declared.tags[0])
    return Sending(declared.name, declared.destination or "its destination")
