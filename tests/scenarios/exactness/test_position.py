"""The algebra of positions against brute force, and the reading of windows against a plain list of rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import Engine, insert, text

from outbox.errors import PositionError
from outbox.model.message import uuid7
from outbox.model.position import EARLIEST, Position, Progress, Window
from outbox.store.database import Channel, Database
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.operations.check import tables_of
from tests.support.readers import selection_of

#: Numbers of transactions in these tests lie below.
END = 24


@st.composite
def positions(draw: st.DrawFn) -> Position:
    """Any position, whether or not a server would ever be there."""
    head = draw(st.integers(0, END))
    return Position.of(head, draw(st.sets(st.integers(0, END))))


def settled(position: Position) -> set[int]:
    """The numbers that a position sees, one by one."""
    return {n for n in range(END + 2) if n < position.head and n not in set(position.open)}


@given(positions())
def test_a_position_sees_what_is_below_its_head_and_not_open(position: Position) -> None:
    """The definition."""
    assert {n for n in range(END + 2) if position.sees(n)} == settled(position)


@given(positions())
def test_a_position_survives_its_text(position: Position) -> None:
    """And the text says where the oldest open number is."""
    floor = min({*range(END + 2)} - settled(position))

    assert Position.parse(str(position)) == position
    assert str(position).split(":")[0] == str(floor)


@given(positions().filter(lambda position: position.head > 0 and 0 not in position.open))
def test_the_text_is_the_servers_own(snapshot_text: Channel, position: Position) -> None:
    """PostgreSQL reads it as a snapshot, and writes it in the same way."""
    rows = snapshot_text.rows("SELECT CAST(CAST(:text AS pg_snapshot) AS text)", text=str(position))

    assert rows == [(str(position),)]


@pytest.mark.parametrize("wrong", ["", "1:2", "1:2:x", "a:b:", "1:2:3:4", "1:-2:", "1:2:1;1"])
def test_what_is_no_position_is_refused(wrong: str) -> None:
    """With the form in the text."""
    with pytest.raises(PositionError):
        Position.parse(wrong)


@pytest.mark.parametrize(("head", "open"), [(-1, ()), (5, (3, 2)), (5, (2, 2)), (5, (5,)), (5, (-1,))])
def test_a_position_that_contradicts_itself_is_refused(head: int, open: tuple[int, ...]) -> None:
    """Open numbers rise, and lie below the head."""
    with pytest.raises(PositionError):
        Position(head, open)


@given(positions(), positions())
def test_a_union_sees_what_either_sees(one: Position, other: Position) -> None:
    """And nothing else."""
    assert settled(one.union(other)) == settled(one) | settled(other)
    assert one.union(other) == other.union(one)


@given(positions(), positions())
@example(Position(9, (3, 5)), Position(4, (1,)))
def test_a_window_holds_what_was_settled_between_its_ends(base: Position, target: Position) -> None:
    """Each number in exactly one of its two parts, wherever the ends lie."""
    window = Window(base, target)
    first, end = window.fresh
    fresh = {n for n in range(first, end) if n not in window.fresh_open}

    assert {n for n in range(END + 2) if window.holds(n)} == settled(target) - settled(base)
    assert sorted([*window.late, *fresh]) == sorted(settled(target) - settled(base))


@given(positions(), positions(), positions())
@example(Position(9, (3,)), Position(9), Position(4))
@example(Position(5), Position(9, (5, 6)), Position(8, (7,)))
def test_a_window_overlaps_what_another_position_sees(base: Position, target: Position, seen: Position) -> None:
    """Of a reader: whether rows of its window were purged."""
    window = Window(base, target)

    assert window.overlaps(seen) == any(window.holds(n) and seen.sees(n) for n in range(END + 2))


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "look"]), st.integers(0, 5)), max_size=60))
def test_windows_in_sequence_hold_every_transaction_once(events: list[tuple[str, int]]) -> None:
    """A server draws numbers and finishes transactions in any order; each is in the first window that can see it."""
    drawn, running, looks = 1, list[int](), [EARLIEST]
    finished: dict[int, int] = {}
    for kind, which in events:
        if kind == "begin":
            running.append(drawn)
            drawn += 1
        elif kind == "end" and running:
            finished[running.pop(which % len(running))] = len(looks)
        elif kind == "look":
            looks.append(Position.of(drawn, running))
    windows = [Window(base, target) for base, target in pairwise(looks)]

    for number, look in finished.items():
        holding = [place for place, window in enumerate(windows, start=1) if window.holds(number)]
        assert holding == ([look] if look < len(looks) else [])


def test_progress_inside_a_window_has_both_its_target_and_its_place() -> None:
    """One without the other means nothing."""
    for half in ({"target": Position(3)}, {"after": 3}):
        with pytest.raises(PositionError):
            Progress(Position(1), **half)


@pytest.fixture(scope="module")
def snapshot_text(postgres) -> Iterator[Channel]:
    """A connection that knows PostgreSQL's own snapshots."""
    from outbox import create_engine

    engine = create_engine(postgres.url())
    channel = Database(engine).open()
    yield channel
    channel.close()
    engine.dispose()


# Reading


@dataclass(frozen=True)
class Row:
    """A row of the log; `number` is what tells whether it is settled."""

    id: int
    number: int
    topic: str
    size: int


