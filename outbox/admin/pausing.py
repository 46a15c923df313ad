"""Pause and resume: a person holds back a subscription or a key, or slows a subscription down."""

from __future__ import annotations

from outbox.admin.commands import backfills_of
from outbox.errors import SubscriptionError
from outbox.model.limits import checked_key, require_notes
from outbox.model.pausing import Pause, Pauses, without_pause
from outbox.model.subscription import Subscription
from outbox.store.database import Channel
from outbox.store.subscriptions.decisions import note
from outbox.store.subscriptions.subscriptions import Subscriptions

#: So many keys of a subscription may be paused at once.
MOST_KEYS = 1_000


def pause(
    channel: Channel,
    name: str,
    *,
    key: str | None = None,
    rate: float | None = None,
    by: str,
    reason: str | None = None,
) -> list[Subscription]:
    """Let the workers of a subscription hand nothing over, or less; return the subscriptions as stored.

    All workers follow within a poll. A call under way ends first, and its outcome is settled. Of a broadcast consumer
    all instances are paused. The messages of a key are parked, and `resume` releases them in order. All partitions have
    equal shares of a rate.
    """
    require_notes(by=by, reason=reason)
    order = Pause(since=channel.now(), by=by, reason=reason, key=key, rate=rate)
    with Subscriptions(channel).changing():
        meant = _meant(channel, name)
        for each in meant:
            Subscriptions(channel).pause(each.name, _with(each.pauses, order))
        note(channel, "pause", by=by, subscription=name, choice={"key": key, "rate": rate}, reason=reason)
    return [Subscriptions(channel).get(each.name) for each in meant]


def resume(channel: Channel, name: str, *, key: str | None = None, by: str | None = None) -> list[Subscription]:
    """Let the workers of a subscription go on at full speed; return the subscriptions as stored.

    Without a key, paused keys stay paused.
    """
    require_notes(by=by)
    with Subscriptions(channel).changing():
        meant = _meant(channel, name)
        if not any(each.key == key for subscription in meant for each in subscription.pauses):
            what = "not paused" if key is None else f"not paused for key {key!r}"
            look = channel.database.commands.line("status")
            raise SubscriptionError(f"{name} is {what}; to see all pauses, run: {look}")
        for each in meant:
            Subscriptions(channel).pause(each.name, without_pause(each.pauses, key))
        note(channel, "resume", by=by, subscription=name, choice={"key": key})
    return [Subscriptions(channel).get(each.name) for each in meant]


def _meant(channel: Channel, name: str) -> list[Subscription]:
    meant = Subscriptions(channel).get_all(name)
    if meant[0].kind == "extract":
        raise SubscriptionError(f"{name} is an extract, which nobody can pause; start it later")
    if meant[0].follows is not None:
        raise SubscriptionError(f"{name} follows {meant[0].follows}; name that one")
    return [*meant, *backfills_of(channel, meant)]


def _with(pauses: Pauses, pause: Pause) -> Pauses:
    """Return the pauses with another one, which replaces an earlier one of the same key, or of all messages."""
    if pause.rate is not None and not 0 < pause.rate < float("inf"):
        raise SubscriptionError(f"rate: must be above 0, not {pause.rate:g}; to hand nothing over, leave the rate out")
    if pause.key is not None:
        checked_key(pause.key)
        if pause.rate is not None:
            raise SubscriptionError("rate: a key has none; slow the subscription down, or pause the key without a rate")
    found = (*without_pause(pauses, pause.key), pause)
    if sum(each.key is not None for each in found) > MOST_KEYS:
        raise SubscriptionError(
            f"key: {MOST_KEYS} keys are paused, and no more can be; resume some, or pause the subscription"
        )
    return found
