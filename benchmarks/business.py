"""How many transactions with messages four writers get through together, against the same rows inserted by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from benchmarks.keyed import insert_as_text, send_with_key
from benchmarks.measure import Goal, Measurement, Turns, at_least, at_most
from benchmarks.site import Site
from benchmarks.writers import ORDERS, WRITERS, Make, insert_by_hand, send_all, team


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


def versus(site: Site, name: str, makes: tuple[Make, Make], *, messages: int, goal: Goal) -> Measurement:
    """Transactions a second of one way of writing messages against another."""
    turns = Turns(name)
    with site.place() as place:
        ORDERS.metadata.create_all(place.engine)
        with team(place.url) as writers:
            for make in makes:
                writers.write(make, messages, site.scale.warm_up_seconds)
            for _ in range(site.scale.rounds):
                rates: tuple[list[float], list[float]] = ([], [])
                # Short turns, so that whatever else the machine does meets both sides alike.
                for _ in range(site.scale.business_turns):
                    for make, found in zip(makes, rates, strict=True):
                        found.append(writers.write(make, messages, site.scale.business_seconds))
                turns.add(median(rates[0]), median(rates[1]))
    return Measurement(name=name, goal=goal, unit="tx/s", ours=turns.ours, other=turns.other)
