"""Writers take delayed messages back: a table of withdrawals, and an index to find a delayed message by its id.

A log with messages gets the index from a person, beside writers: building it here would keep writers waiting for as
long as it takes to read the log. `outbox doctor` names the statement. On the way back parked copies of withdrawn
messages go; what no reader has parked yet is sent.

Writers of the version before go on beside it. Its relays, consumers, extracts and commands stop with an error that
names the version, because they would send what was withdrawn.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0007"
down_revision = "0006"
version = 5


#: Each stands for itself until it is due.
WITHDRAWN = """
    DELETE FROM {parked} WHERE state = 'delayed' AND message_id IN (SELECT message_id FROM {withdrawal} WHERE withdrawn)
"""


def upgrade() -> None:
    context = op.get_context()
    native, schema = part_of(context.dialect.name, Native), context.opts["version_table_schema"]
    op.create_table(
        "outbox_withdrawal",
        sa.Column("message_id", sa.Uuid, primary_key=True),
        sa.Column("withdrawn", sa.Boolean, nullable=False, comment="false: handed over before the message was due"),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        comment="delayed messages that writers took back; shrinks by purge",
        schema=schema,
    )
    if native.transaction is None:
        delayed = native.partial("deliver_at IS NOT NULL")
        op.create_index("outbox_message_delayed", "outbox_message", ("message_id",), schema=schema, **delayed)
        return
    log = quoted("outbox_message", schema)
    index = f"CREATE INDEX outbox_message_delayed ON {log} (message_id) WHERE deliver_at IS NOT NULL"
    is_empty = f"NOT EXISTS (SELECT 1 FROM {log})"  # noqa: S608 - the name is quoted
    op.execute(f"DO $$ BEGIN IF {is_empty} THEN {index}; END IF; END $$")


def downgrade() -> None:
    schema = op.get_context().opts["version_table_schema"]
    tables = {name: quoted(f"outbox_{name}", schema) for name in ("parked", "withdrawal")}
    op.execute(WITHDRAWN.format(**tables))
    op.drop_index("outbox_message_delayed", "outbox_message", schema=schema, if_exists=True)
    op.drop_table("outbox_withdrawal", schema=schema)


def quoted(table: str, schema: str | None) -> Any:
    return op.get_context().dialect.identifier_preparer.format_table(sa.table(table, schema=schema))
