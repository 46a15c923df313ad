"""Calls about the messages of a group and topic: those that wait, and acknowledgements, which go together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice

from outbox.rocketmq.asked import Asked
from outbox.rocketmq.expressions import MessageSelector
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.group_subscription import GroupSubscription
from outbox.rocketmq.front.handles import Handle, expired
from outbox.rocketmq.front.joining import Joining
from outbox.rocketmq.front.polls import Polls, Popped
from outbox.rocketmq.hints import Hints
from outbox.store.subscriptions.receipts import Receipt

#: So many choices of a group and topic are kept, and so many groups, each choice with messages that it has read.
_MOST_CHOICES, _MOST_GROUPS = 4, 256
#: So many pops run at once, each with messages that nobody has yet.
POPS_AT_ONCE = 2


class Groups:
    """The groups and topics that clients call for; in one event loop only."""

    def __init__(
        self, subscription_of: Callable[[str, str], GroupSubscription], hints: Hints, threads: Threads
    ) -> None:
        """`subscription_of`: returns that of a group to a topic."""
        self._subscription_of, self._hints, self._threads = subscription_of, hints, threads
        self._turns = asyncio.Semaphore(POPS_AT_ONCE)
        #: By group and topic, those first that were not asked for longest.
        self._groups: dict[tuple[str, str], GroupCalls] = {}

    def of(self, name: str, topic: str) -> GroupCalls:
        """Return the calls of a group and topic."""
        key = name, topic
        found = self._groups.pop(key, None) or self._made(*key)
        self._groups[key] = found
        # A call adds one at most and looks at two, so the number does not grow for long.
        for oldest in [*islice(self._groups, 2)] if len(self._groups) > _MOST_GROUPS else ():
            group = self._groups.pop(oldest)
            if group.busy or group is found:
                self._groups[oldest] = group
        return found

    def _made(self, name: str, topic: str) -> GroupCalls:
        return GroupCalls(self._subscription_of(name, topic), self._threads, self._hints, self._turns)

    def forget(self, names: Collection[str]) -> None:
        """Begin anew with some groups."""
        for key in [each for each in self._groups if each[0] in names]:
            self._groups.pop(key).end()

    def end(self) -> None:
        """Answer the calls that wait."""
        for group in self._groups.values():
            group.end()


class GroupCalls:
    """The calls of one group and topic."""

    def __init__(
        self, subscription: GroupSubscription, threads: Threads, hints: Hints, turns: asyncio.Semaphore
    ) -> None:
        """`turns`: of the pops of all groups."""
        self.subscription = subscription
        self.acks: Joining[Receipt, bool] = Joining(threads, subscription.ack)
        self._threads, self._hints, self._turns = threads, hints, turns
        self._polls: dict[MessageSelector, Polls] = {}

    @property
    def busy(self) -> bool:
        """True while a call waits for messages, or for what becomes of its acknowledgements."""
        return self.acks.busy or any(each.waits for each in self._polls.values())

    def handle(self, text: str) -> Handle:
        """Return the handle in a text.

        Raises:
            RefusedError: the text is no handle, or one of another group or topic.
        """
        handle = Handle.read(text)
        if not handle.is_of(self.subscription.name):
            raise expired()
        return handle

    def polls(self, choice: MessageSelector) -> Polls:
        """Return the calls that wait for what a choice selects."""
        found = self._polls.get(choice)
        if found is None:
            idle = [each for each, polls in self._polls.items() if not polls.waits]
            for each in idle[: len(self._polls) - _MOST_CHOICES + 1]:
                del self._polls[each]
            found = self._polls[choice] = self._made(choice)
        return found

    def end(self) -> None:
        """Answer the calls that wait."""
        for each in self._polls.values():
            each.end()

    def give_back(self, popped: Popped) -> None:
        """Let others have messages that nobody gets."""
        self._threads.soon(partial(self.subscription.give_back, popped))

    def _made(self, choice: MessageSelector) -> Polls:
        pops, threads, give_back = self.subscription.pops(choice), self._threads, self.subscription.give_back

        async def pop(asked: Sequence[Asked]) -> Popped:
            return await threads.run(partial(pops, asked), unwanted=give_back)

        return Polls(pop, self.give_back, self._hints.wake, self._turns)
