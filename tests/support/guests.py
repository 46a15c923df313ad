"""A role with some privileges on an outbox that is another's, on PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy
from sqlalchemy import Engine, text

from outbox import create_engine


@contextmanager
def owner_and_guest(engine: Engine) -> Iterator[tuple[Engine, Engine]]:
    """The owner's engine, and one of a role that may do nothing yet."""
    role = f"guest_{engine.url.database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
    guest = create_engine(engine.url.set(username=role).render_as_string(hide_password=False))
    try:
        yield engine, guest
    finally:
        guest.dispose()
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def allow(owner: Engine, *privileges: str, table: str | None = None) -> None:
    """Let the guest do this and nothing else, to one of our tables or to all."""
    tables = table or ", ".join(name for name in sqlalchemy.inspect(owner).get_table_names() if "outbox" in name)
    role = f"guest_{owner.url.database}"
    with owner.begin() as connection:
        connection.execute(text(f"REVOKE ALL ON {tables} FROM {role}"))
        if privileges:
            connection.execute(text(f"GRANT {', '.join(privileges)} ON {tables} TO {role}"))
