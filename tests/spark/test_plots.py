"""Pictures of little are as readable as pictures of much; how those of much look is in docs/img."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.spark.reports import plots

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written, in place of their files."""
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: figures.append(self))
    return figures


def titled(figure, words):
    """The panel with these words in its title."""
    (found,) = (axes for axes in figure.get_axes() if words in axes.get_title("left"))
    return found


def span_of(axes):
    """From when to when its time axis goes."""
    from matplotlib.dates import num2date

    return tuple(num2date(number) for number in axes.get_xlim())


def texts_of(axes):
    return [text.get_text() for text in axes.texts]


def batch(name, minute, seconds):
    return {"subscription": name, "settled_at": NOON + minute * MINUTE, "seconds": seconds, "messages": 3}


def times(name, **percentiles):
    return {"subscription": name, "messages": 3, **percentiles}


def draw(*, batches=(), times=(), backlog=None):
    hours = [{"topic": "orders", "hour": NOON, "messages": 3}]
    plots.delivery(
        Path("x.png"), per_hour=hours, batches=batches, times=times, parked=[], backlog=backlog or {"relay": 0}
    )


def test_a_single_batch_is_a_point_among_minutes(drawn):
    draw(batches=[batch("relay", 3, 0.12)], times=[times("relay", p50=0.12, p95=0.12, p99=0.12)])

    axes = titled(drawn[0], "From writing to settled: relay")
    assert span_of(axes) == (NOON - 2 * MINUTE, NOON + 8 * MINUTE)
    assert texts_of(axes) == ["one batch: 120 ms"]
    assert len(axes.collections[0].get_offsets()) == 1


def test_percentiles_that_are_the_same_share_a_line(drawn):
    both = [batch("relay", 3, 0.1), batch("relay", 4, 2.0)]
    draw(batches=both, times=[times("relay", p50=0.1, p95=2.0, p99=2.0)])

    axes = titled(drawn[0], "relay")
    assert (texts_of(axes), len(axes.lines)) == (["p50: 100 ms", "p95, p99: 2.0 s"], 2)


def test_many_batches_have_the_time_that_they_need(drawn):
    draw(batches=[batch("relay", 10 * n, 1.0) for n in range(9)], times=[times("relay", p50=1, p95=1, p99=1)])

    first, last = span_of(titled(drawn[0], "relay"))
    assert NOON - 10 * MINUTE < first < NOON < NOON + 80 * MINUTE < last < NOON + 90 * MINUTE


def test_a_single_hour_stands_in_the_middle(drawn):
    draw()
    plots.written(Path("x.png"), [{"topic": "orders", "hour": NOON, "messages": 3}])

    for figure in drawn:
        first, last = span_of(titled(figure, "Messages written"))
        assert (last - first, NOON - first) == (420 * MINUTE, 180 * MINUTE)


@pytest.mark.parametrize(
    ("backlog", "says"), [({"relay": 0, "a": 0}, ["everything is settled"]), ({"relay": 4}, [" 4"])]
)
def test_a_backlog_of_nothing_is_said_and_not_drawn(drawn, backlog, says):
    draw(backlog=backlog)

    assert texts_of(titled(drawn[0], "Not settled yet")) == says


def test_what_there_is_nothing_of_is_said_in_the_middle(drawn):
    plots.order(Path("x.png"), summary=[{"messages": 1200, "keys": 1}], breaks=[])
    draw()

    for axes in (titled(drawn[0], "Versions"), titled(drawn[1], "Parked messages")):
        (text,) = axes.texts
        assert (text.get_position(), text.get_ha(), text.get_va()) == ((0.5, 0.5), "center", "center")
    assert texts_of(titled(drawn[0], "Versions")) == ["none: the versions of 1 key rise over 1,200 messages"]


def test_a_single_break_is_a_point_among_minutes(drawn):
    found = {"key": "a", "version": 1, "previous": 2, "problem": "fell", "created_at": NOON}
    counts = {"messages": 2, "keys": 1, "broken_keys": 1, "fell": 1, "repeated": 0}
    plots.order(Path("x.png"), summary=[counts], breaks=[found])

    assert span_of(titled(drawn[0], "Versions")) == (NOON - 5 * MINUTE, NOON + 5 * MINUTE)
    assert titled(drawn[0], "1 key with such versions")


def test_ranges_of_an_archive_are_drawn_as_far_as_they_were_compared(drawn):
    """The title says what was done, also where the messages have been purged since."""
    row = {"rows": 100, "archived": 100, "same": True}
    ranges = [{"first_id": 0, "last_id": 99_999, **row}, {"first_id": 100_000, "last_id": 100_304, **row}]
    plots.archive(Path("x.png"), ranges)

    axes = titled(drawn[0], "Old messages and their copies in the archive: every range is the same")
    assert [bar.get_x() for bar in axes.patches] == [0, 100_000]


def test_the_last_range_of_an_archive_has_a_bar_as_wide_as_the_others(drawn):
    """However few of its ids were compared: it may be the one that differs."""
    same = {"rows": 100, "archived": 100, "same": True}
    ranges = [{"first_id": at * 100_000, "last_id": at * 100_000 + 99_999, **same} for at in range(30)]
    last = {"first_id": 3_000_000, "last_id": 3_000_304, "rows": 100, "archived": 99, "same": False}
    plots.archive(Path("x.png"), [*ranges, last])

    axes = titled(drawn[0], "1 of 31 ranges differ")
    (missing,) = axes.texts
    assert {bar.get_width() for bar in axes.patches} == {94_000}
    assert axes.get_xlim()[1] > 3_094_000
    assert 3_000_000 < missing.get_position()[0] < 3_094_000


@pytest.mark.parametrize(
    ("first", "hours", "wanted"),
    [
        (0, 24, ["00:00\n02 Mar 2026", "04:00", "08:00", "12:00", "16:00", "20:00", "00:00\n03 Mar 2026"]),
        (9, 8, ["10:00\n02 Mar 2026", "12:00", "14:00", "16:00"]),
        (0, 24 * 8, ["03 Mar\n2026", "05 Mar", "07 Mar", "09 Mar"]),
    ],
)
def test_an_axis_names_the_day_of_its_first_tick_and_each_day_that_follows(drawn, first, hours, wanted):
    begins = datetime(2026, 3, 2, first, tzinfo=UTC)
    rows = [{"topic": "orders", "hour": begins + hour * 60 * MINUTE, "messages": 3} for hour in range(hours)]
    plots.written(Path("x.png"), rows)

    axis = titled(drawn[0], "Messages written").xaxis
    assert [label.get_text() for label in axis.get_ticklabels()] == wanted
    assert axis.get_major_formatter().get_offset() == ""


def test_an_axis_names_each_year(drawn):
    begins = datetime(2025, 12, 30, tzinfo=UTC)
    rows = [{"topic": "orders", "hour": begins + day * 1440 * MINUTE, "messages": 3} for day in range(4)]
    plots.written(Path("x.png"), rows)

    labels = [label.get_text() for label in titled(drawn[0], "Messages written").xaxis.get_ticklabels()]
    assert [label for label in labels if "\n" in label] == ["30 Dec\n2025", "01 Jan\n2026"]
