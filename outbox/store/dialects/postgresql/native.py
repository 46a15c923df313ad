"""The tables on PostgreSQL: a row of the log holds the id of its transaction."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Identity, Text, text

from outbox.store.dialects.native import Native

NATIVE = Native(
    now="statement_timestamp()",
    id=lambda: Column("id", BigInteger, Identity(cache=1), primary_key=True),
    transaction="(pg_current_xact_id()::text::bigint)",
    name=lambda: Text(collation="C"),
    partial=lambda condition: {"postgresql_where": text(condition)},
)
