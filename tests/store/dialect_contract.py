"""The contract of dialects as a suite: on a database whose dialect passes it, an outbox keeps its promises.

It talks to the database through the parts of `outbox.store` that workers are made of, and judges them by the algebra of
`outbox.model.position`, which uses no SQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine

from outbox.errors import SchemaError
from outbox.model.lease import Partition
from outbox.model.limits import HALF_TOPIC
from outbox.model.message import Message, uuid7
from outbox.model.position import EARLIEST, Progress
from outbox.model.slots import slot_of
from outbox.model.subscription import EVERYTHING, Declaration, Selection
from outbox.model.topics import Topics
from outbox.outbox import Outbox
from outbox.store.database import Channel, Database
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.statements import executor, run
from outbox.store.idempotency.inbox import InboxRows
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.store.dialect_parts import HalfContract, LeaseContract, ParkedContract, UpkeepContract
from tests.store.schedules import Schedule, read_whole
from tests.support import probe
from tests.support.dialects import outbox_of

_AWKWARD = " a'b\"c%s:x \\ é 😀 "
_SMALL = Limits(rows=4, bytes=10_000)


class DialectContract(LeaseContract, ParkedContract, HalfContract, UpkeepContract):
    """The suite. A subclass has a fixture `engine`: a database with empty tables; and a `dialect`, if it is no own."""

    #: The dialect under test; None: the library's own for this engine.
    dialect: ClassVar[Dialect | None] = None

    @pytest.fixture
    def engine(self) -> Engine:
        """An engine on a database with empty outbox tables."""
        raise NotImplementedError

    @pytest.fixture
    def outbox(self, engine: Engine) -> Iterator[Outbox]:
        """An outbox on the engine."""
        outbox = outbox_of(engine, self.dialect)
        yield outbox
        outbox.close()

    @pytest.fixture
    def database(self, outbox: Outbox) -> Database:
        """The database of the outbox."""
        return outbox.database

    @pytest.fixture
    def channel(self, database: Database) -> Iterator[Channel]:
        """A channel as workers have it."""
        with closing(database.open()) as channel:
            yield channel

    # Appending

    def test_ids_follow_the_order_of_the_list(self, outbox: Outbox, channel: Channel) -> None:
        """Append many messages in one call, with and without keys; their ids rise in the order of the list."""
        messages = [Message("alpha", str(n), key=f"k{n % 5}" if n % 3 else None) for n in range(500)]
        with outbox.begin() as session:
            ids = outbox.send_all(session, messages)

        found = read_whole(Log(), channel)

        assert ids == [message.message_id for message in messages]
        assert [message.message_id for message in found] == ids
        assert [message.id for message in found] == sorted({message.id or 0 for message in found})

    def test_every_field_comes_back_exactly(self, outbox: Outbox, channel: Channel) -> None:
        """Read every field back, of a message that is sent alone, and of the same among others."""
        fields: dict[str, Any] = {
            "body": b"\x00\xff\r\n",
            "key": _AWKWARD,
            "tags": _AWKWARD.strip(),
            "headers": {"X-Trace": "a:b'c%s", "name": "Zoë Ω"},
            "content_type": "application/x; a=b",
            "deliver_at": datetime(2031, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC),
            "expires_at": datetime(2032, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC),
        }
        plain: dict[str, Any] = {**dict.fromkeys(fields), "body": b"", "headers": {}}
        made = [Message("alpha", **values) for values in (fields, plain, fields, plain)]
        with outbox.begin() as session:
            for message in made[:2]:
                outbox.send_all(session, [message])
            outbox.send_all(session, made[2:])

        found = read_whole(Log(), channel)

        assert [{name: getattr(m, name) for name in fields} for m in found] == [fields, plain] * 2
        assert [(m.message_id, m.topic, m.attempt) for m in found] == [(m.message_id, "alpha", 1) for m in made]

    def test_times_are_those_of_the_database(self, outbox: Outbox, channel: Channel) -> None:
        """Check that a message is created, and its delay begins, between two readings of the database's clock."""
        log = Log()
        before = log.now(channel).now
        with outbox.begin() as session:
            outbox.send_all(session, [Message("alpha", b"", delay=timedelta(hours=1)), Message("alpha", b"")])
        after = log.now(channel).now

        delayed, plain = read_whole(log, channel)

        assert delayed.created_at is not None and delayed.deliver_at is not None and plain.created_at is not None
        assert before <= delayed.created_at <= plain.created_at <= after
        # SQLite's own arithmetic is good to the millisecond.
        assert abs(delayed.deliver_at - delayed.created_at - timedelta(hours=1)) <= timedelta(milliseconds=1)

    @pytest.mark.parametrize("size", [0, 1, 1_000, 65_536, 4 * 1024 * 1024])
    def test_a_body_of_any_size_comes_back(self, outbox: Outbox, channel: Channel, size: int) -> None:
        """Read bodies of every size, because large ones are fetched apart from their rows."""
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        with outbox.begin() as session:
            outbox.send(session, "alpha", body)
            outbox.send(session, "alpha", b"after it")

        found = read_whole(Log(), channel)

        assert [message.body for message in found] == [body, b"after it"]

    def test_what_is_rolled_back_is_gone(self, outbox: Outbox, channel: Channel) -> None:
        """Roll messages back with their transaction, or with their savepoint alone."""
        with suppress(ZeroDivisionError), outbox.begin() as session:
            outbox.send(session, "alpha", "gone")
            raise ZeroDivisionError
        with outbox.begin() as session:
            outbox.send(session, "alpha", "1")
            with suppress(ZeroDivisionError), session.begin_nested():
                outbox.send(session, "alpha", "gone")
                raise ZeroDivisionError
            with session.begin_nested():
                outbox.send(session, "alpha", "2")

        found = read_whole(Log(), channel)

        assert [message.body for message in found] == [b"1", b"2"]

    def test_a_dedup_key_is_good_once(self, outbox: Outbox, channel: Channel) -> None:
        """Write a dedup key once, in one call and over transactions; one that was rolled back does not count."""
        with suppress(ZeroDivisionError), outbox.begin() as session:
            outbox.send(session, "alpha", "gone", dedup_key=_AWKWARD)
            raise ZeroDivisionError
        with outbox.begin() as session:
            twins = [Message("alpha", "1", dedup_key=_AWKWARD), Message("alpha", "again", dedup_key=_AWKWARD)]
            ids = outbox.send_all(session, [*twins, Message("alpha", "2")])
        with outbox.begin() as session:
            later = outbox.send(session, "alpha", "later", dedup_key=_AWKWARD)

        found = read_whole(Log(), channel)

        assert [message.body for message in found] == [b"1", b"2"]
        assert ids == [found[0].message_id, found[0].message_id, found[1].message_id]
        assert later == ids[0]

    def test_a_consumer_handles_a_message_once(self, outbox: Outbox) -> None:
        """Handle a message once per consumer; after a rollback of the consumer's transaction it is not handled."""
        inbox = InboxRows(outbox.database, timedelta(days=7))
        message, another = uuid7(), uuid7()
        answers = []
        for end, consumer, id in [
            ("rollback", _AWKWARD, message), ("commit", _AWKWARD, message), ("commit", _AWKWARD, message),
            ("commit", "another", message), ("commit", _AWKWARD, another),
        ]:  # fmt: skip
            with outbox.engine.connect() as connection:
                connection.begin()
                answers.append(run(executor(connection), inbox.handle(consumer, id)) is not None)
                getattr(connection, end)()

        assert answers == [True, True, False, True, True]

    def test_tables_that_are_not_there_are_an_error_that_says_so(self, engine: Engine) -> None:
        """Raise an error that names the command that makes the tables."""
        elsewhere = outbox_of(engine, self.dialect, schema="nowhere")

        with pytest.raises(SchemaError, match="outbox db upgrade"), elsewhere.begin() as session:
            elsewhere.send(session, "alpha", b"")

    # Reading

    @pytest.mark.parametrize("seed", range(12))
    def test_windows_hold_what_was_committed_between_their_positions(
        self, outbox: Outbox, channel: Channel, seed: int
    ) -> None:
        """Find each row in one window, in the order of the ids, whatever is open meanwhile or commits late.

        The schedule knows what was committed when, and the algebra. A whole read, every page of the same window, its
        extent, and a second read when all transactions have ended, must bring the same.
        """
        schedule = Schedule(outbox, channel, seed)
        schedule.run(steps=60)

        schedule.check_again()

    def test_an_early_writer_who_commits_late_is_in_the_next_window(self, outbox: Outbox, channel: Channel) -> None:
        """Find ids that are lower than those that were read before: no reader may go on behind the last id."""
        if outbox.database.dialect.locks.one_writer:
            pytest.skip("one writer at a time cannot be overtaken")
        log = Log()
        with outbox.engine.connect() as slow:
            outbox.send(slow, "alpha", "slow")
            with outbox.engine.begin() as quick:
                outbox.send(quick, "alpha", "quick")
            first = log.read_on(channel, EARLIEST)
            outbox.send(slow, "alpha", "slow again")
            slow.commit()
        assert first.capture is not None

        second = log.read_on(channel, first.capture.position)

        assert [[m.body for m in each.messages] for each in (first, second)] == [[b"quick"], [b"slow", b"slow again"]]

    def test_an_idle_read_brings_nothing(self, outbox: Outbox, channel: Channel) -> None:
        """Read nothing, also beside a transaction that is open."""
        log = Log()
        base = log.now(channel).position
        with outbox.engine.connect() as connection:
            outbox.send(connection, "alpha", "not yet")
            idle = [log.read_on(channel, base) for _ in range(3)]

        assert [(reading.rows, reading.complete, reading.seen) for reading in idle] == [([], True, 0)] * 3

    @pytest.mark.parametrize("rows", [3, 4, 5, 6, 8, 21])
    def test_a_read_keeps_to_its_rows(self, outbox: Outbox, channel: Channel, rows: int) -> None:
        """Read page by page what is too much for one read, once and in order."""
        with outbox.begin() as session:
            outbox.send_all(session, [Message("alpha", str(n)) for n in range(rows)])

        batches = list(batches_of(channel, _SMALL, Selection()))

        assert [int(message.body) for batch in batches for message in batch] == list(range(rows))
        assert max(map(len, batches)) <= _SMALL.rows

    def test_a_read_keeps_to_its_bytes(self, outbox: Outbox, channel: Channel) -> None:
        """Read no more bytes than the limit, but always one message, however large."""
        sizes = [10, 9_000, 9_000, 30_000, 10, 2_000, 2_001, 2_002, 6_000, 0]
        with outbox.begin() as session:
            outbox.send_all(session, [Message("alpha", bytes(size)) for size in sizes])

        batches = list(batches_of(channel, _SMALL, Selection()))

        assert [len(message.body) for batch in batches for message in batch] == sizes
        for batch in batches:
            large = [len(message.body) for message in batch if len(message.body) > _SMALL.inline]
            assert len(large) <= 1 or sum(large) <= _SMALL.bytes

    def test_a_selection_chooses(self, outbox: Outbox, channel: Channel) -> None:
        """Select by topic; half messages on demand."""
        messages = [Message(topic, b"") for topic in ["alpha", "beta", "half", "gamma|%", "delta"] * 3]
        for half in messages[2::5]:
            half.topic = HALF_TOPIC
        with outbox.begin() as session:
            outbox.send_all(session, messages)

        found = [(each, limits, read_topics(channel, limits, each)) for limits in _LIMITS for each, _ in _SELECTIONS]

        assert found == [(each, limits, topics * 3) for limits in _LIMITS for each, topics in _SELECTIONS]

    def test_patterns_are_read_as_python_reads_them(self, outbox: Outbox, channel: Channel) -> None:
        """Match `*` only: neither what LIKE nor what GLOB knows besides, and no letter of the other case."""
        with outbox.begin() as session:
            outbox.send_all(session, [Message(topic, b"") for topic in _NASTY_TOPICS])

        found = [
            (chosen, limits, read_topics(channel, limits, Selection(topics=chosen)))
            for limits in _LIMITS
            for chosen in _NASTY_PATTERNS
        ]

        assert found == [
            (chosen, limits, [topic for topic in _NASTY_TOPICS if Topics.of(chosen).matches(topic)])
            for limits in _LIMITS
            for chosen in _NASTY_PATTERNS
        ]

    @pytest.mark.parametrize("limits", [Limits(), _SMALL], ids=["whole", "paged"])
    @pytest.mark.parametrize("number", [1, 2, 3, 5])
    def test_partitions_share_the_log(self, outbox: Outbox, channel: Channel, limits: Limits, number: int) -> None:
        """Read each message in one partition, which owns the slot of its key; also one that was committed late."""
        relay = Subscriptions(channel).declare(Declaration(name="relay", destination="callable:contract"))
        partitions = replace(relay, partitions=number).all_partitions()
        readers = [(each, Cursor(Log(limits, EVERYTHING, each), Progress(EARLIEST))) for each in partitions]
        read: list[tuple[Partition, Message]] = []
        with ExitStack() as stack:
            many = 1 if outbox.database.dialect.locks.one_writer else 2
            writers = [stack.enter_context(outbox.engine.connect()) for _ in range(many)]
            for n in range(24):
                outbox.send(writers[n % many], "alpha", f"{n}", key=f"key-{n % 7}")
                outbox.send(writers[n % many], "alpha", f"{n} without a key")
            for writer in writers:
                writer.commit()
                for partition, cursor in readers:
                    while (batch := cursor.read(channel)).seen:
                        read += [(partition, message) for message in batch.messages]

        bodies = [message.body.decode() for _, message in read]
        slots = outbox.database.slots
        assert sorted(bodies) == sorted(text for n in range(24) for text in (f"{n}", f"{n} without a key"))
        assert all(partition.owns(slot_of(message.key, slots)) for partition, message in read if message.key)

    def test_a_position_never_falls(self, outbox: Outbox, channel: Channel) -> None:
        """Check heads also with a log that is purged empty: the next message is in the next window, once."""
        log = Log()
        heads = [log.now(channel).position.head]
        for number in range(3):
            with outbox.begin() as session:
                outbox.send(session, "alpha", str(number))
            heads.append(log.now(channel).position.head)
        base = log.now(channel).position
        probe.empty(channel)
        empty = log.read_on(channel, base)
        assert empty.capture is not None
        heads.append(empty.capture.position.head)
        with outbox.begin() as session:
            outbox.send(session, "alpha", "next")

        found = log.read_on(channel, empty.capture.position)

        assert heads == sorted(heads)
        assert [message.body for message in found.messages] == [b"next"]


