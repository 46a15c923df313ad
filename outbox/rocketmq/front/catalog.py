"""The catalog: topics and consumer groups, shared by all fronts of an outbox, as one front knows them."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar, TypeVarTuple

from outbox.rocketmq.connections import Connections
from outbox.rocketmq.front.authentication import topics_in
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.clients import ClientPolicy
from outbox.rocketmq.front.declaring import Declarations
from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.routing import TopicType
from outbox.rocketmq.front.settings import MOST_TOPICS
from outbox.rocketmq.front.statuses import Code, RefusedError, line_of
from outbox.rocketmq.front.validation import checked_group, checked_topic
from outbox.runtime.throttled_log import Throttle, ThrottledLog
from outbox.store.database import Channel
from outbox.store.fronts.groups import ConsumerGroup
from outbox.store.fronts.topics import TopicRows

logger = logging.getLogger("outbox")

More = TypeVarTuple("More")
R = TypeVar("R")

#: Seconds between two looks at the rows, besides those for a name that is not known.
_READ_SECONDS = 5.0
#: A call with one of these fields is about messages that were received, and makes no topic.
_OF_RECEIVED = {"entries", "receipt_handle"}


class Catalog:
    """Topics and groups, read again every few seconds, and at once for an unknown name.

    `look` and `run` are for one event loop.
    """

    def __init__(self, rows: Connections, threads: Threads, policy: ClientPolicy) -> None:
        self._rows, self._threads, self._policy = rows, threads, policy
        #: Changed in place, because others keep them.
        self.topics: dict[str, TopicType] = {}
        self.groups: dict[str, ConsumerGroup] = {}
        self.fifo: set[str] = set()
        #: Called after a read with other topics, and with the names of groups that have changed.
        self.on_topics: Callable[[], None] = lambda: None
        self.on_groups: Callable[[set[str]], None] = lambda _names: None
        self._one = asyncio.Lock()
        #: The read that has not begun.
        self._next: asyncio.Task[None] | None = None
        self._log = ThrottledLog(logger)
        self._missing = Throttle()

    def read(self) -> None:
        """Read the rows before there is an event loop."""
        self._take(*self._rows.call(_declared))

    async def run(self) -> None:
        """Read again and again, until cancelled."""
        while True:
            await asyncio.sleep(_READ_SECONDS)
            try:
                await self._read()
            except Exception as error:
                self._log.warning("front: topics and groups were not read, trying again: %s", line_of(error))

    async def look(self, request: Wire) -> None:
        """Read the rows if a request names an unknown topic, or a group whose row may be there and matters.

        Without a row a group is as most groups are, so only settings and strictness want to know for certain.
        """
        is_settings = "settings" in request.DESCRIPTOR.fields_by_name
        group = group_in(request) if is_settings or self._policy.strict_groups else ""
        if topics_in(request) - self.topics.keys() or (group and group not in self.groups):
            await self._read()

    def before(
        self, handler: Callable[[Call, Wire, *More], Awaitable[R]]
    ) -> Callable[[Call, Wire, *More], Awaitable[R]]:
        """Return a handler that first does as `require`."""

        async def answer(call: Call, request: Wire, /, *more: *More) -> R:
            await self.require(request)
            return await handler(call, request, *more)

        return answer

    async def require(self, request: Wire) -> None:
        """Do as `look`; then make a missing topic, or refuse a missing group, as the policy says.

        Raises:
            RefusedError: the group is missing, or there are too many topics.
        """
        await self.look(request)
        if self._policy.create_topics and _OF_RECEIVED.isdisjoint(request.DESCRIPTOR.fields_by_name):
            for name in topics_in(request) - self.topics.keys():
                await self._make(checked_topic(name))
        for name in topics_in(request) - self.topics.keys():
            self._say_missing("topic", name)
        group = group_in(request)
        if self._policy.strict_groups and group and checked_group(group) not in self.groups:
            self._say_missing("group", group)
            raise RefusedError(
                Code.CONSUMER_GROUP_NOT_FOUND,
                f"CODE: 26  DESC: subscription group [{group}] does not exist"
                f" [add it by: outbox rocketmq groups add {shlex.quote(group)}]",
            )

    def _say_missing(self, what: str, name: str) -> None:
        """Log that clients ask for a missing topic or group: one of each a minute, as strangers choose the names."""
        if self._missing.allows(what):
            logger.warning(
                "front: a client asks for %s %.130r, which is not there; add it by: outbox rocketmq %ss add NAME",
                what,
                name,
                what,
            )

    async def _make(self, topic: str) -> None:
        if len(self.topics) >= MOST_TOPICS:
            raise RefusedError(
                Code.TOO_MANY_REQUESTS,
                f"there are {len(self.topics)} topics, and clients make no more"
                f" [add it by: outbox rocketmq topics add {topic}]",
            )
        await self._threads.run(partial(self._rows.call, partial(_add, topic)))
        await self._read()

    async def _read(self) -> None:
        """Read the rows, once for all calls that come before the read begins; they fail with it."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_next())
            # Also where all who wait have been cancelled.
            self._next.add_done_callback(lambda read: read.cancelled() or read.exception())
        await asyncio.shield(self._next)

    async def _read_next(self) -> None:
        async with self._one:
            self._next = None
            self._take(*await self._threads.run(partial(self._rows.call, _declared)))

    def _take(self, topics: Mapping[str, TopicType], groups: Mapping[str, ConsumerGroup]) -> None:
        changed = {name for name, _ in {*groups.items()} ^ {*self.groups.items()}}
        others = topics != self.topics
        _replace(self.topics, topics)
        _replace(self.groups, groups)
        self.fifo.clear()
        self.fifo.update(name for name, group in groups.items() if group.ordered)
        if others:
            self.on_topics()
        if changed:
            self.on_groups(changed)


def group_in(request: Wire) -> str:
    """Return the name of the consumer group of a request; empty without a group."""
    fields = request.DESCRIPTOR.fields_by_name
    if "group" in fields:
        return str(request.group.name)
    return str(request.settings.subscription.group.name) if "settings" in fields else ""


def _declared(channel: Channel) -> tuple[Mapping[str, TopicType], Mapping[str, ConsumerGroup]]:
    declarations = Declarations(channel)
    return declarations.topics(), declarations.groups()


def _add(topic: str, channel: Channel) -> None:
    TopicRows(channel).add(topic, "NORMAL")


def _replace(old: dict[str, R], new: Mapping[str, R]) -> None:
    for name in old.keys() - new.keys():
        del old[name]
    old.update(new)
