"""Renewing: messages of push consumers stay in their hands while the clients live, and half an hour at most."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.desk import Desk
from outbox.rocketmq.front.statuses import line_of
from outbox.runtime.clock import clock
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.subscriptions.receipts import Receipt

logger = logging.getLogger("outbox")

#: The time of a message in the hands of such a client, renewed so often, and for so long at most.
RENEWED = timedelta(seconds=60)
EVERY_SECONDS, LONGEST = 20.0, timedelta(minutes=30)
#: At most so many messages are renewed by one statement.
_MOST = 1000


@dataclass(slots=True)
class _Out:
    """A message in a client's hands, renewed until a moment by `clock`, as soon as the client has the answer."""

    desk: Desk
    client: str
    until: float
    answered: bool = False


class Renewals:
    """The messages that are renewed; in one event loop only.

    The front that handed a message out renews it. If the front is gone, the time of the message is over a minute later.
    """

    def __init__(self, threads: Threads, alive: Callable[[str], bool]) -> None:
        """`alive`: returns whether a client is there."""
        self._threads, self._alive = threads, alive
        self._out: dict[Receipt, _Out] = {}
        self._number = 0
        self._log = ThrottledLog(logger)

    def prepare(self, desk: Desk, client: str, receipts: Collection[Receipt]) -> None:
        """Note messages that are on their way to a client, who may be done with some before the last one is there."""
        until = clock() + LONGEST.total_seconds()
        self._out |= {receipt: _Out(desk, client, until) for receipt in receipts}

    def begin(self, receipts: Collection[Receipt]) -> None:
        """Renew messages from now on, but for those that were ended meanwhile."""
        for receipt in receipts:
            if receipt in self._out:
                self._out[receipt].answered = True

    def end(self, receipts: Collection[Receipt]) -> None:
        """Renew messages no more."""
        for receipt in receipts:
            self._out.pop(receipt, None)

    def number(self) -> int:
        """Return how many messages were renewed since the last call."""
        number, self._number = self._number, 0
        return number

    async def run(self) -> None:
        """Renew again and again, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        """Renew what clients that live have in their hands; a statement takes many of a desk."""
        now, by_desk = clock(), dict[Desk, list[Receipt]]()
        alive = {client: self._alive(client) for client in {out.client for out in self._out.values()}}
        self.end([receipt for receipt, out in self._out.items() if now >= out.until or not alive[out.client]])
        for receipt, out in self._out.items():
            if out.answered:
                by_desk.setdefault(out.desk, []).append(receipt)
        for desk, receipts in by_desk.items():
            for first in range(0, len(receipts), _MOST):
                # What was ended meanwhile may have been given another time.
                await self._renew(desk, [each for each in receipts[first : first + _MOST] if each in self._out])

    async def _renew(self, desk: Desk, receipts: Sequence[Receipt]) -> None:
        try:
            good = await self._threads.run(partial(desk.postpone, receipts, RENEWED))
        except Exception as error:
            self._log.warning("front: messages were not renewed, trying again: %s", line_of(error))
        else:
            self._number += sum(good)
            self.end([receipt for receipt, is_good in zip(receipts, good, strict=True) if not is_good])
