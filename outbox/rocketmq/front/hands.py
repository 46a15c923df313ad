"""What clients have in their hands: a repeated receive gets it again, and for push consumers it is renewed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from outbox.model.message import Message
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.clients import ALIVE_SECONDS
from outbox.rocketmq.front.group_subscription import GroupSubscription
from outbox.rocketmq.front.statuses import line_of
from outbox.runtime.clock import clock
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.subscriptions.receipts import Receipt

logger = logging.getLogger("outbox")

#: The time of messages that are renewed so often, and for so long at most.
RENEWED = timedelta(seconds=60)
RENEW_SECONDS, LONGEST = 20.0, timedelta(minutes=30)
#: About so many messages are renewed by one statement.
_MOST = 1000
#: So many receives may be repeated, with so many bytes of ids and messages.
MOST_REPEATABLE, MOST_BYTES = 16_384, 16 * 1024 * 1024
_UNKNOWN = datetime.min.replace(tzinfo=UTC)


class Key(NamedTuple):
    """The name of a receive: `attempt` is the client's own, and empty for one that is not repeated."""

    client: str
    group: str
    topic: str
    attempt: str


@dataclass(eq=False, slots=True)
class Batch:
    """The messages of a receive under their receipt. `replaced`: a later receive has taken the messages over.

    `out`: what is renewed of them, until `due` by the database, which this front wrote at the moment `since` by its
    clock. `heard`: the last sign of life of the client; `until`: the end of all renewals.
    """

    key: Key
    subscription: GroupSubscription
    receipt: str = ""
    messages: Sequence[Message] = ()
    bytes: int = 0
    replaced: bool = False
    out: Collection[Receipt] = ()
    due: datetime = _UNKNOWN
    since: float = 0.0
    heard: float = 0.0
    until: float = 0.0

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the messages."""
        return [Receipt(each.id or 0, self.receipt) for each in self.messages]

    def due_from(self, now: float) -> datetime:
        """Return `due` of a renewal at a moment. Not every database keeps more than milliseconds."""
        return self.due + timedelta(milliseconds=round((now - self.since) * 1000))


class Hands:
    """The batches of a front's clients; in one event loop only.

    The front that handed a message out renews it, until the message has another time than this front wrote: then a
    call at any front has decided on it. If the front is gone, the time of the message is over a minute later.
    """

    def __init__(
        self,
        threads: Threads,
        alive: Callable[[Collection[str]], Awaitable[Collection[str]]],
        most: int = MOST_REPEATABLE,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`alive`: returns which of some clients are there, at any front."""
        self._threads, self._alive = threads, alive
        self._most, self._most_bytes = most, most_bytes
        #: Batches that a client may ask for again, the oldest first, and those that are renewed.
        self._repeatable: dict[Key, Batch] = {}
        self._renewed: dict[Batch, None] = {}
        self._bytes = 0
        self._number = 0
        self._log = ThrottledLog(logger)

    def begin(self, key: Key, subscription: GroupSubscription) -> Batch:
        """Return a new batch, with the messages of an earlier one of the key, which is replaced."""
        batch, earlier = Batch(key, subscription), self._repeatable.get(key)
        if earlier is not None:
            batch.receipt, batch.messages = earlier.receipt, earlier.messages
            earlier.replaced = True
            self._forget(earlier)
        self._keep(batch)
        return batch

    def got(self, batch: Batch, receipt: str, messages: Sequence[Message]) -> bool:
        """Note the messages of a batch; return False if the batch was replaced meanwhile."""
        if batch.replaced:
            return False
        self._forget(batch)
        batch.receipt, batch.messages = receipt, messages
        if messages:
            self._keep(batch)
        return True

    def end(self, batch: Batch) -> bool:
        """Forget a batch; return False if the batch was replaced."""
        self._forget(batch)
        return not batch.replaced

    async def learn(self, batch: Batch) -> None:
        """Read the time of messages that are to be renewed, before the client has any of them."""
        times = await self._threads.run(partial(batch.subscription.times, batch.receipts))
        batch.out = [*times]
        # One statement has written the time of all of them.
        batch.due = max(times.values(), default=batch.due)
        batch.since = batch.heard = clock()
        batch.until = batch.since + LONGEST.total_seconds()

    def hold(self, batch: Batch) -> None:
        """Renew the messages of a batch from now on that the client has, if their time was read."""
        batch.out = {*batch.out}.intersection(batch.receipts)
        if batch.out and not batch.replaced:
            self._renewed[batch] = None
            self._trim(batch)

    def number(self) -> int:
        """Return how many messages were renewed since the last call."""
        number, self._number = self._number, 0
        return number

    async def renew(self) -> None:
        """Renew what clients that live have in their hands; a statement takes many of a subscription."""
        alive = await self._alive({each.key.client for each in self._renewed})
        now, by_subscription = clock(), dict[GroupSubscription, list[Batch]]()
        for batch in [*self._renewed]:
            if batch.key.client in alive:
                batch.heard = now
            if now >= batch.until or now - batch.heard >= ALIVE_SECONDS:
                del self._renewed[batch]
            else:
                by_subscription.setdefault(batch.subscription, []).append(batch)
        for subscription, batches in by_subscription.items():
            for some in _portions(batches):
                await self._renew(subscription, some)

    async def _renew(self, subscription: GroupSubscription, batches: Sequence[Batch]) -> None:
        now = clock()
        times = {each: (batch.due, batch.due_from(now)) for batch in batches for each in batch.out}
        try:
            renewed = {*await self._threads.run(partial(subscription.renew, times, RENEWED))}
        except Exception as error:
            self._log.warning("front: messages were not renewed, trying again: %s", line_of(error))
            return
        self._number += len(renewed)
        for batch in batches:
            batch.out, batch.due, batch.since = renewed.intersection(batch.out), batch.due_from(now), now
            if not batch.out:
                self._renewed.pop(batch, None)

    def _keep(self, batch: Batch) -> None:
        """Keep a batch for a repetition, if there can be one."""
        if batch.key.attempt:
            batch.bytes = _bytes(batch)
            self._repeatable[batch.key] = batch
            self._bytes += batch.bytes
        while len(self._repeatable) > self._most or self._bytes > self._most_bytes:
            oldest = next(iter(self._repeatable.values()))
            self._drop(oldest)
            self._trim(oldest)

    def _trim(self, batch: Batch) -> None:
        """Keep no contents for renewals alone."""
        if batch in self._renewed and self._repeatable.get(batch.key) is not batch:
            batch.messages = ()

    def _drop(self, batch: Batch) -> None:
        if self._repeatable.get(batch.key) is batch:
            del self._repeatable[batch.key]
            self._bytes -= batch.bytes

    def _forget(self, batch: Batch) -> None:
        self._drop(batch)
        self._renewed.pop(batch, None)


def _portions(batches: Iterable[Batch]) -> Iterable[list[Batch]]:
    some, number = list[Batch](), 0
    for batch in batches:
        some.append(batch)
        number += len(batch.out)
        if number >= _MOST:
            yield some
            some, number = [], 0
    if some:
        yield some


def _bytes(batch: Batch) -> int:
    of_messages = (
        len(each.body) + sum(len(name) + len(value) for name, value in each.headers.items()) for each in batch.messages
    )
    return sum(map(len, batch.key)) + sum(of_messages)