class Rows:
    """A log with chosen ids and numbers: what was read from it is compared with a walk over this list."""

    def __init__(self, engine: Engine, seed: int, count: int) -> None:
        self._engine = engine
        self._database = Database(engine)
        self._random = random.Random(seed)
        self.rows = self._chosen(count)
        self._insert()

    def _chosen(self, count: int) -> list[Row]:
        """Ids with gaps, some wide; neighbours of one transaction, and of others that began long before."""
        rows, id = list[Row](), 0
        for n in range(count):
            id += self._random.choice((1, 1, 1, 2, 7, 900, 5000))
            number = id if self._engine.dialect.name == "sqlite" else max(3, n // 3 - self._random.choice((0, 0, 1, 9)))
            topic = self._random.choice(("orders", "orders", "mails", "rare"))
            rows.append(Row(id, number, topic, self._random.choice((0, 10, 10, 200, 3000))))
        return rows

    def _insert(self) -> None:
        own = "xact_id" in tables_of(self._database).message.c
        values = [
            {"id": row.id, "message_id": uuid7(), "topic": row.topic, "slot": 0, "body": row.size * b"x"}
            | ({"xact_id": row.number} if own else {})
            for row in self.rows
        ]
        with self._engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox_message"))
            table = tables_of(self._database).message
            connection.execute(insert(table), values)

    def window(self) -> Window:
        """Any window: of positions where these rows end, with open transactions where the database has them."""
        low, high = sorted(self._random.choice(self.rows).number + self._random.randrange(2) for _ in range(2))
        return Window(self._position(low), self._position(high))

    def _position(self, head: int) -> Position:
        if self._engine.dialect.name == "sqlite":
            return Position(head)
        below = sorted({row.number for row in self.rows if row.number < head})
        return Position.of(head, self._random.sample(below, min(len(below), self._random.randrange(4))))

    def held(self, window: Window, topics: list[str] | None) -> list[int]:
        """The ids that the window holds, by a look at every row."""
        return [row.id for row in self.rows if window.holds(row.number) and (topics is None or row.topic in topics)]

    def limits(self) -> Limits:
        """From one row a page to all of them."""
        return Limits(rows=self._random.choice((1, 2, 7, 40, 500)), bytes=self._random.choice((1, 500, 9000, 10**6)))

    def topics(self) -> list[str] | None:
        """A selection, or none."""
        return self._random.choice((None, ["orders"], ["rare"], ["mails", "rare"]))

    def read(self, window: Window, limits: Limits, topics: list[str] | None) -> list[int]:
        """The ids that a cursor reads, page by page; now and then another takes over from the stored progress."""
        log, channel = Log(limits, selection_of(topics)), self._database.open()
        sizes = {row.id: row.size for row in self.rows}
        cursor, read = Cursor(log, Progress(window.base, window.target, -1)), list[int]()
        try:
            while True:
                batch = cursor.read(channel)
                ids = [message.id or 0 for message in batch.messages]
                assert len(ids) <= limits.rows
                # Small bodies come with their rows; of large ones those that fit beside them, or one.
                most = limits.bytes + max(limits.bytes, *sizes.values())
                assert sum(sizes[id] for id in ids) <= most
                assert [len(message.body) for message in batch.messages] == [sizes[id] for id in ids]
                read += ids
                if batch.end.target is None:
                    assert batch.end == Progress(window.target)
                    return read
                if self._random.random() < 0.3:
                    cursor = Cursor(log, batch.end)
        finally:
            channel.close()


@pytest.mark.storm
def test_a_window_is_read_page_by_page_exactly_once_in_the_order_of_ids(engine: Engine, full: bool) -> None:
    """Whatever its late and its fresh part, the limits of a page, the selection, and where a reader takes over."""
    seed = random.randrange(1_000_000)
    for round in range(40 if full else 4):
        rows = Rows(engine, seed + round, count=300)
        for _ in range(25):
            window, limits, topics = rows.window(), rows.limits(), rows.topics()
            case = f"seed {seed + round}: {window}, {limits}, {topics}"
            assert rows.read(window, limits, topics) == rows.held(window, topics), case


@pytest.mark.storm
def test_reading_on_from_any_position_brings_the_rest_of_the_log(engine: Engine, full: bool) -> None:
    """In one statement where it fits, else in pages; the rows are old, so everything not seen by the base is new."""
    seed = random.randrange(1_000_000)
    for round in range(40 if full else 4):
        rows = Rows(engine, seed + round, count=120)
        for _ in range(25):
            base, limits, topics = rows.window().base, rows.limits(), rows.topics()
            expected = rows.held(Window(base, Position(10**9)), topics)
            case = f"seed {seed + round}: {base}, {limits}, {topics}"
            assert read_on(engine, base, limits, topics) == expected, case


def read_on(engine: Engine, base: Position, limits: Limits, topics: list[str] | None) -> list[int]:
    """The ids that a cursor brings until it finds nothing more."""
    database = Database(engine)
    channel = database.open()
    cursor, read = Cursor(Log(limits, selection_of(topics)), Progress(base)), list[int]()
    try:
        while (batch := cursor.read(channel)).seen:
            read += [message.id or 0 for message in batch.messages]
    finally:
        channel.close()
    return read
