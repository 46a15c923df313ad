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


def draw(*, backlog=None):
    hours = [{"topic": "orders", "hour": NOON, "messages": 3}]
    plots.delivery(Path("x.png"), per_hour=hours, parked=[], backlog=backlog or {"relay": 0})


def test_a_single_hour_stands_in_the_middle(drawn):
    draw()
    plots.written(Path("x.png"), [{"topic": "orders", "hour": NOON, "messages": 3}])

    for figure in drawn:
        first, last = span_of(titled(figure, "Messages written"))
        assert (last - first, NOON - first) == (420 * MINUTE, 180 * MINUTE)


@pytest.mark.parametrize(
    ("backlog", "says"), [({"relay": 0, "a": 0}, ["everything is settled"]), ({"relay": 4}, ["4"])]
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
    (missing,) = (text for text in axes.texts if text.get_text())
    assert {bar.get_width() for bar in axes.patches} == {94_000}
    assert axes.get_xlim()[1] > 3_094_000
    assert 3_000_000 < missing.xy[0] < 3_094_000
