"""Dead letters by RocketMQ's name for them."""

from __future__ import annotations

from contextlib import closing

from outbox.errors import MQClientError
from outbox.rocketmq.limits import DLQ
from outbox.rocketmq.message_ext import MessageExt
from outbox.rocketmq.names import subscription_name
from outbox.store.subscriptions.parked_messages import DEAD, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.writing.bare import BareOutbox


def dead_letters(outbox: BareOutbox, topic: str, *, limit: int = 100, after: int = -1) -> list[MessageExt]:
    """Return the dead letters of a consumer group, in the order of the log: of all topics, also those at a front.

    Args:
        outbox: where the group is.
        topic: %DLQ%<group>.
        limit: at most so many; one more where the last one is also a letter of the group at a front.
        after: only those behind this `queue_offset`.

    Raises:
        MQClientError: the topic has not this form.
    """
    group = topic.removeprefix(DLQ)
    if not group or group == topic:
        raise MQClientError(f"the topic of dead letters is {DLQ}<group>, not {topic!r:.60}")
    with closing(outbox.database.open()) as channel:
        at_fronts = subscription_name(group, "")
        names = [each.name for each in Subscriptions(channel).all() if each.name.startswith(at_fronts)]
        letters = {name: ParkedMessages(channel, name) for name in (group, *names)}
        dead = sorted((each.id, name) for name, of in letters.items() for each in of.list(DEAD, limit, after))
        # The next page begins behind the last id.
        last = max((id for id, _ in dead[:limit]), default=None)
        found = [letters[name].message(id) for id, name in dead if last is not None and id <= last]
    # A letter that a person has discarded meanwhile is left out.
    return [MessageExt.of(each) for each in found if each is not None]
