"""Concurrent writers, whose transactions commit in another order than they drew their ids, and readers beside them."""

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pyspark.sql.datasource import DataSourceStreamReader
from sqlalchemy import Engine, insert, text

from outbox import Outbox
from tests.scenarios.exactness import writers
from tests.scenarios.exactness.business import Scratch, facts, set_up
from tests.scenarios.exactness.history import Delivery, Findings, judge
from tests.scenarios.exactness.runs import Child
from tests.spark.streams import Stream, written
from tests.support.programs import ROOT
from tests.support.waiting import eventually

pytestmark = pytest.mark.jvm

WRITERS = 4


class MaxIdReader(threading.Thread):
    """Takes what has a higher id than the last one for new, and keeps up with the log."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self._engine = engine
        self.found: list[str] = []
        self.ended = threading.Event()

    def run(self) -> None:
        """Read until the end."""
        last = 0
        statement = text("SELECT id, convert_from(body, 'UTF8') FROM outbox_message WHERE id > :last ORDER BY id")
        while True:
            ended = self.ended.is_set()
            with self._engine.connect() as connection:
                rows = connection.execute(statement, {"last": last}).all()
            self.found += [name for _, name in rows]
            last = rows[-1][0] if rows else last
            if ended:
                return
            time.sleep(0.02)


@contextmanager
def writing(engine: Engine, folder: Path, quota: int) -> Iterator[list[Child]]:
    """Writers with long transactions, early ids, savepoints and rollbacks, until the block ends."""
    set_up(engine, 20)
    enough, log = folder / "enough", folder / "writers.log"
    url = engine.url.render_as_string(hide_password=False)
    tasks = [
        writers.Task(url=url, number=n, quota=quota, enough=str(enough), keys=20, seed=n, long=4, seconds=1.0)
        for n in range(WRITERS)
    ]
    children = [Child(writers, task, log) for task in tasks]
    try:
        yield children
        enough.touch()
        assert eventually(lambda: not any(child.running for child in children), 120)
        assert [child.end(signal.SIGCONT) for child in children] == [0] * WRITERS, log.read_text()[-2000:]
    finally:
        for child in children:
            child.end(signal.SIGKILL)


class StreamProcess:
    """A streaming job with all its processes, of which Spark puts some into groups of their own."""

    def __init__(self, engine: Engine, folder: Path, home: Path) -> None:
        url = engine.url.render_as_string(hide_password=False)
        command = [sys.executable, "-m", "tests.spark.stream_program", url, str(folder), str(folder)]
        environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        with (folder / "stream.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL for the whole session."""
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._process.pid:
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        self._process.wait()


def committed_batches(folder: Path) -> int:
    """How many batches a stream has committed."""
    commits = folder / "checkpoint" / "commits"
    return sum(each.name.isdigit() for each in commits.iterdir()) if commits.exists() else 0


def has_come_on(folder: Path, before: int) -> bool:
    """Whether a stream has committed some batches more."""
    return committed_batches(folder) > before + 3


def test_a_stream_that_is_killed_delivers_what_was_committed_once(spark, spark_home, pg_engine, tmp_path, full):
    """And in the order of each key; a reader of the highest id loses messages in the same run."""
    kills = 10 if full else 1
    chance, naive = random.Random(7), MaxIdReader(pg_engine)

    with writing(pg_engine, tmp_path, quota=400 if full else 120):
        naive.start()
        for _ in range(kills):
            job, before = StreamProcess(pg_engine, tmp_path, spark_home), committed_batches(tmp_path)
            try:
                came = eventually(functools.partial(has_come_on, tmp_path, before), 240)
                assert came, (tmp_path / "stream.log").read_text()[-3000:]
                time.sleep(chance.uniform(0, 1))
            finally:
                job.kill()
    naive.ended.set()
    naive.join()
    drain(spark, pg_engine, tmp_path)

    found = judged(pg_engine, tmp_path)
    missed = {fact.name for fact in facts(pg_engine)} - set(naive.found)
    print(f"{len(facts(pg_engine))} messages, {kills} kills, {found}; the highest id missed {len(missed)}")
    assert found.wrong == {}
    assert missed, "the run was too easy: the reader of the highest id lost nothing"


def drain(spark, engine, folder):
    """What is left, by the session of the tests, from the same checkpoint."""
    url = engine.url.render_as_string(hide_password=False)
    reader = spark.readStream.format("outbox").option("url", url).option("maxRowsPerTrigger", 1000)
    frame = reader.load().select("id", "key", "body")
    writer = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    # Before Spark 4.2 a run is one batch: it may be the batch that was under way at the kill.
    for _ in range(1 if hasattr(DataSourceStreamReader, "getDefaultReadLimit") else 2):
        writer.format("parquet").start(str(folder / "out")).awaitTermination()


def judged(engine: Engine, folder: Path) -> Findings:
    """What the batches hold, compared with what the business committed."""
    batches = list(written(folder / "out"))
    history = [Delivery(bytes(row["body"]).decode(), row["key"]) for batch in batches for row in batch]
    return judge(facts(engine), history, batch=0)


def test_a_reader_below_the_oldest_open_transaction_delivers_an_effect_before_its_cause(pg_engine):
    """The usual advice, `xact_id < xmin`, loses nothing and breaks the order; positions keep it."""
    set_up(pg_engine, 1)
    outbox = Outbox(pg_engine)
    floor = text(
        "SELECT convert_from(body, 'UTF8') FROM outbox_message"
        " WHERE xact_id < pg_snapshot_xmin(pg_current_snapshot())::text::bigint ORDER BY id"
    )
    stream, by_floor, by_position = Stream(pg_engine), list[str](), list[bytes]()
    offset = stream.start()

    def look():
        nonlocal offset
        with pg_engine.connect() as connection:
            by_floor.extend(name for name in connection.scalars(floor) if name not in by_floor)
        offset, rows = stream.next(offset)
        by_position.extend(rows)

    with pg_engine.connect() as second, pg_engine.connect() as third:
        for connection in (second, third):
            connection.execute(insert(Scratch).values(note="draws a transaction id"))
        with pg_engine.begin() as first:
            outbox.send(first, "orders", "cause", key="k0")
        outbox.send(second, "orders", "effect", key="k0")
        second.commit()
        look()
        third.commit()
    look()

    assert by_floor == ["effect", "cause"]
    assert by_position == [b"cause", b"effect"]
