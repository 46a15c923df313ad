"""The label of a database, for people: host, name and schema; never a user, never a password."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import URL

from outbox.runtime.secret import is_secret_name
from outbox.store.dialects.kinds import is_file


def label_of(url: URL, schema: str | None = None) -> str:
    """Return host, database and schema, as `db1:5432/shop/tenant_a`; for SQLite the path of its file."""
    if is_file(url):
        return "/".join(filter(None, (url.database or "memory", schema)))
    host = url.host or _said(url, "host") or _said(url, "service") or "localhost"
    port = f":{url.port}" if url.port else ""
    name = url.database or _said(url, "dbname") or url.username or ""
    return "/".join(filter(None, (f"{host}{port}", name, schema)))


def option_of(url: URL) -> str:
    """Return a URL as an argument of a command: without secrets, and with the user where no output hides the name.

    A file is named by its whole path, because a shell may be in another folder.
    """
    kept = {name: value for name, value in url.query.items() if not is_secret_name(name)}
    if url.username:
        kept["user"] = url.username
    database = url.database
    if is_file(url) and database and database != ":memory:" and not database.startswith("file:"):
        database = str(Path(database).absolute())
    plain = URL.create(url.get_backend_name(), host=url.host, port=url.port, database=database, query=kept)
    return plain.render_as_string()


def told_apart(labels: Sequence[str]) -> list[str]:
    """Return the labels in their order; a repeated label, of a second relay of one database, gets a number."""
    seen: Counter[str] = Counter()
    found = []
    for label in labels:
        seen[label] += 1
        found.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return found


def _said(url: URL, name: str) -> str:
    """Return a parameter of the URL's query; several values, as for several hosts, are joined by commas."""
    value = url.query.get(name, "")
    return value if isinstance(value, str) else ",".join(value)
