"""An extract brings every message into its archive once, and an archive that it cannot continue is left as it is."""

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, create_engine, migrate
from outbox.errors import (
    ArchiveError,
    DatabaseError,
    PositionError,
    PurgedError,
    SchemaError,
    SubscriptionError,
)
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import Position, Progress
from outbox.spark import archived, fetch
from outbox.spark.job import Extract, Extraction
from outbox.spark.manifest import FOLDER, Archive
from outbox.spark.planner import Planner
from outbox.spark.source import OutboxDataSource
from outbox.spark.tables import arrow_schema
from outbox.store.log.extraction import MESSAGES, columns_of
from outbox.store.log.stamp import server_of
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.spark.extracts import Here, extracted, files_in, ids_in, ids_of, run_here, table_of
from tests.spark.reading import place_of
from tests.store.test_purge import now, purge
from tests.store.test_registered_readers import hold, long_ago
from tests.store.test_status import settle


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


@pytest.fixture(autouse=True)
def tasks_may_run_here(monkeypatch):
    """Most of what an extract does needs no Spark."""
    monkeypatch.setattr("outbox.spark.job.run", run_here)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def send(outbox, *bodies: str, topic: str = "orders") -> None:
    with outbox.begin() as session:
        for body in bodies:
            outbox.send(session, topic, body, key=f"key-{body}", headers={"n": body}, tags="t")


def purge_all(outbox) -> None:
    """Everything that is there now."""
    settle(outbox.engine, Progress(now(outbox)))
    assert purge(outbox).rows > 0


# What it writes


@pytest.mark.every_database
@pytest.mark.smoke("the first test of the file loads what writes Parquet")
def test_a_second_extract_brings_what_came_after_the_first(outbox, path):
    send(outbox, "1", "2")
    first = extracted(outbox.engine, path)
    send(outbox, "3")
    second = extracted(outbox.engine, path)

    assert first is not None
    assert second is not None
    assert (first.window, first.rows, second.window, second.rows) == (1, 2, 2, 1)
    assert first.until == second.since
    assert table_of(path).column("body").to_pylist() == [b"1", b"2", b"3"]


def test_an_archive_holds_every_column_as_it_is(outbox, path):
    due = datetime(2030, 1, 31, 12, 30, 1, 234_000, tzinfo=UTC)
    with outbox.begin() as session:
        id = outbox.send(
            session, "orders", b"\x00\xff", key="k", headers={"a": "ü"}, tags="t", deliver_at=due, content_type="x/y"
        )
        outbox.send(session, "orders", b"")

    extracted(outbox.engine, path)

    table = table_of(path)
    first, second = table.to_pylist()
    assert table.schema == arrow_schema(MESSAGES, tuple(columns_of(MESSAGES)))
    assert {name: first[name] for name in ("id", "message_id", "topic", "key", "tags", "content_type", "body")} == {
        "id": 1, "message_id": str(id), "topic": "orders", "key": "k", "tags": "t", "content_type": "x/y",
        "body": b"\x00\xff",
    }  # fmt: skip
    assert (json.loads(first["headers"]), first["deliver_at"], first["expires_at"]) == ({"a": "ü"}, due, None)
    assert abs((first["created_at"] - datetime.now(UTC)).total_seconds()) < 60
    assert (second["key"], second["body"]) == (None, b"")


def test_files_are_parted_by_topic_and_day_and_keep_the_order_of_ids(outbox, path):
    for n in range(40):
        send(outbox, str(n), topic=("orders", "a/b".replace("/", "|"))[n % 2])
    with outbox.engine.begin() as connection:
        day = {"postgresql": "timestamptz '2026-01-30 23:59:59Z'", "sqlite": "'2026-01-30 23:59:59.000'"}
        connection.execute(
            text(f"UPDATE outbox_message SET created_at = {day[outbox.engine.dialect.name]} WHERE id < 9")
        )

    manifest = extracted(outbox.engine, path)

    assert manifest is not None
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    folders = {str(Path(file.path).parent): (file.topic, file.day, file.rows) for file in manifest.files}
    assert folders == {
        "topic=orders/day=2026-01-30": ("orders", "2026-01-30", 4),
        "topic=a%7Cb/day=2026-01-30": ("a|b", "2026-01-30", 4),
        f"topic=orders/day={today}": ("orders", today, 16),
        f"topic=a%7Cb/day={today}": ("a|b", today, 16),
    }
    for file in manifest.files:
        table = pq.ParquetFile(path / file.path).read()
        ids = table.column("id").to_pylist()
        assert ids == sorted(ids)
        assert (file.first_id, file.last_id, file.rows) == (ids[0], ids[-1], len(ids))
        assert set(table.column("topic").to_pylist()) == {file.topic}


