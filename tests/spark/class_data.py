"""Has a short run of Spark leave its classes in a file, with which later ones start in less than half the time."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pyspark.sql import SparkSession

from tests.spark.conftest import settings


def main(classes: Path, folder: Path) -> None:
    """Do a little of what tests do, and wait for the end of Java, which leaves the classes then."""
    builder = SparkSession.builder
    for name, value in settings(folder, class_data=f"-XX:ArchiveClassesAtExit={classes}").items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.createDataFrame([(1, "a"), (2, "b")], "id int, text string").write.parquet(str(folder / "frame"))
    spark.read.parquet(str(folder / "frame")).groupBy("text").count().collect()
    java: Any = spark.sparkContext._gateway
    spark.stop()
    java.shutdown()
    java.proc.stdin.close()
    java.proc.wait()


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        main(Path(sys.argv[1]), Path(name))
