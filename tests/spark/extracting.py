"""A process that extracts window after window by Spark until it is killed. Run with a JSON object of its options."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from pyspark.sql import SparkSession

from outbox.spark.job import Extract, Extraction
from outbox.spark.manifest import Archive
from outbox.spark.place import Address, Place
from tests.spark.conftest import settings


def main(url: str, path: str, rows_per_task: int) -> None:
    """Say `ready`, then each window that was committed."""
    builder = SparkSession.builder
    for name, value in settings(Path(path).parent).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    print("ready", flush=True)
    wanted = Extraction(rows_per_task=rows_per_task)
    with closing(Extract(Archive(path), Place(rows=Address(url)), wanted)) as job:
        while True:
            manifest = job.step(spark)
            if manifest is not None:
                print(manifest.window, flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
