"""Spark's wrong answers when a Python source takes filters, which is why ours takes none. A mended Spark fails here."""

import pyspark.sql.datasource
import pytest

from outbox.spark.source import OutboxReader

pytestmark = pytest.mark.jvm


def test_a_frame_that_is_used_twice_gives_wrong_answers(spark):
    """When this fails, Spark is mended from some version on, and pushing filters may be thought of."""
    if not hasattr(pyspark.sql.datasource, "EqualTo"):
        pytest.skip("before Spark 4.1 no filter is handed to a Python source")
    from tests.spark.numbers_source import Numbers

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        spark.dataSource.register(Numbers)
        frame = spark.read.format("numbers").load()
        one, all = frame.filter("id = 3").count(), frame.count()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")

    assert (one, all) == (1, 1), "Spark counts all ten now"


def test_ours_takes_none():
    assert "pushFilters" not in vars(OutboxReader)
