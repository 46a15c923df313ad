"""A transaction with messages that ends without commit, error or `rollback()` is told once; no other one is."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import Outbox
from outbox.writing import commit_hook

WARNING = "a transaction in which messages were sent was rolled back: it ended without a commit"


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    """As in a process that has told nothing yet."""
    monkeypatch.setattr(commit_hook, "_forgotten_told", False)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage()[: len(WARNING)] for each in caplog.records if each.levelname == "WARNING"]


def closed_session(engine: Engine) -> None:
    with Session(engine) as session:
        Outbox(engine).send(session, "orders", "")


def removed_scope(engine: Engine) -> None:
    scope = scoped_session(sessionmaker(engine))
    Outbox(engine).send(scope, "orders", "")
    scope.remove()


def closed_connection(engine: Engine) -> None:
    with engine.connect() as connection:
        Outbox(engine).send(connection, "orders", "")


@pytest.mark.parametrize("forget", [closed_session, removed_scope, closed_connection])
def test_a_forgotten_commit_is_told_once(engine, caplog, forget: Callable[[Engine], None]):
    forget(engine)
    forget(engine)

    assert told(caplog) == [WARNING]


def committed(engine: Engine) -> None:
    with Session(engine) as session:
        Outbox(engine).send(session, "orders", "")
        session.commit()


def without_messages(engine: Engine) -> None:
    with Session(engine) as session:
        session.connection()


def rolled_back(engine: Engine) -> None:
    with Session(engine) as session:
        Outbox(engine).send(session, "orders", "")
        session.rollback()


def rolled_back_connection(engine: Engine) -> None:
    with engine.connect() as connection:
        transaction = connection.begin()
        Outbox(engine).send(connection, "orders", "")
        transaction.rollback()


def failed(engine: Engine) -> None:
    with suppress(ZeroDivisionError), Session(engine) as session:
        Outbox(engine).send(session, "orders", "")
        raise ZeroDivisionError


def failed_block(engine: Engine) -> None:
    with suppress(ZeroDivisionError), Outbox(engine).begin() as session:
        Outbox(engine).send(session, "orders", "")
        raise ZeroDivisionError


def rolled_back_savepoint(engine: Engine) -> None:
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "")
        savepoint = connection.begin_nested()
        Outbox(engine).send(connection, "orders", "")
        savepoint.close()


@pytest.mark.parametrize(
    "end",
    [committed, without_messages, rolled_back, rolled_back_connection, failed, failed_block, rolled_back_savepoint],
)
def test_no_other_end_of_a_transaction_is_told(engine, caplog, end: Callable[[Engine], None]):
    end(engine)

    assert told(caplog) == []


def test_awaited_sessions_are_closed_where_their_error_is_not_seen_so_nothing_is_told(pg_engine, caplog):
    async def fail() -> None:
        engine = create_async_engine(pg_engine.url)
        with suppress(ZeroDivisionError):
            async with AsyncSession(engine) as session:
                await Outbox(engine).asend(session, "orders", "")
                raise ZeroDivisionError
        await engine.dispose()

    asyncio.run(fail())

    assert told(caplog) == []
