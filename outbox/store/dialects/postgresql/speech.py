"""PostgreSQL's part of an extraction."""

from __future__ import annotations

from datetime import UTC

from outbox.store.dialects.postgresql.filtering import FILTERING
from outbox.store.dialects.speech import Speech


def _quoted(text: str) -> str:
    """Return a text as a literal that means the same with any settings of the server, and holds no colon.

    Where a statement of ours takes parameters, the word after a colon would be read as one.
    """
    quoted = text.replace("'", "''")
    if "\\" not in text and ":" not in text:
        return f"'{quoted}'"
    return "E'" + quoted.replace("\\", "\\\\").replace(":", "\\x3a") + "'"


SPEECH = Speech(
    show={"uuid": "CAST({c} AS text)"},
    replaced={},
    text=_quoted,
    uuid=lambda value: f"CAST('{value}' AS uuid)",
    moment=lambda moment: f"CAST('{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}+00' AS timestamptz)",
    filtering=FILTERING,
    # `+ 0` keeps the planner off the index (xact_id, id), which would sort the whole window.
    number="r.xact_id + 0",
    # One probe of (xact_id, id) each; OFFSET 0 keeps the planner from making a join of it.
    late="(SELECT m.* FROM (VALUES {values}) AS late(n) CROSS JOIN LATERAL (SELECT * FROM {table}"
    " WHERE xact_id = late.n AND id >= {first} AND id <= {last} ORDER BY xact_id, id OFFSET 0) AS m) AS r",
    server="SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system, CASE WHEN NOT"
    " pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END AS timeline",
    settings=(
        "SET enable_seqscan = off",
        "SET enable_bitmapscan = off",
        "SET jit = off",
        "SET max_parallel_workers_per_gather = 0",
    ),
    patience="SET statement_timeout = '10min'",
    replayed="SELECT NOT pg_is_in_recovery() OR coalesce(pg_last_wal_replay_lsn() >= CAST({lsn} AS pg_lsn), false)"
    " AS replayed",
)
