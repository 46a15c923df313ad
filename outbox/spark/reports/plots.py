"""Pictures of the reports, from rows as plain values: drawn on the driver, by matplotlib."""

from __future__ import annotations

from collections import defaultdict
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
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")
_OTHERS, _BAD, _INK, _EMPTY = "#9A9A9A", "#D55E00", "#333333", "#F6F6F6"
#: Older messages have darker colours.
_AGE_COLOURS = ("#FDE0C5", "#F8B58B", "#EE8A5B", "#D1603A", "#8F3B1B")
_STATE_COLOURS = {"committed": "#009E73", "rolled back": "#9A9A9A", "open": "#56B4E9", "parked": "#D55E00"}

_STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.15,
    "figure.constrained_layout.h_pad": 0.08,
}
_DPI = 120
#: Points between a panel and its title, where a legend is between them.
_ABOVE_LEGEND = 26
#: The most topics and bars that a reader can tell apart. The rest is summed up, or left out; a title may say how many
#: are left out.
_MOST_TOPICS, _MOST_BARS = 5, 14
_HOUR, _LEAST_HOURS = timedelta(hours=1), 7
#: The shortest time axis. A single moment has no length, and would be drawn on an axis of years.
_LEAST_TIME = timedelta(minutes=10)


def delivery(path: Path, *, per_hour: Sequence[Row], parked: Sequence[Row], backlog: Mapping[str, int]) -> None:
    """Draw the delivery report: rows of `messages_per_hour` and `parked_by_age`, and the backlog by subscription."""
    with _drawn(path, (10, 7)) as figure:
        top, bottom = figure.subfigures(2, 1, hspace=0.04)
        _per_hour(top.subplots(), per_hour)
        left, right = bottom.subplots(1, 2, width_ratios=(3, 2))
        _parked(left, parked)
        _backlog(right, backlog)


def written(path: Path, per_hour: Sequence[Row]) -> None:
    """Draw rows of `messages_per_hour` alone."""
    with _drawn(path, (10, 3.4)) as figure:
        _per_hour(figure.subplots(), per_hour)


def transactions(path: Path, rows: Sequence[Row]) -> None:
    """Draw the reconciliation of half messages: rows of `states`."""
    shown = sorted(rows, key=lambda row: -sum(_counts(row).values()))[:_MOST_BARS]
    with _drawn(path, (10, 1.9 + 0.45 * len(shown))) as figure:
        axes = figure.add_subplot()
        _title(axes, "Half messages, by what became of them", left_out=len(rows) - len(shown), pad=_ABOVE_LEGEND)
        if not shown:
            _nothing(axes, "there are no half messages")
            return
        names = [f"{_short(row['producer_group'] or '(purged)')}  →  {_short(row['topic'])}" for row in shown]
        _stacked(axes, names, [_counts(row) for row in shown], _STATE_COLOURS)
        for at, row in enumerate(shown):
            counts = _counts(row)
            said = ", ".join(f"{counts[state]:,} {state}" for state in ("open", "parked") if counts[state])
            label = axes.annotate(
                said, (sum(counts.values()), at), (6, 0), textcoords="offset points", va="center", fontsize=8.5
            )
            if row["contradictions"]:
                text = f"{row['contradictions']:,} contradiction{'s' if row['contradictions'] > 1 else ''}"
                axes.annotate(
                    text, (1, 0.5), (8, 0), xycoords=label, textcoords="offset points", va="center", color=_BAD,
                    weight="bold",
                )  # fmt: skip
        axes.set_xlabel("half messages")
        axes.set_xlim(0, 1.35 * max(sum(_counts(row).values()) for row in shown))


def order(path: Path, *, summary: Sequence[Row], breaks: Sequence[Row]) -> None:
    """Draw the order audit: rows of `summary`, and some or all rows of `breaks`."""
    messages, keys = (sum(row[name] for row in summary) for name in ("messages", "keys"))
    with _drawn(path, (10, 6.2 if breaks else 2.2)) as figure:
        if not breaks:
            axes = figure.add_subplot()
            _title(axes, "Versions that do not rise")
            _nothing(axes, f"none: the versions of {_counted(keys, 'key')} rise over {_counted(messages, 'message')}")
            return
        grid = figure.add_gridspec(2, 1, height_ratios=(1.3, 1))
        _steps_back(figure.add_subplot(grid[0]), breaks, summary)
        _worst_keys(figure.add_subplot(grid[1]), breaks, sum(row["broken_keys"] for row in summary))


