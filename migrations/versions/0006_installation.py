"""A random id of each outbox: nothing else differs between two SQLite files, or two schemas of one database."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_DRAWN = {"postgresql": "CAST(gen_random_uuid() AS text)", "sqlite": "lower(hex(randomblob(16)))"}


def upgrade() -> None:
    context = op.get_context()
    schema: str | None = context.opts["version_table_schema"]
    installation = sa.Column("installation", sa.Text, comment="random id of this outbox, drawn with its tables")
    op.add_column("outbox_meta", installation, schema=schema)
    columns = sa.column("version", sa.Integer), sa.column("installation", sa.Text)
    meta = sa.table("outbox_meta", *columns, schema=schema)
    op.execute(sa.update(meta).values(version=6, installation=sa.text(_DRAWN[context.dialect.name])))
