"""What a data team runs once a night: extract what is new, look whether it is sound, analyse it.

    export OUTBOX_DATABASE=sqlite:///shop.db
    python nightly.py archive

A night that was killed is simply run again: nothing is extracted twice, and nothing is missing.
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from outbox.spark import archived, extract
from outbox.spark.reports import delivery, order, plots


def revenue(messages: DataFrame) -> DataFrame:
    """Add up what orders cost by their newest version, by customer."""
    body = sf.from_json(sf.col("body").cast("string"), "customer string, total long, version long").alias("body")
    orders = messages.where("topic = 'orders'").select("key", body)
    newest = orders.groupBy("key").agg(sf.max_by("body", "body.version").alias("body"))
    return newest.groupBy("body.customer").agg(sf.sum("body.total").alias("revenue")).orderBy("customer")


def draw(messages: DataFrame, audited: DataFrame, folder: Path) -> None:
    """Draw what was written by the hour, and the versions that do not rise."""
    folder.mkdir(exist_ok=True)
    per_hour = [row.asDict() for row in delivery.messages_per_hour(messages).collect()]
    plots.written(folder / "written.png", per_hour)
    summary = [row.asDict() for row in order.summary(audited).collect()]
    breaks = [row.asDict() for row in order.breaks(audited).collect()]
    plots.order(folder / "order.png", summary=summary, breaks=breaks)


def night(spark: SparkSession, archive: Path, url: str = "env:OUTBOX_DATABASE") -> None:
    """Do what one night has to do. The executors, too, find the database by OUTBOX_DATABASE."""
    manifest = extract(spark, archive, url=url, halves=True, register="nightly")
    print("nothing new" if manifest is None else f"window {manifest.window}: {manifest.rows} messages")

    messages = archived(spark, archive)
    audited = order.versions(order.with_window(messages), order.version_in_body("$.version")).cache()
    broken = order.breaks(audited).count()
    print(f"{audited.count()} messages of keys, {broken} with a version that does not rise")
    for row in revenue(messages).collect():
        print(f"{row.customer}: {row.revenue}")
    draw(messages, audited, archive.parent / "reports")


if __name__ == "__main__":
    night(SparkSession.builder.appName("nightly").getOrCreate(), Path(sys.argv[1]).absolute())