def test_a_manifest_says_what_its_files_hold(outbox, path):
    send(outbox, *map(str, range(30)))

    manifest = extracted(outbox.engine, path, rows_per_task=7)

    assert manifest is not None
    assert len(manifest.files) == 5
    for file in manifest.files:
        content = (path / file.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.bytes, file.sha256)


def test_values_that_do_not_repeat_have_no_dictionary(outbox, path):
    """To try one costs time, and it is thrown away."""
    send(outbox, *map(str, range(30)))
    manifest = extracted(outbox.engine, path)
    assert manifest is not None

    group = pq.ParquetFile(path / manifest.files[0].path).metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}

    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert {name for name, column in columns.items() if "RLE_DICTIONARY" in column.encodings} == {
        "topic", "key", "slot", "tags", "content_type", "xact_id",
    }  # fmt: skip


def test_nothing_new_is_no_window(outbox, path):
    send(outbox, "1")
    extracted(outbox.engine, path)

    assert extracted(outbox.engine, path) is None
    assert len(Archive(path).manifests()) == 1


def test_an_idle_archive_still_comes_along_now_and_then(outbox, path):
    """Its position is that by which retention goes."""
    extracted(outbox.engine, path)
    with outbox.engine.begin() as connection:
        connection.execute(text("SELECT 1 FROM outbox_meta"))
    wanted = Extraction(empty_after=timedelta(0))

    with closing(Extract(Archive(path), place_of(outbox.engine), wanted)) as job:
        found = job.step(Here())

    assert found is not None
    assert (found.window, found.rows) == (2, 0)


def test_rows_of_a_transaction_that_commits_late_come_in_a_later_window(pg_engine, path):
    outbox = Outbox(pg_engine)
    with pg_engine.connect() as late:
        outbox.send(late, "orders", "late")
        send(outbox, "1")
        extracted(pg_engine, path)
        late.commit()
    send(outbox, "2")
    extracted(pg_engine, path)

    assert table_of(path).column("body").to_pylist() == [b"1", b"late", b"2"]


def test_half_messages_come_only_when_they_are_asked_for(outbox, path, tmp_path):
    send(outbox, "half", "whole")
    with outbox.engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_message SET topic = '{HALF_TOPIC}' WHERE id = 1"))

    extracted(outbox.engine, path)
    extracted(outbox.engine, tmp_path / "all", halves=True)

    assert (ids_of(path), ids_of(tmp_path / "all")) == ([2], [1, 2])


def test_only_the_topics_that_are_asked_for_come(outbox, path):
    send(outbox, "1")
    send(outbox, "2", topic="mail")

    manifest = extracted(outbox.engine, path, topics=["mail"])

    assert manifest is not None
    assert (manifest.topics, ids_of(path)) == (("mail",), [2])


def test_a_first_window_without_such_a_topic_is_empty(outbox, path):
    """The folder of the archive is not there yet."""
    send(outbox, "1")

    manifest = extracted(outbox.engine, path, topics=["mail"])

    assert (manifest and manifest.files, ids_of(path)) == ((), [])


# What it refuses


@pytest.mark.parametrize("changed", [{"topics": ["orders"]}, {"halves": True}])
def test_an_archive_of_other_messages_is_not_continued(outbox, path, changed):
    send(outbox, "1")
    extracted(outbox.engine, path)

    with pytest.raises(ArchiveError, match=r"holds all topics without half messages; .* or to another folder"):
        extracted(outbox.engine, path, **changed)


def test_purged_messages_are_a_gap_that_is_named_and_can_be_accepted(outbox, path):
    send(outbox, "1")
    extracted(outbox.engine, path)
    send(outbox, "2")
    purge_all(outbox)
    send(outbox, "3")

    with pytest.raises(PurgedError, match=r"messages after \S+, where \S+ ends, were purged .* --accept-gap"):
        extracted(outbox.engine, path)
    assert len(files_in(path)) == 1
    manifest = extracted(outbox.engine, path, accept_gap=True)

    assert manifest is not None
    assert isinstance(manifest.gap, Position)
    assert (ids_of(path), extracted(outbox.engine, path)) == ([1, 3], None)


