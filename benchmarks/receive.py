"""What it costs to receive a message and to acknowledge it: against a table whose rows are claimed and deleted."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import psycopg

from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Place, Site
from outbox import Outbox
from outbox.rocketmq import SimpleConsumer

_INVISIBLE, _AT_ONCE = timedelta(minutes=1), timedelta(0)
_QUEUE = """
    DROP TABLE IF EXISTS queued;
    CREATE TABLE queued (id bigint PRIMARY KEY, body bytea NOT NULL, due_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX ON queued (due_at);
    INSERT INTO queued SELECT id, body FROM outbox_message
"""
_CLAIM = """
    UPDATE queued SET due_at = now() + interval '1 minute' WHERE id = (
        SELECT id FROM queued WHERE due_at <= now() ORDER BY due_at LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING id, body
"""


def receive(site: Site, callers: int) -> list[Measurement]:
    """Messages a second that threads of one consumer receive and acknowledge, against rows claimed and deleted."""
    turns, count = Turns(f"receive_{callers}"), site.scale.booked
    with site.place() as place:
        place.fill(count)
        for number in range(site.scale.rounds):
            place.execute(_QUEUE)
            turns.add(_received(place, f"group-{number}", callers, count), _claimed(place, callers, count))
    return [Measurement(name=turns.name, goal=at_least(0.3), unit="msg/s", ours=turns.ours, other=turns.other)]


def _received(place: Place, group: str, callers: int, count: int) -> float:
    with SimpleConsumer(group, Outbox(place.engine), {"orders": "*"}, await_duration=_AT_ONCE) as consumer:

        def next() -> int:
            found = consumer.receive(1, _INVISIBLE)
            for message in found:
                consumer.ack(message)
            return len(found)

        return _rate([next] * callers, count)


def _claimed(place: Place, callers: int, count: int) -> float:
    with ExitStack() as stack:
        connections = [stack.enter_context(place.connect()) for _ in range(callers)]

        def next_of(connection: psycopg.Connection[tuple[object, ...]]) -> Callable[[], int]:
            connection.autocommit = True

            def next() -> int:
                found = connection.execute(_CLAIM).fetchall()
                for id, _ in found:
                    connection.execute("DELETE FROM queued WHERE id = %s", (id,))
                return len(found)

            return next

        return _rate([next_of(each) for each in connections], count)


def _rate(callers: list[Callable[[], int]], count: int) -> float:
    """Messages a second that callers get, each in a thread of its own, until all are gone."""

    def call(next: Callable[[], int]) -> int:
        came = 0
        while got := next():
            came += got
        return came

    started = time.perf_counter()
    with ThreadPoolExecutor(len(callers)) as threads:
        came = sum(threads.map(call, callers))
    if came != count:
        raise RuntimeError(f"{came} messages came, {count} were there")
    return came / (time.perf_counter() - started)
