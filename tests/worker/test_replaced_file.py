"""A file that is replaced while a worker uses it: the worker goes on with the file that is there now."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox, create_engine
from outbox.store.database import Database
from outbox.store.dialects.sqlite import channel as sqlite_channel
from outbox.store.log.log import Log
from tests.support.destination import Destination, relay_to
from tests.support.readers import send
from tests.support.waiting import eventually


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """The path is looked at before each statement."""
    monkeypatch.setattr(sqlite_channel, "LOOK_SECONDS", 0.0)


@pytest.fixture
def other(sqlite_template: Path, tmp_path: Path) -> Outbox:
    """The file of another outbox."""
    path = tmp_path / "other.sqlite3"
    shutil.copy(sqlite_template, path)
    return Outbox(create_engine(f"sqlite:///{path}"))


def replace_file(old: Outbox, new: Outbox) -> None:
    """Put a file in the place of another one, with nothing of either left beside it."""
    new.engine.dispose()
    old.engine.dispose()
    path, by = (Path(each.engine.url.database or "") for each in (old, new))
    with closing(sqlite3.connect(by)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    by.replace(path)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


def test_a_running_relay_goes_on_with_the_file_that_replaces_its_own(sqlite_engine: Engine, other, caplog):
    outbox, destination = Outbox(sqlite_engine), Destination()
    send(outbox, "old")
    send(other, "new")
    relay = relay_to(destination, outbox)
    relay.start()
    before = eventually(lambda: destination.bodies == [b"old"])
    replace_file(outbox, other)
    after = eventually(lambda: destination.bodies == [b"old", b"new"])
    relay.stop()
    relay.join(60)

    assert (before, after) == (True, True)
    assert f"the file {sqlite_engine.url.database} was replaced or removed while it was open" in caplog.text


def test_a_connection_to_a_replaced_file_is_refused(sqlite_engine: Engine, other):
    outbox = Outbox(sqlite_engine)
    with closing(outbox.database.open()) as channel:
        replace_file(outbox, other)
        with pytest.raises(Exception, match="was replaced or removed while it was open") as read:
            channel.now()
        with (
            pytest.raises(Exception, match="was replaced or removed while it was open") as written,
            channel.transaction(),
        ):
            pass

    assert [outbox.database.transient(each.value) for each in (read, written)] == [True, True]


def test_a_file_has_an_incarnation_of_its_own(sqlite_engine: Engine, other):
    """What a worker knows about the rows of one file is void on another one."""
    found = []
    for database in (Database(sqlite_engine), Database(sqlite_engine), other.database):
        with closing(database.open()) as channel:
            found.append(Log().now(channel).incarnation)

    assert (found[0] == found[1], found[0] == found[2]) == (True, False)


def test_nothing_is_made_in_the_place_of_a_file_that_was_moved_away(sqlite_engine: Engine):
    """An empty file would take the write-ahead log that is left there, and with it the commits of the other file."""
    outbox, path = Outbox(sqlite_engine), Path(sqlite_engine.url.database or "")
    away = path.with_name("away")
    with closing(outbox.database.open()):
        path.rename(away)
    with pytest.raises(Exception, match="is not there any more") as refused:
        outbox.database.open()
    found = path.exists()
    away.rename(path)
    with closing(outbox.database.open()) as channel:
        back = Log().last(channel)

    assert (outbox.database.transient(refused.value), found, back) == (True, False, 0)
