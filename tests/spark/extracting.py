"""A process that extracts window after window by Spark until it is killed. Run with a JSON object of its options."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing

from pyspark.sql import SparkSession

from outbox.spark.job import Extract, Extraction
from outbox.spark.manifest import Archive
from outbox.spark.place import Address, Place

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main(url: str, path: str, rows_per_task: int) -> None:
    """Say `ready`, then each window that was committed."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    print("ready", flush=True)
    wanted = Extraction(rows_per_task=rows_per_task, register=None)
    with closing(Extract(spark, Archive(path), Place(rows=Address(url=url)), wanted)) as job:
        while True:
            manifest = job.step()
            if manifest is not None:
                print(manifest.window, flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
