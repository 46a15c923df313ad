"""What is parked, as a test sees it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing

from sqlalchemy import Engine, text

from outbox.model.decision import Verb
from outbox.model.parking import Parking
from outbox.store.database import Database
from outbox.store.subscriptions.decisions import Decisions


def states(engine: Engine) -> dict[str, int]:
    """How many messages are parked in which state."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT coalesce(state, 'behind'), count(*) FROM outbox_parked GROUP BY state"))
        return {str(state): int(count) for state, count in rows}


def attempts(engine: Engine) -> int:
    """How many failed attempts were counted against parked messages."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT coalesce(sum(attempts), 0) FROM outbox_parked")).scalar_one())


def decide(engine: Engine, verb: Verb, of: str = "") -> None:
    """Decide on all dead letters as a person does, or only on those with the body `of`."""
    with closing(Database(engine).open()) as channel, channel.transaction():
        letters = "SELECT subscription, id FROM {parked} WHERE state = 'dead' AND (:every = 1 OR body = :body)"
        ids: dict[str, list[int]] = {}
        for subscription, id in channel.rows(letters, every=int(not of), body=of.encode()):
            ids.setdefault(subscription, []).append(id)
        for subscription, some in ids.items():
            Decisions(channel, subscription).write(verb, sorted(some), by="test", reason="test")


def decisions(engine: Engine) -> list[tuple[str, str, str, str | None, list[int], int | None, bool]]:
    """Return all decisions: person, verb, subscription, reason, ids of messages, count, and whether it is done."""
    columns = 'SELECT "by", verb, subscription, reason, choice, count, done_at FROM outbox_decision ORDER BY id'
    with engine.connect() as connection:
        rows = connection.execute(text(columns)).all()
    return [(*row[:4], sorted(json.loads(row[4]).get("ids", [])), row[5], row[6] is not None) for row in rows]


def by_id(parkings: Mapping[Parking, Iterable[int]]) -> list[tuple[int, Parking]]:
    """What messages are parked as, in the order of the log."""
    return sorted(((id, parking) for parking, ids in parkings.items() for id in ids), key=lambda each: each[0])
