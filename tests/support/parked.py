"""What is parked, as a test sees it."""

from __future__ import annotations

from sqlalchemy import Engine, text


def states(engine: Engine) -> dict[str, int]:
    """How many messages are parked in which state."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT state, count(*) FROM outbox_parked GROUP BY state"))
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