def test_an_accepted_gap_is_noted_although_nothing_is_left(outbox, path):
    """Else every later extract would meet it again."""
    extracted(outbox.engine, path)
    send(outbox, "1")
    purge_all(outbox)

    manifest = extracted(outbox.engine, path, accept_gap=True)

    assert manifest is not None
    assert (manifest.rows, manifest.gap is not None, extracted(outbox.engine, path)) == (0, True, None)


def test_what_was_purged_before_the_first_extract_is_no_gap(outbox, path):
    send(outbox, "1")
    purge_all(outbox)
    send(outbox, "2")

    extracted(outbox.engine, path)

    assert ids_of(path) == [2]


def test_what_is_purged_while_an_extract_reads_stops_it(outbox, path, monkeypatch):
    send(outbox, "1")
    extracted(outbox.engine, path)
    send(outbox, "2")

    def run(spark, work):
        purge_all(outbox)
        return run_here(spark, work)

    monkeypatch.setattr("outbox.spark.job.run", run)
    with pytest.raises(PurgedError, match="were purged during the read"):
        extracted(outbox.engine, path)

    assert (ids_of(path), len(files_in(path))) == ([1], 1)


def test_a_window_that_is_purged_before_it_is_planned_stops_it(outbox, path, monkeypatch):
    """No task is left then that could notice."""
    send(outbox, "1")
    extracted(outbox.engine, path)
    send(outbox, "2")
    tasks = Planner.tasks

    def late(*arguments, **options):
        purge_all(outbox)
        return tasks(*arguments, **options)

    monkeypatch.setattr(Planner, "tasks", late)
    with pytest.raises(PurgedError):
        extracted(outbox.engine, path)

    assert len(Archive(path).manifests()) == 1


def test_what_is_purged_between_two_looks_at_what_is_gone_stops_it(outbox, path, monkeypatch):
    send(outbox, "1")
    extracted(outbox.engine, path)
    send(outbox, "2")
    look, looks = Planner.purged, []

    def purged(planner):
        looks.append(look(planner))
        if len(looks) == 1:
            purge_all(outbox)
        return looks[-1]

    monkeypatch.setattr(Planner, "purged", purged)
    with pytest.raises(PurgedError):
        extracted(outbox.engine, path)

    assert len(Archive(path).manifests()) == 1


def test_a_task_that_fails_after_its_first_rows_takes_them_back(outbox, path, monkeypatch):
    send(outbox, "1", "2")
    read = fetch.batches

    def torn(task):
        yield from read(task)
        raise DatabaseError("the connection was lost")

    monkeypatch.setattr(fetch, "batches", torn)
    with pytest.raises(DatabaseError, match="the connection was lost"):
        extracted(outbox.engine, path)

    assert (files_in(path), Archive(path).last()) == ([], None)


def test_an_archive_of_another_server_is_not_continued(pg_engine, path):
    outbox = Outbox(pg_engine)
    send(outbox, "1")
    extracted(pg_engine, path)
    file = path / FOLDER / "00000001.json"
    stored = json.loads(file.read_text())
    stored["server"]["timeline"] = "00000009"
    file.write_text(json.dumps(stored))
    send(outbox, "2")

    with pytest.raises(PositionError, match=r"timeline 00000009 then, 00000001 now.* --accept-server"):
        extracted(pg_engine, path)

    assert extracted(pg_engine, path, accept_server=True) is not None
    assert ids_of(path) == [1, 2]


def test_an_archive_of_another_file_is_not_continued(sqlite_engine, path, tmp_path):
    """It draws the same ids, so that a position of the first file would pass over what is in the second."""
    send(Outbox(sqlite_engine), "1", "2")
    extracted(sqlite_engine, path)
    other = create_engine(f"sqlite:///{tmp_path / 'other.sqlite3'}")
    migrate.upgrade(other)
    send(Outbox(other), "3", "4", "5")

    with pytest.raises(PositionError, match=r"\(installation of the outbox \w{32} then, \w{32} now\)"):
        extracted(other, path)


