"""A held key is a queue with one head: what stands behind the head of its key has no state any more.

Of messages that failed behind another one of their key, the attempts begin again.

Writers of the version before go on beside it. Its relays, consumers, extracts and commands stop with an error that
names the version, and lose nothing.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0005"
down_revision = "0004"
version = 3

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


#: The way back: what stands behind a head has a state again.
BLOCKS = "unit IS NOT NULL"
BLOCKED = "coalesce(state, 'blocked')"
KNOWN = "coalesce(state IN ('delayed', 'waiting', 'retry', 'dead'), unit IS NOT NULL)"
KNOWN_BEFORE = "state IN ('delayed', 'waiting', 'retry', 'blocked', 'dead')"
PARKED, BEFORE = "outbox_parked", "outbox_parked_before"


def upgrade() -> None:
    native = part_of(op.get_context().dialect.name, Native)
    if native.transaction is None:
        rows = f"""
            SELECT {ENVELOPE}, {STATE}, n.the_unit, n.nth, {ATTEMPTS}, {DUE.format(now=native.now)}, {ERROR}, {REQUEST}
            FROM ({NUMBERED.format(parked=BEFORE)}) AS n
        """  # noqa: S608 - the names are ours
        in_a_new_table(["ready", "key", "head"], [state(), unit()], KNOWN, rows)
        make_common_indexes(native)
    else:
        in_place(native)
    index("unit", "subscription", "unit", "place", **native.partial("unit IS NOT NULL"))
    head = native.partial("unit IS NOT NULL AND state IS NOT NULL")
    index("head", "subscription", "unit", unique=bool(head), **head)


def downgrade() -> None:
    native = part_of(op.get_context().dialect.name, Native)
    if native.transaction is None:
        rows = f"""
            SELECT {ENVELOPE}, {BLOCKED}, {BLOCKS}, place, attempts, due_at, error, {REQUEST} FROM {BEFORE}
        """  # noqa: S608 - the names are ours
        in_a_new_table(["unit", "head"], [state(nullable=False), blocks(nullable=False)], KNOWN_BEFORE, rows)
        make_common_indexes(native)
    else:
        in_place_back()
    index("ready", "subscription", "place", **native.partial("state = 'blocked'"))
    index("key", "subscription", "key", "place", **native.partial("blocks"))
    index("head", "subscription", "key", "place", **native.partial("blocks AND state <> 'blocked'"))


def in_place(native: Native) -> None:
    """Keep the table, because roles have rights on it."""
    drop_indexes(PARKED, "ready", "key", "head")
    op.drop_constraint("outbox_parked_state", PARKED, type_="check", schema=schema())
    op.alter_column(PARKED, "state", nullable=True, schema=schema())
    op.add_column(PARKED, unit(), schema=schema())
    op.execute(f"""
        UPDATE {parked()} AS p SET unit = n.the_unit, place = n.nth, state = {STATE}, attempts = {ATTEMPTS},
               due_at = {DUE.format(now=native.now)}, error = {ERROR}
        FROM ({NUMBERED.format(parked=parked())}) AS n WHERE p.subscription = n.subscription AND p.id = n.id
    """)  # noqa: S608 - the name is quoted
    op.drop_column(PARKED, "blocks", schema=schema())
    op.create_check_constraint("outbox_parked_state", PARKED, KNOWN, schema=schema())


def in_place_back() -> None:
    drop_indexes(PARKED, "unit", "head")
    op.drop_constraint("outbox_parked_state", PARKED, type_="check", schema=schema())
    op.add_column(PARKED, blocks(nullable=True), schema=schema())
    op.execute(f"UPDATE {parked()} SET blocks = {BLOCKS}, state = {BLOCKED}")  # noqa: S608 - the name is quoted
    for filled in ("state", "blocks"):
        op.alter_column(PARKED, filled, nullable=False, schema=schema())
    op.drop_column(PARKED, "unit", schema=schema())
    op.create_check_constraint("outbox_parked_state", PARKED, KNOWN_BEFORE, schema=schema())


def in_a_new_table(gone: list[str], columns: list[sa.Column[Any]], check: str, rows: str) -> None:
    """Make the table anew, where no column can be changed. `columns`: two that the other table does not have so."""
    op.rename_table(PARKED, BEFORE)
    drop_indexes(BEFORE, "due", "state", "request", *gone)
    create_parked(columns, check)
    names = ", ".join(column.name for column in columns)
    into = f"INSERT INTO {PARKED} ({ENVELOPE}, {names}, place, attempts, due_at, error, {REQUEST})"
    op.execute(f"{into} {rows}")
    op.drop_table(BEFORE)


def make_common_indexes(native: Native) -> None:
    index("due", "subscription", "due_at", **native.partial("state IN ('delayed', 'waiting', 'retry')"))
    index("state", "subscription", "state", "id")
    index("request", "subscription", **native.partial("request IS NOT NULL"))


def create_parked(columns: list[sa.Column[Any]], check: str) -> None:
    op.create_table(
        PARKED,
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
        *columns,
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
        sa.CheckConstraint(check, name="outbox_parked_state"),
        comment="copies of parked messages; shrinks by the lease holder",
    )


def state(*, nullable: bool = True) -> sa.Column[Any]:
    return sa.Column("state", sa.Text, nullable=nullable)


def unit() -> sa.Column[Any]:
    return sa.Column("unit", name(), comment="the key that is held; null: the message stands for itself")


def blocks(*, nullable: bool) -> sa.Column[Any]:
    return sa.Column("blocks", sa.Boolean, nullable=nullable, comment="later messages of the key wait for this one")


def name() -> Any:
    return part_of(op.get_context().dialect.name, Native).name()


def moment() -> Any:
    return sa.DateTime(timezone=True)


def index(name: str, *columns: str, unique: bool = False, **partial: Any) -> None:
    op.create_index(f"outbox_parked_{name}", PARKED, columns, schema=schema(), unique=unique, **partial)


def drop_indexes(table: str, *names: str) -> None:
    for each in names:
        op.drop_index(f"outbox_parked_{each}", table, schema=schema(), if_exists=True)


def parked() -> str:
    context = op.get_context()
    return context.dialect.identifier_preparer.format_table(sa.table("outbox_parked", schema=schema()))


def schema() -> str | None:
    found: str | None = op.get_context().opts["version_table_schema"]
    return found
