"""The lease of a test's one subscription, as the database has it."""

from datetime import timedelta

from sqlalchemy import Engine, text


def step_clock(engine: Engine, by: timedelta, moment: str = "outbox_lease.lease_until") -> None:
    """As if the clock of the database had been set: the moment in this column is so much further back, or ahead."""
    table, column = moment.split(".")
    with engine.begin() as connection:
        seconds = -by.total_seconds()
        moved = {
            "postgresql": f"{column} + CAST(:seconds AS double precision) * interval '1 second'",
            "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', {column}, :seconds || ' seconds')",
        }[engine.dialect.name]
        connection.execute(text(f"UPDATE {table} SET {column} = {moved}"), {"seconds": seconds})


def lease_left(engine: Engine) -> float:
    """For how many seconds the lease is still its holder's, by the database's clock."""
    with engine.connect() as connection:
        left = {
            "postgresql": "extract(epoch FROM lease_until - clock_timestamp())",
            "sqlite": "(julianday(lease_until) - julianday('now')) * 86400.0",
        }[engine.dialect.name]
        return float(connection.execute(text(f"SELECT {left} FROM outbox_lease")).scalar_one() or 0)


def notice(engine: Engine) -> str:
    """What a worker says of why it does not work."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT max(notice) FROM outbox_lease")).scalar_one() or ""


def epoch(engine: Engine) -> int:
    """How often it was taken."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT epoch FROM outbox_lease")).scalar_one())


def end_lease(engine: Engine) -> None:
    """As if the lease had run out, of a process that has given it back or does nothing any more."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET owner = NULL, lease_until = NULL"))
