"""What Spark forks its Python workers from: a process that has imported what each of them would import anew.

Run by Spark in place of its own `pyspark.daemon`, with the module of the workers.
"""

import gc
import sys
from contextlib import suppress
from importlib import import_module

from pyspark.daemon import manager

#: What the workers of a data source, its plans and its tasks import.
_IMPORTED = (
    "adbc_driver_postgresql.dbapi", "outbox.spark.fetch", "outbox.spark.job", "outbox.spark.planner",
    "outbox.spark.source", "outbox.spark.stream", "pandas", "psycopg", "pyarrow.parquet", "sqlalchemy",
)  # fmt: skip

if __name__ == "__main__":
    for name in (sys.argv[1], *_IMPORTED):
        with suppress(ImportError):  # not everything is installed everywhere
            import_module(name)
    # A worker collects garbage after each piece of work.
    gc.collect()
    gc.freeze()
    manager()
