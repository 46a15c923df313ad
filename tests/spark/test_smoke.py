"""One session of Spark reads the log as a batch and as a stream, extracts it, and reads the archive back."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.spark import archived, extract
from tests.spark.test_stream import Job


@pytest.mark.smoke("a session of Spark")
@pytest.mark.every_database
def test_a_batch_a_stream_and_an_archive_hold_the_same_messages(spark: Any, engine: Engine, tmp_path: Path) -> None:
    url = engine.url.render_as_string(hide_password=False)
    outbox = Outbox(engine)
    with outbox.begin() as session:
        ids = [str(outbox.send(session, "orders", str(number), key="k")) for number in range(5)]

    batch = spark.read.format("outbox").option("url", url).load()
    rows = Job(spark, engine, tmp_path).drain()
    extract(spark, tmp_path / "archive", url=url)

    frames = (batch, archived(spark, tmp_path / "archive"))
    assert [[str(row.message_id) for row in frame.orderBy("id").collect()] for frame in frames] == [ids, ids]
    assert (rows, Job(spark, engine, tmp_path).bodies()) == ([5], [b"0", b"1", b"2", b"3", b"4"])
