"""Whether speed stays: with millions of passed messages behind, and under a snapshot that is held all the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from benchmarks.drain import drain
from benchmarks.measure import Measurement, Turns, at_least, say
from benchmarks.site import Place, Site
from outbox import Message, Outbox, Relay, Verdict
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings


def flat_backlog(site: Site) -> list[Measurement]:
    """Messages a second with many passed rows kept in the log, against few."""
    few, many = site.scale.flat_passed
    turns = Turns("flat_backlog")
    with site.place() as large:
        _pass(large, many)
        for _ in range(site.scale.rounds):
            with site.place() as small:
                _pass(small, few)
                turns.add(
                    _append_and_drain(large, site.scale.flat_drained), _append_and_drain(small, site.scale.flat_drained)
                )
    return [Measurement(name="flat_backlog", goal=at_least(0.9), unit="msg/s", ours=turns.ours, other=turns.other)]


def _pass(place: Place, count: int) -> None:
    place.fill(count)
    drain(place, count)


def _append_and_drain(place: Place, count: int) -> float:
    place.fill(count)
    return drain(place, count)


class Stamps:
    """A sender that does nothing but note when it was called."""

    destination = "sender:stamps"

    def __init__(self) -> None:
        self.moments: list[float] = []

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """All of them are done."""
        self.moments.append(time.perf_counter())
        return [DONE] * len(messages)

    def close(self) -> None:
        """Nothing is held."""


def flat_pinned(site: Site) -> list[Measurement]:
    """Settles a second, the last of many against the first, while a transaction holds its snapshot."""
    last, first = _settles(site, held=False)
    without = last / first
    say(f"flat_pinned: {last:,.0f} against {first:,.0f}, {without:.2f} without the held transaction")
    turns = Turns("flat_pinned")
    for _ in range(site.scale.rounds):
        turns.add(*_settles(site, held=True))
    return [
        Measurement(
            name="flat_pinned",
            goal=at_least(0.9),
            unit="settles/s",
            ours=turns.ours,
            other=turns.other,
            remark=f"without the held transaction {without:.2f}",
        )
    ]


def _settles(site: Site, *, held: bool) -> tuple[float, float]:
    """The rates of the last and of the first settles, one message each."""
    count, end = site.scale.settles, site.scale.settles_at_an_end
    with site.place() as place:
        place.fill(count)
        stamps = Stamps()
        with place.pinned() if held else nullcontext():
            Relay(Outbox(place.engine), stamps, settings=Settings(limits=Limits(rows=1))).until_empty()
    at = stamps.moments
    if len(at) != count:
        raise RuntimeError(f"{len(at)} calls for {count} messages")
    return end / (at[-1] - at[-1 - end]), end / (at[end] - at[0])
