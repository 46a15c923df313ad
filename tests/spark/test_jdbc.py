"""Predicates for Spark's JDBC reader, with a real driver."""

import os
import shutil
import subprocess

import pytest
from sqlalchemy import text

from outbox import Outbox
from outbox.errors import OptionError, PositionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST, Position, Window
from outbox.spark import jdbc_predicates, position
from tests.spark.conftest import cache

DRIVER = "org.postgresql:postgresql:42.7.13"


@pytest.fixture(scope="session")
def driver():
    """PostgreSQL's driver; Maven fetches it once."""
    jar = cache() / "postgresql-42.7.13.jar"
    if not jar.exists():
        if shutil.which("mvn") is None:
            if "CI" in os.environ:
                pytest.fail("Maven fetches the driver, and is not installed")
            pytest.skip("Maven fetches the driver, and is not installed")
        command = ["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={DRIVER}", f"-DoutputDirectory={jar.parent}"]
        subprocess.run(command, check=True, timeout=240, stdin=subprocess.DEVNULL)
    return jar


def test_each_message_of_a_window_is_in_one_partition(spark, pg_engine, driver):
    """Also one that commits late, and those of other windows in none."""
    url, outbox = pg_engine.url.render_as_string(hide_password=False), Outbox(pg_engine)
    with pg_engine.connect() as late:
        outbox.send(late, "orders", "late")
        with pg_engine.begin() as connection:
            outbox.send(connection, "orders", "before")
        since = position(url=url)
        late.commit()
    with pg_engine.begin() as connection:
        for n in range(20):
            outbox.send(connection, "orders", str(n))
        connection.execute(text("UPDATE outbox_message SET topic = :half WHERE body = '19'"), {"half": HALF_TOPIC})
    until = position(url=url)
    with pg_engine.begin() as connection:
        outbox.send(connection, "orders", "after")

    spark.sql(f"ADD JAR '{driver}'")
    host = f"jdbc:postgresql://127.0.0.1:{pg_engine.url.port}/{pg_engine.url.database}"
    properties = {"user": "postgres", "driver": "org.postgresql.Driver", "fetchsize": "1000"}

    def bodies(**options):
        predicates = jdbc_predicates(since, until, 3, **options)
        frame = spark.read.jdbc(host, "outbox_message", predicates=predicates, properties=properties)
        assert frame.rdd.getNumPartitions() == 3
        return sorted(bytes(row.body).decode() for row in frame.select("body").collect())

    assert bodies() == sorted(["late", *map(str, range(19))])
    assert bodies(halves=True) == sorted(["late", *map(str, range(20))])


def test_the_conditions_are_those_of_the_window():
    base, target = Position(10, (4, 7)), Position(20, (7, 15))

    found = jdbc_predicates(base, target, 2)

    assert found == [
        "((xact_id >= 10 AND xact_id < 20 AND xact_id NOT IN (15)) OR (xact_id IN (4)))"
        f" AND topic <> '{HALF_TOPIC}' AND id % 2 = {i}"
        for i in range(2)
    ]
    assert Window(base, target).late == (4,)
    assert jdbc_predicates(None, target, 1) == jdbc_predicates(EARLIEST, str(target), 1)


def test_mistakes():
    with pytest.raises(OptionError, match="n: must be at least 1, not 0"):
        jdbc_predicates(None, "1:1:", 0)
    with pytest.raises(PositionError, match="not a position"):
        jdbc_predicates("now", "1:1:", 1)