def archive(path: Path, ranges: Sequence[Row]) -> None:
    """Draw the comparison of a database with its archive: rows of `compare`."""
    with _drawn(path, (10, 3.4)) as figure:
        axes = figure.add_subplot()
        different = [row for row in ranges if not row["same"]]
        said = f"{len(different)} of {len(ranges)} ranges differ" if different else "every range is the same"
        _title(axes, f"Old messages and their copies in the archive{f': {said}' if ranges else ''}")
        if not ranges:
            _nothing(axes, "nothing could be purged, so nothing was compared")
            return
        highest = max(row["rows"] for row in ranges)
        # The last range may have fewer ids, but its bar has to be seen, too.
        width = max(row["last_id"] - row["first_id"] + 1 for row in ranges)
        for row in ranges:
            colour = _COLOURS[0] if row["same"] else _BAD
            axes.bar(row["first_id"], row["rows"], width=width * 0.94, align="edge", color=colour)
            if not row["same"]:
                said = f"{row['rows'] - row['archived']:,} missing" if row["archived"] < row["rows"] else "differs"
                place = (row["first_id"] + width / 2, 1.03 * highest)
                axes.text(*place, said, ha="center", va="bottom", color=_BAD, weight="bold")
        axes.set(xlabel="id of the message", ylabel="messages in the database", ylim=(0, 1.15 * highest))
        _thousands(axes.xaxis, axes.yaxis)
        axes.grid(axis="y")


# Panels


