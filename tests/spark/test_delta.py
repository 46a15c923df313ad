"""A Delta table follows the manifests: every window once, whatever was killed between the two."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from sqlalchemy import Engine

from outbox import Outbox
from outbox.errors import ArchiveError
from outbox.spark.delta import APPLICATION, commit_missing
from outbox.spark.manifest import Archive
from tests.spark.extracts import Here, extracted, ids_of, run_here


@pytest.fixture(autouse=True)
def tasks_run_here(monkeypatch):
    monkeypatch.setattr("outbox.spark.job.run", run_here)


@pytest.fixture
def outbox(sqlite_engine: Engine) -> Outbox:
    return Outbox(sqlite_engine)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def send(outbox, *bodies: str) -> None:
    with outbox.begin() as session:
        for n, body in enumerate(bodies):
            outbox.send(session, ("orders", "a|b%c")[n % 2], body)


def rows_of(path: Path) -> list[tuple[int, str, bytes]]:
    """What a reader of the Delta table finds."""
    query = QueryBuilder().register("t", DeltaTable(path)).execute("SELECT id, topic, body FROM t ORDER BY id")
    return [tuple(row.values()) for batch in query for row in _rows(batch)]


def _rows(batch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.record_batch(batch).to_pylist()
    return found


@pytest.mark.storm
def test_the_table_has_the_rows_of_the_archive(outbox, path):
    send(outbox, "1", "2")
    extracted(outbox.engine, path, delta=True)
    send(outbox, "3", "4")
    manifest = extracted(outbox.engine, path, delta=True)

    assert manifest is not None
    assert rows_of(path) == [(1, "orders", b"1"), (2, "a|b%c", b"2"), (3, "orders", b"3"), (4, "a|b%c", b"4")]
    table = DeltaTable(path)
    assert table.transaction_version(APPLICATION) == 2
    assert table.history(1)[0]["outbox.until"] == str(manifest.until)


def test_manifests_of_windows_that_the_table_has_are_not_read(outbox, path):
    """An archive that is extended every few seconds has millions of them."""
    for body in "123":
        send(outbox, body)
        extracted(outbox.engine, path, delta=True)
    (path / "_outbox" / "00000001.json").write_text("damaged")
    send(outbox, "4")

    extracted(outbox.engine, path, delta=True)

    assert [id for id, _, _ in rows_of(path)] == [1, 2, 3, 4]


def test_windows_from_before_the_table_are_committed_to_it(outbox, path):
    """Also those of an extract that was killed between its manifest and the table."""
    send(outbox, "1", "2")
    extracted(outbox.engine, path)
    send(outbox, "3")
    extracted(outbox.engine, path)

    assert extracted(outbox.engine, path, delta=True) is None

    assert [id for id, _, _ in rows_of(path)] == ids_of(path) == [1, 2, 3]
    assert commit_missing(Archive(path)) == 0


def test_two_at_once_commit_a_window_once(outbox, path):
    send(outbox, "1", "2")
    extracted(outbox.engine, path)
    extracted(outbox.engine, path, delta=True)
    for n in range(3):
        send(outbox, str(n))
        extracted(outbox.engine, path)

    def commit(_):
        try:
            return commit_missing(Archive(path))
        except ArchiveError:
            return 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(commit, range(8)))

    assert commit_missing(Archive(path)) == 0
    assert [id for id, _, _ in rows_of(path)] == ids_of(path)


def test_a_table_that_is_ahead_of_the_archive_is_refused(outbox, path, tmp_path):
    send(outbox, "1")
    extracted(outbox.engine, path, delta=True)
    send(outbox, "2")
    extracted(outbox.engine, path, delta=True)
    (path / "_outbox" / "00000002.json").unlink()

    with pytest.raises(ArchiveError, match="has window 2, but the last manifest is that of 1"):
        extracted(outbox.engine, path, delta=True)


def test_a_table_of_windows_that_were_written_anew_is_refused(outbox, path):
    """The manifest of its last window was lost, and an extract that knew of no table has written another one."""
    send(outbox, "1")
    extracted(outbox.engine, path, delta=True)
    send(outbox, "2")
    extracted(outbox.engine, path, delta=True)
    (path / "_outbox" / "00000002.json").unlink()
    send(outbox, "3")
    extracted(outbox.engine, path)

    with pytest.raises(ArchiveError, match="has another window 2 than the manifests"):
        extracted(outbox.engine, path, delta=True)


def test_spark_is_not_asked_for_a_table(outbox, path):
    """Nothing of Delta's own jars is needed."""
    send(outbox, "1")
    extracted(outbox.engine, path, spark=Here(), delta=True)
    shutil.rmtree(path / "_outbox")

    assert [id for id, _, _ in rows_of(path)] == [1]
