"""Manifests say what an archive consists of, whatever was killed while it was written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox.errors import ArchiveError
from outbox.model.position import EARLIEST, Position
from outbox.spark.manifest import FOLDER, Archive, ArchivedFile, Manifest, partition_of
from outbox.store.log.stamp import Server

SERVER = Server(dialect="postgresql", system="42", database=5, timeline="00000001", installation="a-b")


def manifest(window, files=(), **changes) -> Manifest:
    """The manifest of a window that begins where the one before it ends."""
    made = Manifest(
        window=window,
        server=SERVER,
        since=Position((window - 1) * 10),
        until=Position(window * 10),
        captured_at=datetime(2026, 1, 31, 12, tzinfo=UTC),
        files=tuple(files),
    )
    return replace(made, **changes)


def written(archive, name="1.parquet", content=b"rows", topic="orders", rows=4) -> ArchivedFile:
    """A file of an archive, as an executor would write it."""
    path = archive.path / partition_of(topic, "2026-01-31") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return ArchivedFile(
        path=str(path.relative_to(archive.path)),
        topic=topic,
        day="2026-01-31",
        rows=rows,
        bytes=len(content),
        sha256="0" * 64,
        first_id=1,
        last_id=rows,
    )


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def test_a_manifest_is_read_as_it_was_written(archive):
    wanted = manifest(
        1, [written(archive)], topics=("orders",), halves=True, gap=Position(9, (3,)), until=Position(12, (7, 9))
    )

    archive.commit(wanted)

    assert (archive.last(), archive.manifests(), archive.counted()) == (wanted, [wanted], list(wanted.files))
    assert archive.manifests(first=0) == [wanted]
    assert [path.name for path in (archive.path / FOLDER).iterdir()] == ["00000001.json"]


def test_a_manifest_is_the_json_that_others_read(archive):
    archive.commit(manifest(1, [written(archive)]))

    stored = json.loads((archive.path / FOLDER / "00000001.json").read_text())

    assert stored == {
        "version": 1,
        "window": 1,
        "server": {
            "dialect": "postgresql",
            "system": "42",
            "database": 5,
            "timeline": "00000001",
            "installation": "a-b",
        },
        "since": "0:0:",
        "until": "10:10:",
        "topics": None,
        "halves": False,
        "gap": None,
        "rows": 4,
        "captured_at": "2026-01-31T12:00:00+00:00",
        "files": [
            {
                "path": "topic=orders/day=2026-01-31/1.parquet",
                "topic": "orders",
                "day": "2026-01-31",
                "rows": 4,
                "bytes": 4,
                "sha256": "0" * 64,
                "first_id": 1,
                "last_id": 4,
            }
        ],
    }


def test_an_archive_that_is_not_there_yet_has_no_manifest(archive):
    assert (archive.last(), archive.manifests(), archive.path.exists()) == (None, [], False)
    assert archive.of_days("2026-01-01", "2026-01-31") == []


def test_a_window_is_committed_once(archive):
    first = manifest(1, [written(archive)])
    archive.commit(first)

    with pytest.raises(ArchiveError, match=r"00000001\.json is there already: another extract .* let only one"):
        archive.commit(manifest(1, [written(archive, "other.parquet")]))

    assert archive.manifests() == [first]
    assert len(list((archive.path / FOLDER).iterdir())) == 1


def test_a_file_that_is_not_where_the_driver_looks_does_not_count(archive):
    """An executor with a disk of its own writes to nowhere."""
    lost = written(archive)
    (archive.path / lost.path).unlink()

    with pytest.raises(ArchiveError, match=r"1\.parquet, which an executor has written, is not there .* share"):
        archive.commit(manifest(1, [lost]))

    assert archive.last() is None


def test_a_file_of_another_size_does_not_count(archive):
    with pytest.raises(ArchiveError, match="has 4 bytes, but 5 were written; nothing of window 1 counts"):
        archive.commit(manifest(1, [replace(written(archive), bytes=5)]))


def test_a_file_that_was_cut_short_since_is_found_without_reading_it(archive):
    archive.commit(manifest(1, [written(archive), whole := written(archive, "2.parquet")]))
    (archive.path / "topic=orders/day=2026-01-31/1.parquet").write_bytes(b"row")

    archive.require([whole])
    with pytest.raises(ArchiveError, match=r"1\.parquet, which a manifest counts, has 3 bytes, but 4 were .* backup"):
        archive.require(archive.counted())


@pytest.mark.parametrize(
    ("number", "text", "told"),
    [
        (1, "{", r"is not a manifest \(JSONDecodeError.*; restore the file from a backup"),
        (1, "[]", "is not a manifest"),
        (1, json.dumps({"version": 2}), "is of version 2, not 1; install a newer outbox-log"),
        (1, manifest(2).to_json(), "is the manifest of window 2; the name was changed"),
        (1, manifest(1).to_json().replace('"rows": 0', '"rows": 3'), "the files have 0 rows, not 3"),
        (1, manifest(1).to_json().replace('"10:10:"', '"10"'), "not a position"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(archive, number, text, told):
    folder = archive.path / FOLDER
    folder.mkdir(parents=True)
    (folder / f"{number:08}.json").write_text(text)

    with pytest.raises(ArchiveError, match=told):
        archive.last()


def test_a_manifest_that_is_missing_fails_the_reads_that_need_it_and_no_others(archive):
    for window in range(1, 6):
        archive.commit(manifest(window, captured_at=datetime(2026, 1, 20 + window, 12, tzinfo=UTC)))
    (archive.path / FOLDER / "00000002.json").unlink()

    assert archive.newest().window == 5
    assert [each.window for each in archive.manifests(first=3)] == [3, 4, 5]
    assert archive.manifests(first=6) == []
    assert [each.window for each in archive.since(35)] == [4, 5]
    assert [each.window for each in archive.of_days("2026-01-25", "2026-01-25")] == [3, 4, 5]
    for needs in (archive.manifests, archive.counted, lambda: archive.since(15), lambda: archive.clean(timedelta(0)),
                  lambda: archive.of_days("2026-01-22", "2026-01-22")):  # fmt: skip
        with pytest.raises(
            ArchiveError, match=r"00000002\.json is missing, although a later .*; restore the file from"
        ):
            needs()


def test_a_missing_manifest_is_needed_if_its_window_has_a_file_of_the_day(archive):
    for window in range(1, 6):
        archive.commit(manifest(window, captured_at=datetime(2026, 1, 20 + window, 12, tzinfo=UTC)))
    file = archive.path / written(archive, "00000002-0000-x.parquet").path
    (archive.path / FOLDER / "00000002.json").unlink()

    with pytest.raises(ArchiveError, match=r"00000002\.json is missing"):
        archive.of_days("2026-01-31", "2026-01-31")
    file.unlink()
    assert [each.window for each in archive.of_days("2026-01-31", "2026-01-31")] == [5]


def test_windows_before_a_number_are_not_read(archive):
    for window in range(1, 6):
        archive.commit(manifest(window))
    (archive.path / FOLDER / "00000001.json").write_text("damaged")

    found = {number: [each.window for each in archive.since(number)] for number in (20, 25, 49, 90)}

    assert found == {20: [3, 4, 5], 25: [3, 4, 5], 49: [5], 90: [5]}
    with pytest.raises(ArchiveError, match=r"00000001\.json is not a manifest"):
        archive.since(9)


def test_windows_from_before_some_days_are_not_read(archive):
    """Unless a file of such a day says otherwise, as where the database's clock was ahead by days."""
    for window in range(1, 7):
        archive.commit(manifest(window, captured_at=datetime(2026, 1, 20 + window, 12, tzinfo=UTC)))
    archive.commit(manifest(7, [late := written(archive, "00000007-0000-x.parquet")]))
    (archive.path / FOLDER / "00000001.json").write_text("damaged")

    def found(*days):
        return [each.window for each in archive.of_days(*days)]

    assert (found("2026-01-26", "2026-01-27"), found("2026-02-09", "2026-02-09")) == ([4, 5, 6, 7], [7])
    with pytest.raises(ArchiveError, match=r"00000001\.json is not a manifest"):
        found("2026-01-22", "2026-01-22")
    ahead = archive.path / late.path.replace("2026-01-31", "2026-02-09").replace("00000007", "00000003")
    ahead.parent.mkdir()
    ahead.touch()
    assert found("2026-02-09", "2026-02-09") == [3, 7]


