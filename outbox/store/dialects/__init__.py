"""The differences between databases. Code elsewhere does not compare their names."""

from importlib import import_module
from typing import TypeVar

from outbox.errors import DatabaseError
from outbox.store.dialects.kinds import KINDS

P = TypeVar("P")


def part_of(kind: str, part: type[P]) -> P:
    """Return the `Dialect`, the `Native` or the `Speech` of a kind of database, by SQLAlchemy's name for the kind.

    Each is a constant in a file of its name in the folder of the kind, and loads no driver that the others need.
    """
    if kind not in KINDS:
        raise DatabaseError(f"no outbox on {kind} yet; use {' or '.join(KINDS.values())}")
    name = part.__name__
    found = getattr(import_module(f"{__name__}.{kind}.{name.lower()}"), name.upper())
    assert isinstance(found, part)
    return found
