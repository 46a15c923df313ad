"""${message}."""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade() -> None:
    schema: str | None = op.get_context().opts["version_table_schema"]
    ${upgrades if upgrades else "pass"}