def test_manifests_of_two_archives_are_refused(archive):
    archive.commit(manifest(1))
    archive.commit(manifest(2, since=Position(11)))

    with pytest.raises(ArchiveError, match="begins at 11:11:, but the manifest before ends at 10:10:"):
        archive.manifests()


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/archive", "hdfs://host/archive", "dbfs:/archive", "s3a:/archive", "hdfs:/archive", "DBFS:archive",
        Path("s3a://bucket/archive"),
    ],
)  # fmt: skip
def test_a_path_that_only_spark_could_open_is_refused(path):
    with pytest.raises(ArchiveError, match=r"a folder that the driver and all executors see, not in .*; mount"):
        Archive(path)


@pytest.mark.parametrize("form", ["file://{}", "file:{}", "FILE:{}", "file://localhost{}"])
def test_a_file_url_is_a_path(tmp_path, form):
    assert Archive(form.format(f"{tmp_path}/a%20b%23c#d")).path == tmp_path / "a b#c#d"


def test_a_file_url_of_a_machine_is_refused():
    """As it is written with one slash too few."""
    with pytest.raises(ArchiveError, match="'data' is the name of a machine there; write file:///absolute/path"):
        Archive("file://data/archive")


@pytest.mark.parametrize(
    "path", ["C:/archive", "c:archive", "./dbfs:/archive", "/mnt/dbfs:/archive", "2026-01:archive"]
)
def test_a_colon_alone_makes_no_scheme(path):
    """It may stand behind the letter of a drive, or in the name of a folder."""
    assert Archive(path).path == Path(path).absolute()


