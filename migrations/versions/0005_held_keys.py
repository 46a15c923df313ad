"""A held key is a queue with one head: what stands behind the head of its key has no state any more.

Relays and consumers of the version before refuse the tables; writers go on. Of messages that failed behind another one
of their key, the attempts begin again.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0005"
down_revision = "0004"

#: The rows with their unit, the place in the unit, and whether the turn of what stands first has come.
NUMBERED = """
    SELECT p.*, CASE WHEN blocks THEN key END AS the_unit, state = 'blocked' AS unblocked,
           row_number() OVER (PARTITION BY subscription, CASE WHEN blocks THEN key END ORDER BY place, id) AS nth
    FROM {parked} AS p
"""
HEADS = "n.the_unit IS NULL OR n.nth = 1"
STATE = f"CASE WHEN {HEADS} THEN CASE WHEN n.unblocked THEN 'retry' ELSE n.state END END"
ATTEMPTS = f"CASE WHEN ({HEADS}) AND NOT n.unblocked THEN n.attempts ELSE 0 END"
DUE = f"CASE WHEN {HEADS} THEN CASE WHEN n.unblocked THEN {{now}} ELSE n.due_at END END"
ERROR = f"CASE WHEN {HEADS} THEN n.error END"
ENVELOPE = (
    "subscription, id, message_id, topic, key, slot, tags, headers, content_type, created_at, deliver_at, expires_at"
)
REQUEST = "parked_at, request, requested_by, request_reason, requested_at, body"


def upgrade() -> None:
    native = part_of(op.get_context().dialect.name, Native)
    if native.transaction is None:
        in_a_new_table(native)
    else:
        in_place(native)
    index("outbox_parked_unit", "subscription", "unit", "place", **native.partial("unit IS NOT NULL"))
    head = native.partial("unit IS NOT NULL AND state IS NOT NULL")
    index("outbox_parked_head", "subscription", "unit", unique=True, **head)


def in_place(native: Native) -> None:
    """Keep the table, because roles have rights on it."""
    for gone in ("ready", "key", "head"):
        op.drop_index(f"outbox_parked_{gone}", "outbox_parked", schema=schema())
    op.drop_constraint("outbox_parked_state", "outbox_parked", type_="check", schema=schema())
    op.alter_column("outbox_parked", "state", nullable=True, schema=schema())
    op.add_column("outbox_parked", unit(), schema=schema())
    op.execute(f"""
        UPDATE {parked()} AS p SET unit = n.the_unit, place = n.nth, state = {STATE}, attempts = {ATTEMPTS},
               due_at = {DUE.format(now=native.now)}, error = {ERROR}
        FROM ({NUMBERED.format(parked=parked())}) AS n WHERE p.subscription = n.subscription AND p.id = n.id
    """)  # noqa: S608 - the name is quoted
    op.drop_column("outbox_parked", "blocks", schema=schema())
    op.create_check_constraint("outbox_parked_state", "outbox_parked", known(), schema=schema())


def in_a_new_table(native: Native) -> None:
    """Make the table anew, where no column can be changed."""
    op.rename_table("outbox_parked", "outbox_parked_before")
    for gone in ("due", "ready", "key", "head", "state", "request"):
        op.drop_index(f"outbox_parked_{gone}", "outbox_parked_before")
    create_parked()
    op.execute(f"""
        INSERT INTO outbox_parked ({ENVELOPE}, state, unit, place, attempts, due_at, error, {REQUEST})
        SELECT {ENVELOPE}, {STATE}, n.the_unit, n.nth, {ATTEMPTS}, {DUE.format(now=native.now)}, {ERROR}, {REQUEST}
        FROM ({NUMBERED.format(parked="outbox_parked_before")}) AS n
    """)  # noqa: S608 - the names are ours
    op.drop_table("outbox_parked_before")
    index("outbox_parked_due", "subscription", "due_at", **native.partial("state IN ('delayed', 'waiting', 'retry')"))
    index("outbox_parked_state", "subscription", "state", "id")
    index("outbox_parked_request", "subscription", **native.partial("request IS NOT NULL"))


def create_parked() -> None:
    op.create_table(
        "outbox_parked",
        sa.Column("subscription", name(), primary_key=True),
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("message_id", sa.Uuid, nullable=False),
        sa.Column("topic", name(), nullable=False),
        sa.Column("key", name()),
        sa.Column("slot", sa.SmallInteger, nullable=False),
        sa.Column("tags", name()),
        sa.Column("headers", sa.Text, comment="JSON object of strings"),
        sa.Column("content_type", sa.Text),
        sa.Column("created_at", moment(), nullable=False),
        sa.Column("deliver_at", moment()),
        sa.Column("expires_at", moment()),
        sa.Column("state", sa.Text),
        unit(),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", moment()),
        sa.Column("error", sa.Text),
        sa.Column("parked_at", moment(), nullable=False),
        sa.Column("request", sa.Text),
        sa.Column("requested_by", sa.Text),
        sa.Column("request_reason", sa.Text),
        sa.Column("requested_at", moment()),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.CheckConstraint(known(), name="outbox_parked_state"),
        comment="copies of parked messages; shrinks by the lease holder",
    )


def known() -> str:
    return "coalesce(state IN ('delayed', 'waiting', 'retry', 'dead'), unit IS NOT NULL)"


def unit() -> sa.Column[Any]:
    return sa.Column("unit", name(), comment="the key that is held; null: the message stands for itself")


def name() -> Any:
    return part_of(op.get_context().dialect.name, Native).name()


def moment() -> Any:
    return sa.DateTime(timezone=True)


def index(name: str, *columns: str, unique: bool = False, **partial: Any) -> None:
    op.create_index(name, "outbox_parked", columns, schema=schema(), unique=unique and bool(partial), **partial)


def parked() -> str:
    context = op.get_context()
    return context.dialect.identifier_preparer.format_table(sa.table("outbox_parked", schema=schema()))


def schema() -> str | None:
    found: str | None = op.get_context().opts["version_table_schema"]
    return found
