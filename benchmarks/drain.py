"""How fast a backlog goes to a sender that only looks at it, against the loops that one would write instead."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader

from benchmarks.measure import Measurement, Turns, at_least
from benchmarks.site import Place, Site
from outbox import Done, Message, Outbox, Relay, Verdict
from outbox.cli.relay import NEW_OBJECTS
from outbox.model.message import stored_message
from outbox.runtime.garbage import collect_rarely

_BATCH = 1_000
_COLUMNS = "id, message_id, topic, key, tags, headers, body, content_type, created_at, deliver_at, expires_at"

#: The columns that a handler is given, and no index but the one that the claim walks.
_CLAIM_TABLE = """
    DROP TABLE IF EXISTS claimed;
    CREATE TABLE claimed (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id uuid NOT NULL, topic text NOT NULL, key text,
        slot smallint NOT NULL, tags text, headers text, body bytea NOT NULL, content_type text,
        created_at timestamptz NOT NULL DEFAULT statement_timestamp(), deliver_at timestamptz, expires_at timestamptz)
"""
_CLAIM = f"""
    DELETE FROM claimed
    WHERE id = ANY (ARRAY(SELECT id FROM claimed ORDER BY id LIMIT {_BATCH} FOR UPDATE SKIP LOCKED))
    RETURNING {_COLUMNS}
"""
_FETCH = f"SELECT {_COLUMNS} FROM outbox_message WHERE id > %s ORDER BY id LIMIT {_BATCH}"


class Touching:
    """A sender that looks at the key and the body of each message, as every real one does, and counts."""

    destination = "sender:touching"

    def __init__(self) -> None:
        self.count = 0

    def send(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """All of them are done."""
        self.count += touch(messages)
        return [Done() for _ in messages]

    def close(self) -> None:
        """Nothing is held."""


def touch(messages: Sequence[Message]) -> int:
    """How many messages have a key and a body."""
    return sum(message.key is not None and message.body is not None for message in messages)


def drain(place: Place, count: int, name: str = "relay") -> float:
    """A relay, as in the process of `outbox relay`, sends what its subscription has not passed; messages a second."""
    sender = Touching()
    relay = Relay(Outbox(place.engine), sender, name=name)

    def send_all() -> int:
        relay.until_empty()
        return sender.count

    with in_a_process_of_its_own(NEW_OBJECTS):
        return _rate(count, send_all)


@contextmanager
def in_a_process_of_its_own(objects: int) -> Iterator[None]:
    """Collect garbage as in the process of a command."""
    before = gc.get_threshold()
    collect_rarely(objects)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def drain_vs_claim(site: Site) -> list[Measurement]:
    """Messages a second, against a loop that claims, handles and deletes."""
    count = site.scale.drained
    with site.place() as place:
        place.fill(count)
        turns = Turns("drain_vs_claim")
        for number in range(site.scale.rounds):
            place.execute(_CLAIM_TABLE)
            place.fill(count, "claimed")
            turns.add(drain(place, count, f"round-{number}"), claim(place, count))
    return [Measurement(name="drain_vs_claim", goal=at_least(2.2), unit="msg/s", ours=turns.ours, other=turns.other)]


def drain_vs_fetch(site: Site) -> list[Measurement]:
    """Messages a second, against a loop that only fetches the same rows and builds the same objects."""
    count = site.scale.drained
    with site.place() as place:
        place.fill(count)
        turns = Turns("drain_vs_fetch")
        for number in range(site.scale.rounds):
            turns.add(drain(place, count, f"round-{number}"), fetch(place, count))
    return [Measurement(name="drain_vs_fetch", goal=at_least(0.9), unit="msg/s", ours=turns.ours, other=turns.other)]


def drain_pinned_vs_claim(site: Site) -> list[Measurement]:
    """Messages a second against the claiming loop, after others have passed under a snapshot that is still held."""
    turns = Turns("drain_pinned_vs_claim")
    for _ in range(site.scale.rounds):
        turns.add(*_pinned_round(site))
    return [
        Measurement(name="drain_pinned_vs_claim", goal=at_least(3), unit="msg/s", ours=turns.ours, other=turns.other)
    ]


def _pinned_round(site: Site) -> tuple[float, float]:
    passed, count = site.scale.passed, site.scale.drained_pinned
    with site.place() as place:
        place.execute(_CLAIM_TABLE)
        place.fill(passed)
        place.fill(passed, "claimed")
        with place.pinned():
            drain(place, passed)
            claim(place, passed)
            place.fill(count)
            place.fill(count, "claimed")
            return drain(place, count), claim(place, count)


def claim(place: Place, count: int) -> float:
    """Claim and delete in batches, as well as one knows how: prepared, binary, a commit a batch."""
    with place.connect() as connection:
        cursor = _cursor(connection)

        def claim_all() -> int:
            claimed = 0
            while rows := cursor.execute(_CLAIM).fetchall():
                rows.sort(key=lambda row: int(row[0]))
                messages = [stored_message(row) for row in rows]
                claimed += touch(messages)
                connection.commit()
            connection.commit()
            return claimed

        return _rate(count, claim_all)


def fetch(place: Place, count: int) -> float:
    """Read the log by its ids in batches, and remember nothing."""
    with place.connect() as connection:
        connection.autocommit = True
        cursor = _cursor(connection)

        def fetch_all() -> int:
            fetched = after = 0
            while rows := cursor.execute(_FETCH, (after,)).fetchall():
                messages = [stored_message(row) for row in rows]
                fetched += touch(messages)
                after = rows[-1][0]
            return fetched

        return _rate(count, fetch_all)


def _cursor(connection: psycopg.Connection[tuple[Any, ...]]) -> psycopg.Cursor[tuple[Any, ...]]:
    """Prepares at once, and leaves times and UUIDs for whoever looks at them, as the relay's own does."""
    connection.prepare_threshold = 0
    cursor = connection.cursor(binary=True)
    cursor.adapters.register_loader("timestamptz", Int8BinaryLoader)
    cursor.adapters.register_loader("uuid", ByteaBinaryLoader)
    return cursor


def _rate(expected: int, work: Callable[[], int]) -> float:
    """Messages a second, of work that tells how many there were."""
    started = time.perf_counter()
    count = work()
    seconds = time.perf_counter() - started
    if count != expected:
        raise RuntimeError(f"{count} messages came, {expected} were there")
    return count / seconds
