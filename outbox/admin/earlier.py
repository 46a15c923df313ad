"""Earlier messages that a subscription does not read: told when a person alters it, or orders a backfill."""

from __future__ import annotations

import logging
from dataclasses import replace

from outbox.errors import SubscriptionError
from outbox.model.subscription import Selection, Subscription
from outbox.model.topics import ANYTHING, Topics, covers
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.operations.status import passed

logger = logging.getLogger("outbox")


def tell_passed(channel: Channel, before: Subscription, after: Subscription) -> None:
    """Log how many messages a wider selection came too late for, and the backfill for these."""
    gained = _gained(before.selection, after.selection)
    if gained is None or after.kind not in ("relay", "consumer"):
        return
    number = passed(channel, replace(after, topics=gained.chosen()))
    if not number.number:
        return
    again = ""
    if not _are_new(before.selection, after.selection):
        again = ", in which handled messages come again"
    backfill = channel.database.commands.line("subscriptions", "backfill", after.name, "--topics", _list(gained))
    logger.warning(
        "%s has passed %s of its selection of now, and does not go back; for a backfill%s, run: %s",
        after.name, counted(number, "earlier message"), again, backfill,
    )  # fmt: skip


def tell_unread(channel: Channel, stored: Subscription, backfilled: tuple[str, ...] | None) -> None:
    """Log that later messages of a backfill's topics are not handled, and how to alter the subscription."""
    read, wanted = Topics.of(stored.topics), Topics.of(backfilled)
    missing = [each for each in wanted.included if not _is_read(read, each)]
    if not missing:
        return
    topics = _list(Topics.of(sorted({*(stored.topics or (ANYTHING,)), *missing} - {f"!{each}" for each in missing})))
    alter = channel.database.commands.line("subscriptions", "alter", stored.name, "--topics", topics)
    logger.warning(
        "%s does not read all of these topics: messages from after the backfill are not handled; to read the topics"
        " from now on, and learn which backfill to run then, run: %s",
        stored.name, alter,
    )  # fmt: skip


def _are_new(before: Selection, after: Selection) -> bool:
    """Return whether a selection has gained nothing but topics that were not read before."""
    return (before.tags, before.filter) == (after.tags, after.filter) and _new_topics(before, after) is not None


def _gained(before: Selection, after: Selection) -> Topics | None:
    """Return the topics whose messages are selected now, and were not before; None: no topics.

    Where no list describes these topics, return all topics of the selection.
    """
    more_tags = before.tags is not None and (after.tags is None or not set(after.tags) <= set(before.tags))
    if more_tags or before.filter not in (None, after.filter):
        return Topics.of(after.topics)
    if after.topics == before.topics or all(_is_read(Topics.of(before.topics), each) for each in _parts(after)):
        return None
    return _new_topics(before, after) or Topics.of(after.topics)


def _new_topics(before: Selection, after: Selection) -> Topics | None:
    old, new = Topics.of(before.topics), Topics.of(after.topics)
    if old.exceptions:
        return None
    try:
        return new.without(old.included)
    except SubscriptionError:
        return None


def _parts(selection: Selection) -> tuple[str, ...]:
    return Topics.of(selection.topics).included


def _is_read(topics: Topics, part: str) -> bool:
    """Return whether all topics of a name or a pattern are read, as far as it is easy to tell."""
    return any(covers(each, part) for each in topics.included) and all(
        not Topics.of([each]).shares(Topics.of([part])) for each in topics.exceptions
    )


def _list(topics: Topics) -> str:
    chosen = topics.chosen()
    return ANYTHING if chosen is None else ",".join(chosen)
