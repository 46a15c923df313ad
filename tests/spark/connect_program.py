"""Spark Connect, with a server of its own; the arguments are a URL, and a folder for what it read and wrote."""

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import outbox.spark
from tests.spark.conftest import settings


def main(url: str, folder: Path) -> None:
    """Read a batch and a stream, extract twice, and read the archive."""
    builder = SparkSession.builder.remote("local[2]")
    for name, value in settings(folder).items():
        if name != "spark.master":
            builder = builder.config(name, value)
    spark = builder.getOrCreate()
    found = spark.read.format("outbox").option("url", url).load().count()
    outbox.spark.register(spark)
    frame = spark.read.format("outbox").option("url", url).option("topics", "orders").load().orderBy("id")
    reader = spark.readStream.format("outbox").option("url", url).option("maxRowsPerTrigger", 2).load()
    writer = reader.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    writer.format("parquet").start(str(folder / "out")).awaitTermination()
    streamed = spark.read.parquet(str(folder / "out")).count()
    bodies = [bytes(row.body).decode() for row in frame.collect()]
    read = {
        "client": type(spark).__module__, "found": found, "bodies": bodies, "streamed": streamed,
        **_archive(spark, url, folder / "archive"),
    }  # fmt: skip
    (folder / "read.json").write_text(json.dumps(read))
    spark.stop()


def _archive(spark: SparkSession, url: str, path: Path) -> dict[str, Any]:
    manifests = [outbox.spark.extract(spark, path, url=url, rows_per_task=2) for _ in range(2)]
    archived = outbox.spark.archived(spark, path)
    mails = outbox.spark.archived(spark, path, topics="mails")
    return {
        "empty": outbox.spark.archived(spark, path, topics="returns").count(),
        "windows": [manifest and manifest.rows for manifest in manifests],
        "archived": [bytes(row.body).decode() for row in archived.orderBy("id").collect()],
        "mails": mails.count(),
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
