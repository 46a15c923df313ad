"""`spark.readStream.format("outbox")`, from end to end."""

import json
import time
from contextlib import closing, contextmanager
from datetime import timedelta

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import DataSourceStreamReader
from sqlalchemy import text

from outbox import Outbox
from outbox.admin import commands
from outbox.store.operations.purge import Purge
from outbox.store.operations.status import statuses
from tests.support.waiting import eventually

pytestmark = pytest.mark.jvm


def url_of(engine):
    return engine.url.render_as_string(hide_password=False)


def send(engine, *names):
    with engine.begin() as connection:
        for name in names:
            Outbox(engine).send(connection, "orders", name)


class Job:
    """A streaming query that writes Parquet."""

    def __init__(self, spark, engine, folder, **options):
        self._spark, self._folder = spark, folder
        reader = spark.readStream.format("outbox").option("url", url_of(engine)).options(**options)
        self._writer = (
            reader.load()
            .select("id", "body", "topic")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(folder / "checkpoint"))
        )

    def drain(self):
        """Everything that is there; returns how many rows each batch had."""
        query = self._writer.trigger(availableNow=True).start(str(self._folder / "out"))
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    @contextmanager
    def running(self):
        """Follow the log for a while."""
        query = self._writer.trigger(processingTime="50 milliseconds").start(str(self._folder / "out"))
        try:
            yield query
        finally:
            query.stop()

    def bodies(self):
        """What was written, by id."""
        if not (self._folder / "out" / "_spark_metadata").exists():
            return []
        frame = self._spark.read.schema("id long, body binary").parquet(str(self._folder / "out"))
        return [bytes(row.body) for row in frame.orderBy("id").collect()]

    def offsets(self):
        """The offsets of the checkpoint, in their order."""
        folder = self._folder / "checkpoint" / "offsets"
        numbers = sorted(int(each.name) for each in folder.iterdir() if each.name.isdigit())
        return [json.loads((folder / str(number)).read_text().splitlines()[-1]) for number in numbers]


def test_batches_have_exactly_as_many_rows_as_asked_for(spark, pg_engine, tmp_path):
    """And a restart goes on where the checkpoint is. The page about Spark streams from SQLite."""
    send(pg_engine, *"abcdefg")
    # Before Spark 4.2 there are no limits.
    pages = [3, 3, 1] if hasattr(DataSourceStreamReader, "getDefaultReadLimit") else [7]
    assert Job(spark, pg_engine, tmp_path, maxRowsPerTrigger=3).drain() == pages

    send(pg_engine, *"hi")
    job = Job(spark, pg_engine, tmp_path, maxRowsPerTrigger=3)

    assert job.drain() == [2]
    assert job.bodies() == [name.encode() for name in "abcdefghi"]


def test_an_idle_stream_writes_no_offsets(spark, pg_engine, tmp_path):
    """Although other transactions move the head of the log."""
    job = Job(spark, pg_engine, tmp_path, pollIntervalMs=20)
    send(pg_engine, "a")
    with job.running():
        assert eventually(lambda: job.bodies() == [b"a"])
        before = len(job.offsets())
        for _ in range(40):
            with pg_engine.begin() as connection:
                connection.execute(text("SELECT pg_current_xact_id()"))
            time.sleep(0.05)
        assert len(job.offsets()) == before
        send(pg_engine, "b")
        assert eventually(lambda: job.bodies() == [b"a", b"b"])


def test_a_stream_from_latest_begins_with_its_first_run(spark, pg_engine, tmp_path):
    """Also when nothing came in that run: where it began stands in the checkpoint."""
    send(pg_engine, "before")
    assert Job(spark, pg_engine, tmp_path, startingPosition="latest").drain() == []
    send(pg_engine, "after")
    job = Job(spark, pg_engine, tmp_path, startingPosition="latest")

    assert (job.drain(), job.bodies()) == ([1], [b"after"])


def kept(engine):
    """Purge what may be purged; return what is left."""
    with closing(Outbox(engine).database.open()) as channel:
        Purge(channel).run(timedelta(0))
    with engine.connect() as connection:
        return [bytes(body) for (body,) in connection.execute(text("SELECT body FROM outbox_message ORDER BY id"))]


def test_retention_waits_for_a_registered_stream(spark, pg_engine, tmp_path):
    """From the first batch on, although the relay is further; a committed batch goes, and a drop ends the wait."""
    job = Job(spark, pg_engine, tmp_path, reader="nightly", maxRowsPerTrigger=1)
    send(pg_engine, "a")
    with job.running():
        assert eventually(lambda: job.bodies() == [b"a"])
        send(pg_engine, "b")
        assert eventually(lambda: job.bodies() == [b"a", b"b"])
    send(pg_engine, "c")
    with Outbox(pg_engine).running(lambda message: None):
        assert eventually(lambda: kept(pg_engine)[-1:] == [b"c"] and b"a" not in kept(pg_engine))
    with closing(Outbox(pg_engine).database.open()) as channel:
        (stream,) = [each for each in statuses(channel)[1] if each.kind == "extract"]
        commands.drop(channel, "nightly")

    assert (stream.name, stream.destination) == ("nightly", "a stream of Spark")
    assert stream.backlog in (1, 2)
    assert kept(pg_engine) == []


def test_an_error_of_the_stream_is_shown_as_it_is(spark, pg_engine, tmp_path):
    send(pg_engine, "a")
    Job(spark, pg_engine, tmp_path).drain()
    stored = tmp_path / "checkpoint" / "offsets" / "0"
    stored.write_text(stored.read_text().replace("00000001", "00000009"))
    (stored.parent / ".0.crc").unlink()

    with pytest.raises(StreamingQueryException, match="another server than"):
        Job(spark, pg_engine, tmp_path).drain()
    with pytest.raises(StreamingQueryException, match="since: a stream begins at startingPosition"):
        Job(spark, pg_engine, tmp_path / "other", since="1:1:").drain()
