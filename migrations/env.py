"""What Alembic runs around the revisions; `outbox.migrate` hands over a connection, or a dialect to write SQL for."""

from typing import Any

from alembic import context
from sqlalchemy import Connection, inspect, text
from sqlalchemy.schema import CreateSchema

from outbox.migrate import fence, first_rows, take_over, wait_for_others
from outbox.schema import VERSION, VERSION_TABLE, metadata

attributes = context.config.attributes
schema: str | None = attributes.get("schema")


def configure(dialect: str, **where: Any) -> None:
    """Options that a change of the database and a script have in common."""
    context.configure(
        **where,
        target_metadata=metadata(schema, dialect),
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        include_schemas=schema is not None,
        transactional_ddl=True,  # also on SQLite, which can, although Alembic assumes that its driver cannot
    )


def run_on(connection: Connection) -> None:
    """Change the database that `connection` is connected to."""
    wait_for_others(connection, schema, VERSION_TABLE)
    if schema is not None and not inspect(connection).has_schema(schema):
        connection.execute(CreateSchema(schema))
    take_over(connection, schema)
    # First of all, because a worker that settles holds its lease, and then wants the tables.
    fence(connection, schema, attributes.get("version", VERSION))
    configure(connection.dialect.name, connection=connection)
    with context.begin_transaction():
        context.run_migrations()


def write_script(dialect: str) -> None:
    """Write SQL instead."""
    configure(dialect, dialect_name=dialect, literal_binds=True)
    with context.begin_transaction():
        if schema is not None:
            context.execute(CreateSchema(schema, if_not_exists=True))
        context.run_migrations()
        for statement in first_rows(context.get_context().dialect, schema, attributes["slots"]):
            context.execute(text(statement))


if context.is_offline_mode():
    write_script(attributes["dialect"])
else:
    run_on(attributes["connection"])
