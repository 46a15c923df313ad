"""Writers no longer send messages themselves: their column in the log and their acks go.

What writers have left behind is sent by the relay of their subscription. It begins again where the subscription that
looked after such messages stood, so that nothing is lost; what the relay has sent since then comes twice, in order.
"""

import sqlalchemy as sa
from alembic import op

from outbox.model.position import Position
from outbox.store.dialects import part_of
from outbox.store.dialects.native import Native

revision = "0004"
down_revision = "0003"

_COMPENSATION = ":compensation"


def upgrade() -> None:
    context = op.get_context()
    schema = context.opts["version_table_schema"]
    # First, because this waits for transactions with such messages.
    op.drop_column("outbox_message", "direct", schema=schema)
    if not context.as_sql:
        _Relays(op.get_bind(), schema).take_over()
    op.drop_table("outbox_ack", schema=schema)
    kinds = "relay, check, extract, consumer, broadcast or backfill"
    if context.dialect.supports_comments:
        op.alter_column("outbox_subscription", "kind", comment=kinds, schema=schema)


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
        # Workers that are still at work cannot settle any more, because of the epoch.
        of = self._lease.c.subscription.in_((relay, compensation))
        fence = {"epoch": self._lease.c.epoch + 1, "owner": None, "lease_until": None}
        self._connection.execute(self._lease.update().where(of, self._lease.c.partition >= 0).values(fence))
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
        """Return each partition with its new epoch, and the base of its newest progress."""
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
