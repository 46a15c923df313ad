"""Options: every mistake names the option, the limit and the fix."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from outbox.errors import OptionError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import Position
from outbox.spark.offset import Mark
from outbox.spark.options import NAMES, Options
from outbox.spark.place import conninfo
from outbox.store.log.extraction import Narrowing
from tests.support.refusals import refusal

URL = {"url": "postgresql://me@host/db"}


def parsed(**options):
    return Options({**URL, **options})


def test_what_is_usual():
    found = parsed()

    assert (found.table, found.start, found.since, found.partitions, found.max_rows) == (
        "messages", "earliest", None, None, None,
    )  # fmt: skip
    assert found.columns[:4] == ("id", "xact_id", "message_id", "topic")
    assert (found.retries, found.narrowing, found.fail_on_data_loss) == (5, Narrowing(), True)


def test_names_count_in_any_case():
    """Spark hands them over in lower case, or as the user wrote them."""
    assert parsed(MAXROWSPERTRIGGER="5").max_rows == parsed(maxrowspertrigger="5").max_rows == 5


def test_rows_are_chosen():
    narrowing = parsed(**{
        "topics": "orders, mails", "keys": "a,,b,c", "createdFrom": "2026-01-31T12:00:00Z", "where.key": "relay",
        "WHERE.slot": "7, 9", "where.tags": "", "where.content_type": "a,,b", "halves": "true",
        "filter": " price > 100 ",
    }).narrowing  # fmt: skip

    assert narrowing == Narrowing(
        topics=("orders", "mails"),
        keys=("a,b", "c"),
        created_from=datetime(2026, 1, 31, 12, tzinfo=UTC),
        where=(("key", ("relay",)), ("slot", ("7", "9")), ("tags", ("",)), ("content_type", ("a,b",))),
        filter="price > 100",
        halves=True,
    )
    assert narrowing.describe()["filter"] == "price > 100"
    assert parsed(filter="TRUE").narrowing.filter is None


def test_positions_are_bare_or_of_a_server():
    text = '{"v":1,"server":{"dialect":"postgresql","system":"7"},"position":"3:9:3,5"}'

    assert parsed(since="3:9:3,5").since == Mark(position=Position(9, (3, 5)))
    found = parsed(startingPosition=text).start
    assert isinstance(found, Mark)
    assert found.server is not None
    assert (found.position, found.server.system) == (Position(9, (3, 5)), "7")
    assert parsed(startingPosition="LATEST").start == "latest"


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"topcis": "a"}, "topcis: there is no such option; did you mean topics?"),
    ({"path": "/x"}, "path: the source reads a database, no path; call load() without an argument"),
    ({"table": "message"}, "table: 'message' is none of messages,"),
    ({"columns": "id,bdy"}, "columns: the table messages has no column 'bdy'; did you mean body?"),
    ({"columns": "id,id"}, "columns: name a column twice"),
    ({"columns": "id,,,"}, "columns: has an empty part"),
    ({"topics": "a,"}, "topics: has an empty part; write names with a comma between two"),
    ({"table": "op", "topics": "a"}, "topics: the table op has no column 'topic'"),
    ({"table": "op", "since": "1:1:"}, "since: means nothing for the table op; leave the option out, or read messages"),
    ({"createdFrom": "yesterday"}, "createdFrom: 'yesterday' cannot be read; write a time such as"),
    ({"createdTo": "2026-01-31T12:00:00"}, "createdTo: '2026-01-31T12:00:00' has no time zone; append Z for UTC"),
    ({"where.nothing": "1"}, "where.nothing: the table messages has no column 'nothing'"),
    ({"where.id": "1,x"}, "where.id: 'x' is no value of type long"),
    ({"where.id": "1,"}, "where.id: has an empty part; write names with a comma between two"),
    ({"where.body": "x"}, "where.body: a column of type binary cannot be compared; filter the DataFrame"),
    ({"where.message_id": "x"}, "where.message_id: 'x' is no value of type uuid"),
    ({"where.key": "a\0"}, "where.key: holds a NUL"),
    ({"keys": "a\0b"}, "keys: holds a NUL"),
    ({"table": "subscription", "where.ordered": "1"}, "where.ordered: '1' is neither true nor false"),
    ({"filter": "price > 'x'"}, "filter: Value ''x'' cannot be compared; only numbers have an order\n  price > 'x'\n"),
    ({"filter": ""}, "filter: Expression can't be null! SQL92; "),
    ({"table": "op", "filter": "a = 1"}, "filter: the table op has no column 'headers'"),
    ({"partitions": "0"}, "partitions: '0' is not allowed; write a whole number from 1 to 10000"),
    ({"rowsPerPartition": "many"}, "rowsPerPartition: 'many' cannot be read; write a whole number from 1"),
    ({"retries": "-1"}, "retries: '-1' is not allowed; write a whole number from 0 to 100"),
    ({"failOnDataLoss": "maybe"}, "failOnDataLoss: 'maybe' is none of true, false"),
    ({"onIdentityChange": "ignore"}, "onIdentityChange: 'ignore' is none of fail, accept, replay"),
    ({"createdFrom": "2026-02-01T00:00:00Z", "createdTo": "2026-01-01T00:00:00Z"},
     "createdFrom: 2026-02-01 00:00:00+00:00 is not before createdTo, 2026-01-01 00:00:00+00:00; exchange them"),
    ({"topics": "orders,a b/c"},
     "topics: one must be 1 to 249 characters of [A-Za-z0-9._%|-], not . or .., but is 'a b/c'; topics are whole"),
    ({"halves": "yes"}, "halves: 'yes' is none of true, false; choose from the list"),
    ({"table": "progres"}, "table: 'progres' is none of messages, "),
    ({"since": "yesterday"}, "since: not a position: yesterday; use outbox.spark.position()"),
    ({"until": "{}"}, "until: not a position: {}; use outbox.spark.position()"),
    ({"url": "host/db"}, "url: is not a URL; write postgresql://"),
    ({"url": "mysql://host/db"}, "url: no outbox lives in mysql"),
    ({"url": "sqlite://"}, "url: Spark's processes cannot share a database in memory"),
    ({"url": "postgresql://h/d?password=x"}, "url: holds a password, which plans, logs and"),
    ({"plannerUrl": "postgresql://me:x@h/d"}, "plannerUrl: holds a password, which plans,"),
]  # fmt: skip


def test_a_mistake_is_told_by_the_name_of_its_option():
    told = [(options, refusal(parsed, **options), f"OptionError: {begins}") for options, begins in MISTAKES]

    assert [each for each in told if not (each[1] or "").startswith(each[2])] == []


def test_what_may_be_chosen_is_told_once():
    with pytest.raises(OptionError) as caught:
        parsed(table="invoices")
    assert (str(caught.value).count("parked"), str(caught.value).endswith("; choose from the list")) == (1, True)

    with pytest.raises(OptionError, match=r"; did you mean progress\?$"):
        parsed(table="progres")


def test_half_messages_are_chosen_by_their_topic_too():
    assert parsed(topics=HALF_TOPIC).narrowing.topics == (HALF_TOPIC,)


def test_the_page_explains_every_option():
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    explained = {name for row in page.splitlines() if row.startswith("| `") for name in re.findall("`([^`]+)`", row)}

    assert [name for name in NAMES if name not in explained] == []


def test_nothing_given():
    """As for a table of `create table`, whose options Spark does not hand over when it is read."""
    with pytest.raises(OptionError, match=r"url: say where the database is; .* select … from NAME with \(url"):
        Options({})
    with pytest.raises(OptionError, match="url: say where the database is; give the option"):
        Options({"topics": "orders"})


def test_the_properties_that_spark_gives_to_a_table_are_passed_over():
    of_spark = {"owner": "root", "provider": "outbox", "comment": "hello", "option.url": "x", "OPTION.topics": "y"}

    assert vars(parsed(**of_spark)) == vars(parsed())


def test_a_service_of_libpq():
    place = parsed(url="postgresql:///?service=shop").place

    assert (conninfo(place.rows.resolve()), place.label()) == (
        "connect_timeout='10' fallback_application_name='outbox spark' service='shop'", "shop",
    )  # fmt: skip