#: All rows in one read, and read by read.
_LIMITS = (Limits(), _SMALL)
#: Selections, each with the topics of what it chooses.
_SELECTIONS: tuple[tuple[Selection, list[str]], ...] = (
    (Selection(), ["alpha", "beta", "gamma|%", "delta"]),
    (Selection(topics=("beta", "gamma|%")), ["beta", "gamma|%"]),
    (Selection(topics=(HALF_TOPIC,)), [HALF_TOPIC]),
    (Selection(topics=("epsilon",)), []),
    (Selection(topics=("*a",)), ["alpha", "beta", "delta"]),
    (Selection(topics=("gamma|%", "al*")), ["alpha", "gamma|%"]),
    (Selection(topics=("!*a",)), ["gamma|%"]),
    (Selection(topics=("!alpha", "!g*%", "*e*a*")), ["beta", "delta"]),
    (Selection(topics=("RMQ_*", "be*")), ["beta"]),
    (Selection(topics=("*", "!delta")), ["alpha", "beta", "gamma|%"]),
)
#: Topics that hold what LIKE or GLOB could read in another way.
_NASTY_TOPICS = (
    "a", "a%b", "a_b", "axb", "a.b", "A.b", "A_B", "a|b", "a-b", "a..b", "a.x.b", "a%%b", "%", "_", "%b", "b%", "|",
    "half", "HALF_X", "aXbY", "a%xb", "a_xb", "x" * 249,
)  # fmt: skip
_NASTY_PATTERNS = (
    ("a%b",), ("a_b",), ("a%*",), ("a_*",), ("A*",), ("a*B",), ("*.b",), ("a.*.b",), ("*|*",), ("%*",), ("_*",),
    ("*%",), ("a*", "!a%*"), ("!a_b",), ("!*_*",), ("!A*", "!*B"), ("*a*b*", "a.b"), ("a-*", "a%b", "!*%"),
    ("HALF*",), ("!half*",), ("*", "!a"),
)  # fmt: skip


def batches_of(channel: Channel, limits: Limits, selection: Selection) -> Iterator[list[Message]]:
    """Yield the log from its beginning in batches, as a worker reads it."""
    cursor = Cursor(Log(limits, selection), Progress(EARLIEST))
    while (batch := cursor.read(channel)).seen:
        yield batch.messages


def read_topics(channel: Channel, limits: Limits, selection: Selection) -> list[str]:
    """Return the topics of what a selection chooses of the log, in the order of the reads."""
    return [message.topic for batch in batches_of(channel, limits, selection) for message in batch]
