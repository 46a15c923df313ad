"""The order audit: keys whose version does not rise from message to message.

The source of the messages decides which order is audited:

- An archive, with the number of the window: the order in which readers of the archive get the messages. Windows follow
  one another, and inside a window the ids rise. The library promises this order per key.
- A stream, with the number of its batch in place of the window: the same order.
- A plain batch read is one window: the order of the ids alone. Writers of a key may take turns: each locks the row of
  its subject before the send. Then the order of the ids is the order of the commits. Otherwise a reader may get the
  messages in another order, which only an archive or a stream shows.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from outbox.model.limits import HALF_TOPIC

COLUMNS = "id long, topic string, key string, headers string, body binary, created_at timestamp"

FELL, REPEATED = "fell", "repeated"


def version_in_header(name: str) -> Column:
    """Return the version in a header, as text; null: there is no such header."""
    # Not by a JSON path, because a path cannot express every name that a header may have.
    return sf.from_json("headers", "map<string, string>")[name]


def version_in_body(path: str) -> Column:
    """Return the version at a JSON path of the body (`$.version`, `$.order.version`), as text; null: there is none."""
    return sf.get_json_object(sf.col("body").cast("string"), path)


def with_window(archived: DataFrame) -> DataFrame:
    """Add to each message of an archive the number of its window, taken from the name of its file."""
    number = sf.regexp_extract(sf.col("_metadata.file_name"), r"^(\d+)-", 1)
    return archived.withColumn("window", number.cast("bigint"))


def order_of(messages: DataFrame) -> tuple[str, ...]:
    """Return the columns by which messages are ordered: (window, id) of an archive, else id."""
    return ("window", "id") if "window" in messages.columns else ("id",)


def versions(messages: DataFrame, version: Column) -> DataFrame:
    """Compare the version of each message with the version of the message before, of the same key.

    A version that has come before in another topic is no repetition: each topic may tell of a version once.

    Args:
        messages: half messages are left out, and so are messages without a key, which have no order.
        version: `version_in_header`, `version_in_body`, or any column that is a whole number or its text.

    Returns:
        the columns of the order, topic, key, created_at, text (the version as written in the message), version (a whole
        number; null: none, or no whole number), previous (the version before, of the key; of a repetition the version
        before in its topic), problem (null, "fell" or "repeated").
    """
    by = order_of(messages)
    text = version.cast("string")
    keyed = messages.where((sf.col("topic") != HALF_TOPIC) & sf.col("key").isNotNull())
    rows = keyed.select(*by, "topic", "key", "created_at", text.alias("text"), text.try_cast("bigint").alias("version"))
    # Messages without a version get a partition of their own, so that none stands between two others.
    of_key, of_topic = (
        sf.lag("version").over(Window.partitionBy(*parts, sf.col("version").isNull()).orderBy(*by))
        for parts in (("key",), ("key", "topic"))
    )
    compared = rows.withColumn("previous", of_key).withColumn("own", of_topic)
    fell, repeated = sf.col("version") < sf.col("previous"), sf.col("version") == sf.col("own")
    return (
        compared.withColumn("problem", sf.when(fell, FELL).when(repeated, REPEATED))
        .withColumn("previous", sf.when(sf.col("problem") == REPEATED, sf.col("own")).otherwise(sf.col("previous")))
        .drop("own")
    )


def breaks(audited: DataFrame) -> DataFrame:
    """Return the messages whose version does not rise, in their order."""
    return audited.where(sf.col("problem").isNotNull()).orderBy(*order_of(audited))


def summary(audited: DataFrame) -> DataFrame:
    """Sum up the rows of `versions` by topic.

    Returns:
        topic, keys, messages (with a key), without_version, unreadable (a version that is no whole number), fell,
        repeated, broken_keys.
    """
    broken = sf.col("problem").isNotNull()
    return (
        audited.groupBy("topic")
        .agg(
            sf.count_distinct("key").alias("keys"),
            sf.count("*").alias("messages"),
            sf.count_if(sf.col("text").isNull()).alias("without_version"),
            sf.count_if(sf.col("text").isNotNull() & sf.col("version").isNull()).alias("unreadable"),
            sf.count_if(sf.col("problem") == FELL).alias(FELL),
            sf.count_if(sf.col("problem") == REPEATED).alias(REPEATED),
            sf.count_distinct(sf.when(broken, sf.col("key"))).alias("broken_keys"),
        )
        .orderBy("topic")
    )
