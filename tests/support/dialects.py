"""Dialects that differ from the library's own in some answers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

from sqlalchemy import Engine

from outbox import Outbox
from outbox.store.database import Database
from outbox.store.dialects.dialect import Dialect


def varied(dialect: Dialect, **answers: Any) -> Dialect:
    """Return a dialect with other answers, whichever of its parts gives them."""
    for part in fields(dialect):
        value = getattr(dialect, part.name)
        given = {each.name for each in fields(value)} & answers.keys() if is_dataclass(value) else set()
        if given and not isinstance(value, type):
            dialect = replace(dialect, **{part.name: replace(value, **{name: answers.pop(name) for name in given})})
    assert not answers, f"no part of a dialect answers {', '.join(answers)}"
    return dialect


def outbox_of(engine: Engine, dialect: Dialect | None, **options: Any) -> Outbox:
    """Return an outbox on a database that speaks a dialect; None: the library's own."""
    with _speaking(dialect):
        return Outbox(engine, **options)


def database_of(engine: Engine, dialect: Dialect | None) -> Database:
    """Return a database that speaks a dialect; None: the library's own."""
    with _speaking(dialect):
        return Database(engine)


def _speaking(dialect: Dialect | None) -> AbstractContextManager[Any]:
    return nullcontext() if dialect is None else patch("outbox.store.database.part_of", return_value=dialect)
