"""A check of the slot: a message with a negative slot is in no partition, and would never be delivered.

On a log with messages the check counts for new messages at once, without a look at the others: that would keep writers
waiting for as long as it takes to read the log. `outbox doctor` names the statement that looks at the others beside
writers.

The version before goes on beside it, because its writers give no message a negative slot.
"""

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0003"
down_revision = "0002"
version = 1


def upgrade() -> None:
    context = op.get_context()
    if part_of(context.dialect.name, Native).transaction is None:
        return
    message = sa.table("outbox_message", schema=context.opts["version_table_schema"])
    log = context.dialect.identifier_preparer.format_table(message)
    op.execute(f"ALTER TABLE {log} ADD CONSTRAINT outbox_message_slot CHECK (slot >= 0) NOT VALID")
    validate = f"ALTER TABLE {log} VALIDATE CONSTRAINT outbox_message_slot"
    is_empty = f"NOT EXISTS (SELECT 1 FROM {log})"  # noqa: S608 - the name is quoted
    op.execute(f"DO $$ BEGIN IF {is_empty} THEN {validate}; END IF; END $$")


def downgrade() -> None:
    context = op.get_context()
    if part_of(context.dialect.name, Native).transaction is not None:
        schema = context.opts["version_table_schema"]
        op.drop_constraint("outbox_message_slot", "outbox_message", type_="check", schema=schema)