def test_a_server_that_changes_while_a_window_begins_is_not_extracted(outbox, path, monkeypatch):
    send(outbox, "1")
    monkeypatch.setattr(
        "outbox.spark.planner.server_of", lambda channel: replace(server_of(channel), installation="another")
    )

    with pytest.raises(PositionError, match=r"leads to another server, .* than when the window began"):
        extracted(outbox.engine, path)

    assert files_in(path) == []


def test_an_archive_of_another_schema_is_not_continued(pg_engine, path):
    migrate.upgrade(pg_engine, "other")
    send(Outbox(pg_engine), "1")
    extracted(pg_engine, path)

    with pytest.raises(PositionError, match=r"\(installation of the outbox \S{36} then, \S{36} now\)"):
        extracted(pg_engine, path, schema="other")


def test_a_database_that_went_back_is_not_extracted(sqlite_engine, path, tmp_path):
    """From a backup it draws ids anew that the archive has."""
    outbox = Outbox(sqlite_engine)
    send(outbox, "1")
    backup = tmp_path / "backup.sqlite3"
    with closing(sqlite3.connect(str(sqlite_engine.url.database))) as connection:
        connection.execute(f"VACUUM INTO '{backup}'")
    send(outbox, "2")
    extracted(sqlite_engine, path)
    sqlite_engine.dispose()
    file = Path(str(sqlite_engine.url.database))
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()
    shutil.copy(backup, file)

    with pytest.raises(PositionError, match=r"is at 3:3:, but \S+ only at 2:2:: the database has gone back"):
        extracted(create_engine(f"sqlite:///{file}"), path)


def test_what_differs_of_another_server_is_told_and_nothing_else(pg_engine, path):
    send(Outbox(pg_engine), "1")
    extracted(pg_engine, path)
    file = path / FOLDER / "00000001.json"
    stored = json.loads(file.read_text())
    stored["server"]["database"] = 7
    file.write_text(json.dumps(stored))

    with pytest.raises(PositionError) as caught:
        extracted(pg_engine, path)

    with pg_engine.connect() as connection:
        oid = connection.execute(text("SELECT oid FROM pg_database WHERE datname = current_database()")).scalar()
    assert f"another server, timeline or outbox (oid of the database 7 then, {oid} now)" in str(caught.value)
    assert str(caught.value).endswith("accept the server: --accept-server, or accept_server=True")


def test_a_position_of_another_database_says_what_differs(sqlite_engine):
    url = sqlite_engine.url.render_as_string(hide_password=False)
    other = '{"v":1,"server":{"dialect":"postgresql","system":"7","installation":"x"},"position":"0:0:"}'

    with pytest.raises(PositionError) as caught:
        OutboxDataSource({"url": url, "since": other})

    with sqlite_engine.connect() as connection:
        installation = connection.execute(text("SELECT installation FROM outbox_meta")).scalar()
    assert str(caught.value) == (
        "since: the position is of another server, timeline or outbox (kind of database postgresql then, sqlite now,"
        f" system identifier 7 then, None now, installation of the outbox x then, {installation} now), and means"
        " nothing here; take a position from outbox.spark.position() for this url, or read the database that the"
        " position is of"
    )


def test_an_archive_that_is_not_there_is_no_empty_one(path):
    """Else a mistyped name would pass for a day without messages."""
    for each in (path, path.parent):
        with pytest.raises(ArchiveError) as caught:
            archived(Here(), each)
        assert str(caught.value) == f"there is no archive in {each}; to write an archive: outbox extract {each}"


def test_a_file_is_no_archive(outbox, path):
    path.write_text("")

    for each in (path, path / "inside"):
        for asked in (lambda each=each: extracted(outbox.engine, each), lambda each=each: archived(Here(), each)):
            with pytest.raises(ArchiveError) as caught:
                asked()
            told = f"{path} is a file, and an archive is a folder: give the path of a folder"
            assert str(caught.value) == told


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_read(outbox, monkeypatch):
    send(outbox, "1")
    monkeypatch.setattr("outbox.spark.job.run", lambda *_: pytest.fail("tasks are run"))

    with pytest.raises(ArchiveError, match=r"^/proc/archive cannot be written to: no file can be made in /proc .*give"):
        extracted(outbox.engine, Path("/proc/archive"))