@pytest.mark.parametrize("topic", ["orders", "a.b-c_d|e%f", "..", "a/b", "ü", "%" * 249, "x" * 3000])
def test_every_topic_has_a_folder_of_its_own(tmp_path, topic):
    """Also one that no writer of ours would let through."""
    folder = tmp_path / partition_of(topic, "2026-01-31")

    folder.mkdir(parents=True)

    assert [each.name for each in tmp_path.glob("topic=*/day=*")] == ["day=2026-01-31"]
    assert partition_of(topic, "2026-01-31") != partition_of(topic + "x", "2026-01-31")


def test_cleaning_leaves_a_window_that_is_written_still(archive):
    """However long that takes: it may be committed while the others are looked through."""
    archive.commit(manifest(1, [written(archive, "00000001-0000-x.parquet")]))
    under_way = [written(archive, f"0000000{window}-0000-y.parquet") for window in (1, 2)]
    for file in under_way:
        os.utime(archive.path / file.path, (0, 0))

    archive.clean(timedelta(minutes=30))

    assert [(archive.path / file.path).exists() for file in under_way] == [False, True]


def test_cleaning_takes_what_no_manifest_counts_and_is_old_enough(archive):
    counted, stray, young = (written(archive, f"{name}.parquet") for name in ("counted", "stray", "young"))
    archive.commit(manifest(1, [counted]))
    torn = archive.path / FOLDER / "00000001-x.tmp"
    torn.write_bytes(b"{")
    long_ago = time.time() - 3600
    for path in (archive.path / counted.path, archive.path / stray.path, torn):
        os.utime(path, (long_ago, long_ago))

    cleaned = archive.clean(timedelta(minutes=30))

    assert cleaned == (2, 5)
    left = sorted(path.name for path in archive.path.rglob("*") if path.is_file())
    assert left == ["00000001.json", "counted.parquet", "young.parquet"]
    assert (archive.path / young.path).exists()


COMMITTER = """
import os, signal, sys
from datetime import UTC, datetime
from outbox.model.position import Position
from outbox.spark.manifest import Archive, Manifest
from outbox.store.log.stamp import Server
from outbox.errors import ArchiveError

path, name, until, fault = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
archive = Archive(path)
link = os.link
if fault == "before the link":
    os.link = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
if fault == "after the link":
    os.link = lambda *args: (link(*args), os.kill(os.getpid(), signal.SIGKILL))
print("ready", flush=True)
while True:
    last = archive.last()
    window = 1 if last is None else last.window + 1
    if window > until:
        break
    server = Server(dialect=name, system="x" * 50_000)
    try:
        archive.commit(Manifest(
            window=window, server=server, since=Position(window - 1), until=Position(window), files=(),
            captured_at=datetime.now(UTC),
        ))
        print(window, flush=True)
    except ArchiveError:
        pass
"""


def committer(archive: Archive, name: str, until: int, fault: str = "") -> subprocess.Popen[str]:
    """A process that commits windows until there are so many."""
    command = [sys.executable, "-c", COMMITTER, str(archive.path), name, str(until), fault]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> list[int]:
    """The windows that a process says it has committed."""
    out, _ = process.communicate(timeout=60)
    return [int(line) for line in out.split() if line.isdigit()]


@pytest.mark.parametrize(("fault", "committed"), [("before the link", 0), ("after the link", 1)])
def test_a_process_killed_at_the_commit_has_committed_all_of_it_or_nothing(archive, fault, committed):
    killed = committer(archive, "killed", 3, fault)
    ended(killed)

    assert (killed.returncode, len(archive.manifests())) == (-signal.SIGKILL, committed)
    assert ended(committer(archive, "next", 3)) == list(range(committed + 1, 4))
    assert [each.server.dialect for each in archive.manifests()] == [
        *["killed"] * committed,
        *["next"] * (3 - committed),
    ]


@pytest.mark.storm
def test_processes_killed_at_any_moment_leave_whole_manifests(archive, full):
    said: list[int] = []
    for seed in range(40 if full else 8):
        process = committer(archive, str(seed), 1_000_000)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0, 0.2))
        process.kill()
        said += ended(process)

    windows = [each.window for each in archive.manifests()]
    assert windows == list(range(1, len(windows) + 1))
    assert set(said) <= set(windows)
    assert archive.manifests()[0].since == EARLIEST


def test_two_processes_that_commit_at_once_commit_every_window_once(archive):
    processes = [committer(archive, name, 60) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(ended, processes)

    assert sorted(one + two) == list(range(1, 61))
    by = [each.server.dialect for each in archive.manifests()]
    assert by == ["one" if window in one else "two" for window in range(1, 61)]
