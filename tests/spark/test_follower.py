"""Where the batches of a stream begin and end, without Spark: offsets go through JSON as they do there."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
from sqlalchemy import text

from outbox import Outbox, PositionError
from outbox.errors import OptionError, PurgedError
from outbox.model.position import Progress
from outbox.spark.offset import Offset
from outbox.spark.options import Options
from outbox.spark.planner import Planner
from tests.spark.streams import Stream


@pytest.fixture
def stream(engine):
    stream = Stream(engine)
    with closing(stream.follower):
        yield stream


def send(engine, *names, topic="orders"):
    with engine.begin() as connection:
        for name in names:
            Outbox(engine).send(connection, topic, name)


def test_pages_hold_exactly_as_many_rows_as_were_asked_for(engine, stream):
    send(engine, *"abcdefg")

    end, batches = stream.all(stream.start(), limit=3)

    assert batches == [[b"a", b"b", b"c"], [b"d", b"e", b"f"], [b"g"]]
    assert end.progress.target is None
    send(engine, "h")
    assert stream.next(end, 3)[1] == [b"h"]


def test_pages_hold_as_many_selected_rows(engine):
    stream = Stream(engine, topics="orders")
    for name in "abcdef":
        send(engine, f"{name}0", topic="mails")
        send(engine, name)

    assert stream.all(stream.start(), limit=4)[1] == [[b"a", b"b", b"c", b"d"], [b"e", b"f"]]


def test_without_a_limit_everything_comes_at_once(engine, stream):
    send(engine, *"abc")

    assert stream.all(stream.start())[1] == [[b"a", b"b", b"c"]]


def test_a_batch_is_the_same_when_it_is_planned_again(engine, stream):
    """After a crash Spark repeats the batch whose end its checkpoint has."""
    send(engine, *"abcde")
    start = stream.start()
    end, rows = stream.next(start, 3)
    send(engine, *"fgh")
    stream.begin()

    assert stream.rows(start, end) == rows == [b"a", b"b", b"c"]
    assert stream.all(end, 3)[1] == [[b"d", b"e"], [b"f", b"g", b"h"]]


def test_what_commits_late_comes_with_the_next_batch(pg_engine):
    stream = Stream(pg_engine)
    with pg_engine.connect() as open:
        Outbox(pg_engine).send(open, "orders", "late")
        send(pg_engine, *"abc")
        end, batches = stream.all(stream.start(), 2)
        assert batches == [[b"a", b"b"], [b"c"]]
        open.commit()
    send(pg_engine, "d")

    assert stream.all(end, 2)[1] == [[b"late", b"d"]]


def test_an_idle_stream_stays_where_it_is(engine):
    """A head that moves with every foreign transaction would have Spark write files and run empty batches."""
    stream = Stream(engine, topics="orders")
    send(engine, "a")
    start, _ = stream.all(stream.start())

    for _ in range(3):
        send(engine, "other", topic="mails")
        assert stream.next(start) == (start, [])
    send(engine, "b")
    assert stream.next(start)[1] == [b"b"]


def test_a_stream_of_a_silent_topic_moves_now_and_then(engine):
    """Else retention of what it does not select would look like a loss, when it begins again from its checkpoint."""
    stream = Stream(engine, topics="orders")
    send(engine, "a")
    start, _ = stream.all(stream.start())

    stream.next(start)
    stream.seconds += 601
    assert stream.next(start)[0] == start
    send(engine, "other", topic="mails")
    stream.seconds += 601
    end, rows = stream.next(start)

    assert rows == []
    assert end.progress.base.head > start.progress.base.head


def test_a_run_that_ends_by_itself_moves_before_it_does(engine):
    """It lives for seconds, so that a stream of such runs would never move, and retention would look like a loss."""
    stream = Stream(engine, topics="orders")
    send(engine, "a")
    start, _ = stream.all(stream.start())
    send(engine, "other", topic="mails")
    stream.begin()
    stream.follower.stop_at_now()

    end, batches = stream.all(start)
    purge(engine, stream.follower.now().progress.base)
    send(engine, "b")
    stream.begin()
    stream.follower.stop_at_now()

    assert (batches, stream.all(end)[1]) == ([[]], [[b"b"]])


def test_between_two_polls_nothing_is_asked(engine):
    stream = Stream(engine, pollIntervalMs=250)
    send(engine, "a")
    start, _ = stream.all(stream.start())
    send(engine, "b")

    assert stream.next(start) == (start, [])
    stream.seconds += 0.3
    assert stream.next(start)[1] == [b"b"]


def test_a_stream_begins_at_latest_or_at_a_position(engine):
    import outbox.spark

    send(engine, "a")
    latest = Stream(engine, startingPosition="latest")
    start, rows = latest.next(latest.start())
    position = outbox.spark.position(url=engine.url.render_as_string(hide_password=False))
    send(engine, "b")
    at_position = Stream(engine, startingPosition=position)
    send(engine, "c")

    assert rows == []
    assert latest.all(start)[1] == at_position.all(at_position.start())[1] == [[b"b", b"c"]]


def test_the_first_batch_of_a_stream_from_latest_is_the_same_when_it_is_repeated(engine):
    """Spark keeps where the first batch ends, and asks again where it begins."""
    stream = Stream(engine, startingPosition="latest")
    start = stream.start()
    send(engine, "before")
    end, rows = stream.next(start)
    assert rows == []
    send(engine, "after")
    stream.begin()

    assert stream.rows(stream.start(), end) == []
    assert stream.all(end)[1] == [[b"after"]]


def test_an_end_is_never_passed(engine, stream):
    send(engine, *"abc")
    start = stream.start()
    stream.follower.stop_at_now()
    send(engine, *"def")

    assert stream.all(start, 2)[1] == [[b"a", b"b"], [b"c"]]


def test_the_first_position_counts_until_it_is_stored(engine, stream):
    """Spark asks twice for where a stream begins."""
    latest = Stream(engine, startingPosition="latest")
    first = latest.start()
    send(engine, "a")

    assert latest.start() == first


def moved(offset, **server):
    return replace(offset, server=replace(offset.server, **server))


@pytest.mark.parametrize(
    ("before", "now"), [({"keys": "a,,b"}, {"keys": "a,b"}), ({"where.tags": "a,,b"}, {"where.tags": "a,b"})]
)
def test_a_comma_in_a_value_is_no_second_value(engine, before, now):
    first = Stream(engine, **before)
    send(engine, "a")
    end, _ = first.next(first.start())

    with pytest.raises(PositionError, match="the selection of the checkpoint is"):
        Stream(engine, **now).next(end)


@pytest.mark.parametrize(
    "change",
    [{"system": "7000000000000000001"}, {"timeline": "00000009"}, {"database": 1}, {"installation": "another"}],
)
def test_another_server_is_refused(pg_engine, change):
    """A promoted standby hands the same transaction ids out again, for other rows."""
    stream = Stream(pg_engine)
    send(pg_engine, "a")
    start = stream.start()
    end, _ = stream.next(start)

    with pytest.raises(PositionError, match=r"another server than .* Set onIdentityChange=replay"):
        stream.next(moved(end, **change))
    with pytest.raises(PositionError, match="another server than"):
        stream.rows(start, moved(end, **change))


def test_another_server_is_accepted_or_read_from_its_beginning(pg_engine):
    send(pg_engine, "a")
    first = Stream(pg_engine)
    end = moved(first.next(first.start())[0], system="7000000000000000001")
    send(pg_engine, "b")

    accepting, replaying = (Stream(pg_engine, onIdentityChange=how) for how in ("accept", "replay"))

    assert accepting.all(end)[1] == [[b"b"]]
    assert replaying.all(end, 1)[1] == [[b"a"], [b"b"]]


@pytest.mark.parametrize(("before", "now", "told"), [
    ({}, {"topics": "late"}, "is all topics, and now topics=late:"),
    ({"topics": "late"}, {}, "is topics=late, and now all topics:"),
    ({"topics": "late"}, {"topics": "orders,late"}, "is topics=late, and now topics=late,orders:"),
    ({"topics": "a"}, {"topics": "a", "halves": "true"}, "is topics=a, and now topics=a, halves=true:"),
    ({"where.tags": "relay"}, {"halves": "true"}, "is where.tags=relay, and now halves=true:"),
])  # fmt: skip
def test_a_checkpoint_of_another_selection_is_refused(engine, before, now, told):
    """What only the new selection takes lies behind the checkpoint, and would never come."""
    send(engine, "a")
    first = Stream(engine, **before)
    start = first.start()
    end, _ = first.next(start)

    for repeated in (lambda: Stream(engine, **now).next(end), lambda: Stream(engine, **now).rows(start, end)):
        with pytest.raises(PositionError, match=told) as caught:
            repeated()
        assert "set onSelectionChange=accept" in str(caught.value)


def test_another_selection_is_accepted_on_demand_and_is_the_checkpoints_from_then_on(engine):
    first = Stream(engine, topics="late")
    send(engine, "a")
    send(engine, "b", topic="late")
    start, _ = first.next(first.start())

    end, rows = Stream(engine, onSelectionChange="accept").next(start)
    send(engine, "c")

    assert (rows, end == start) == ([], False)
    assert Stream(engine).next(end)[1] == [b"c"]


def test_the_same_selection_in_other_words_is_the_same(engine):
    first = Stream(engine, topics="orders,late", createdFrom="2020-01-01T12:00:00+01:00")
    send(engine, "a")
    end, _ = first.next(first.start())
    send(engine, "b")

    assert Stream(engine, topics="late, orders", createdFrom="2020-01-01T11:00:00Z").next(end)[1] == [b"b"]


def test_a_long_selection_is_told_apart_by_a_digest(engine):
    first, other = (Stream(engine, keys=",".join(f"key-{n}" for n in range(most))) for most in (500, 501))

    offset = first.start()

    assert len(json.dumps(offset.to_dict())) < 700
    with pytest.raises(PositionError, match="the selection of the checkpoint is keys=key-0,"):
        other.next(offset)


def test_a_server_that_went_back_is_refused(engine, stream):
    """Restored from an older copy, it draws numbers again that were read."""
    send(engine, "a")
    end, _ = stream.next(stream.start())
    ahead = replace(end, progress=Progress(replace(end.progress.base, head=end.progress.base.head + 1000)))

    with pytest.raises(PositionError, match="below the position"):
        stream.next(ahead)
    with pytest.raises(PositionError, match="below the position"):
        Stream(engine, onIdentityChange="accept").next(ahead)
    assert Stream(engine, onIdentityChange="replay").next(ahead)[1] == [b"a"]


def purge(engine, position):
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET purged = :purged"), {"purged": str(position)})


def test_retention_that_passed_the_checkpoint_is_an_error(engine, stream):
    send(engine, "a")
    start, _ = stream.all(stream.start())
    send(engine, "b")
    end = stream.follower.latest(start, None)
    purge(engine, end.progress.base)

    with pytest.raises(PurgedError, match="were purged"):
        stream.rows(start, end)
    assert Stream(engine, failOnDataLoss="false").rows(start, end) == [b"b"]


@pytest.mark.parametrize("limit", [None, 1])
def test_what_was_purged_unread_is_told_at_the_next_look(engine, limit):
    """And not only when another message comes, which may be days later."""
    stream = Stream(engine)
    send(engine, *"ab")
    start, _ = stream.next(stream.start(), limit)
    send(engine, "c")
    gone = stream.follower.now().progress.base
    delete_all(engine)
    purge(engine, gone)

    for each in (stream, Stream(engine)):
        with pytest.raises(PurgedError, match="were purged unread from"):
            each.next(start, limit)
    assert Stream(engine, failOnDataLoss="false").next(start, limit) == (start, [])


def test_what_was_looked_at_before_it_was_purged_is_not_missed(engine):
    """There was nothing for the stream in it."""
    stream = Stream(engine, topics="orders")
    send(engine, "a")
    start, _ = stream.all(stream.start())
    send(engine, "other", topic="mails")
    # The purge comes no further than the look: transactions of other databases on the server move the position, too.
    gone = stream.follower.now().progress.base
    assert stream.next(start) == (start, [])
    delete_all(engine)
    purge(engine, gone)

    assert stream.next(start) == (start, [])


def delete_all(engine):
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message"))


def test_what_was_gone_at_the_beginning_is_not_missed(engine):
    """A stream that begins at earliest takes what there is; what goes later is missed, also within its first window."""
    send(engine, "gone")
    gone = Stream(engine).follower.now().progress.base
    delete_all(engine)
    purge(engine, gone)
    send(engine, *"abc")
    stream = Stream(engine)

    start = stream.start()
    end, rows = stream.next(start, 1)
    assert rows == [b"a"]
    assert stream.next(end, 1)[1] == [b"b"]
    purge(engine, stream.follower.now().progress.base)
    with pytest.raises(PurgedError, match="were purged"):
        stream.next(end, 1)


def test_an_idle_stream_reads_another_servers_log_from_its_beginning(engine, monkeypatch):
    """That nothing had come was said of the server before."""
    stream = Stream(engine, onIdentityChange="replay")
    send(engine, "a")
    end, _ = stream.all(stream.start())
    server, now = Planner.server, Planner.now
    monkeypatch.setattr(Planner, "server", lambda self: replace(server(self), system="7"))
    monkeypatch.setattr(Planner, "now", lambda self: replace(now(self), server=self.server()))

    assert stream.next(end)[1] == [b"a"]


@pytest.mark.parametrize("limit", [None, 1])
def test_what_is_purged_before_the_first_batch_is_repeated_is_an_error(engine, stream, limit):
    """Spark asks again where the stream begins; by then what is gone is more."""
    send(engine, *"ab")
    end, _ = stream.next(stream.start(), limit)
    purge(engine, stream.follower.now().progress.base)
    stream.begin()

    with pytest.raises(PurgedError, match="were purged"):
        stream.rows(stream.start(), end)


def test_replaying_after_a_purge_misses_nothing_of_before(pg_engine):
    send(pg_engine, "a")
    first = Stream(pg_engine)
    end = moved(first.next(first.start())[0], system="7000000000000000001")
    purge(pg_engine, first.follower.now().progress.base)

    assert Stream(pg_engine, onIdentityChange="replay").all(end)[1] == [[b"a"]]


@pytest.mark.parametrize("damage", [{"v": 2}, {"base": "nonsense"}, {"base": None}, {"after": 3}, {"selected": None}])
def test_an_unreadable_offset_says_what_to_do(engine, stream, damage):
    offset = stream.start().to_dict() | damage

    with pytest.raises(PositionError, match=r"cannot be read .* new checkpointLocation"):
        Offset.from_dict(offset)
    with pytest.raises(PositionError, match="cannot be read"):
        Offset.from_dict({"something": "else"})


def test_what_only_a_batch_has_is_refused(engine):
    with pytest.raises(OptionError, match="since: a stream begins at startingPosition"):
        Stream(engine, since="1:1:").options.require_stream()
    with pytest.raises(OptionError, match="table: only messages can be followed, not op"):
        Options({"url": "sqlite:////x", "table": "op"}).require_stream()
