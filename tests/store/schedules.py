"""Random schedules of transactions, judged by the algebra of positions: what a window holds, and in which order."""

from __future__ import annotations

import random
from collections.abc import Iterable

from sqlalchemy import Connection

from outbox.model.message import Message
from outbox.model.position import EARLIEST, Window
from outbox.model.subscription import Selection
from outbox.outbox import Outbox
from outbox.store.database import Channel
from outbox.store.log.log import Extent, Limits, Log
from tests.support import probe

_MOST_OPEN = 4


def read_whole(log: Log, channel: Channel) -> list[Message]:
    """Return everything that is committed, in one read."""
    reading = log.read_on(channel, EARLIEST)
    assert reading.complete, "it was to fit into one read"
    return reading.messages


def paged(log: Log, channel: Channel, window: Window, most: int) -> list[int]:
    """Return the ids of a window, read page by page; a window has no more than `most` pages."""
    extent = log.extent(channel, window)
    ids: list[int] = []
    after = extent.first - 1
    while after < extent.last:
        reading = log.page(channel, window, extent, after, extent.last)
        ids += [row[0] for row in reading.rows]
        assert reading.complete or reading.reached is not None, "a page brought nothing, and was not the last"
        after = extent.last if reading.complete else reading.reached or 0
        most -= 1
        assert most >= 0, f"the pages of {window} do not end; so far they brought {ids}"
    return ids


class Schedule:
    """Some transactions in one thread: they append, use savepoints, stay open, commit or roll back, in any order.

    In between the schedule reads on. It knows what was committed between two reads, because nothing else happens
    meanwhile.
    """

    def __init__(self, outbox: Outbox, channel: Channel, seed: int) -> None:
        self._outbox = outbox
        self._channel = channel
        self._random = random.Random(seed)
        self._log = Log()
        self._most_open = 1 if outbox.database.dialect.locks.one_writer else _MOST_OPEN
        self._open: list[Connection] = []
        self._base = EARLIEST
        self._settled: set[int] = set()
        self._windows: list[tuple[Window, list[int]]] = []
        self._names = 0

    def run(self, steps: int) -> None:
        """Do `steps` random steps; then end every transaction, and read the rest."""
        acts = (self._begin, self._append, self._append, self._nest, self._end, self._read)
        try:
            for _ in range(steps):
                self._random.choice(acts)()
            while self._open:
                self._end()
            self._read()
        finally:
            for connection in self._open:
                connection.close()

    def check_again(self) -> None:
        """Read every window again: none may have changed, whatever was committed later."""
        for window, ids in self._windows:
            self._check_pages(window, ids)

    def _begin(self) -> None:
        if len(self._open) < self._most_open:
            connection = self._outbox.engine.connect()
            self._open.append(connection)
            connection.begin()
            self._send(connection)

    def _append(self) -> None:
        if self._open:
            self._send(self._random.choice(self._open))

    def _nest(self) -> None:
        if self._open:
            connection = self._random.choice(self._open)
            savepoint = connection.begin_nested()
            self._send(connection)
            savepoint.rollback() if self._random.random() < 0.5 else savepoint.commit()

    def _end(self) -> None:
        if self._open:
            connection = self._open.pop(self._random.randrange(len(self._open)))
            connection.rollback() if self._random.random() < 0.3 else connection.commit()
            connection.close()

    def _send(self, connection: Connection) -> None:
        count = self._random.choice((1, 1, 2, 5))
        self._names += count
        key = self._random.choice((None, "a", "b"))
        messages = [Message("alpha", str(self._names + n), key=key) for n in range(count)]
        self._outbox.send_all(connection, messages)

    def _read(self) -> None:
        reading = self._log.read_on(self._channel, self._base)
        assert reading.capture is not None
        assert reading.complete, "there are few messages"
        window = Window(self._base, reading.capture.position)
        numbers = probe.numbers(self._channel)
        expected = sorted(numbers.keys() - self._settled)
        held = sorted(id for id, number in numbers.items() if window.holds(number))
        assert held == expected, f"by the algebra {window} holds {held}; committed since the last read are {expected}"
        brought = [row[0] for row in reading.rows]
        assert brought == expected, f"a read brought {brought}; committed since the last one are {expected}"
        late = [id for id in expected if numbers[id] < self._base.head]
        self._check_extent(window, fresh=sorted({*expected} - {*late}), late=late)
        self._check_pages(window, expected)
        self._windows.append((window, expected))
        self._base, self._settled = window.target, set(numbers)

    def _check_extent(self, window: Window, *, fresh: list[int], late: list[int]) -> None:
        extent = self._log.extent(self._channel, window)
        expected = Extent(_ends(fresh), _ends(late))
        assert extent == expected, f"the extent of {window} is {extent}, not {expected}"

    def _check_pages(self, window: Window, expected: list[int]) -> None:
        for rows, filter in ((1, None), (2, None), (3, None), (1_000, None), (2, "TRUE")):
            log = Log(Limits(rows=rows), Selection(filter=filter))
            brought = paged(log, self._channel, window, most=len(expected) + 2)
            assert brought == expected, f"pages of {rows} rows, {filter=}: {brought}; {window} holds {expected}"


def _ends(ids: Iterable[int]) -> tuple[int, int] | None:
    ids = list(ids)
    return (ids[0], ids[-1]) if ids else None
