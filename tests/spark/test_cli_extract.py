"""`outbox extract` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.errors import DatabaseError
from outbox.model.position import Progress
from outbox.schema import VERSION
from outbox.spark.job import Extract
from outbox.spark.manifest import Archive
from tests.spark.conftest import use_class_data
from tests.spark.extracts import Here, ids_in, ids_of, run_here
from tests.store.test_purge import now, purge
from tests.store.test_status import settle
from tests.support.command_line import Ended
from tests.support.command_line import outbox as run

PROGRAM = [sys.executable, "-c", "from outbox.cli import main; main()"]


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture(autouse=True)
def without_spark(monkeypatch):
    """What the command does around Spark needs none."""

    @contextmanager
    def session(**_: object) -> Iterator[Here]:
        yield Here()

    monkeypatch.setattr("outbox.spark.job.run", run_here)
    monkeypatch.setattr("outbox.cli.spark.session", session)


def send(outbox, *bodies: str) -> None:
    with outbox.begin() as session:
        for body in bodies:
            outbox.send(session, "orders", body)


def extract(outbox, path, *options: str, **environment: str) -> Ended:
    return run(outbox.engine, "extract", str(path), *options, **environment)


def test_it_adds_a_window_and_says_so(outbox, path):
    send(outbox, "1", "2")
    first, second = extract(outbox, path), extract(outbox, path)

    assert (first.code, first.out) == (0, "")
    assert first.err.startswith("window 1: 2 messages in 1 file, ")
    assert (second.code, second.err) == (0, "nothing new\n")
    assert ids_of(path) == [1, 2]


def test_it_tells_programs_in_json(outbox, path):
    send(outbox, "1", "2")
    told = extract(outbox, path, "--json").json

    (manifest,) = Archive(path).manifests()
    assert told.pop("seconds") >= 0
    assert told == {
        "version": 1,
        "more": False,
        "window": 1,
        "rows": 2,
        "files": 1,
        "bytes": manifest.bytes,
        "since": "0:0:",
        "until": str(manifest.until),
        "gap": None,
    }


def test_until_empty_ends_when_nothing_comes(outbox, path, monkeypatch):
    bodies = iter(["2", "3"])
    step = Extract.step

    def busy(self, spark):
        found = step(self, spark)
        for body in bodies:
            send(outbox, body)
            break
        return found

    monkeypatch.setattr(Extract, "step", busy)
    send(outbox, "1")

    ended = extract(outbox, path, "--until-empty")

    assert (ended.code, ids_of(path)) == (0, [1, 2, 3])
    assert [line.partition(":")[0] for line in ended.err.splitlines()] == [
        "window 1", "window 2", "window 3", "nothing new",
    ]  # fmt: skip


def test_follow_goes_on_over_an_outage_until_it_is_told_to_stop(outbox, path, monkeypatch):
    send(outbox, "1")
    step, steps = Extract.step, list[int]()

    def troubled(self, spark):
        steps.append(len(steps))
        if len(steps) == 2:
            raise DatabaseError("shop cannot be reached")
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, spark)

    monkeypatch.setattr(Extract, "step", troubled)

    ended = extract(outbox, path, "--follow", "--interval", "10ms")

    assert (ended.code, len(steps), ids_of(path)) == (0, 4, [1])
    assert "Error: shop cannot be reached" in ended.err


def test_follow_does_not_wait_for_a_database_that_was_never_there(outbox, path, monkeypatch):
    def never(*_):
        raise DatabaseError("shop cannot be reached")

    monkeypatch.setattr(Extract, "step", never)

    assert extract(outbox, path, "--follow").code == 2


def test_it_registers_for_retention(outbox, path):
    send(outbox, "1")

    assert extract(outbox, path, "--register", "nightly", "--hold", "7d").code == 0

    listed = run(outbox.engine, "subscriptions", "list", "--json").json["subscriptions"]
    (found,) = [each for each in listed if each["kind"] == "extract"]
    assert (found["name"], found["hold_seconds"], found["destination"]) == ("nightly", 7 * 86_400, str(path))


def test_a_gap_ends_it_in_one_line_and_can_be_accepted(outbox, path):
    extract(outbox, path)
    send(outbox, "1")
    settle(outbox.engine, Progress(now(outbox)))
    purge(outbox)
    send(outbox, "2")

    refused, accepted = extract(outbox, path), extract(outbox, path, "--accept-gap")

    assert refused.code == 1
    assert refused.err.startswith("Error: messages after ")
    assert len(refused.err.splitlines()) == 1
    assert (accepted.code, ids_of(path)) == (0, [2])
    assert "were purged before, and are missing" in accepted.err


def test_a_name_that_a_shell_would_part_is_quoted_where_it_is_to_be_typed(outbox, path):
    extract(outbox, path, "--register", "a b!")

    ended = extract(outbox, path.parent / "other", "--register", "a b!")

    assert (ended.code, "run before: outbox subscriptions drop 'a b!' --database " in ended.err) == (2, True)


@pytest.mark.parametrize("database", [None, "sqlite:////one.db sqlite:////two.db"])
def test_cleaning_needs_no_database_and_says_what_it_did(outbox, path, database):
    send(outbox, "1")
    extract(outbox, path)
    (path / "topic=orders" / "day=2026-01-01").mkdir()
    stray = path / "topic=orders" / "day=2026-01-01" / "00000001-0009-x.parquet"
    stray.write_bytes(b"torn")
    os.utime(stray, (0, 0))

    ended = run(database, "extract", str(path), "--clean", "1d")

    assert (ended.code, ended.err) == (0, f"{path}: deleted 1 file that no manifest counts, 4 bytes\n")
    assert (stray.exists(), ids_of(path)) == (False, [1])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--until-empty", "--follow"], "--until-empty and --follow exclude each other"),
        (["--master", "local", "--remote", "sc://x"], "--master and --remote exclude each other"),
        (["--conf", "executor.memory=4g"], "write spark.name=value, such as spark.executor.memory=4g"),
        (["--hold", "7d"], "--hold says how long retention waits for --register NAME"),
        (["--topics", "a b"], "topics: one"),
        (["--topics", "orders.*"], "is a pattern or an exception; here topics are whole names"),
    ],
)
def test_mistakes_in_the_options_are_told_before_anything_starts(sqlite_engine, path, options, told):
    ended = run(sqlite_engine, "extract", str(path), *options)

    assert (ended.code, told in ended.err, path.exists()) == (2, True, False)


def test_a_place_that_is_no_folder_is_refused(sqlite_engine):
    ended = run(sqlite_engine, "extract", "s3://bucket/archive")

    assert (ended.code, "an archive lives in a folder" in ended.err) == (1, True)


def test_tables_of_another_version_show_before_spark_is_started(sqlite_engine, path):
    with sqlite_engine.begin() as connection:
        connection.execute(text(f"UPDATE outbox_meta SET version = {VERSION + 1}"))

    ended = run(sqlite_engine, "extract", str(path))

    assert (ended.code, f"version {VERSION + 1}" in ended.err, "install a newer outbox-log" in ended.err) == (
        1,
        True,
        True,
    )


def test_what_keeps_a_window_from_being_added_shows_before_spark_is_started(outbox, path, monkeypatch):
    """A start of Spark takes long, and then nothing would come of it."""
    send(outbox, "1")
    extract(outbox, path, "--topics", "orders")
    send(outbox, "2")
    settle(outbox.engine, Progress(now(outbox)))
    purge(outbox)
    extract(outbox, path.parent / "third", "--register", "nightly")
    monkeypatch.setattr("outbox.cli.spark.session", lambda **_: pytest.fail("Spark is started"))

    for place, options, told in (
        (path, ["--topics", "mails"], "holds the topics orders without half messages"),
        (path, ["--topics", "orders", "--halves"], "holds the topics orders without half messages"),
        (path, ["--topics", "orders"], "were purged before they were extracted"),
        (path.parent / "other", ["--register", "nightly"], "'nightly' is registered for the archive"),
        (Path("/proc/archive"), [], "/proc/archive cannot be written to"),
    ):
        ended = extract(outbox, place, *options)
        assert (ended.code in (1, 2), told in ended.err, ended.err.count("\n")) == (True, True, 1), ended.err


@pytest.mark.parametrize(("package", "options"), [("pyspark", []), ("pyarrow", []), ("deltalake", ["--delta"])])
def test_an_extra_that_is_missing_is_named(sqlite_engine, path, monkeypatch, package, options):
    monkeypatch.setattr("outbox.cli.spark.find_spec", lambda name: None if name == package else find_spec(name))

    ended = run(sqlite_engine, "extract", str(path), *options)

    extra = "delta" if package == "deltalake" else "spark"
    assert (ended.code, ended.err) == (2, f"Error: {package} is not installed: pip install 'outbox-log[{extra}]'\n")


def test_a_password_is_in_no_option_of_spark(monkeypatch):
    """The processes of a session on this machine inherit the environment."""
    from outbox.cli.options import Target
    from outbox.cli.spark import place_of

    monkeypatch.setenv("OUTBOX_DATABASE", "")
    place = place_of(Target("postgresql://u:secret@h/d"), local=True)

    assert "secret" not in repr(place)
    assert (place.rows.variable, place.rows.resolve().password) == ("OUTBOX_DATABASE", "secret")


def test_a_standbys_password_is_in_none_either(monkeypatch):
    """On a cluster executors have a variable of their own; the database itself concerns this process alone."""
    from outbox.cli.options import Target
    from outbox.cli.spark import place_of

    monkeypatch.setenv("OUTBOX_DATABASE", "")
    monkeypatch.setenv("OUTBOX_STANDBY", "of the cluster")
    target, standby = Target("postgresql://u:secret@h/d"), "postgresql://u:hidden@copy/d"
    place = place_of(target, local=False, standby=standby)

    assert "secret" not in repr(place)
    assert "hidden" not in repr(place)
    assert (place.rows.variable, os.environ["OUTBOX_STANDBY"]) == ("OUTBOX_STANDBY", "of the cluster")
    assert place.planner is not None
    assert place.planner.resolve().password == "secret"
    assert place_of(target, local=True, standby=standby).rows.resolve().password == "hidden"


def test_a_standby_of_sqlite_is_refused(outbox, path):
    ended = extract(outbox, path, "--standby", "sqlite:////tmp/copy.db")

    assert (ended.code, "SQLite has no standbys" in ended.err) == (2, True)


@pytest.mark.jvm
@pytest.mark.timeout(900)
def test_a_spark_of_its_own_is_quiet_and_gone_at_the_end(pg_engine, spark_home, path, tmp_path):
    """All that is said is one line; nothing else reaches the terminal."""
    send(Outbox(pg_engine), "1", "2")
    url = pg_engine.url.render_as_string(hide_password=False)
    # What Java runs here ends before a good compiler has paid for itself.
    java = f"-XX:TieredStopAtLevel=1 {use_class_data()}"
    (tmp_path / "spark-defaults.conf").write_text(f"spark.driver.extraJavaOptions {java}\n")
    environment = {
        **os.environ, "OUTBOX_DATABASE": url, "SPARK_HOME": str(spark_home), "SPARK_CONF_DIR": str(tmp_path)
    }  # fmt: skip

    ended = subprocess.run(
        [*PROGRAM, "extract", str(path), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["rows"] == 2
    assert ids_of(path) == ids_in(pg_engine)


def test_a_java_that_is_not_there_is_one_line(sqlite_engine, path):
    environment = {
        **os.environ,
        "OUTBOX_DATABASE": sqlite_engine.url.render_as_string(hide_password=False),
        "JAVA_HOME": "/nowhere",
    }

    ended = subprocess.run(
        [*PROGRAM, "extract", str(path)], env=environment, capture_output=True, text=True, timeout=800, check=False
    )

    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
    assert ended.stderr.startswith("Error: Spark does not start: ")
    assert "Java 17 or newer" in ended.stderr
