"""Renewing: messages of push consumers stay in their hands while the clients live, and half an hour at most."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial

from outbox.model.verdict import describe
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.desk import Desk
from outbox.runtime.clock import clock
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.subscriptions.receipts import Receipt

logger = logging.getLogger("outbox")

#: The time of a message in the hands of such a client, renewed so often, and for so long at most.
RENEWED = timedelta(seconds=60)
EVERY_SECONDS, LONGEST = 20.0, timedelta(minutes=30)


class Renewals:
    """The messages that are renewed, by the desk that has handed them out; in one event loop only.

    The front that handed a message out renews it. If the front is gone, the time of the message is over a minute later.
    """

    def __init__(self, threads: Threads, alive: Callable[[str], bool]) -> None:
        """`alive`: returns whether a client is there."""
        self._threads, self._alive = threads, alive
        #: By desk and receipt: the client, and until when the message is renewed.
        self._out: dict[Desk, dict[Receipt, tuple[str, float]]] = {}
        self._log = ThrottledLog(logger)

    def begin(self, desk: Desk, client: str, receipts: Collection[Receipt]) -> None:
        """Renew messages from now on."""
        until = clock() + LONGEST.total_seconds()
        self._out.setdefault(desk, {}).update(dict.fromkeys(receipts, (client, until)))

    def end(self, desk: Desk, receipt: Receipt) -> None:
        """Renew a message no more."""
        self._out.get(desk, {}).pop(receipt, None)

    async def run(self) -> None:
        """Renew again and again, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew what clients that live have in their hands, by one statement for each desk."""
        for desk, out in list(self._out.items()):
            now = clock()
            over = [receipt for receipt, (client, until) in out.items() if now >= until or not self._alive(client)]
            for receipt in over:
                del out[receipt]
            receipts = [*out]
            if not receipts:
                del self._out[desk]
                continue
            try:
                good = await self._threads.run(partial(desk.postpone, receipts, RENEWED))
            except Exception as error:
                self._log.warning("front: messages were not renewed, trying again: %s", describe(error))
                continue
            for receipt, is_good in zip(receipts, good, strict=True):
                if not is_good:
                    out.pop(receipt, None)
