"""An extract whose tasks Spark runs, and an archive that Spark reads."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.errors import ArchiveError, OptionError, PurgedError
from outbox.spark import archived
from outbox.spark.manifest import FOLDER, Archive
from outbox.store.log.extraction import MESSAGES, columns_of
from tests.spark.extracts import extracted, files_in, ids_in, run_here, table_of
from tests.spark.test_extract import purge_all, send

pytestmark = pytest.mark.jvm


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def test_spark_writes_the_same_and_reads_what_counts(spark, outbox, path):
    path = path.with_name("archive [of] {all} *?")
    send(outbox, *map(str, range(50)))
    send(outbox, "other", topic="mail")
    extracted(outbox.engine, path, spark=spark, rows_per_task=20)
    stray = path / "topic=orders" / "day=2026-01-01" / "00000002-0000-x.parquet"
    stray.parent.mkdir()
    shutil.copy(files_in(path)[0], stray)

    frame = archived(spark, path)

    assert sorted(row.id for row in frame.select("id").collect()) == ids_in(outbox.engine)
    found = frame.toArrow().sort_by("id")
    wanted = table_of(path).sort_by("id")
    assert found.cast(pa.schema([field.with_nullable(True) for field in wanted.schema])).equals(wanted)
    assert archived(spark, path, topics=["mail"]).count() == 1
    assert archived(spark, path, days=("2000-01-01", "2000-12-31")).count() == 0
    with pytest.raises(OptionError, match=r"days: \('2000-1-1', 'x'\) are no two days; write"):
        archived(spark, path, days=("2000-1-1", "x"))


def test_an_archive_without_messages_is_an_empty_frame(spark, outbox, path):
    extracted(outbox.engine, path, spark=spark)

    assert (archived(spark, path).count(), archived(spark, path).columns) == (0, list(columns_of(MESSAGES)))


def test_a_damaged_first_manifest_does_not_fail_a_read_of_later_days(spark, outbox, path):
    for _ in range(2):
        extracted(outbox.engine, path, spark=spark)
    send(outbox, "1")
    extracted(outbox.engine, path, spark=spark)
    damaged, old = (path / FOLDER / f"0000000{window}.json" for window in (1, 2))
    damaged.write_text("damaged")
    old.write_text(json.dumps({**json.loads(old.read_text()), "captured_at": "2020-01-01T12:00:00+00:00"}))

    assert archived(spark, path, days=("2020-02-01", "9999-12-31")).count() == 1
    for days in (None, ("0001-01-01", "9999-12-31")):
        with pytest.raises(ArchiveError, match=r"00000001\.json is not a manifest"):
            archived(spark, path, days=days)


def test_an_executors_error_is_told_as_it_is(spark, outbox, path, monkeypatch):
    """Not as Spark wraps it."""
    send(outbox, "1")
    extracted(outbox.engine, path, spark=spark)
    send(outbox, "2")

    def purged(spark, work):
        purge_all(outbox)
        return run_here(spark, work)

    monkeypatch.setattr("outbox.spark.job.run", purged)
    with pytest.raises(PurgedError, match=r"^rows of \S+ were purged during the read"):
        extracted(outbox.engine, path, spark=spark)

    assert len(files_in(path)) == 1


def test_a_file_that_cannot_be_written_ends_it(spark, outbox, path):
    send(outbox, "1")
    path.mkdir()
    (path / "topic=orders").write_text("in the way")

    with pytest.raises(ArchiveError, match=r"could not write the window: NotADirectoryError.*none of it counts; see"):
        extracted(outbox.engine, path, spark=spark)

    assert Archive(path).last() is None
