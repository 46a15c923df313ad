"""Pictures as SVG, made here, each with its table: the last hour of a number, and the way of a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from markupsafe import Markup

from outbox.admin.results import Passage, PassageState, Trace
from outbox.dashboard.values import moment, plain, visible
from outbox.runtime.text import age

Points = Sequence[tuple[datetime, float | None]]
Shape = Literal["round", "square", "diamond", "triangle"]

_WIDTH, _HEIGHT = 160, 32
#: Places in a timeline, in pixels.
_NAMES, _COLUMN, _HEAD, _ROW, _END, _BESIDE = 190, 110, 44, 34, 60, 17
_MOST_NAME = 22
#: The states in which a subscription has finished with a message, and those in which the message is none of its own.
_ENDS: tuple[PassageState, ...] = ("passed", "discarded", "withdrawn")
_NOT_ITS_OWN: tuple[PassageState, ...] = ("unselected", "before")
_SHAPES: dict[Shape, Markup] = {
    "round": Markup('<circle cx="{x}" cy="{y}" r="6"/>'),
    "square": Markup('<path d="M{x} {y}m-6 -6h12v12h-12z"/>'),
    "diamond": Markup('<path d="M{x} {y}m0 -8l8 8l-8 8l-8 -8z"/>'),
    "triangle": Markup('<path d="M{x} {y}m0 -7l8 13h-16z"/>'),
}


def sparkline(points: Points, *, title: str, unit: str = "") -> Markup:
    """Return a small line of a number over time, with the least, the most and the last value in its table.

    Args:
        points: the oldest first; None: no value is kept of that moment, and the line has a gap.
        title: what is counted.
        unit: of the number, such as `s`.
    """
    title, unit = plain(title), plain(unit)
    known = [value for _, value in points if value is not None]
    if not known:
        return Markup('<p class="sparkline">{}: no values yet</p>').format(title)
    numbers = ", ".join(
        f"{name} {_number(value, unit)}"
        for name, value in (("last", known[-1]), ("least", min(known)), ("most", max(known)))
    )
    rows = Markup("").join(
        Markup('<tr><th scope="row">{}</th><td class="number">{}</td></tr>').format(
            moment(at),
            "–" if value is None else _number(value, unit),  # noqa: RUF001  # a dash
        )
        for at, value in points
    )
    return Markup(
        '<figure class="sparkline"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        ' aria-label="{title}: {numbers}">{lines}</svg><details><summary>{title}: {last}</summary>'
        '<table><caption>{title}: {numbers}</caption><thead><tr><th scope="col">Until</th>'
        '<th scope="col" class="number">{title}</th></tr></thead><tbody>{rows}</tbody></table></details></figure>'
    ).format(
        width=_WIDTH,
        height=_HEIGHT,
        title=title,
        numbers=numbers,
        last=_number(known[-1], unit),
        lines=Markup("").join(_lines(points, max(known))),
        rows=rows,
    )


def timeline(trace: Trace) -> Markup:
    """Return the way of a message through each subscription: what happened from left to right, and the same as a table.

    Between two columns lies the time between two moments, whatever its length; a column says how long that was.
    """
    ways = [_Way.of(each, trace) for each in trace.subscriptions]
    moments = sorted({each.at for way in ways for each in way.steps})
    places = {at: _NAMES + 50 + number * _COLUMN for number, at in enumerate(moments)}
    rows = Markup("").join(_row(each) for each in ways)
    table = Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="The way through each subscription"><table>'
        '<thead><tr><th scope="col">Subscription</th><th scope="col">State</th><th scope="col">In words</th>'
        '<th scope="col">Moments</th></tr></thead><tbody>{}</tbody></table></div>'
    ).format(rows)
    if not moments:
        return Markup('<figure class="timeline">{}</figure>').format(table)
    return Markup(
        '<figure class="timeline"><div class="scroll" tabindex="0" role="region" aria-label="Picture of the way">'
        '<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        ' aria-label="The way of message {id} through {number} subscriptions; the table below tells the same">'
        "{columns}{ways}</svg></div><figcaption>Moments from left to right, not to scale. Round: written or passed."
        " Square: set aside. Diamond: decided by a person. Triangle: due.</figcaption>{table}</figure>"
    ).format(
        width=_NAMES + len(moments) * _COLUMN + _END,
        height=_HEAD + len(ways) * _ROW + 10,
        id=trace.id,
        number=len(ways),
        columns=Markup("").join(_columns(moments, places, _HEAD + len(ways) * _ROW)),
        ways=Markup("").join(_drawn(each, places, _HEAD + n * _ROW + _ROW // 2) for n, each in enumerate(ways)),
        table=table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What happened to a message at one moment, or will."""

    at: datetime
    shape: Shape
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A passage with its steps, the earliest first."""

    passage: Passage
    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, passage: Passage, trace: Trace) -> _Way:
        return cls(passage=passage, steps=tuple(sorted(_steps(passage, trace), key=lambda each: each.at)))


def _steps(passage: Passage, trace: Trace) -> Iterator[_Step]:
    if passage.state in _NOT_ITS_OWN:
        return
    if trace.created_at is not None:
        yield _Step(at=trace.created_at, shape="round", what="written")
    copy = passage.copy
    if copy is not None and copy.parked_at is not None:
        yield _Step(at=copy.parked_at, shape="square", what="set aside")
    due = trace.deliver_at if copy is None else copy.due_at
    if due is not None:
        yield _Step(at=due, shape="triangle", what="due")
    if copy is not None and copy.decision is not None and copy.decided_at is not None:
        yield _Step(at=copy.decided_at, shape="diamond", what=f"{copy.decision} by {copy.decided_by}, not carried out")
    for each in passage.decisions:
        verb = each.verb.replace("_", " ")
        yield _Step(at=each.at, shape="diamond", what=f"{verb} by {each.by}")
        if each.done_at is not None:
            yield _Step(at=each.done_at, shape="round", what=f"{verb} carried out")
    if passage.passed_at is not None:
        latest = " at the latest" if passage.passed_at_is_latest else ""
        # The position passes a message also when a worker sets it aside, and people decide on nothing else.
        if passage.decisions:
            yield _Step(at=passage.passed_at, shape="square", what=f"set aside{latest}")
        else:
            yield _Step(at=passage.passed_at, shape="round", what=f"passed{latest}")


def _row(way: _Way) -> Markup:
    steps = (Markup("<li>{}: {}</li>").format(moment(each.at), visible(each.what)) for each in way.steps)
    passage = way.passage
    return Markup(
        '<tr><th scope="row">{}</th><td><span class="badge {}">{}</span></td><td>{}</td><td><ul>{}</ul></td></tr>'
    ).format(visible(passage.subscription), passage.state, passage.state, visible(passage.what), Markup("").join(steps))


def _drawn(way: _Way, places: dict[datetime, int], y: int) -> Markup:
    """Return the line of one subscription; the way of a message that is not at its end is dashed."""
    passage, name = way.passage, way.passage.subscription
    short = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}…"
    shapes, beside = Markup(""), Counter[datetime]()
    for each in way.steps:
        # What happened at one moment, such as a decision that was carried out at once, stands side by side.
        x = places[each.at] + _BESIDE * beside[each.at]
        beside[each.at] += 1
        shapes += Markup('<g class="{}"><title>{}</title>{}</g>').format(
            each.shape, plain(f"{each.what}, {_clock(each.at)}"), _SHAPES[each.shape].format(x=x, y=y)
        )
    line = Markup("")
    if way.steps:
        ends = "whole" if passage.state in _ENDS else "open"
        line = Markup('<path class="way {}" d="M{} {}H{}"/>').format(
            ends, places[way.steps[0].at], y, places[way.steps[-1].at] + (0 if ends == "whole" else _COLUMN // 2)
        )
    return Markup('<text x="0" y="{}">{}</text><text class="state" x="0" y="{}">{}</text>{}{}').format(
        y - 2, plain(short), y + 12, passage.state, line, shapes
    )


def _columns(moments: Sequence[datetime], places: dict[datetime, int], bottom: int) -> Iterator[Markup]:
    for number, at in enumerate(moments):
        before = moments[number - 1] if number else None
        same_day = before is not None and before.astimezone(UTC).date() == at.astimezone(UTC).date()
        under = f"{at.astimezone(UTC):%Y-%m-%d}" if before is None else f"+{age((at - before).total_seconds())}"
        under += "" if same_day or before is None else f", {at.astimezone(UTC):%d %b}"
        yield Markup(
            '<path class="moment" d="M{x} {top}V{bottom}"/><text class="moment" x="{x}" y="14">{clock}</text>'
            '<text class="moment" x="{x}" y="30">{under}</text>'
        ).format(x=places[at], top=_HEAD - 8, bottom=bottom, clock=_clock(at), under=under)


def _lines(points: Points, most: float) -> Iterator[Markup]:
    """Yield the lines between gaps; a lone value is a dot."""
    step = (_WIDTH - 8) / max(1, len(points) - 1)
    line = list[str]()
    for number, (_, value) in enumerate([*points, (points[-1][0], None)]):
        if value is not None:
            line.append(f"{4 + number * step:.1f},{_HEIGHT - 4 - (_HEIGHT - 8) * max(0.0, value) / (most or 1):.1f}")
        elif line:
            yield Markup('<polyline points="{}"/>').format(" ".join([*line, line[-1]] if len(line) == 1 else line))
            line = []


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S}"


def _number(value: float, unit: str) -> str:
    said = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"
    return f"{said} {unit}".rstrip()
