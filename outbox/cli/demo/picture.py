"""The run of a demo as a picture: committed and received messages over time, and the events of the play."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_WIDTH, _HEIGHT = 900, 420
#: The plot within the picture.
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 880, 130, 370
_MARK_STEP = 22
#: The colours of Okabe and Ito, for people who cannot tell red from green as well.
_COMMITTED, _RECEIVED, _INK, _PALE = "#0072B2", "#E69F00", "#333333", "#BBBBBB"


@dataclass(slots=True)
class History:
    """The course of a run. `samples`: seconds, committed, received; `marks`: seconds, and the event in words."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)

    def first_with_more_received_than(self, number: int) -> float | None:
        """Return the seconds of the first sample with more received messages; None without such a sample."""
        return next((at for at, _, received in self.samples if received > number), None)


def saved(history: History) -> Path:
    """Write the picture of a run into the folder for temporary files; return the path."""
    with tempfile.NamedTemporaryFile("w", prefix="outbox-demo-", suffix=".svg", delete=False) as file:
        file.write(drawn(history))
    return Path(file.name)


def drawn(history: History) -> str:
    """Return the picture as SVG, which every browser shows."""
    seconds = max([at for at, _, _ in history.samples] + [at for at, _ in history.marks] + [1.0])
    messages = max([max(committed, received) for _, committed, received in history.samples] + [1])

    def x(at: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * at / seconds, 1)

    def y(number: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * number / messages, 1)

    def line(column: int, colour: str) -> str:
        points = " ".join(f"{x(sample[0])},{y(sample[column])}" for sample in history.samples)
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'

    style = f'font-family="sans-serif" font-size="13" fill="{_INK}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {style}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<path d="M{_LEFT} {_TOP} V{_BOTTOM} H{_RIGHT}" fill="none" stroke="{_INK}"/>',
        *_labels(seconds, messages),
        *_events(history.marks, x),
        line(1, _COMMITTED),
        line(2, _RECEIVED),
        f'<text x="{_LEFT}" y="410" fill="{_COMMITTED}">committed messages</text>',
        f'<text x="{_LEFT + 170}" y="410" fill="{_RECEIVED}">received messages, copies included</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _labels(seconds: float, messages: int) -> list[str]:
    return [
        f'<text x="{_LEFT - 8}" y="{_TOP + 5}" text-anchor="end">{messages:,}</text>',
        f'<text x="{_LEFT - 8}" y="{_BOTTOM}" text-anchor="end">0</text>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 18}" text-anchor="end">{seconds:.0f} s</text>',
    ]


def _events(marks: Sequence[tuple[float, str]], x: Callable[[float], float]) -> list[str]:
    """Return a dashed line for each event; the words stand one below the other, so that none hides another."""
    found = []
    for number, (at, text) in enumerate(sorted(marks)):
        place, height = x(at), 20 + _MARK_STEP * number
        anchor = "end" if place > (_LEFT + _RIGHT) / 2 else "start"
        found += [
            f'<path d="M{place} {height + 5} V{_BOTTOM}" stroke="{_PALE}" stroke-dasharray="4 4"/>',
            f'<text x="{place}" y="{height}" text-anchor="{anchor}">{text}</text>',
        ]
    return found
