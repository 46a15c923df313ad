"""`spark.read.format("outbox")`, from end to end."""

import pytest
from sqlalchemy import Engine

import outbox.spark
from outbox import Outbox

pytestmark = pytest.mark.jvm


@pytest.fixture
def messages(engine: Engine):
    """Ten messages of two topics."""
    shop = Outbox(engine)
    with engine.begin() as connection:
        for n in range(10):
            shop.send(connection, "orders" if n % 2 else "mails", str(n), key=f"k{n % 3}", headers={"n": f"{n}.50"})
    return engine


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def bodies(frame):
    return [bytes(row.body) for row in frame.select("body").collect()]


def test_the_source_is_found_by_its_name_alone(spark, messages):
    frame = spark.read.format("outbox").option("url", url_of(messages)).load()

    assert [row.id for row in frame.orderBy("id").collect()] == list(range(1, 11))
    assert frame.filter("topic = 'orders' and key = 'k1'").count() == 2


def test_a_frame_stands_still_from_its_load_on(spark, messages):
    frame = spark.read.format("outbox").option("url", url_of(messages)).load()
    with messages.begin() as connection:
        Outbox(messages).send(connection, "orders", "later")

    assert (frame.count(), len(frame.collect())) == (10, 10)
    assert spark.read.format("outbox").option("url", url_of(messages)).load().count() == 11


def test_rows_and_columns_are_narrowed_by_options(spark, messages):
    reader = spark.read.format("outbox").option("url", url_of(messages)).option("topics", "orders").option("keys", "k1")
    by_option = reader.option("columns", "body,id").load()
    by_schema = reader.schema("id long, body binary").load()

    assert by_option.columns == ["body", "id"]
    assert sorted(bodies(by_option)) == sorted(bodies(by_schema)) == [b"1", b"7"]
    assert by_schema.columns == ["id", "body"]
    by_filter = reader.option("filter", "n BETWEEN 7.5 AND 1e3 AND TAGS IS NULL").option("columns", "body").load()
    assert bodies(by_filter) == [b"7"]


def test_a_table_of_the_source_is_read_with_its_options_beside_it(spark, messages):
    """Spark gives properties of its own to a table, and hands the options over perhaps only when it makes the table."""
    options = f"url '{url_of(messages)}', topics 'orders'"
    outbox.spark.register(spark)
    name, view = (f"{kind}_{messages.dialect.name}" for kind in ("shop", "shop_view"))
    spark.sql(f"CREATE TABLE {name} USING outbox OPTIONS ({options}) COMMENT 'what was sold'")
    spark.sql(f"CREATE TEMPORARY VIEW {view} USING outbox OPTIONS ({options})")

    for query in (f"SELECT body FROM {name} WITH ({options})", f"SELECT body FROM {view}"):
        assert sorted(bodies(spark.sql(query))) == [b"1", b"3", b"5", b"7", b"9"]
    spark.sql(f"DROP TABLE {name}")
    spark.catalog.dropTempView(view)


def test_windows_between_positions(spark, messages):
    outbox.spark.register(spark)
    since = outbox.spark.position(url=url_of(messages))
    with messages.begin() as connection:
        Outbox(messages).send(connection, "orders", "a")
    until = outbox.spark.position(url=url_of(messages))
    with messages.begin() as connection:
        Outbox(messages).send(connection, "orders", "b")

    reader = spark.read.format("outbox").option("url", url_of(messages)).option("since", since)

    assert bodies(reader.load()) == [b"a", b"b"]
    assert bodies(reader.option("until", until).load()) == [b"a"]
    assert reader.option("since", until).load().count() == 0


def test_other_tables(spark, messages):
    meta = spark.read.format("outbox").option("url", url_of(messages)).option("table", "meta").load()
    parked = spark.read.format("outbox").option("url", url_of(messages)).option("table", "parked").load()

    assert [row.slots for row in meta.collect()] == [256]
    assert parked.count() == 0


def test_partitions(spark, messages):
    frame = spark.read.format("outbox").option("url", url_of(messages)).option("partitions", 3).load()

    sizes = frame.selectExpr("spark_partition_id() as p").groupBy("p").count().collect()

    assert sorted(row["count"] for row in sizes) == [3, 3, 4]


MISTAKES = {
    ("topcis", "a"): "topcis: there is no such option; did you mean topics?",
    ("url", "postgresql://me:geheim@h/d"): "url: holds a password",
    ("maxRowsPerTrigger", "5"): "maxRowsPerTrigger: only for spark.readStream",
}


def test_mistakes_are_told_clearly(spark, sqlite_engine):
    for (option, value), words in MISTAKES.items():
        reader = spark.read.format("outbox").option("url", url_of(sqlite_engine)).option(option, value)

        with pytest.raises(Exception, match=words.replace("?", r"\?")) as caught:
            reader.load().count()
        assert "geheim" not in str(caught.value)
