"""Sessions of PostgreSQL, ended from outside."""

from sqlalchemy import Engine, text

from tests.support.waiting import eventually

_TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND "
_COUNT = _TERMINATE.replace("pg_terminate_backend(pid)", "count(*)")


def terminate(engine: Engine, which: str, **parameters: object) -> None:
    """End the sessions for which an SQL condition is true, and wait until they are gone."""
    condition = f"datname = current_database() AND {which}"
    with engine.connect() as connection:
        connection.execute(text(f"{_TERMINATE}{condition}"), parameters)
    assert eventually(lambda: _count(engine, condition, parameters) == 0)


def _count(engine: Engine, condition: str, parameters: dict[str, object]) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"{_COUNT}{condition}"), parameters).scalar_one())
