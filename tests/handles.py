"""The ways in which an application holds a transaction."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker


@contextmanager
def a_session(engine: Engine) -> Iterator[Session]:
    """A session of its own."""
    with Session(engine) as session:
        yield session


@contextmanager
def a_scoped_session(engine: Engine) -> Iterator[scoped_session[Session]]:
    """The session of a scope, as web frameworks hand it out."""
    session = scoped_session(sessionmaker(engine))
    yield session
    session.remove()


@contextmanager
def a_connection(engine: Engine) -> Iterator[Connection]:
    """A connection, without any ORM."""
    with engine.connect() as connection:
        yield connection


HANDLES: dict[str, Callable[[Engine], AbstractContextManager[Any]]] = {
    "Session": a_session,
    "scoped_session": a_scoped_session,
    "Connection": a_connection,
}