def _per_hour(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Messages written, by topic")
    totals: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        totals[row["topic"]] += row["messages"]
    if not totals:
        _nothing(axes, "no messages")
        return
    largest = sorted(totals, key=lambda topic: -totals[topic])[:_MOST_TOPICS]
    colours = dict(zip(largest, _COLOURS, strict=False))
    rest = len(totals) - len(largest)
    heights: defaultdict[str, defaultdict[datetime, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        name = row["topic"] if row["topic"] in colours else f"{rest} others"
        heights[name][row["hour"]] += row["messages"]
    bottom: defaultdict[datetime, int] = defaultdict(int)
    names = [*largest, *(name for name in heights if name not in colours)]
    for name in names:
        hours = sorted(heights[name])
        axes.bar(
            hours,
            [heights[name][hour] for hour in hours],
            bottom=[bottom[hour] for hour in hours],
            width=_HOUR * 0.92,
            align="edge",
            color=colours.get(name, _OTHERS),
        )
        for hour in hours:
            bottom[hour] += heights[name][hour]
    _legend_beside(axes, [(_short(name), colours.get(name, _OTHERS)) for name in names])
    # A few hours are drawn in the middle, with bars that are no wider than in a picture of many hours.
    axes.set_xlim(*_widened(min(bottom), max(bottom) + _HOUR, _LEAST_HOURS * _HOUR))
    axes.set(ylabel="messages per hour", xlabel="written at (UTC)")
    _thousands(axes.yaxis)
    axes.grid(axis="y")
    _times(axes)


def _parked(axes: Axes, rows: Sequence[Row]) -> None:
    _title(axes, "Parked messages, by state and age", pad=_ABOVE_LEGEND)
    bars: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for row in rows:
        bars[row["subscription"], row["state"]][row["age"]] = row["messages"]
    if not bars:
        _nothing(axes, "nothing is parked")
        return
    places = sorted(bars, key=lambda place: -sum(bars[place].values()))[:_MOST_BARS]
    names = [f"{_short(subscription, 20)}: {state}" for subscription, state in places]
    counts = [{age: bars[place].get(age, 0) for age in AGES} for place in places]
    _stacked(axes, names, counts, dict(zip(AGES, _AGE_COLOURS, strict=True)), labels=False)
    for at, each in enumerate(counts):
        axes.text(sum(each.values()), at, f" {sum(each.values()):,}", va="center")
    axes.set_xlabel("messages")
    axes.margins(x=0.12)


def _backlog(axes: Axes, backlog: Mapping[str, int]) -> None:
    _title(axes, "Not settled yet", pad=_ABOVE_LEGEND)
    names = sorted(backlog, key=lambda name: -backlog[name])[:_MOST_BARS]
    if not names:
        _nothing(axes, "there is no subscription")
        return
    if not any(backlog.values()):
        _nothing(axes, "everything is settled")
        return
    axes.barh(range(len(names)), [backlog[name] for name in names], height=0.6, color=_COLOURS[0])
    for at, name in enumerate(names):
        axes.text(backlog[name], at, f" {backlog[name]:,}", va="center")
    _named_bars(axes, [_short(name, 20) for name in names])
    axes.set_xlabel("messages")
    axes.set_xlim(0, max(1, *backlog.values()) * 1.2)
    _thousands(axes.xaxis)


def _steps_back(axes: Axes, breaks: Sequence[Row], summary: Sequence[Row]) -> None:
    counts = {name: sum(row[name] for row in summary) for name in ("messages", "fell", "repeated")}
    said = f"{counts['fell'] + counts['repeated']:,} among {counts['messages']:,} messages"
    _title(axes, f"Versions that do not rise: {said}")
    axes.axhline(0, color=_INK, linewidth=0.8)
    for problem, colour in (("fell", _BAD), ("repeated", _COLOURS[1])):
        own = [row for row in breaks if row["problem"] == problem]
        axes.scatter(
            [row["created_at"] for row in own],
            [row["version"] - row["previous"] for row in own],
            s=22, color=colour, alpha=0.8, linewidths=0,
        )  # fmt: skip
        if own:
            place = 0 if problem == "repeated" else min(row["version"] - row["previous"] for row in own) / 2
            axes.annotate(
                f"{counts[problem]:,} {problem}", (1.01, place), xycoords=("axes fraction", "data"), va="center",
                color=colour, weight="bold", annotation_clip=False,
            )  # fmt: skip
    axes.set(ylabel="version minus the one before", xlabel="written at (UTC)")
    axes.margins(y=0.15)
    axes.grid(axis="y")
    _thousands(axes.yaxis)
    _times(axes, [row["created_at"] for row in breaks])


def _worst_keys(axes: Axes, breaks: Sequence[Row], keys: int) -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    for row in breaks:
        counts[row["key"]] += 1
    worst = sorted(counts, key=lambda key: (-counts[key], key))[:8]
    _title(axes, f"{_counted(keys, 'key')} with such versions", left_out=keys - len(worst))
    axes.barh(range(len(worst)), [counts[key] for key in worst], height=0.6, color=_BAD)
    for at, key in enumerate(worst):
        axes.text(counts[key], at, f" {counts[key]:,}", va="center")
    _named_bars(axes, [_short(key) for key in worst])
    axes.set_xlabel("versions that do not rise")
    _thousands(axes.xaxis)


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
        figure.savefig(path, dpi=_DPI)


def _title(axes: Axes, text: str, *, left_out: int = 0, pad: int = 10) -> None:
    axes.set_title(text if left_out <= 0 else f"{text} ({left_out:,} more are not shown)", pad=pad)


def _nothing(axes: Axes, text: str) -> None:
    """Draw a pale panel with the reason for its emptiness."""
    axes.set(xticks=[], yticks=[], facecolor=_EMPTY)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_INK, wrap=True)


def _stacked(
    axes: Axes,
    names: Sequence[str],
    counts: Sequence[Mapping[str, int]],
    colours: Mapping[str, str],
    *,
    labels: bool = True,
) -> None:
    """Draw horizontal bars of several parts; with `labels`, write the number on each part of enough width."""
    longest = max(sum(each.values()) for each in counts)
    left = [0] * len(counts)
    for part, colour in colours.items():
        widths = [each[part] for each in counts]
        if not any(widths):
            continue
        axes.barh(range(len(counts)), widths, left=left, height=0.62, color=colour, label=part)
        for at, width in enumerate(widths):
            if labels and width > longest * 0.045:
                axes.text(left[at] + width / 2, at, f"{width:,}", ha="center", va="center", color="white", fontsize=8.5)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _named_bars(axes, names)
    _thousands(axes.xaxis)
    _legend_below(axes, [(part, colour) for part, colour in colours.items() if any(each[part] for each in counts)])


def _named_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _legend_beside(axes: Axes, entries: Sequence[tuple[str, str]]) -> None:
    """Write the names in their colours beside the panel, the last one on top, in the order of the stacked parts."""
    for at, (name, colour) in enumerate(entries):
        y = 0.06 + at * 0.12
        axes.annotate(
            name, (1.01, y), xycoords="axes fraction", color=colour, weight="bold", va="center", annotation_clip=False
        )


def _legend_below(axes: Axes, entries: Sequence[tuple[str, str]]) -> None:
    """Draw small squares with their names in one line, below the title."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=name) for name, colour in entries],
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=len(entries), frameon=False, fontsize=8.5,
        handlelength=0.9, handleheight=0.9, columnspacing=1.2, borderpad=0,
    )  # fmt: skip


def _widened(first: datetime, last: datetime, least: timedelta) -> tuple[datetime, datetime]:
    """Return the span from `first` to `last`, widened on both sides to `least` if shorter."""
    missing = max(least - (last - first), timedelta(0))
    return first - missing / 2, last + missing / 2


def _times(axes: Axes, moments: Sequence[datetime] = ()) -> None:
    """Show times on the horizontal axis, widened around moments that lie close together."""
    if moments and max(moments) - min(moments) < _LEAST_TIME:
        axes.set_xlim(*_widened(min(moments), max(moments), _LEAST_TIME))
    dates = import_module("matplotlib.dates")
    axes.xaxis.set_major_locator(locator := dates.AutoDateLocator(minticks=3, maxticks=8))
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def _thousands(*axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for each in axes:
        each.set_major_locator(MaxNLocator(nbins=6, integer=True))
        each.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))


def _counts(row: Row) -> dict[str, int]:
    return {state: int(row[state.replace(" ", "_")]) for state in STATES}


def _counted(number: int, noun: str) -> str:
    return counted(number, noun).replace(str(number), f"{number:,}", 1)


def _short(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
