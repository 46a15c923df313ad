"""A driver of a standalone cluster: reads a database, extracts an archive, reads the archive, and writes what it saw.

The arguments are the URL of the master, and a folder. `OUTBOX_DATABASE` is in the environment of driver and workers.
"""

import json
import os
import sys
from pathlib import Path

from pyspark.sql.functions import udf

from outbox.cli.spark import Cluster, session
from outbox.spark import archived, extract
from tests.spark.conftest import settings

URL = "env:OUTBOX_DATABASE"


def main(master: str, folder: Path) -> None:
    """Work on the cluster, with both executors there before the first task begins."""
    own = {name: value for name, value in settings(folder).items() if name != "spark.master"}
    own |= {"spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "600m"}
    own |= {"spark.scheduler.minRegisteredResourcesRatio": "1"}
    own |= {"spark.executor.extraJavaOptions": own["spark.driver.extraJavaOptions"]}
    conf = tuple(f"{name}={value}" for name, value in own.items())
    with session(cluster=Cluster(master=master, remote=None, conf=conf)) as spark:
        messages = spark.read.format("outbox").option("url", URL).option("partitions", 4).load()
        read = messages.select("body", udf(lambda: os.environ.get("NODE"))().alias("node")).collect()
        manifest = extract(spark, folder / "archive", url=URL, rows_per_task=2)
        found = {
            "read": sorted(bytes(row.body).decode() for row in read),
            "nodes": sorted({row.node for row in read}),
            "window": None if manifest is None else manifest.rows,
            "archived": sorted(bytes(row.body).decode() for row in archived(spark, folder / "archive").collect()),
        }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
