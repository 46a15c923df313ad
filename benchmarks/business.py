"""How many transactions with messages four writers get through together, against the same rows inserted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.keyed import insert_as_text, send_with_key
from benchmarks.measure import Goal, Measurement, Turns, at_least, at_most
from benchmarks.site import Site
from benchmarks.writers import ORDERS, WRITERS, Make, Team, insert_by_hand, send_all, send_directly, team


def business_1(site: Site) -> list[Measurement]:
    """Transactions a second of four writers with one message of `send_all`, against INSERTs by hand."""
    return [versus(site, "business_1", (send_all, insert_by_hand), messages=1, goal=at_least(0.9))]


def business_5(site: Site) -> list[Measurement]:
    """Transactions a second of four writers with five messages of `send_all`, against INSERTs by hand."""
    return [versus(site, "business_5", (send_all, insert_by_hand), messages=5, goal=at_least(0.9))]


def write_4_connections(site: Site, messages: int) -> list[Measurement]:
    """Keyed messages with headers against SQL as text: microseconds a transaction takes each of the four writers."""
    makes = (send_with_key, insert_as_text)
    rates = versus(site, f"write_4_connections_{messages}", makes, messages=messages, goal=at_most(1.15))
    ours, other = ([WRITERS * 1e6 / rate for rate in each] for each in (rates.ours, rates.other))
    return [replace(rates, unit="µs", ours=ours, other=other)]


def business_direct(site: Site) -> list[Measurement]:
    """Transactions a second and all their messages sent by the writers, against those that leave it to a relay."""
    shares: list[float] = []
    pace = Pace(site.scale.rounds, site.scale.direct_turns, site.scale.direct_seconds, site.scale.warm_up_seconds)
    with _writers(site) as writers:
        turns = _turns(writers, "business_direct", (send_directly, send_all), 1, pace, shares)
    remark = f"{median(shares):.0%} of the messages sent directly"
    return [_measurement(turns, at_least(0.8), remark)]


@dataclass(frozen=True, slots=True)
class Pace:
    """Short turns, so that whatever else the machine does meets both sides alike."""

    rounds: int
    turns: int
    seconds: float
    warm_up_seconds: float


def versus(site: Site, name: str, makes: tuple[Make, Make], *, messages: int, goal: Goal) -> Measurement:
    """Transactions a second of one way of writing messages against another."""
    pace = Pace(site.scale.rounds, site.scale.business_turns, site.scale.business_seconds, site.scale.warm_up_seconds)
    with _writers(site) as writers:
        turns = _turns(writers, name, makes, messages, pace, [])
    return _measurement(turns, goal)


def _turns(writers: Team, name: str, makes: tuple[Make, Make], messages: int, pace: Pace, shares: list[float]) -> Turns:
    """The rates of both sides, after a turn of each to warm up; `shares`: how much was sent directly."""
    for make in makes:
        writers.write(make, messages, pace.warm_up_seconds)
    turns = Turns(name)
    for _ in range(pace.rounds):
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(pace.turns):
            for make, found in zip(makes, rates, strict=True):
                rate, sent = writers.write(make, messages, pace.seconds)
                found.append(rate)
                if make is send_directly:
                    shares.append(sent / (rate * messages))
        turns.add(median(rates[0]), median(rates[1]))
    return turns


@contextmanager
def _writers(site: Site) -> Iterator[Team]:
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        with team(place.url) as writers:
            yield writers


def _measurement(turns: Turns, goal: Goal, remark: str = "") -> Measurement:
    return Measurement(name=turns.name, goal=goal, unit="tx/s", ours=turns.ours, other=turns.other, remark=remark)
