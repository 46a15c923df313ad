"""Writers no longer send messages themselves: their subscriptions and their acks go.

What writers have left behind is sent by the relay of their subscription. It begins again where the subscription that
looked after such messages stood, so that nothing is lost; what the relay has sent since then comes twice, in order.

Writers of the version before go on beside it, and send nothing themselves. Its relays, consumers, extracts and commands
stop with an error that names the version, and lose nothing.
"""

import sqlalchemy as sa
from alembic import op

from outbox.model.position import Position
from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0004"
down_revision = "0003"
version = 2

_COMPENSATION = ":compensation"


def upgrade() -> None:
    context = op.get_context()
    schema = context.opts["version_table_schema"]
    if part_of(context.dialect.name, Native).transaction is not None:
        # Waits for transactions with such messages.
        message = context.dialect.identifier_preparer.format_table(sa.table("outbox_message", schema=schema))
        op.execute(f"LOCK TABLE {message} IN SHARE ROW EXCLUSIVE MODE")
    if not context.as_sql:
        _Relays(op.get_bind(), schema).take_over()
    op.drop_table("outbox_ack", schema=schema)
    kinds = "relay, check, extract, consumer, broadcast or backfill"
    if context.dialect.supports_comments:
        op.alter_column("outbox_subscription", "kind", comment=kinds, schema=schema)
        # The column stays, because an INSERT of the version before names it.
        unused = "always null; writers of version 0.1.0 name it"
        op.alter_column("outbox_message", "direct", comment=unused, schema=schema)


def downgrade() -> None:
    context = op.get_context()
    schema, native = context.opts["version_table_schema"], part_of(context.dialect.name, Native)
    create_ack(native, schema)
    if not context.as_sql:
        forget_writers(op.get_bind(), native, schema)
    if context.dialect.supports_comments:
        kinds = "relay, compensation, check, extract, consumer, broadcast or backfill"
        op.alter_column("outbox_subscription", "kind", comment=kinds, schema=schema)
        comment = "subscription whose writer sends the message itself"
        op.alter_column("outbox_message", "direct", comment=comment, schema=schema)


def create_ack(native: Native, schema: str | None) -> None:
    number = native.transaction
    settled = [sa.Column("xact_id", sa.BigInteger, nullable=False, server_default=sa.text(number))] if number else []
    op.create_table(
        "outbox_ack",
        native.id(),
        sa.Column("subscription", native.name(), nullable=False),
        sa.Column("writer", sa.Text, nullable=False, comment="the process that sent them"),
        sa.Column("first_id", sa.BigInteger, nullable=False),
        sa.Column("last_id", sa.BigInteger, nullable=False),
        sa.Column("ids", sa.Text, nullable=False, comment="JSON list of places in the log"),
        sa.Column("acked_at", sa.DateTime(timezone=True), nullable=False),
        *settled,
        comment="batches sent by the writer; shrinks by the lease holder of the compensation",
        schema=schema,
    )
    op.create_index("outbox_ack_last_id", "outbox_ack", ["subscription", "last_id"], schema=schema)


def forget_writers(connection: sa.Connection, native: Native, schema: str | None) -> None:
    """Take the marks of writers from all messages that a subscription has not passed.

    A relay of the version before leaves a message with a mark to its writer, which has none of them any more.
    """
    number = "id" if native.transaction is None else "xact_id"
    message = sa.table("outbox_message", sa.column(number), sa.column("direct"), schema=schema)
    progress = sa.table("outbox_progress", sa.column("base"), schema=schema)
    standing = [Position.parse(base) for base in connection.scalars(sa.select(progress.c.base).distinct())]
    first = min((number for each in standing for number in (*each.open, each.head)), default=0)
    marked = message.c[number] >= first, message.c.direct.is_not(None)
    connection.execute(message.update().where(*marked).values(direct=None))


class _Relays:
    """The subscriptions, each with what its writers have left behind."""

    def __init__(self, connection: sa.Connection, schema: str | None) -> None:
        self._connection = connection
        metadata = sa.MetaData()
        names = ("subscription", "lease", "progress", "parked")
        tables = (sa.Table(f"outbox_{name}", metadata, schema=schema, autoload_with=connection) for name in names)
        self._subscription, self._lease, self._progress, self._parked = tables
        self._now = sa.text(part_of(connection.dialect.name, Native).now)

    def take_over(self) -> None:
        name = self._subscription.c.name
        kinds = sa.select(name).where(self._subscription.c.kind == "compensation")
        for compensation in self._connection.scalars(kinds).all():
            relay = compensation.removesuffix(_COMPENSATION)
            if self._connection.scalar(sa.select(name).where(name == relay)) is None:
                self._rename(compensation, relay)
            else:
                self._begin_again(relay, compensation)

    def _rename(self, compensation: str, relay: str) -> None:
        """Make the relay, which nobody has declared yet, of what its writers have left behind."""
        for table in (self._lease, self._progress, self._parked):
            self._give(table, compensation, relay)
        columns = {"name": relay, "kind": "relay", "destination": None, "on_dead": None, "grace_ms": 0}
        of = self._subscription.c.name == compensation
        self._connection.execute(self._subscription.update().where(of).values(columns))

    def _begin_again(self, relay: str, compensation: str) -> None:
        """Let each partition of the relay begin again with the first message that writers may have left behind."""
        (left,) = (base for _, base in self._standing(compensation))
        for lease, base in self._standing(relay):
            seen_by_both = Position.of(min(base.head, left.head), {*base.open, *left.open})
            stored = {"n": 0, "base": str(seen_by_both), "settled_at": self._now}
            self._connection.execute(self._progress.insert().values(**lease, **stored))
        there = sa.select(self._parked.c.id).where(self._parked.c.subscription == relay)
        twice = self._parked.c.id.in_(there.scalar_subquery())
        self._connection.execute(self._parked.delete().where(self._parked.c.subscription == compensation, twice))
        self._give(self._parked, compensation, relay)
        for table in (self._lease, self._progress):
            self._connection.execute(table.delete().where(table.c.subscription == compensation))
        self._connection.execute(self._subscription.delete().where(self._subscription.c.name == compensation))

    def _give(self, table: sa.Table, compensation: str, relay: str) -> None:
        self._connection.execute(table.update().where(table.c.subscription == compensation).values(subscription=relay))

    def _standing(self, name: str) -> list[tuple[dict[str, object], Position]]:
        """Return each partition with its epoch, which this upgrade has begun, and the base of its newest progress."""
        lease, progress = self._lease.c, self._progress.c
        columns = (lease.subscription, lease.generation, lease.partition, lease.epoch)
        mine = sa.select(*columns).where(lease.subscription == name, lease.partition >= 0)
        found = []
        for row in self._connection.execute(mine).all():
            of = (
                progress.subscription == name,
                progress.generation == row.generation,
                progress.partition == row.partition,
            )
            newest = sa.select(progress.base).where(*of).order_by(progress.epoch.desc(), progress.n.desc()).limit(1)
            found.append((row._asdict(), Position.parse(self._connection.scalar(newest) or "0:0:")))
        return found
