"""Extracts beside writers that commit out of order, killed again and again.

What must come of it: the files that manifests count hold every committed message once, in the order of its key.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox.model.position import Position, Window
from outbox.spark.job import Extract, Extraction, Next
from outbox.spark.manifest import Archive, ArchivedFile
from tests.scenarios.exactness import writers
from tests.scenarios.exactness.business import facts, set_up
from tests.spark.extracts import Here, files_in, ids_in, ids_of, run_here, table_of
from tests.spark.reading import place_of
from tests.support.programs import ROOT, Program

KEYS = 20


@pytest.fixture(autouse=True)
def tasks_may_run_here(monkeypatch):
    monkeypatch.setattr("outbox.spark.job.run", run_here)


class Writers:
    """Processes that write in every way that makes the order of commits hard to tell.

    A few of their transactions stay open for `seconds`.
    """

    def __init__(self, engine: Engine, folder: Path, quota: int, seconds: float, number: int = 4) -> None:
        set_up(engine, KEYS)
        self._enough = folder / "enough"
        self._processes = [self._started(engine, each, quota, seconds) for each in range(number)]

    def _started(self, engine: Engine, number: int, quota: int, seconds: float) -> Program:
        url = engine.url.render_as_string(hide_password=False)
        enough = str(self._enough)
        task = writers.Task(url=url, number=number, quota=quota, enough=enough, keys=KEYS, seed=number, seconds=seconds)
        return Program(["-m", writers.__name__, json.dumps(asdict(task))])

    def end(self) -> None:
        """Let them finish, as soon as each has committed its quota."""
        self._enough.touch()
        assert [each.wait(120) for each in self._processes] == [0] * len(self._processes)

    def kill(self) -> None:
        """Whatever happened, none stays."""
        for each in self._processes:
            each.kill()
            each.wait()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[[Engine, int, float], Writers]]:
    """Start writers."""
    made: list[Writers] = []

    def start(engine: Engine, quota: int, seconds: float) -> Writers:
        made.append(Writers(engine, tmp_path, quota, seconds))
        return made[-1]

    yield start
    for each in made:
        each.kill()


class Repeated:
    """Does something again and again in a thread, until it is stopped."""

    def __init__(self, what: Callable[[], object], pause: float = 0.02) -> None:
        self._what = what
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: Exception | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause):
                self._what()
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        """End, and raise what went wrong in the thread."""
        self._stop.set()
        self._thread.join(60)
        if self.error is not None:
            raise self.error


class HighestId:
    """The reader that everybody writes first: what has a higher id than the last one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ids: list[int] = []

    def read(self) -> None:
        """Read on."""
        with self._engine.connect() as connection:
            statement = text("SELECT id FROM outbox_message WHERE id > :last ORDER BY id")
            self.ids += connection.execute(statement, {"last": max(self.ids, default=0)}).scalars()


def judge(engine: Engine, path: Path) -> None:
    """Every committed message is there once, in the order of its key; and inside a file by id."""
    ids = ids_of(path)
    assert len(ids) == len(set(ids)), "a message was extracted twice"
    assert sorted(ids) == ids_in(engine), "a message is missing, or was never committed"
    versions = {fact.name: (fact.key, fact.version) for fact in facts(engine)}
    last: dict[str | None, int] = {}
    for body in table_of(path).column("body").to_pylist():
        key, version = versions[body.decode()]
        if key is not None:
            assert version > last.get(key, 0), f"{key} came in another order than it was committed in"
            last[key] = version


def kill_session(leader: int) -> None:
    """Kill a process and all it has started: Spark's Python workers have a process group of their own."""
    # What they start while we look is found by the next look.
    for _ in range(3):
        for path in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if os.getsid(int(path.name)) == leader:
                    os.kill(int(path.name), signal.SIGKILL)


@pytest.fixture
def extracting(spark_home: Path) -> Iterator[Callable[[Engine, Path], subprocess.Popen[str]]]:
    """Start a process that extracts by Spark, and wait until it has committed a window."""
    environment = {**os.environ, "SPARK_HOME": str(spark_home), "PYSPARK_PYTHON": sys.executable}
    made: list[subprocess.Popen[str]] = []

    def start(engine: Engine, path: Path) -> subprocess.Popen[str]:
        url = engine.url.render_as_string(hide_password=False)
        options = json.dumps({"url": url, "path": str(path), "rows_per_task": 200})
        command = [sys.executable, "-m", "tests.spark.extracting", options]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        made.append(process)
        said = process.stdout
        assert said is not None
        assert [said.readline(), said.readline().strip().isdigit()] == ["ready\n", True]
        return process

    yield start
    for each in made:
        kill_session(each.pid)
        each.wait()


