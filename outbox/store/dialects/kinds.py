"""The kinds of database that may hold an outbox, as far as a URL tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import URL

#: SQLAlchemy's names for them, and those for people. Each is a folder beside this file, imported at the first use.
KINDS = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}


def is_file(url: URL) -> bool:
    """Return whether a database is a file, without a server and without schemas."""
    return url.get_backend_name() == "sqlite"
