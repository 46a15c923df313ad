"""Topics and consumer groups of an outbox: added, changed and dropped, by operators and at the start of a front."""

from __future__ import annotations

from typing import cast, get_args

from outbox.errors import MQClientError
from outbox.rocketmq.front.routing import TopicType
from outbox.rocketmq.front.settings import CONSUME_ATTEMPTS
from outbox.rocketmq.front.statuses import RefusedError
from outbox.rocketmq.front.validation import checked_group, checked_topic
from outbox.rocketmq.names import subscription_name
from outbox.store.database import Channel
from outbox.store.fronts.groups import ConsumerGroup, GroupRows
from outbox.store.fronts.topics import TopicRows
from outbox.store.half_messages.pending import HalfTransactions
from outbox.store.subscriptions.subscriptions import Subscriptions

TYPES = get_args(TopicType)


class Declarations:
    """The topics and groups of one outbox. An error names the fix."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands = channel.database.commands
        self._topics, self._groups = TopicRows(channel), GroupRows(channel)
        self._subscriptions = Subscriptions(channel)

    def add_topic(self, name: str, type_: str) -> bool:
        """Add a topic; return False if the topic is there.

        Raises:
            MQClientError: the name or the type is none, or the topic has another type.
        """
        require_topic(name, type_)
        known = self._topics.all()
        stored = known.get(name) or self._topics.add(name, type_)
        if stored != type_:
            drop = self._commands.line("rocketmq", "topics", "drop", name)
            raise MQClientError(
                f"topic {name} is of type {stored}, not {type_}; to give it another type, first: {drop}"
            )
        return name not in known

    def topics(self) -> dict[str, TopicType]:
        """Return the types by the names of the topics, sorted."""
        return cast("dict[str, TopicType]", self._topics.all())

    def drop_topic(self, name: str) -> None:
        """Drop a topic; the messages stay in the log.

        Raises:
            MQClientError: the topic is not there, or has open transactions.
        """
        known = self._topics.all()
        if name not in known:
            raise MQClientError(f"there is no topic {name!r:.300}; there are: {', '.join(known) or 'none'}")
        with self._topics.dropping(name):
            self._require_settled(name)
            self._topics.drop(name)

    def _require_settled(self, topic: str) -> None:
        if HalfTransactions(self._channel).pending(group=topic, limit=1):
            look = self._commands.line("half", "list", "--group", topic)
            raise MQClientError(
                f"topic {topic} has open transactions, and nobody would be asked about them any more; to decide them,"
                f" first: {look}"
            )

    def add_group(self, name: str, *, ordered: bool, retries: int | None = None) -> ConsumerGroup:
        """Add a consumer group, or give it other properties.

        `retries`: the most after the first attempt; None: as before, and 16 at first, as in RocketMQ.

        Raises:
            MQClientError: the name is none, or the group receives in another order already.
        """
        require_group(name)
        # No front declares a subscription of the group meanwhile.
        with self._subscriptions.changing():
            before = self._groups.find(name)
            attempts = CONSUME_ATTEMPTS if before is None else before.attempts
            group = ConsumerGroup(name, ordered, attempts if retries is None else retries + 1)
            self._require_order(name, ordered=ordered)
            if not self._groups.add(group):
                self._groups.change(group)
        return group

    def groups(self) -> dict[str, ConsumerGroup]:
        """Return the groups by name, sorted."""
        return self._groups.all()

    def drop_group(self, name: str) -> None:
        """Drop the properties of a consumer group; the subscriptions stay.

        Raises:
            MQClientError: the group is not there, or receives in order.
        """
        known = self._groups.all()
        if name not in known:
            raise MQClientError(f"there is no group {name!r:.300}; there are: {', '.join(known) or 'none'}")
        self._require_order(name, ordered=False)
        self._groups.drop(name)

    def _require_order(self, name: str, *, ordered: bool) -> None:
        """Refuse another order than the subscriptions of a group have."""
        others = {
            each.name: topic
            for each in self._subscriptions.all()
            for topic in each.topics or ()
            if each.kind == "consumer" and each.name == subscription_name(name, topic) and each.ordered != ordered
        }
        if others:
            option = "--ordered" if ordered else "--no-ordered"
            first = " && ".join(self._commands.line("subscriptions", "alter", each, option) for each in sorted(others))
            raise MQClientError(
                f"group {name} receives {', '.join(sorted(others.values()))} {'out of' if ordered else 'in'} order"
                f" already; first: {first}"
            )


def require_topic(name: str, type_: str) -> None:
    """Refuse what is no topic.

    Raises:
        MQClientError: the name or the type is none.
    """
    try:
        checked_topic(name)
    except RefusedError as error:
        raise MQClientError(error.text) from error
    if type_ not in TYPES:
        raise MQClientError(f"the type of topic {name} is one of {', '.join(TYPES)}, not {type_!r:.80}")


def require_group(name: str) -> None:
    """Refuse what is no name of a consumer group.

    Raises:
        MQClientError: the name is none.
    """
    try:
        checked_group(name)
    except RefusedError as error:
        raise MQClientError(error.text) from error
