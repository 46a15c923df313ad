"""The databases of Django's settings, as URLs of SQLAlchemy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL

from outbox.errors import DatabaseError
from outbox.store.dialects import part_of
from outbox.store.dialects.dialect import Dialect
from outbox.store.dialects.kinds import KINDS, is_file

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def url_of(connection: BaseDatabaseWrapper) -> URL:
    """Return the URL of a connection's database, with the driver of workers.

    Of the `OPTIONS` the URL gets those that libpq knows.

    Raises:
        DatabaseError: an outbox cannot be there.
    """
    settings: Mapping[str, Any] = connection.settings_dict
    kind, name = connection.vendor, str(settings["NAME"] or "")
    if kind not in KINDS:
        raise DatabaseError(
            f"the database {connection.alias!r} is {kind}; an outbox needs {' or '.join(KINDS.values())}"
        )
    url = URL.create(
        kind,
        username=settings["USER"] or None,
        password=settings["PASSWORD"] or None,
        host=settings["HOST"] or None,
        port=int(settings["PORT"]) if settings["PORT"] else None,
        database=name or None,
    )
    if not is_file(url):
        options = settings["OPTIONS"].items()
        url = url.update_query_dict({key: str(value) for key, value in options if isinstance(value, str | int)})
    elif name.startswith("file:"):
        url = url.update_query_dict({"uri": "true"})
    return part_of(kind, Dialect).driving.blocking_url(url)
