"""A request of a person that is written while the tables are upgraded is not lost."""

from __future__ import annotations

from alembic import command
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from outbox import migrate
from tests.store.test_migrations import empty_pg, park_earlier  # noqa: F401
from tests.support.parked import decisions


def test_a_request_beside_an_upgrade_becomes_a_decision_or_is_refused(empty_pg: Engine):  # noqa: F811
    """A command of the version before comes between two statements of the upgrade."""
    park_earlier(empty_pg)
    with empty_pg.begin() as connection:
        command.upgrade(migrate._config(connection=connection, schema=None), "0005")
    other = create_engine(empty_pg.url, connect_args={"options": "-c lock_timeout=500"})
    request = text("UPDATE outbox_parked SET request = 'replay', requested_by = 'ann' WHERE id = 1")
    written = list[bool]()

    def ask(_connection, _cursor, statement, *_rest) -> None:
        if not statement.lstrip().startswith("INSERT INTO outbox_decision"):
            return
        try:
            with other.begin() as connection:
                connection.execute(request)
            written.append(True)
        except DBAPIError:
            written.append(False)

    event.listen(empty_pg, "after_cursor_execute", ask)
    migrate.upgrade(empty_pg)
    other.dispose()

    found = {(by, verb) for by, verb, *_ in decisions(empty_pg)}
    assert (written, found) in [([True], {("ann", "replay")}), ([False], set())]
