"""An upgrade from tables whose writers sent messages themselves: what writers have left behind is sent by the relay."""

import uuid
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, migrate
from outbox.errors import SchemaError
from outbox.testing.servers import PostgresServer
from tests.support.destination import Destination, relay_to
from tests.support.revisions import make_earlier

DESTINATION = "test"


@pytest.fixture(params=["postgresql", "sqlite"])
def earlier(request, tmp_path):
    """Tables of the last revision whose writers sent messages themselves."""
    if request.param == "sqlite":
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'earlier.sqlite3'}")
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        engine = sqlalchemy.create_engine(server.create_database(f"earlier_{uuid.uuid4().hex}"))
    make_earlier(engine, "0003")
    yield engine
    engine.dispose()


def insert(connection: Connection, table: str, **values: Any) -> None:
    """One row."""
    names = ", ".join(values)
    bound = ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO outbox_{table} ({names}) VALUES ({bound})"), values)


def declare(connection: Connection, name: str, kind: str, base: str) -> None:
    """A subscription as it was, and where it stands; `relay` is there from the beginning."""
    if name != "relay":
        subscription = {"name": name, "kind": kind, "on_dead": "block", "grace_ms": 10_000}
        insert(connection, "subscription", created_at="2026-01-01", **subscription)
        insert(connection, "lease", subscription=name, generation=1, partition=0)
    destined = text("UPDATE outbox_subscription SET destination = :to, on_dead = 'block' WHERE name = :name")
    connection.execute(destined, {"to": DESTINATION, "name": name})
    partition = {"subscription": name, "generation": 1, "partition": 0, "epoch": 0, "n": 1}
    insert(connection, "progress", base=base, settled_at="2026-01-01", **partition)


def write(engine: Engine, *bodies: str, direct: str | None = None) -> str:
    """Messages, and the position behind them."""
    with engine.begin() as connection:
        for body in bodies:
            row = {"message_id": uuid.uuid4().hex, "topic": "t", "slot": 0, "body": body.encode(), "direct": direct}
            insert(connection, "message", **row)
    outbox = Outbox(engine)
    channel = outbox.database.open()
    try:
        reads = outbox.database.dialect.reads
        return str(channel.rows(reads.capture)[0][0])
    finally:
        channel.close()
        outbox.close()


def park(engine: Engine, subscription: str, body: str) -> None:
    """A copy of the message with this body, which is due."""
    parked = (
        "INSERT INTO outbox_parked (subscription, id, message_id, topic, slot, created_at, state, blocks, place,"
        " attempts, due_at, parked_at, body) SELECT :name, id, message_id, topic, slot, created_at, 'retry', :blocks,"
        " id, 1, created_at, created_at, body FROM outbox_message WHERE body = :body"
    )
    with engine.begin() as connection:
        connection.execute(text(parked), {"name": subscription, "body": body.encode(), "blocks": False})


def sent_after_the_upgrade(engine: Engine) -> list[bytes]:
    """What a relay of this version sends."""
    migrate.upgrade(engine)
    destination = Destination()
    relay_to(destination, Outbox(engine)).until_empty()
    return destination.bodies


def test_the_relay_sends_what_writers_have_left_behind_and_repeats_at_most(earlier):
    """It stood at the end of the log; the other one was behind."""
    write(earlier, "before")
    left = write(earlier, "parked", direct="relay")
    write(earlier, "left behind", direct="relay")
    passed = write(earlier, "sent by the relay")
    with earlier.begin() as connection:
        declare(connection, "relay", "relay", passed)
        declare(connection, "relay:compensation", "compensation", left)
    park(earlier, "relay:compensation", "parked")

    sent = sent_after_the_upgrade(earlier)

    assert sorted(sent) == [b"left behind", b"parked", b"sent by the relay"]
    with earlier.connect() as connection:
        names = connection.scalars(text("SELECT name FROM outbox_subscription")).all()
        strangers = [
            connection.scalar(text(f"SELECT count(*) FROM outbox_{table} WHERE subscription <> 'relay'"))
            for table in ("lease", "progress", "parked")
        ]
    assert (names, strangers) == (["relay"], [0, 0, 0])


def test_a_relay_that_was_behind_goes_on_from_where_it_stood(earlier):
    stood = write(earlier, "sent")
    write(earlier, "waits")
    write(earlier, "left behind", direct="relay")
    passed = write(earlier, "waits, too")
    with earlier.begin() as connection:
        declare(connection, "relay", "relay", stood)
        declare(connection, "relay:compensation", "compensation", passed)
    park(earlier, "relay:compensation", "left behind")

    sent = sent_after_the_upgrade(earlier)

    assert set(sent) == {b"waits", b"left behind", b"waits, too"}


def test_a_relay_that_has_never_run_begins_where_its_writers_began(earlier):
    began = write(earlier, "of nobody")
    write(earlier, "left behind", direct="later")
    with earlier.begin() as connection:
        declare(connection, "later:compensation", "compensation", began)
    migrate.upgrade(earlier)
    destination = Destination()
    relay_to(destination, Outbox(earlier), name="later", topics=["t"]).until_empty()

    assert destination.bodies == [b"left behind"]


def test_a_worker_of_before_settles_nothing_any_more(earlier):
    """It keeps its lease until it notices, because a call may be under way."""
    here = write(earlier, "1", direct="relay")
    with earlier.begin() as connection:
        declare(connection, "relay", "relay", here)
        declare(connection, "relay:compensation", "compensation", "0:0:")
        lease = "UPDATE outbox_lease SET owner = 'w0rker', epoch = 7, lease_until = '2999-01-01'"
        connection.execute(text(lease))

    migrate.upgrade(earlier)

    with earlier.connect() as connection:
        (found,) = connection.execute(text("SELECT subscription, owner, epoch > 7 FROM outbox_lease")).all()
        newest = connection.scalar(text("SELECT max(epoch) FROM outbox_progress"))
    assert (tuple(found), newest > 7) == (("relay", "w0rker", True), True)


def test_a_revision_of_an_applications_own_alembic_is_refused_while_something_may_be_left_behind(earlier):
    with earlier.begin() as connection:
        declare(connection, "relay:compensation", "compensation", "0:0:")

    with (
        pytest.raises(SchemaError, match=r"^relay:compensation may have .*`outbox db upgrade.*` .* keeps them$"),
        earlier.begin() as connection,
    ):
        migrate.seed(connection)

    assert migrate.current_revision(earlier) == "0003"


def test_without_writers_that_sent_themselves_nothing_is_sent_again(earlier):
    passed = write(earlier, "sent")
    with earlier.begin() as connection:
        declare(connection, "relay", "relay", passed)

    assert sent_after_the_upgrade(earlier) == []
