"""The registry: rows of the clients of all fronts, by which a front knows the clients of another front.

A front that asks whether a client is there makes its row as old as one that is due, and a front with the client writes
the row anew. So nothing is written for a client whose calls and stream are at one front.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from sys import intern

from outbox.rocketmq.connections import Connections
from outbox.rocketmq.front.calls import Threads
from outbox.rocketmq.front.clients import ALIVE_SECONDS, Clients
from outbox.rocketmq.front.protocol import numbers
from outbox.rocketmq.front.statuses import line_of
from outbox.runtime.clock import clock as own_clock
from outbox.runtime.throttled_log import ThrottledLog
from outbox.store.database import Channel
from outbox.store.fronts.clients import ClientRow, ClientRows

logger = logging.getLogger("outbox")

#: Seconds between two exchanges, two looks for questions of other fronts, and two prunings.
EXCHANGE_SECONDS, _LOOK_SECONDS, _PRUNE_SECONDS = 1.0, 5.0, 600.0
_KINDS = numbers("ClientType")
_NAMES = {number: name for name, number in _KINDS.items()}
#: Longer ids are not stored, because a primary key has little room.
_LONGEST_ID = 255


class Registry:
    """Writes new clients of a front, all by one statement, and reads unknown clients."""

    def __init__(
        self,
        clients: Clients,
        topics: Mapping[str, object],
        rows: Connections,
        threads: Threads,
        *,
        clock: Callable[[], float] = own_clock,
    ) -> None:
        """`topics`: the topics of the catalog."""
        self._clients, self._topics = clients, topics
        self._rows, self._threads = rows, threads
        self._clock = clock
        self._look_at = self._prune_at = 0.0
        self._log = ThrottledLog(logger)

    async def alive(self, ids: Collection[str]) -> set[str]:
        """Return which clients are there, at this front or at another one, which answers until the next call."""
        here = {id for id in ids if self._clients.alive(id)}
        others = [id for id in ids if id not in here and len(id) <= _LONGEST_ID]
        if others:
            try:
                here |= await self._threads.run(partial(self._rows.call, partial(_ask, others)))
            except Exception as error:
                self._log.warning("front: other fronts were not asked for clients, trying again: %s", line_of(error))
        return here

    async def exchange(self) -> None:
        """Write clients that are due, and read unknown clients, if there are any, and what other fronts ask."""
        due, unknown = self._clients.due(), self._clients.unknown()
        rows = [ClientRow(id, _NAMES[kind], topics) for id, kind, topics in due if len(id) <= _LONGEST_ID]
        looks, prunes = self._clock() >= self._look_at, self._clock() >= self._prune_at
        if not (rows or unknown or looks):
            return
        exchange = partial(_exchange, rows, unknown, prunes=prunes)
        found, asked = await self._threads.run(partial(self._rows.call, exchange))
        self._look_at = self._clock() + _LOOK_SECONDS
        if prunes:
            self._prune_at = self._clock() + _PRUNE_SECONDS
        self._clients.noted(due)
        self._clients.asked(asked)
        known = [
            (each.id, _KINDS[each.kind], frozenset(intern(name) for name in each.topics if name in self._topics))
            for each in found
            if each.kind in _KINDS
        ]
        self._clients.learned(unknown, known)


def _ask(clients: Collection[str], channel: Channel) -> set[str]:
    return ClientRows(channel).ask(clients, timedelta(seconds=ALIVE_SECONDS))


def _exchange(
    due: Collection[ClientRow], unknown: Collection[str], channel: Channel, *, prunes: bool
) -> tuple[list[ClientRow], list[str]]:
    rows = ClientRows(channel)
    if due:
        rows.seen(due)
    if prunes:
        rows.prune()
    return rows.find(unknown) if unknown else [], rows.asked()