def killed(process: subprocess.Popen[str], after: float) -> None:
    """Kill Spark in the middle of its work."""
    time.sleep(after)
    kill_session(process.pid)
    process.communicate(timeout=30)


@pytest.mark.jvm
@pytest.mark.timeout(1200)
def test_a_spark_that_is_killed_again_and_again_extracts_every_message_once(
    pg_engine, written, extracting, tmp_path, full
):
    """Beside it: extracts without a pause to an archive of their own, and a reader by the highest id."""
    path, other = tmp_path / "archive", tmp_path / "other"
    kills = 10 if full else 1
    writing = written(pg_engine, 1000 if full else 200, 1.5)
    naive = HighestId(pg_engine)
    with closing(Extract(Archive(other), place_of(pg_engine), Extraction(rows_per_task=40))) as job:
        beside = [Repeated(lambda: job.step(Here()), 0.2), Repeated(naive.read)]
        try:
            for seed in range(kills):
                killed(extracting(pg_engine, path), random.Random(seed).uniform(0.0, 2.0))
            writing.end()
        finally:
            for each in beside:
                each.stop()
        job.step(Here())
        naive.read()
    with closing(Extract(Archive(path), place_of(pg_engine))) as job:
        job.step(Here())

    judge(pg_engine, path)
    judge(pg_engine, other)
    assert len(Archive(path).manifests()) > kills
    assert set(naive.ids) < set(ids_in(pg_engine)), "nothing was hard: a reader by the highest id has missed nothing"
    counted = {path / file.path for file in Archive(path).counted()}
    Archive(path).clean(timedelta(seconds=-1))
    assert set(files_in(path)) == counted


@pytest.mark.storm
def test_repeated_extracts_of_sqlite_bring_every_message_once(sqlite_engine, written, tmp_path, full):
    """On SQLite a transaction that stays open has all others wait."""
    path = tmp_path / "archive"
    writing = written(sqlite_engine, 500 if full else 40, 0.2)
    with closing(Extract(Archive(path), place_of(sqlite_engine))) as job:
        repeated = Repeated(lambda: job.step(Here()))
        try:
            writing.end()
        finally:
            repeated.stop()
        job.step(Here())

    judge(sqlite_engine, path)
    assert len(Archive(path).manifests()) > 2


def forgetful(base: Position, target: Position) -> Window:
    """A window without what was open at its beginning."""
    return Window(Position(base.head), target)


def repetitive(base: Position, target: Position) -> Window:
    """A window with all that is newer than the oldest transaction that was open at its beginning."""
    return Window(Position(base.open[0]) if base.open else base, target)


def reading(broken: Callable[[Position, Position], Window]) -> Callable[..., list[ArchivedFile]]:
    """An extract that reads another window than its manifest says."""
    whole = Extract._extracted

    def read(job: Extract, spark: Any, number: int, found: Next) -> list[ArchivedFile]:
        return whole(job, spark, number, replace(found, window=broken(found.window.base, found.window.target)))

    return read


@pytest.mark.storm
def test_broken_extracts_fail_the_same_judgement(pg_engine, written, tmp_path):
    """Else the judgement proves nothing. Two of them take turns beside the same writers."""
    writing = written(pg_engine, 100, 0.7)
    with ExitStack() as stack:
        jobs = {}
        for window in (forgetful, repetitive):
            job = Extract(Archive(tmp_path / window.__name__), place_of(pg_engine))
            jobs[window] = stack.enter_context(closing(job))

        def step() -> None:
            for window, job in jobs.items():
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Extract, "_extracted", reading(window))
                    job.step(Here())

        repeated = Repeated(step)
        try:
            writing.end()
        finally:
            repeated.stop()
        step()

    with pytest.raises(AssertionError, match="a message is missing"):
        judge(pg_engine, tmp_path / "forgetful")
    with pytest.raises(AssertionError, match="extracted twice"):
        judge(pg_engine, tmp_path / "repetitive")
