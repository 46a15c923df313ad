"""The options of a consumer, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypedDict, get_args

from outbox.model.limits import require_flags, require_numbers
from outbox.model.retry import RETRY_LEVELS, RetryPolicy
from outbox.model.subscription import OnDead, Start, require_policy, require_start, require_words
from outbox.worker.settings import Settings

#: The handling of a partition after a failure. key: only the message's key waits. queue: everything of the partition.
Suspend = Literal["key", "queue"]
#: RocketMQ's for a consumer group: 16 retries, so 17 deliveries, and then a dead letter.
RETRIES = RetryPolicy(attempts=17, wait=RETRY_LEVELS)


class ConsumerOptions(TypedDict, total=False):
    """The rarer options of a consumer; see `Consumer`."""

    start: Start
    partitions: int | None
    concurrency: int
    batch_size: int | None
    inbox: bool
    deadline: timedelta
    retry: RetryPolicy
    suspend: Suspend
    on_dead: OnDead | None
    compact: bool | None
    broadcast: bool
    instance: str | None
    settings: Settings | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options with their defaults.

    Raises:
        TypeError, ValueError: an option is wrong, or does not go with another one.
    """

    start: Start | None = None
    partitions: int | None = None
    concurrency: int = 1
    batch_size: int | None = None
    inbox: bool = False
    deadline: timedelta = timedelta(seconds=30)
    retry: RetryPolicy = RETRIES
    suspend: Suspend = "key"
    on_dead: OnDead | None = None
    compact: bool | None = None
    broadcast: bool = False
    instance: str | None = None
    settings: Settings | None = None

    def __post_init__(self) -> None:
        require_numbers(
            concurrency=self.concurrency,
            partitions=1 if self.partitions is None else self.partitions,
            batch_size=1 if self.batch_size is None else self.batch_size,
        )
        require_flags(inbox=self.inbox, broadcast=self.broadcast)
        require_words(suspend=(self.suspend, get_args(Suspend)))
        require_policy(self.on_dead)
        require_start(self.start)
        if self.inbox and self.batch_size is not None:
            raise ValueError(
                "inbox=True has a transaction for each message, and batch_size hands over lists; leave batch_size out,"
                " or leave inbox out and call Inbox.once(session, message) in a transaction of the function's own"
            )
        if self.broadcast and self.partitions not in (None, 1):
            raise ValueError("partitions: an instance of a broadcast consumer has one partition; leave partitions out")
        if self.instance is not None and not self.broadcast:
            raise ValueError("instance is for broadcast=True; leave instance out, the members of a group need no names")
