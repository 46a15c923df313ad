"""Pictures of the reports, from rows as plain values: drawn on the driver, by matplotlib."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from outbox.errors import MissingExtraError
from outbox.runtime.text import counted
from outbox.spark.reports.delivery import AGES
from outbox.spark.reports.reconciliation import STATES

Row = Mapping[str, Any]
#: Types of matplotlib, whose type hints cover neither times nor styles.
Axes: TypeAlias = Any
Figure: TypeAlias = Any

#: The colours of Okabe and Ito. People who cannot tell red from green can tell these apart, too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#9A9A9A")
_BAD, _EMPTY = "#D55E00", "#F6F6F6"
#: Older messages have darker colours.
_AGE_COLOURS = ("#FDE0C5", "#F8B58B", "#EE8A5B", "#D1603A", "#8F3B1B")
_STATE_COLOURS = ("#009E73", "#9A9A9A", "#56B4E9", _BAD)

_STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 120,
}
#: The most topics and bars that a reader can tell apart. The rest is summed up, or left out; a title may say how many
#: are left out.
_MOST_TOPICS, _MOST_BARS = 5, 14
_HOUR = timedelta(hours=1)
#: The shortest time axes, of hours and of moments. A single moment has no length, and would be drawn on an axis of
#: years; a few hours would have wider bars than many.
_LEAST_HOURS, _LEAST_TIME = 7 * _HOUR, timedelta(minutes=10)


def delivery(path: Path, *, per_hour: Sequence[Row], parked: Sequence[Row], backlog: Mapping[str, int]) -> None:
    """Draw the delivery report: rows of `messages_per_hour` and `parked_by_age`, and the backlog by subscription."""
    with _drawn(path, (10, 7)) as figure:
        top, bottom = figure.subfigures(2, 1, hspace=0.04)
        _per_hour(top.subplots(), per_hour)
        left, right = bottom.subplots(1, 2, width_ratios=(3, 2))
        _parked(left, parked)
        right.set_title("Not settled yet")
        if any(backlog.values()):
            _bars(right, backlog, _COLOURS[0])
        else:
            _nothing(right, "everything is settled" if backlog else "there is no subscription")


def written(path: Path, per_hour: Sequence[Row]) -> None:
    """Draw rows of `messages_per_hour` alone."""
    with _drawn(path, (10, 3.4)) as figure:
        _per_hour(figure.subplots(), per_hour)


def transactions(path: Path, rows: Sequence[Row]) -> None:
    """Draw the reconciliation of half messages: rows of `states`."""
    shown = sorted(rows, key=lambda row: -sum(_counts(row).values()))[:_MOST_BARS]
    with _drawn(path, (10, 1.9 + 0.45 * len(shown))) as figure:
        axes = figure.add_subplot()
        _title(axes, "Half messages, by what became of them", left_out=len(rows) - len(shown))
        if not shown:
            _nothing(axes, "there are no half messages")
            return
        names = [f"{_short(row['producer_group'] or '(purged)')}  →  {_short(row['topic'])}" for row in shown]
        parts = {state: [_counts(row)[state] for row in shown] for state in STATES}
        pending = ("open", "parked", "contradictions")
        said = [", ".join(f"{row[name]:,} {name}" for name in pending if row[name]) for row in shown]
        for text, row in zip(_stacked(axes, names, parts, _STATE_COLOURS, labels=said), shown, strict=True):
            if row["contradictions"]:
                text.set(color=_BAD, weight="bold")
        axes.margins(x=0.4)


def order(path: Path, *, summary: Sequence[Row], breaks: Sequence[Row]) -> None:
    """Draw the order audit: rows of `summary`, and some or all rows of `breaks`."""
    messages, keys, fell, repeated, broken = (
        sum(row[name] for row in summary) if breaks or name in ("messages", "keys") else 0
        for name in ("messages", "keys", "fell", "repeated", "broken_keys")
    )
    with _drawn(path, (10, 6.2 if breaks else 2.2)) as figure:
        if not breaks:
            axes = figure.add_subplot()
            axes.set_title("Versions that do not rise")
            _nothing(axes, f"none: the versions of {_counted(keys, 'key')} rise over {_counted(messages, 'message')}")
            return
        steps, worst = figure.subplots(2, 1, height_ratios=(1.3, 1))
        steps.set_title(f"Versions that do not rise: {fell + repeated:,} among {messages:,} messages")
        for problem, number, colour in (("fell", fell, _BAD), ("repeated", repeated, _COLOURS[1])):
            own = [row for row in breaks if row["problem"] == problem]
            moments, differences = [row["created_at"] for row in own], [row["version"] - row["previous"] for row in own]
            steps.scatter(moments, differences, s=22, color=colour, label=f"{number:,} {problem}")
        steps.set(ylabel="version minus the one before", xlabel="written at (UTC)")
        _legend_beside(steps)
        moments = [row["created_at"] for row in breaks]
        _times(steps, min(moments), max(moments), _LEAST_TIME)
        counts = dict(Counter(row["key"] for row in breaks).most_common(8))
        _title(worst, f"{_counted(broken, 'key')} with such versions", left_out=broken - len(counts))
        _bars(worst, counts, _BAD)


def archive(path: Path, ranges: Sequence[Row]) -> None:
    """Draw the comparison of a database with its archive: rows of `compare`."""
    with _drawn(path, (10, 3.4)) as figure:
        axes = figure.add_subplot()
        different = sum(not row["same"] for row in ranges)
        said = f"{different} of {len(ranges)} ranges differ" if different else "every range is the same"
        axes.set_title(f"Old messages and their copies in the archive{f': {said}' if ranges else ''}")
        if not ranges:
            _nothing(axes, "nothing could be purged, so nothing was compared")
            return
        # The last range may have fewer ids, but its bar has to be seen, too.
        width = max(row["last_id"] - row["first_id"] + 1 for row in ranges)
        bars = axes.bar(
            [row["first_id"] for row in ranges],
            [row["rows"] for row in ranges],
            width=width * 0.94,
            align="edge",
            color=[_COLOURS[0] if row["same"] else _BAD for row in ranges],
        )
        missing = (row["rows"] - row["archived"] for row in ranges)
        said_of = [f"{number:,} missing" if number > 0 else "differs" for number in missing]
        labels = ["" if row["same"] else text for row, text in zip(ranges, said_of, strict=True)]
        axes.bar_label(bars, labels, padding=10, color=_BAD, weight="bold")
        axes.set(xlabel="id of the message", ylabel="messages in the database")
        axes.margins(y=0.15)
        _thousands(axes.xaxis, axes.yaxis)
        axes.grid(axis="y")


def _per_hour(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("Messages written, by topic")
    totals = Counter[str]()
    for row in rows:
        totals[row["topic"]] += row["messages"]
    if not totals:
        _nothing(axes, "no messages")
        return
    largest = [topic for topic, _ in totals.most_common(_MOST_TOPICS)]
    others = f"{len(totals) - len(largest)} others"
    heights: defaultdict[str, Counter[datetime]] = defaultdict(Counter)
    for row in rows:
        heights[row["topic"] if row["topic"] in largest else others][row["hour"]] += row["messages"]
    hours = sorted({row["hour"] for row in rows})
    bottom = [0] * len(hours)
    for name, colour in zip((*largest, others), _COLOURS, strict=False):
        if name in heights:
            own = [heights[name][hour] for hour in hours]
            label = _short(name)
            axes.bar(hours, own, bottom=bottom, width=_HOUR * 0.92, align="edge", color=colour, label=label)
            bottom = [a + b for a, b in zip(bottom, own, strict=True)]
    axes.set(ylabel="messages per hour", xlabel="written at (UTC)")
    _legend_beside(axes)
    _times(axes, hours[0], hours[-1] + _HOUR, _LEAST_HOURS)


def _parked(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_title("Parked messages, by state and age")
    bars: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        bars[f"{_short(row['subscription'], 20)}: {row['state']}"][row["age"]] += row["messages"]
    if not bars:
        _nothing(axes, "nothing is parked")
        return
    names = sorted(bars, key=lambda name: -bars[name].total())[:_MOST_BARS]
    _stacked(axes, names, {age: [bars[name][age] for name in names] for age in AGES}, _AGE_COLOURS)


# Parts of panels


@contextmanager
def _drawn(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure, which is written to a file at the end."""
    try:
        matplotlib, figures = import_module("matplotlib"), import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtraError("pictures need an extra: pip install 'outbox-log[plot]'") from error
    with matplotlib.rc_context(_STYLE):
        # Not by pyplot, which would look for a display.
        figure = figures.Figure(figsize=size)
        yield figure
        figure.savefig(path)


