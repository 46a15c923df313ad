"""What one read brings, of the log and of what is parked: in order, never more than the limits of rows and bytes."""

from contextlib import closing
from datetime import timedelta

import pytest

from outbox import Message, Outbox
from outbox.model.parking import Parking
from outbox.model.position import Position, Progress
from outbox.store.log.cursor import Cursor
from outbox.store.log.log import Limits, Log
from outbox.store.subscriptions.parked import Parked
from outbox.worker.settings import Settings
from tests.support.parked import by_id
from tests.support.readers import Collector, send, texts, worker

SMALL = Limits(rows=10, bytes=100_000)


@pytest.mark.smoke("writes and reads batches of large bodies")
@pytest.mark.alone
@pytest.mark.parametrize("backlog", [True, False], ids=["backlog", "steady"])
def test_a_batch_keeps_to_the_limits_of_rows_and_bytes(engine, full, backlog):
    """Small bodies come with their rows, large ones one after the other; one always does."""
    outbox = Outbox(engine)
    limits = Limits() if full else SMALL
    size = 4 * 1024 * 1024 if full else 60_000
    sizes = [size if n % 3 else 10 for n in range(200 if full else 60)] + [0, 1, limits.inline, limits.inline + 1]
    handler = Collector()
    reader = worker(outbox.database, handler, settings=Settings(limits=limits))
    for n, length in enumerate(sizes):
        with outbox.begin() as session:
            outbox.send(session, "orders", bytes([n % 256]) * length)
        if not backlog and n % 5 == 0:
            reader.until_empty()
    reader.until_empty()

    assert [(len(m.body), m.body[:1]) for m in handler.messages] == [
        (length, bytes([n % 256])[:length]) for n, length in enumerate(sizes)
    ]
    assert max(len(batch) for batch in handler.batches) <= limits.rows
    for batch in handler.batches:
        large = [len(message.body) for message in batch if len(message.body) > limits.inline]
        assert len(large) <= 1 or sum(large) <= limits.bytes
        assert sum(len(message.body) for message in batch) - sum(large) <= limits.bytes


@pytest.mark.parametrize("rows", [9, 10, 11, 12, 25])
def test_a_window_of_any_size_around_the_limit_comes_whole_and_once(engine, rows):
    outbox = Outbox(engine)
    send(outbox, *map(str, range(rows)))
    with closing(outbox.database.open()) as channel:
        cursor = Cursor(Log(SMALL), Progress(Position(0)))
        found: list[str] = []
        for _ in range(20):
            batch = cursor.read(channel)
            assert len(batch.messages) <= SMALL.rows
            found += texts(batch.messages)
            if not batch.seen:
                break

    assert found == [str(n) for n in range(rows)]


def test_what_is_set_aside_keeps_to_the_limits_of_rows_and_bytes(engine, channel):
    """A body that is larger than the limit comes alone, wherever it stands; with keys or without, all come in order."""
    outbox = Outbox(engine)
    sizes = [250_000, *[60_000 if n % 3 else 10 for n in range(40)], 250_000, 10, *[40_000] * 5, *[10] * 30, 250_000]
    with outbox.begin() as session:
        outbox.send_all(
            session, [Message("t", bytes(size), key=f"k{n}" if n % 2 else None) for n, size in enumerate(sizes)]
        )
    parked, now = Parked(channel, "relay"), timedelta(0)
    with channel.transaction():
        parked.park(by_id({Parking(state="retry", holds=True, delay=now): list(range(1, len(sizes) + 1))}))

    portions: list[list[Message]] = []
    while ready := parked.ready([], SMALL.rows, SMALL.bytes):
        portions.append([each.message for each in ready])
        parked.remove([message.id or 0 for message in portions[-1]])

    assert [(m.id, len(m.body)) for portion in portions for m in portion] == list(enumerate(sizes, 1))
    lengths = [[len(message.body) for message in portion] for portion in portions]
    assert [each for each in lengths if len(each) > 1 and sum(each) > SMALL.bytes] == []
    assert max(map(len, lengths)) == SMALL.rows