def test_looking_whether_an_archive_can_be_written_leaves_nothing(path):
    Archive(path).require_writable()

    assert (path.exists(), list(path.parent.iterdir())) == (False, [])


def test_a_window_that_another_extract_was_quicker_with_does_not_count_twice(outbox, path, monkeypatch):
    send(outbox, "1")

    def slow(spark, work):
        files = run_here(spark, work)
        monkeypatch.setattr("outbox.spark.job.run", run_here)
        extracted(outbox.engine, path)
        return files

    monkeypatch.setattr("outbox.spark.job.run", slow)
    with pytest.raises(ArchiveError, match="another extract writes to"):
        extracted(outbox.engine, path)

    assert (ids_of(path), len(files_in(path))) == ([1], 2)
    assert Archive(path).clean(timedelta(seconds=-1))[0] == 1
    assert (ids_of(path), len(files_in(path))) == ([1], 1)


def test_a_task_that_fails_leaves_nothing(outbox, path, monkeypatch):
    """And the window is whole at the next try."""
    send(outbox, *map(str, range(20)))
    path.mkdir()
    today = path / "topic=orders"
    today.write_text("in the way")

    with pytest.raises(ArchiveError, match=r"Spark could not write the window: .*; none of it counts"):
        extracted(outbox.engine, path, rows_per_task=7)
    assert (Archive(path).last(), files_in(path)) == (None, [])
    today.unlink()
    extracted(outbox.engine, path, rows_per_task=7)

    assert ids_of(path) == ids_in(outbox.engine)


def test_tables_of_another_version_are_refused(engine, path):
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET version = 4"))

    with pytest.raises(SchemaError, match="of version 4"):
        extracted(engine, path)


# Retention


def test_retention_waits_for_an_extract_that_is_registered(outbox, path):
    send(outbox, "1")
    extracted(outbox.engine, path, register="nightly")
    send(outbox, "2")
    settle(outbox.engine, Progress(now(outbox)))

    assert (purge(outbox).rows, purge(outbox).held_by, ids_in(outbox.engine)) == (1, ("nightly",), [2])
    extracted(outbox.engine, path, register="nightly")
    assert (purge(outbox).rows, ids_of(path)) == (1, [1, 2])


def test_an_extract_that_was_released_finds_the_gap(outbox, path):
    send(outbox, "1")
    extracted(outbox.engine, path, register="nightly")
    send(outbox, "2")
    settle(outbox.engine, Progress(now(outbox)))
    long_ago(outbox, 31)
    assert purge(outbox).rows == 2

    with pytest.raises(PurgedError, match="--accept-gap"):
        extracted(outbox.engine, path, register="nightly")
    assert hold(outbox).released
    extracted(outbox.engine, path, register="nightly", accept_gap=True)

    assert not hold(outbox).released


def test_an_archive_whose_disk_is_not_mounted_is_not_begun_again(outbox, path):
    """Retention would wait for the new one, which lacks what was purged."""
    send(outbox, "1")
    extracted(outbox.engine, path, register="nightly")
    path.rename(path.with_name("elsewhere"))

    with pytest.raises(
        SubscriptionError, match=r"'nightly' has come to window 1, but there is no archive in .*mounted"
    ):
        extracted(outbox.engine, path, register="nightly")

    assert not path.exists() or not files_in(path)
    with closing(outbox.database.open()) as channel:
        Subscriptions(channel).drop("nightly")
    extracted(outbox.engine, path, register="nightly")
    assert ids_of(path) == [1]


def test_a_position_that_the_database_was_not_told_is_told_by_the_next_run(outbox, path, monkeypatch, caplog):
    """Killed, or cut off, between the manifest and the database."""
    send(outbox, "1")
    from outbox.spark.registration import Registration

    with monkeypatch.context() as broken:
        broken.setattr("outbox.store.subscriptions.readers.Readers.advance", lambda *_: 1 / 0)
        broken.setattr(Registration, "begin", lambda *_: None)
        extracted(outbox.engine, path, register="nightly")
    assert "window 1 is committed, but the database was not told" in caplog.text
    extracted(outbox.engine, path, register="nightly")
    settle(outbox.engine, Progress(now(outbox)))

    assert purge(outbox).rows == 1