def _title(axes: Axes, text: str, *, left_out: int) -> None:
    axes.set_title(text if left_out <= 0 else f"{text} ({left_out:,} more are not shown)")


def _nothing(axes: Axes, text: str) -> None:
    """Draw a pale panel with the reason for its emptiness."""
    axes.set(xticks=[], yticks=[], facecolor=_EMPTY)
    axes.spines[:].set_visible(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", wrap=True)


def _bars(axes: Axes, counts: Mapping[str, int], colour: str) -> None:
    names = sorted(counts, key=lambda name: (-counts[name], name))[:_MOST_BARS]
    _stacked(axes, [_short(name, 20) for name in names], {"": [counts[name] for name in names]}, (colour,))


def _stacked(
    axes: Axes,
    names: Sequence[str],
    parts: Mapping[str, Sequence[int]],
    colours: Sequence[str],
    labels: Sequence[str] | None = None,
) -> Sequence[Any]:
    """Draw horizontal bars of several parts, and return the texts at their ends: the sums, or `labels`."""
    left = [0] * len(names)
    for (part, widths), colour in zip(parts.items(), colours, strict=True):
        bars = axes.barh(range(len(names)), widths, left=left, height=0.6, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("messages")
    axes.margins(x=0.12)
    _thousands(axes.xaxis)
    if len(parts) > 1:
        _legend_beside(axes)
    texts: Sequence[Any] = axes.bar_label(bars, labels or [f"{number:,}" for number in left], padding=4)
    return texts


def _legend_beside(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _times(axes: Axes, first: datetime, last: datetime, least: timedelta) -> None:
    """Show the times from `first` to `last` on the horizontal axis, or `least` around them, if they lie closer."""
    missing = max(least - (last - first), timedelta(0))
    if missing:
        axes.set_xlim(first - missing / 2, last + missing / 2)
    dates = import_module("matplotlib.dates")
    axes.xaxis.set_major_locator(locator := dates.AutoDateLocator(minticks=3, maxticks=8))
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    axes.grid(axis="y")
    _thousands(axes.yaxis)


def _thousands(*axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for each in axes:
        each.set_major_locator(MaxNLocator(nbins=6, integer=True))
        each.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _counts(row: Row) -> dict[str, int]:
    return {state: int(row[state.replace(" ", "_")]) for state in STATES}


def _counted(number: int, noun: str) -> str:
    return counted(number, noun).replace(str(number), f"{number:,}", 1)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
