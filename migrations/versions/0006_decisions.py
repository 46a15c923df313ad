"""What people decided has a table of its own, and leaves the parked messages.

What was requested and is not carried out yet becomes a row of the new table for each message.

Writers of the version before go on beside it. Its relays, consumers, extracts and commands stop with an error that
names the version, and lose nothing.
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0006"
down_revision = "0005"
version = 4

OPEN = """
    INSERT INTO {decision} (at, "by", verb, subscription, reason, choice)
    SELECT coalesce(requested_at, {now}), coalesce(requested_by, 'unknown'), request, subscription, request_reason,
           '{{"ids": [' || id || ']}}'
    FROM {parked} WHERE request IS NOT NULL ORDER BY subscription, id
"""
STANDING = """
    SELECT subscription, verb, "by", reason, at, choice FROM {decision}
    WHERE done_at IS NULL AND verb IN ('replay', 'discard') ORDER BY id
"""
REQUEST = """
    UPDATE {parked} SET request = :verb, requested_by = :by, request_reason = :reason, requested_at = :at
    WHERE subscription = :subscription AND id = :id
"""


def upgrade() -> None:
    context = op.get_context()
    native, schema = part_of(context.dialect.name, Native), context.opts["version_table_schema"]
    op.create_table(
        "outbox_decision",
        native.id(),
        sa.Column("at", moment(), nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("subscription", native.name(), comment="null: of none"),
        sa.Column("reason", sa.Text),
        sa.Column("count", sa.BigInteger, comment="so many messages it was carried out on"),
        sa.Column("done_at", moment(), comment="null: not carried out yet"),
        sa.Column("choice", sa.Text, nullable=False, comment="JSON object: what was decided on"),
        comment="decisions of people; shrinks by lease holders",
        sqlite_autoincrement=True,
        schema=schema,
    )
    is_open = native.partial("done_at IS NULL")
    op.create_index("outbox_decision_open", "outbox_decision", ("subscription", "id"), schema=schema, **is_open)
    op.create_index("outbox_decision_done_at", "outbox_decision", ("done_at",), schema=schema)
    tables = {name: quoted(f"outbox_{name}", schema) for name in ("decision", "parked")}
    # First, because it locks the table: a request of a moment later would be lost.
    op.drop_index("outbox_parked_request", "outbox_parked", schema=schema)
    op.execute(OPEN.format(**tables, now=native.now))
    for column in ("request", "requested_by", "request_reason", "requested_at"):
        op.drop_column("outbox_parked", column, schema=schema)


def downgrade() -> None:
    """What is not carried out yet stands on its messages again; the record of the rest goes."""
    context = op.get_context()
    native, schema = part_of(context.dialect.name, Native), context.opts["version_table_schema"]
    for column in (
        sa.Column("request", sa.Text),
        sa.Column("requested_by", sa.Text),
        sa.Column("request_reason", sa.Text),
        sa.Column("requested_at", moment()),
    ):
        op.add_column("outbox_parked", column, schema=schema)
    if not context.as_sql:
        give_back(op.get_bind(), schema)
    requested = native.partial("request IS NOT NULL")
    op.create_index("outbox_parked_request", "outbox_parked", ("subscription",), schema=schema, **requested)
    op.drop_table("outbox_decision", schema=schema)


def give_back(connection: sa.Connection, schema: str | None) -> None:
    """Write the open decisions on their messages, in the order in which they were made."""
    tables = {name: quoted(f"outbox_{name}", schema) for name in ("decision", "parked")}
    for subscription, verb, by, reason, at, choice in connection.execute(sa.text(STANDING.format(**tables))).all():
        chosen = json.loads(choice)
        about = {"subscription": subscription, "verb": verb, "by": by, "reason": reason, "at": at}
        rows = [{**about, "id": id} for id in chosen.get("left", chosen.get("ids", ()))]
        if rows:
            connection.execute(sa.text(REQUEST.format(**tables)), rows)


def moment() -> Any:
    return sa.DateTime(timezone=True)


def quoted(table: str, schema: str | None) -> str:
    return op.get_context().dialect.identifier_preparer.format_table(sa.table(table, schema=schema))
