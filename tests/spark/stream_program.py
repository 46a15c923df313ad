"""A streaming job in a process of its own, which the tests kill: URL and folder as arguments."""

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.conftest import settings


def main(url: str, folder: Path, home: str) -> None:
    """Follow the log into Parquet files until the end comes."""
    builder = SparkSession.builder
    for name, value in settings(Path(home)).items():
        builder = builder.config(name, value)
    reader = builder.getOrCreate().readStream.format("outbox").option("url", url).option("maxRowsPerTrigger", 100)
    frame = reader.option("pollIntervalMs", 20).load().select("id", "key", "body")
    writer = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    writer.format("parquet").start(str(folder / "out")).awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
