"""Reading ahead: batches come in the order of the log, whoever reads them and whatever goes wrong."""

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from itertools import count
from threading import current_thread

import pytest

from outbox import Message, Outbox
from outbox.model.position import Position, Progress
from outbox.model.verdict import Verdict
from outbox.store.database import Channel, Database
from outbox.store.log.cursor import Batch, Cursor
from outbox.store.log.log import Limits, Log
from outbox.worker.fetch import AHEAD, Prefetcher
from outbox.worker.policy import HandlerPolicy
from outbox.worker.settings import Settings
from tests.support.readers import Collector, send, texts, worker
from tests.support.waiting import eventually

FIRST = Progress(Position.parse("1:1:"))


class Counting(Cursor):
    """A cursor that counts its reads, and fails where it is told to."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, FIRST)
        self.reads = 0
        self.fails_at = 0

    def read(self, channel: Channel) -> Batch:
        """As ever, if it is not the one that fails."""
        self.reads += 1
        if self.reads == self.fails_at:
            raise ConnectionError("away")
        return super().read(channel)


@pytest.fixture
def cursor(engine):
    """Ten messages, one a batch."""
    outbox = Outbox(engine)
    send(outbox, *"0123456789")
    return Counting(Log(Limits(rows=1)))


@pytest.fixture
def reader(engine, cursor):
    database = Outbox(engine).database
    with closing(database.open()) as channel, closing(Prefetcher(channel, cursor)) as reader:
        yield reader


def taken(reader: Prefetcher) -> list[str]:
    """What comes from here on."""
    found: list[str] = []
    while (batch := reader.read()).seen:
        found += texts(batch.messages)
        if batch.end.target is not None:
            reader.read_ahead()
    return found


def test_what_is_read_ahead_comes_in_order(reader):
    assert taken(reader) == list("0123456789")


def test_no_more_is_read_ahead_than_asked_for(reader, cursor):
    reader.read()
    reader.read_ahead()
    reader.read_ahead()

    assert eventually(lambda: cursor.reads == 1 + AHEAD)
    assert texts(reader.read().messages) == ["1"]
    assert cursor.reads == 1 + AHEAD


def test_a_look_takes_nothing(reader):
    reader.read()
    looks = [reader.more() for _ in range(3)]

    assert looks == [True] * 3
    assert taken(reader) == list("123456789")
    assert reader.more() is False


def test_a_look_at_what_was_read_ahead_leaves_it_in_order(reader):
    reader.read()
    reader.read_ahead()

    assert reader.more() is True
    assert taken(reader) == list("123456789")


def test_what_failed_ahead_is_raised_when_its_turn_comes(reader, cursor):
    cursor.fails_at = 3
    reader.read()
    reader.read_ahead()

    assert texts(reader.read().messages) == ["1"]
    assert reader.more() is False
    with pytest.raises(ConnectionError):
        reader.read()


def test_what_is_forgotten_is_read_again(reader):
    first = reader.read()
    reader.read_ahead()
    assert reader.more()
    reader.forget().move_to(first.end)

    assert taken(reader) == list("123456789")


def test_while_a_batch_of_a_backlog_is_handled_the_next_are_read(engine, monkeypatch):
    """On a thread of their own: the server works while the destination does."""
    outbox, readers, read = Outbox(engine), list[str](), Cursor.read
    send(outbox, *"0123456789")

    def told(cursor: Cursor, channel: Channel) -> Batch:
        readers.append(current_thread().name)
        return read(cursor, channel)

    class Patient(Collector):
        """Its first call ends when enough was read."""

        def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
            if not self.batches:
                self.in_time = eventually(lambda: readers.count("outbox-reader") >= AHEAD)
            return super().__call__(messages)

    monkeypatch.setattr(Cursor, "read", told)
    handler = Patient()
    patient = HandlerPolicy(deadline=timedelta(minutes=2))
    worker(outbox.database, handler, settings=Settings(limits=Limits(rows=1)), policy=patient).until_empty()

    assert handler.in_time
    assert texts(handler.messages) == list("0123456789")


def without_connections(monkeypatch: pytest.MonkeyPatch, *, opened: int = 0) -> list[str]:
    """Have the server refuse all connections after so many; the threads that were refused."""
    tries, refused, open = count(1), list[str](), Database.open

    def full(database: Database) -> Channel:
        if next(tries) > opened:
            refused.append(current_thread().name)
            raise ConnectionError("sorry, too many clients already")
        return open(database)

    monkeypatch.setattr(Database, "open", full)
    return refused


def test_without_a_connection_of_its_own_everything_is_read_on_the_workers(reader, monkeypatch):
    refused = without_connections(monkeypatch)

    assert (taken(reader), refused) == (list("0123456789"), ["outbox-reader"])


def test_without_a_connection_of_its_own_a_look_takes_nothing(reader, monkeypatch):
    without_connections(monkeypatch)

    assert (reader.more(), taken(reader), reader.more()) == (True, list("0123456789"), False)


def test_a_worker_sends_on_while_the_server_gives_no_more_connections(engine, monkeypatch, caplog):
    """Two are enough: one to work on, and one that renews the lease."""
    outbox, collector = Outbox(engine), Collector()
    send(outbox, *"0123456789")
    without_connections(monkeypatch, opened=2)

    worker(outbox.database, collector, settings=Settings(limits=Limits(rows=1))).until_empty()

    assert texts(collector.messages) == list("0123456789")
    said = "no connection to read ahead, reading on without: unexpected ConnectionError"
    assert [each.getMessage() for each in caplog.records if "read ahead" in each.getMessage()] == [said]
