"""What is parked, as a test sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Engine, text

from outbox.model.parking import Parking


def states(engine: Engine) -> dict[str, int]:
    """How many messages are parked in which state."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT coalesce(state, 'behind'), count(*) FROM outbox_parked GROUP BY state"))
        return {str(state): int(count) for state, count in rows}


def attempts(engine: Engine) -> int:
    """How many failed attempts were counted against parked messages."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT coalesce(sum(attempts), 0) FROM outbox_parked")).scalar_one())


def request(engine: Engine, verb: str, of: str = "") -> None:
    """Ask for all dead letters what a person would ask, or only for those with the body `of`."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outbox_parked SET request = :verb, requested_by = 'test', request_reason = 'test'"
                " WHERE state = 'dead' AND (:all OR body = :body)"
            ),
            {"verb": verb, "all": not of, "body": of.encode()},
        )


def by_id(parkings: Mapping[Parking, Iterable[int]]) -> list[tuple[int, Parking]]:
    """What messages are parked as, in the order of the log."""
    return sorted(((id, parking) for parking, ids in parkings.items() for id in ids), key=lambda each: each[0])
