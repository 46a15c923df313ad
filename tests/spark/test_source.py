"""The data source as Spark calls it, without Spark."""

import pickle
import subprocess
import sys
from typing import cast

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

import outbox.spark
from outbox import MissingExtraError, Outbox
from outbox.errors import OptionError
from outbox.spark.source import OutboxDataSource


@pytest.fixture
def source(engine, monkeypatch):
    """A source whose URL stands in the environment, with something to read."""
    with engine.begin() as connection:
        for name in "abc":
            Outbox(engine).send(connection, "orders", name)
    monkeypatch.setenv("SHOP_URL", engine.url.render_as_string(hide_password=False))

    def make(**options):
        return OutboxDataSource({"url": "env:SHOP_URL", **options})

    return make


def id_and(name="body", type=None, *, nullable=True):
    return StructType([StructField("id", LongType()), StructField(name, type or BinaryType(), nullable)])


def test_partitions_are_read(source):
    reader = pickle.loads(pickle.dumps(source())).reader(id_and())

    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    rows = [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]

    assert [row["body"] for row in rows] == [b"a", b"b", b"c"]
    assert list(reader.read(InputPartition(None))) == list(reader.read(None)) == []


def test_the_schema_names_the_columns(source):
    assert source(columns="slot,id,created_at").schema() == "`slot` smallint, `id` bigint, `created_at` timestamp"
    assert source().schema().startswith("`id` bigint, `xact_id` bigint, `message_id` string, `topic` string, ")


@pytest.mark.parametrize(("schema", "words"), [
    (id_and("bdy"), "schema: the table messages has no column 'bdy'; choose from id, xact_id,"),
    (id_and("body", StringType()), "schema: the column body is of type binary, not string; cast it after load()"),
    (id_and(nullable=False), "schema: the column body is declared NOT NULL; leave NOT NULL out"),
])  # fmt: skip
def test_a_schema_that_does_not_fit(source, schema, words):
    with pytest.raises(OptionError) as caught:
        source().reader(schema)

    assert str(caught.value).startswith(words)


def read_by(reader, start, end):
    """The bodies of one batch."""
    parts = reader.partitions(start, end)
    return [row["body"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_a_stream_of_a_spark_without_limits(source, engine):
    """Before 4.2 Spark says neither where it is nor how much it wants."""
    reader = source(maxRowsPerTrigger="2").streamReader(id_and())
    start = reader.initialOffset()
    first = reader.latestOffset()
    second = reader.latestOffset()

    def read(start, end):
        return read_by(reader, start, end)

    assert (read(start, first), read(first, second)) == ([b"a", b"b"], [b"c"])
    assert reader.latestOffset() == second
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "d")
    restarted = source(maxRowsPerTrigger="2").streamReader(id_and())
    assert read(first, restarted.latestOffset()) == [b"c", b"d"], "the rest of the window that was open, and what came"
    repeating = source(maxRowsPerTrigger="1").streamReader(id_and())
    assert read(start, first) == read_by(repeating, start, first), "the batch that was planned before the crash"
    assert read_by(repeating, first, repeating.latestOffset()) == [b"c", b"d"], "availableNow asks once"
    for each in (reader, restarted, repeating):
        each.stop()


@pytest.mark.parametrize(("position", "before"), [("latest", []), ("earliest", [b"a", b"b", b"c"])])
def test_a_spark_without_limits_asks_for_the_end_before_the_beginning(source, engine, position, before):
    """Before 4.2; what comes between the two belongs to the next batch."""
    reader = source(startingPosition=position, maxRowsPerTrigger="2").streamReader(id_and())
    end = reader.latestOffset()
    with engine.begin() as connection:
        Outbox(engine).send(connection, "orders", "d")

    start = reader.initialOffset()
    following = reader.latestOffset()

    assert (read_by(reader, start, end), read_by(reader, end, following)) == (before, [b"d"])
    reader.stop()


def test_no_secret_is_pickled(source, monkeypatch, pg_engine):
    url = pg_engine.url.set(password="geheim")
    monkeypatch.setenv("SHOP_URL", url.render_as_string(hide_password=False))

    made = source()
    partitions = made.reader(id_and()).partitions()
    stream = made.streamReader(id_and())
    stream.initialOffset()

    for each in (made, partitions, stream):
        assert b"geheim" not in pickle.dumps(each)
    stream.stop()


def test_importing_is_light():
    """Every session with any Python source imports the root module."""
    said = "; import sys; print([name for name in ('pyarrow', 'sqlalchemy', 'psycopg') if name in sys.modules])"

    def loaded(module):
        command = [sys.executable, "-c", f"import {module}{said}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert loaded("pyspark_outbox") == loaded("pyspark.sql.datasource")


@pytest.mark.storm
def test_a_task_is_read_without_psycopg(pg_engine, tmp_path):
    """On an executor ADBC is enough: it has PostgreSQL's client library with it."""
    with pg_engine.begin() as connection:
        Outbox(pg_engine).send(connection, "orders", "a")
    source = OutboxDataSource({"url": pg_engine.url.render_as_string(hide_password=False)})
    path = tmp_path / "task"
    path.write_bytes(pickle.dumps(source.reader(id_and()).partitions()[0].value))
    code = (
        "import pickle, sys; sys.modules['psycopg'] = None; from outbox.spark.fetch import batches;"
        f" print([b.to_pylist() for b in batches(pickle.load(open({str(path)!r}, 'rb')))])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("[[{'id': 1, 'body': b'a'}]]\n", "")


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark.sql.datasource"])
def test_without_the_extra_it_is_named(monkeypatch, missing):
    monkeypatch.delitem(sys.modules, "outbox.spark.source")
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingExtraError, match=r"outbox-log\[spark\]"):
        outbox.spark.register(cast("SparkSession", None))
