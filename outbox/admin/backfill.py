"""Backfills: earlier messages of some topics are handled again, beside a subscription that goes on."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from outbox.admin.earlier import tell_unread
from outbox.errors import SubscriptionError
from outbox.model.subscription import Start, Subscription, backfill_of, require_start
from outbox.model.topics import chosen_topics
from outbox.store.database import Channel
from outbox.store.log.log import Log
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.subscriptions import Subscriptions

#: Generations are numbers of 31 bits.
_GENERATIONS = 2**31 - 1


def backfill(
    channel: Channel, name: str, topics: Sequence[str], start: Start = "earliest", *, by: str | None = None
) -> Subscription:
    """Have the workers of a subscription handle earlier messages of some topics; return the backfill as stored.

    The workers handle the messages up to the position of now, and the subscription goes on. The backfill has the
    policy, tags, filter and number of partitions of the subscription. When every message is handled and nothing is
    parked, the backfill is dropped. No order is promised between the backfill and the subscription, which need not have
    the topics, and whose workers need not run yet.
    """
    require_start(start)
    if start == "latest":
        raise SubscriptionError("a backfill handles earlier messages: it begins at earliest or at a time")
    subscriptions = Subscriptions(channel)
    with subscriptions.changing():
        stored = subscriptions.get(name)
        _require_fitting(stored)
        if subscriptions.find(backfill_of(name)) is not None:
            drop = channel.database.commands.line("subscriptions", "drop", backfill_of(name))
            raise SubscriptionError(f"a backfill of {name} is under way: wait for its end, or run: {drop}")
        now = Log().now(channel).position
        made = replace(
            stored,
            name=backfill_of(name),
            kind="backfill",
            topics=chosen_topics(topics),
            # By chance, so that nothing of an earlier backfill counts that a process still knows.
            generation=1 + secrets.randbelow(_GENERATIONS),
            grace=timedelta(0),
            stop_at=now,
            next_partitions=None,
        )
        subscriptions.create_at(made, [subscriptions.first_progress(start, now)] * made.partitions)
        note(channel, "backfill", by=by, subscription=name, choice={"topics": made.topics, "start": start})
    tell_unread(channel, stored, made.topics)
    return subscriptions.get(made.name)


def _require_fitting(stored: Subscription) -> None:
    if stored.kind not in ("relay", "consumer"):
        raise SubscriptionError(f"{stored.name} is of the kind {stored.kind}; a backfill is for a relay or a consumer")
    if not stored.is_used:
        raise SubscriptionError(f"{stored.name} has no destination yet: run its relay once, which declares all of it")
