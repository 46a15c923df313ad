"""The subscriptions of consumer groups to topics, in the tables of an outbox. All of it is SQL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from outbox.model.subscription import Declaration, Selection
from outbox.rocketmq.asked import Asked
from outbox.rocketmq.connections import Connections
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.calls import THREADS
from outbox.rocketmq.front.group_subscription import GroupSubscription
from outbox.rocketmq.front.polls import Popped
from outbox.rocketmq.front.settings import CONSUME_ATTEMPTS
from outbox.rocketmq.front.statuses import line_of
from outbox.rocketmq.hints import Hints
from outbox.rocketmq.names import subscription_name
from outbox.rocketmq.partition_pops import Kept
from outbox.rocketmq.popping import Popping, new_receipt, opening
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.database import Channel
from outbox.store.failure import in_one_line
from outbox.store.fronts.groups import ConsumerGroup, GroupRows
from outbox.store.subscriptions.receipts import Receipt, Receipts
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker.failures import log_away, passes
from outbox.writing.bare import BareOutbox

logger = logging.getLogger("outbox")


class GroupSubscriptions:
    """The subscriptions of groups, as a front has them, and their connections."""

    def __init__(self, outbox: BareOutbox) -> None:
        self.outbox = outbox
        self.connections = Connections(opening(outbox), THREADS)
        #: Any number of groups may have large messages before them.
        self.kept = Kept()
        self.closed = False
        self.hints = Hints(outbox, opening(outbox))

    def of(self, group: str, topic: str) -> GroupSubscription:
        """Return the subscription of a group to a topic."""
        return _Stored(self, group, topic)

    def close(self, seconds: float) -> None:
        """Close the connections, within so many seconds."""
        self.closed = True
        self.connections.close()
        self.hints.close(seconds)


class _Stored:
    """See `GroupSubscription`. Any number of fronts may have one of the same group and topic."""

    def __init__(self, all: GroupSubscriptions, group: str, topic: str) -> None:
        self._all, self._outbox, self._connections = all, all.outbox, all.connections
        self.name, self._group, self._topic = subscription_name(group, topic), group, topic
        self._log = ThrottledLog(logger)

    def pops(self, choice: MessageSelector) -> Callable[[Sequence[Asked]], Popped]:
        """Do as `GroupSubscription.pops`. None is handed out while the database is away, or a worker has the lease."""
        popping: Popping | None = None

        def pop(asked: Sequence[Asked]) -> Popped:
            nonlocal popping
            receipt, database = new_receipt(), self._outbox.database
            try:
                with self._connections.one() as channel, channel.database.explained():
                    if popping is None or not popping.known:
                        popping = self._popping(channel, choice)
                    return Popped(receipt, popping.pop(channel, receipt, asked))
            except Exception as error:
                if not passes(database, error, known=popping is not None and popping.known):
                    # The subscription was dropped or altered, perhaps: the next pop declares it anew.
                    popping = None
                    raise
                log_away(self._log, in_one_line(error, database.commands)[0])
                return Popped(receipt, [[] for _ in asked])

        return pop

    def _popping(self, channel: Channel, choice: MessageSelector) -> Popping:
        """Return what declares the subscription, and pops, by the row that the group has now."""
        group = GroupRows(channel).find(self._group) or ConsumerGroup(self._group, False, CONSUME_ATTEMPTS)
        declared = Declaration(
            name=self.name,
            destination=None,
            kind="consumer",
            topics=(self._topic,),
            on_dead="continue",
            ordered=group.ordered,
        )
        return Popping(
            self._outbox,
            declared,
            start="earliest",
            max_attempts=group.attempts,
            selection=Selection(topics=(self._topic,), tags=choice.tags, filter=choice.filter),
            kept=self._all.kept,
        )

    def ack(self, receipts: Sequence[Receipt]) -> list[bool]:
        return self._use(receipts, lambda of_group: of_group.ack(receipts))

    def postpone(self, receipts: Sequence[Receipt], wait: timedelta) -> list[bool]:
        return self._use(receipts, lambda of_group: of_group.postpone(receipts, wait))

    def times(self, receipts: Sequence[Receipt]) -> Mapping[Receipt, datetime]:
        return self._connections.call(lambda channel: Receipts(channel, self.name).times(receipts))

    def renew(self, times: Mapping[Receipt, tuple[datetime, datetime]], wait: timedelta) -> Collection[Receipt]:
        return self._connections.call(lambda channel: Receipts(channel, self.name).renew(times, wait))

    def dead_letter(self, receipts: Sequence[Receipt], error: str) -> list[bool]:
        return self._use(receipts, lambda of_group: of_group.dead_letter(receipts, error))

    def is_known(self) -> bool:
        return self._connections.call(lambda channel: Subscriptions(channel).find(self.name) is not None)

    def out(self, ids: Collection[int]) -> set[int]:
        return self._connections.call(lambda channel: Receipts(channel, self.name).out(ids))

    def give_back(self, popped: Popped) -> None:
        receipts = [Receipt(each.id or 0, popped.receipt) for some in popped.messages for each in some]
        try:
            self._use(receipts, lambda of_group: of_group.give_back(receipts))
        except Exception as error:
            # They come again when their time is over.
            self._log.warning("front: messages of a call that has ended were not given back: %s", line_of(error))
        if self._all.closed:  # the pop had not ended when the front did
            self._connections.close()
        else:
            self._outbox.notifier.hint()

    def _use(self, receipts: Sequence[Receipt], use: Callable[[Receipts], set[int]]) -> list[bool]:
        def used(channel: Channel) -> set[int]:
            return use(Receipts(channel, self.name))

        valid = self._connections.call(used) if receipts else set[int]()
        return [each.id in valid for each in receipts]
