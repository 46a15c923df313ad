"""The catalog: topics and consumer groups, shared by all fronts of an outbox, as one front knows them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar, TypeVarTuple, cast

from outbox.rocketmq.connections import Connections
from outbox.rocketmq.front.authentication import topics_in
from outbox.rocketmq.front.calls import Call, Threads
from outbox.rocketmq.front.clients import ClientPolicy
from outbox.rocketmq.front.joining import Joining
from outbox.rocketmq.front.protocol import Wire
from outbox.rocketmq.front.routing import TopicType
from outbox.rocketmq.front.settings import MOST_TOPICS
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.rocketmq.front.validation import checked_group, checked_topic
from outbox.runtime.throttled_log import Throttle
from outbox.store.database import Channel
from outbox.store.fronts.groups import ConsumerGroup, GroupRows
from outbox.store.fronts.topics import TopicRows

logger = logging.getLogger("outbox")

More = TypeVarTuple("More")
R = TypeVar("R")

#: Seconds between two reads of all rows.
READ_SECONDS = 5.0
#: A call with one of these fields is about messages that were received, and makes no topic.
_OF_RECEIVED = {"entries", "receipt_handle"}


class Catalog:
    """Topics and groups: all are read now and then, and those of an unknown name at once; in one event loop only."""

    def __init__(self, rows: Connections, threads: Threads, policy: ClientPolicy) -> None:
        self._rows, self._threads, self._policy = rows, threads, policy
        #: Changed in place, because others keep them.
        self.topics: dict[str, TopicType] = {}
        self.groups: dict[str, ConsumerGroup] = {}
        self.fifo: set[str] = set()
        #: Called after a read with other topics, and with the names of groups that have changed.
        self.on_topics: Callable[[], None] = lambda: None
        self.on_groups: Callable[[set[str]], None] = lambda _names: None
        self._types = self._joining(_types)
        self._rows_of_groups = self._joining(_groups)
        self._missing = Throttle()

    def read(self) -> None:
        """Read all rows, before there is an event loop."""
        self._take(*self._rows.call(_all))

    async def read_again(self) -> None:
        """Read all rows."""
        self._take(*await self._threads.run(partial(self._rows.call, _all)))

    async def look(self, request: Wire) -> None:
        """Look for the topics of a request that are not known, and for its group if its row may be there and matters.

        Without a row a group is as most groups are, so only settings and strictness want to know for certain.
        """
        is_settings = "settings" in request.DESCRIPTOR.fields_by_name
        group = group_in(request) if is_settings or self._policy.strict_groups else ""
        topics = [name for name in topics_in(request) - self.topics.keys() if _passes(checked_topic, name)]
        groups = [group] if group and group not in self.groups and _passes(checked_group, group) else []
        found, known = await _found(self._types, topics), await _found(self._rows_of_groups, groups)
        if found or known:
            self._take(self.topics | found, self.groups | known)

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
        type_ = await self._threads.run(partial(self._rows.call, partial(_add, topic)))
        self._take(self.topics | {topic: type_}, self.groups)

    def _joining(self, read: Callable[[Channel, Collection[str]], Mapping[str, R]]) -> Joining[str, list[R]]:
        """Return what finds the row of each name, if there is one; names that wait are looked for together."""

        def found(names: Sequence[str]) -> list[list[R]]:
            rows = self._rows.call(lambda channel: read(channel, names))
            return [[rows[name]] if name in rows else [] for name in names]

        return Joining(self._threads, found)

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


async def _found(rows: Joining[str, list[R]], names: Sequence[str]) -> dict[str, R]:
    """Return what is there, by name."""
    return {name: row for name, found in zip(names, await rows.call(names), strict=True) for row in found}


def _all(channel: Channel) -> tuple[Mapping[str, TopicType], Mapping[str, ConsumerGroup]]:
    return cast("dict[str, TopicType]", TopicRows(channel).all()), GroupRows(channel).all()


def _types(channel: Channel, names: Collection[str]) -> Mapping[str, TopicType]:
    return cast("dict[str, TopicType]", TopicRows(channel).named(names))


def _groups(channel: Channel, names: Collection[str]) -> Mapping[str, ConsumerGroup]:
    return GroupRows(channel).named(names)


def _add(topic: str, channel: Channel) -> TopicType:
    return cast("TopicType", TopicRows(channel).add(topic, "NORMAL"))


def _passes(check: Callable[[str], object], name: str) -> bool:
    try:
        check(name)
    except RefusedError:
        return False
    return True


def _replace(old: dict[str, R], new: Mapping[str, R]) -> None:
    for name in old.keys() - new.keys():
        del old[name]
    old.update(new)
