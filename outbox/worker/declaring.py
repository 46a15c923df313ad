"""Declares the subscription of a worker, again after each reconnection; never again after a drop."""

from __future__ import annotations

import logging
from dataclasses import replace

from outbox.errors import SubscriptionError
from outbox.model.subscription import Declaration, Start, Subscription
from outbox.runtime.named import named
from outbox.runtime.text import counted
from outbox.store.database import Channel
from outbox.store.subscriptions.notices import RefusalNotice
from outbox.store.subscriptions.subscriptions import Subscriptions

logger = logging.getLogger("outbox")


class Declaring:
    """The declaration of one subscription, over all connections of a worker."""

    def __init__(self, declared: Declaration, start: Start | None) -> None:
        """`start`: where a new subscription begins; None: another process creates the subscription."""
        self._declared = declared
        self._start = start
        #: True when the subscription was declared before.
        self.known = False
        self._refusal_notice = RefusalNotice(declared.name)

    def declare(self, channel: Channel, owner: str) -> Subscription | None:
        """Return the subscription as stored, created if new; note a refusal for `outbox status`.

        None: the process that creates the subscription has not yet, or not again.

        Raises:
            SubscriptionError: stored otherwise, or dropped since the first declaration; see `Subscriptions.declare`.
        """
        with self._refusal_notice.noted(channel, owner):
            subscriptions, declared = Subscriptions(channel), self._declared
            found = subscriptions.find(declared.name)
            if found is None and self._start is None:
                self.known = False
                return None
            if self.known and found is None:
                # Declared anew, the subscription would begin at its start, and everything would be sent again.
                raise SubscriptionError(f"subscription {declared.name!r} was dropped under this worker")
            if self.known:
                # Once it has begun, it does not depend on the others: what is altered of one route stops that one only.
                subscription = subscriptions.declare(replace(declared, beside=()), None)
            else:
                # Only a worker that begins stores hosts: one that reconnects does not undo what a newer one has stored.
                subscription = subscriptions.store_hosts(subscriptions.declare(declared, self._start), declared)
                self.known = True
                self._say_if_partitions_differ(channel, subscription)
        if found is None or not found.is_used:
            start, about = self._start if found is None else "earliest", named("begins", subscription=subscription.name)
            logger.info("subscription %s begins at %s", subscription.name, start, extra=about)
        return subscription

    def _say_if_partitions_differ(self, channel: Channel, stored: Subscription) -> None:
        """Log that the stored number of partitions counts: another number is for a new subscription."""
        asked = self._declared.partitions
        if asked not in (None, stored.partitions, stored.next_partitions):
            number = counted(stored.partitions, "partition")
            alter = channel.database.commands.line("subscriptions", "alter", stored.name, "--partitions", asked)
            logger.warning("%s has %s, and not %d; to change that, run: %s", stored.name, number, asked, alter)
