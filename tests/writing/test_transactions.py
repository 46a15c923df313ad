"""What happens to the transaction happens to the message, however the transaction is held."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine
from outbox.testing.servers import PostgresServer
from tests.conftest import adopt
from tests.support.destination import relay_to
from tests.support.handles import HANDLES
from tests.support.readers import bodies

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]

Send = Callable[[str], None]
Handle = Any


@pytest.fixture(scope="module")
def pg_home(postgres: PostgresServer, pg_template: str) -> Iterator[Engine]:
    """A PostgreSQL database for all of these tests: there are many, and each needs but an empty log."""
    name = f"transactions_{uuid.uuid4().hex}"
    engine = create_engine(postgres.create_database(name, template=pg_template))
    adopt(engine)
    yield engine
    engine.dispose()
    postgres.drop_database(name)


@pytest.fixture
def pg_engine(pg_home: Engine) -> Engine:
    """That database, with an empty log."""
    with pg_home.begin() as connection:
        connection.execute(text("DELETE FROM outbox_message"))
    return pg_home


@pytest.fixture
def plain_sqlite_engine(sqlite_template: Path, tmp_path: Path) -> Iterator[Engine]:
    """SQLite as SQLAlchemy opens it by default: the driver begins by itself, and not before a savepoint."""
    path = tmp_path / "plain.sqlite3"
    shutil.copy(sqlite_template, path)
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


@pytest.fixture(params=["pg_engine", "sqlite_engine", "plain_sqlite_engine"])
def any_engine(request: pytest.FixtureRequest) -> Engine:
    """A migrated database, behind every kind of engine that an application may have."""
    found: Engine = request.getfixturevalue(request.param)
    return found


# Each of these ends its transaction, and says which messages exist then.


def commit(handle: Handle, send: Send) -> list[str]:
    send("1")
    send("2")
    handle.commit()
    return ["1", "2"]


def rollback(handle: Handle, send: Send) -> list[str]:
    send("1")
    handle.rollback()
    return []


def one_after_the_other(handle: Handle, send: Send) -> list[str]:
    send("1")
    handle.rollback()
    send("2")
    handle.commit()
    send("3")
    handle.commit()
    send("4")
    handle.rollback()
    return ["2", "3"]


def close(handle: Handle, send: Send) -> list[str]:
    send("1")
    handle.close()
    return []


def commit_and_close(handle: Handle, send: Send) -> list[str]:
    send("1")
    handle.commit()
    send("2")
    handle.close()
    return ["1"]


def savepoint_released(handle: Handle, send: Send) -> list[str]:
    send("1")
    with handle.begin_nested():
        send("2")
    send("3")
    handle.commit()
    return ["1", "2", "3"]


def savepoint_rolled_back(handle: Handle, send: Send) -> list[str]:
    send("1")
    savepoint = handle.begin_nested()
    send("2")
    savepoint.rollback()
    send("3")
    handle.commit()
    return ["1", "3"]


def savepoint_first_and_released(handle: Handle, send: Send) -> list[str]:
    with handle.begin_nested():
        send("1")
    handle.commit()
    return ["1"]


def savepoint_first_then_rollback(handle: Handle, send: Send) -> list[str]:
    """The release of a savepoint that nothing was begun before must not commit."""
    with handle.begin_nested():
        send("1")
    handle.rollback()
    return []


def savepoint_first_then_close(handle: Handle, send: Send) -> list[str]:
    with handle.begin_nested():
        send("1")
    handle.close()
    return []


def three_deep_the_middle_rolled_back(handle: Handle, send: Send) -> list[str]:
    send("1")
    with handle.begin_nested():
        send("2")
        middle = handle.begin_nested()
        send("3")
        with handle.begin_nested():
            send("4")
        middle.rollback()
        send("5")
    handle.commit()
    return ["1", "2", "5"]


def three_deep_the_inner_raises(handle: Handle, send: Send) -> list[str]:
    with handle.begin_nested(), handle.begin_nested():
        send("1")
        with suppress(RuntimeError), handle.begin_nested():
            send("2")
            raise RuntimeError
        send("3")
    handle.commit()
    return ["1", "3"]


def three_deep_then_rollback(handle: Handle, send: Send) -> list[str]:
    with handle.begin_nested(), handle.begin_nested(), handle.begin_nested():
        send("1")
    handle.rollback()
    return []


def a_statement_fails_in_a_savepoint(handle: Handle, send: Send) -> list[str]:
    send("1")
    with suppress(DBAPIError), handle.begin_nested():
        send("2")
        handle.execute(text("SELECT * FROM there_is_no_such_table"))
    send("3")
    handle.commit()
    return ["1", "3"]


def an_exception_in_the_block(handle: Handle, send: Send) -> list[str]:
    with suppress(RuntimeError), handle.begin():
        send("1")
        raise RuntimeError
    return []


def a_block(handle: Handle, send: Send) -> list[str]:
    with handle.begin():
        send("1")
    return ["1"]


def expunge_all(session: Session, send: Send) -> list[str]:
    send("1")
    session.expunge_all()
    session.commit()
    return ["1"]


def reset(session: Session, send: Send) -> list[str]:
    send("1")
    session.reset()
    send("2")
    session.commit()
    return ["2"]


def invalidate(session: Session, send: Send) -> list[str]:
    send("1")
    session.invalidate()
    return []


FOR_ALL = [
    commit, rollback, one_after_the_other, close, commit_and_close, savepoint_released, savepoint_rolled_back,
    savepoint_first_and_released, savepoint_first_then_rollback, savepoint_first_then_close,
    three_deep_the_middle_rolled_back, three_deep_the_inner_raises, three_deep_then_rollback,
    a_statement_fails_in_a_savepoint, an_exception_in_the_block, a_block,
]  # fmt: skip
FOR_SESSIONS = [expunge_all, reset, invalidate]


def outcome(engine: Engine, kind: str, script: Callable[[Handle, Send], list[str]], **fields: Any) -> None:
    outbox = Outbox(engine)
    with HANDLES[kind](engine) as handle:
        expected = script(handle, lambda body: [outbox.send(handle, "orders", body, **fields)].clear())

    assert [body.decode() for body in bodies(engine)] == expected


@pytest.mark.parametrize("kind", HANDLES)
@pytest.mark.parametrize("script", FOR_ALL, ids=lambda script: script.__name__)
def test_a_message_shares_the_fate_of_its_transaction(any_engine, kind, script):
    outcome(any_engine, kind, script)


@pytest.mark.parametrize("script", FOR_SESSIONS, ids=lambda script: script.__name__)
def test_a_message_is_not_an_object_of_the_session(any_engine, script):
    outcome(any_engine, "Session", script)


@pytest.mark.parametrize("script", FOR_ALL, ids=lambda script: script.__name__)
def test_a_keyed_message_shares_the_fate_of_its_transaction(engine, script):
    outcome(engine, "Session", script, key="order-1")


def test_a_transaction_that_stays_open_holds_back_no_other_and_comes_at_its_commit(pg_engine, destination):
    outbox = Outbox(pg_engine)
    relay = relay_to(destination, outbox)
    with pg_engine.begin() as long:
        outbox.send(long, "orders", b"long")
        with pg_engine.begin() as short:
            outbox.send(short, "orders", b"short")
        relay.until_empty()
        meanwhile = destination.bodies

    relay.until_empty()

    assert (meanwhile, destination.bodies) == ([b"short"], [b"short", b"long"])


@pytest.mark.parametrize("detached", ["before", "after"])
def test_a_detached_connection_is_one_too(engine, detached):
    outbox = Outbox(engine)
    connection = engine.connect()
    if detached == "before":
        connection.detach()
    outbox.send(connection, "orders", b"1")
    if detached == "after":
        connection.detach()
    connection.commit()
    connection.close()

    assert bodies(engine) == [b"1"]
