"""Held keys: the head of each, the messages behind, and how many messages a decision lets go on."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.admin.face import Face, awaited
from outbox.admin.results import HeldKey, KeyDetail
from outbox.model.limits import checked_key, require_numbers
from outbox.model.pausing import Pause
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.parked_messages import MOST_BEHIND, ParkedMessages
from outbox.store.subscriptions.subscriptions import Subscriptions


class HeldKeys(Face):
    """Questions about held keys."""

    def held(self, *, top: int = 50, name: str | None = None) -> tuple[HeldKey, ...]:
        """Return the held keys with the most messages behind, the most first.

        Args:
            top: at most so many.
            name: of the subscription; None: all. Check-backs are left out.

        Raises:
            SubscriptionError: there is no such subscription.
            ValueError: `top` is no whole number from 1 on.
        """
        require_numbers(top=top)
        with self._channel() as channel:
            found = list[HeldKey]()
            for subscription in _readers(channel, name):
                parked = ParkedMessages(channel, subscription.name)
                counts, is_minimum = parked.most_held(top)
                heads = parked.heads([*counts])
                found += [
                    HeldKey(
                        subscription=subscription.name,
                        key=key,
                        head=heads[key],
                        behind=number - 1,
                        behind_is_minimum=is_minimum,
                        pause=_pause(subscription, key),
                    )
                    for key, number in counts.items()
                    if key in heads
                ]
            return tuple(sorted(found, key=lambda each: (-each.behind, each.subscription, each.key))[:top])

    def key(self, key: str, *, name: str | None = None, limit: int = 100) -> tuple[KeyDetail, ...]:
        """Return what holds a key back, by subscription; empty: its messages flow.

        Messages that stand for themselves, such as delayed ones, hold nothing back, and are in `parked`.

        Args:
            key: of messages.
            name: of the subscription; None: all.
            limit: at most so many messages behind each head.

        Raises:
            SubscriptionError: there is no such subscription.
            InvalidMessageError: no message can have the key.
            ValueError: the limit is no whole number from 1 on.
        """
        require_numbers(limit=limit)
        key = checked_key(key)
        with self._channel() as channel:
            details = [_detail(channel, each, key, limit) for each in _readers(channel, name)]
            return tuple(each for each in details if each.head is not None or each.pause is not None)

    aheld = awaited(held)
    akey = awaited(key)


def _detail(channel: Channel, subscription: Subscription, key: str, limit: int) -> KeyDetail:
    parked = ParkedMessages(channel, subscription.name)
    messages, topics = parked.of_key(key, limit + 1), parked.topics_behind(key)
    behind = sum(topics.values())
    return KeyDetail(
        subscription=subscription.name,
        key=key,
        head=messages[0] if messages else None,
        behind=behind,
        behind_is_minimum=behind >= MOST_BEHIND,
        pause=_pause(subscription, key),
        messages=tuple(messages[1:]),
        topics=topics,
    )


def _readers(channel: Channel, name: str | None) -> Sequence[Subscription]:
    """Return the subscriptions that hold keys for people: a check-back has transactions instead."""
    found = Subscriptions(channel).all() if name is None else Subscriptions(channel).get_all(name)
    return [each for each in found if each.kind != "check"]


def _pause(subscription: Subscription, key: str) -> Pause | None:
    return next((each for each in subscription.pauses if each.key == key), None)
