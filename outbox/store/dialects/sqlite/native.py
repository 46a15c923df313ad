"""The tables on SQLite: the id of a row tells what is settled, and moments are texts that sort by time."""

from __future__ import annotations

from sqlalchemy import Column, Integer, Text, text

from outbox.store.dialects.native import Native

NATIVE = Native(
    now="(strftime('%Y-%m-%d %H:%M:%f', 'now'))",
    id=lambda: Column("id", Integer, primary_key=True),
    transaction=None,
    name=Text,
    partial=lambda condition: {"sqlite_where": text(condition)},
)
