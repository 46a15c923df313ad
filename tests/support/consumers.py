"""Consumers for tests: with short pauses, and functions that note what they got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from tenacity import wait_fixed

from outbox import Consumer, Message, Outbox, RetryPolicy
from tests.support.destination import briskly


def consumer_of(outbox: Outbox, name: str = "billing", **options: Any) -> Consumer:
    """A consumer with three tries in quick succession, unless it is given others."""
    chosen = {"retry": RetryPolicy(attempts=3, wait=wait_fixed(0.05)), "settings": briskly(), **options}
    return outbox.consumer(name, **chosen)


def write(outbox: Outbox, *bodies: str, topic: str = "orders", key: str | None = None) -> None:
    """Commit messages, in one transaction."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message(topic, body, key=key) for body in bodies])


def parked(outbox: Outbox, name: str = "billing") -> list[tuple[str, int, str | None]]:
    """The parked messages of a subscription in the order of the log: state, failures and error."""
    query = "SELECT coalesce(state, 'behind'), attempts, error FROM {parked} WHERE subscription = :name ORDER BY id"
    with closing(outbox.database.open()) as channel:
        return [(state, attempts, error) for state, attempts, error in channel.rows(query, name=name)]


def until_over(consumer: Consumer, name: str = "billing", *states: str) -> None:
    """Handle until nothing is to be tried again."""
    while True:
        consumer.until_empty()
        if not any(state in ("retry", "waiting") for state, _, _ in parked(consumer.outbox, name)):  # type: ignore[arg-type]
            return


def texts(messages: Iterable[Message] | Sequence[Message]) -> list[str]:
    """The bodies as text."""
    return [message.body.decode() for message in messages]
