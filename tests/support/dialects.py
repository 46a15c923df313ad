"""Dialects that differ from the library's own in some answers."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

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
