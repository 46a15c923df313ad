"""The matrix sees what is broken: outboxes with one fault each, and a case that tells them from a sound one."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event

from outbox import Outbox
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.store.dialects.sqlite.dialect import DIALECT as SQLITE
from tests.scenarios.matrix.homes import KINDS, Home
from tests.scenarios.matrix.playing import left_by
from tests.scenarios.matrix.scenarios import SCENARIOS
from tests.scenarios.matrix.table import Scenario
from tests.support.dialects import outbox_of, varied

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


class OnAConnectionOfItsOwn(Outbox):
    """Sends beside the caller's transaction."""

    def send(self, handle: Any, topic: str, body: object, **fields: Any) -> Any:
        """Commit the message at once."""
        with self.engine.begin() as connection:
            return super().send(connection, topic, body, **fields)


class WithTheSessionsCommit(Outbox):
    """Sends when a session says that it has committed, which may have been but a savepoint's release."""

    def send(self, handle: Any, topic: str, body: object, **fields: Any) -> Any:
        """Remember the message, and write it after the commit."""
        if not hasattr(handle, "flush"):
            return super().send(handle, topic, body, **fields)

        def committed(_session: object) -> None:
            with self.engine.begin() as connection:
                Outbox.send(self, connection, topic, body, **fields)

        return event.listen(handle, "after_commit", committed, once=True)


class WhenASavepointIsReleased(Outbox):
    """Takes the release of a savepoint for a commit."""

    def send(self, handle: Any, topic: str, body: object, **fields: Any) -> Any:
        """Remember the message, and write it at the next release or commit."""
        waiting: list[object] = [body]

        def over(*_: object) -> None:
            if waiting:
                waiting.clear()
                with self.engine.execution_options(over=True).begin() as connection:
                    Outbox.send(self, connection, topic, body, **fields)

        event.listen(handle, "release_savepoint", over)
        return event.listen(handle, "commit", over)


class WithoutFlush(Outbox):
    """Sends before the row that orders the key is written."""

    def send(self, handle: Any, topic: str, body: object, **fields: Any) -> Any:
        """Leave the session's objects where they are."""
        with handle.no_autoflush:
            return super().send(handle, topic, body, **fields)


def blind_to_failures(engine: Engine) -> Outbox:
    """Does not ask whether the transaction has failed."""
    return outbox_of(engine, varied(POSTGRESQL, is_aborted=lambda _driver: False))


def deaf_to_rollbacks(engine: Engine) -> Outbox:
    """Does not hear what the server answers to a COMMIT."""
    return outbox_of(engine, varied(POSTGRESQL, commit=lambda commit, _connection: commit() is None))


def content_with_autocommit(engine: Engine) -> Outbox:
    """Does not ask whether there is a transaction."""
    return outbox_of(engine, varied(POSTGRESQL, commits_every_statement=lambda _driver: False))


def trusting_the_driver(engine: Engine) -> Outbox:
    """Lets SQLite's driver release a savepoint that nothing was begun before."""
    return outbox_of(engine, varied(SQLITE, prepare=None))


TWINS: list[tuple[Callable[[Any], Outbox], str, str, str]] = [
    (OnAConnectionOfItsOwn, "rollback", "Connection", "postgresql"),
    (OnAConnectionOfItsOwn, "savepoint_rolled_back", "Session", "postgresql"),
    (OnAConnectionOfItsOwn, "nothing_but_the_end_of_the_program", "psycopg", "postgresql"),
    (WithTheSessionsCommit, "create_savepoint_session_commit_connection_rollback", "Connection", "postgresql"),
    (WithTheSessionsCommit, "rollback_only_session_commit_connection_rollback", "Connection", "postgresql"),
    (WhenASavepointIsReleased, "savepoint_released_then_close", "Connection", "postgresql"),
    (WhenASavepointIsReleased, "three_deep_the_outer_rolled_back", "Connection", "postgresql"),
    (WithoutFlush, "a_keyed_message_takes_its_object_along", "Session", "postgresql"),
    (WithoutFlush, "a_keyed_message_takes_its_object_along", "scoped_session", "sqlite"),
    (blind_to_failures, "a_failed_transaction_does_not_pretend_to_commit", "AsyncSession", "postgresql"),
    (blind_to_failures, "a_failed_block_does_not_pretend_to_commit", "Connection", "postgresql"),
    (blind_to_failures, "a_failed_block_does_not_pretend_to_commit", "Session", "psycopg2"),
    (deaf_to_rollbacks, "a_failed_transaction_does_not_pretend_to_commit", "AsyncSession", "asyncpg"),
    (content_with_autocommit, "autocommit_is_refused", "Session", "postgresql"),
    (content_with_autocommit, "autocommit_is_refused", "AsyncConnection", "asyncpg"),
    (content_with_autocommit, "autocommit_is_refused", "psycopg_async", "postgresql"),
    (trusting_the_driver, "three_deep_all_released_then_rollback", "Connection", "plain_sqlite"),
    (trusting_the_driver, "savepoint_first_and_released_then_rollback", "AsyncSession", "plain_sqlite"),
]


@pytest.mark.parametrize(("twin", "name", "kind", "database"), TWINS)
def test_a_broken_outbox_is_told_from_a_sound_one(homes: dict[str, Home], twin, name, kind, database):
    scenario, home = BY_NAME[name], homes[database]

    assert holds(scenario, kind, home, Outbox)
    assert not holds(scenario, kind, home, twin)


def holds(scenario: Scenario, kind: str, home: Home, make_outbox: Callable[[Any], Outbox]) -> bool:
    """Whether the scenario leaves what it says, and raises where it says so."""
    try:
        left = left_by(scenario, KINDS[kind], home, make_outbox)
    except (AssertionError, pytest.fail.Exception):
        return False
    return left == scenario.expected
