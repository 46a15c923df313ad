"""The process that Spark forks its Python workers from: it has imported what otherwise each of them would import."""

from importlib import import_module

from pyspark.daemon import manager

IMPORTED = (
    "outbox.spark.planner",
    "outbox.spark.source",
    "pyarrow",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.worker",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
)

if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    manager()
