"""Windows divided into tasks: each committed message is in exactly one, however they are cut."""

import itertools
import pickle
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest
from sqlalchemy import Engine, text

from outbox import DatabaseError, Outbox, SchemaError
from outbox.errors import OptionError, PurgedError, StandbyError
from outbox.model.limits import HALF_TOPIC
from outbox.model.position import EARLIEST, Position, Window
from outbox.spark.connections import AdbcConnection
from outbox.spark.place import Address, Place
from outbox.spark.planner import Page, Planner
from outbox.spark.tables import arrow_schema
from outbox.store.database import Channel
from outbox.store.dialects import part_of
from outbox.store.dialects.speech import Speech
from outbox.store.log.extraction import Extraction, Narrowing, Span, columns_of
from outbox.store.log.stamp import stamp
from tests.spark.reading import bodies, place_of, read, tables_of


@pytest.fixture
def planner(engine: Engine) -> Iterator[Planner]:
    """A planner of this test's database."""
    planner = Planner(place_of(engine), retries=1)
    yield planner
    planner.close()


def send(engine, *names, topic="orders", **fields):
    with engine.begin() as connection:
        for name in names:
            Outbox(engine).send(connection, topic, name, **fields)


def numbered(first, last):
    return [str(n) for n in range(first, last)]


def test_a_window_holds_what_was_committed_between_two_positions(engine, planner):
    send(engine, "before")
    base = planner.now()
    send(engine, "a", "b")
    target = planner.now()
    send(engine, "after")

    rows = read(planner.tasks(Window(base.position, target.position)))

    assert bodies(rows) == [b"a", b"b"]


@pytest.mark.storm
def test_tasks_divide_a_window_and_share_nothing(engine, planner):
    send(engine, *numbered(0, 100))
    window = Window(EARLIEST, planner.now().position)

    tasks = planner.tasks(window, rows_per_task=30)
    by_number = planner.tasks(window, partitions=7)

    assert [len(read([task])) for task in tasks] == [25, 25, 25, 25]
    assert len(by_number) == 7
    assert bodies(read(by_number)) == [name.encode() for name in numbered(0, 100)]


def test_a_transaction_that_was_open_comes_in_the_window_after_its_commit(pg_engine):
    """Its ids lie below those that were read before: nobody who reads by ids would find them."""
    planner = Planner(place_of(pg_engine))
    first, second = pg_engine.connect(), pg_engine.connect()
    for connection, name in ((first, "late 1"), (second, "late 2")):
        Outbox(pg_engine).send(connection, "orders", name)
    send(pg_engine, "early")
    base = planner.now()
    first.commit()
    middle = planner.now()
    second.commit()
    send(pg_engine, "fresh")
    target = planner.now()

    with closing(planner):
        windows = [Window(a, b) for a, b in (
            (EARLIEST, base.position), (base.position, middle.position), (middle.position, target.position),
            (base.position, target.position))]  # fmt: skip
        found = [sorted(bodies(read(planner.tasks(window)))) for window in windows]

    assert found == [[b"early"], [b"late 1"], [b"fresh", b"late 2"], [b"fresh", b"late 1", b"late 2"]]
    first.close()
    second.close()


def test_pages_cut_a_window_by_id_exactly(engine, planner):
    send(engine, *numbered(0, 10))
    window = Window(EARLIEST, planner.now().position)

    first = planner.page(window, 4)
    second = planner.page(window, 4, after=first.last)
    third = planner.page(window, 4, after=second.last)

    assert [first, second, third] == [Page(4, 4, more=True), Page(4, 8, more=True), Page(2, 10, more=False)]
    assert bodies(read(planner.tasks(window, after=first.last, upto=second.last))) == [b"4", b"5", b"6", b"7"]
    assert planner.page(Window(window.target, window.target), 4) == Page(0, None, more=False)


def test_a_page_takes_late_and_fresh_rows_in_the_order_of_their_ids(pg_engine):
    planner = Planner(place_of(pg_engine))
    with pg_engine.connect() as late, pg_engine.connect() as later:
        Outbox(pg_engine).send(late, "orders", "1")
        Outbox(pg_engine).send(later, "orders", "2")
        base = planner.now()
        send(pg_engine, "3", "4")
        late.commit()
        later.commit()

    with closing(planner):
        window = Window(base.position, planner.now().position)
        page = planner.page(window, 3)
        rows = read(planner.tasks(window, upto=page.last))

    assert (page.rows, page.more) == (3, True)
    assert bodies(rows) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("what", ["page", "tasks"])
def test_no_window_is_planned_on_a_standby(pg_engine, what):
    """An address of several servers may lead there after a lost connection, and rows may be missing there."""
    with closing(Planner(place_of(pg_engine), retries=0)) as planner:
        send(pg_engine, "1")
        window = Window(planner.now().position, Position(10**9))
        planner.close()
        with pg_engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA lagging")
            standby = "pg_is_in_recovery() RETURNS boolean LANGUAGE sql STABLE AS 'SELECT true'"
            connection.exec_driver_sql(f"CREATE FUNCTION lagging.{standby}")
            name = pg_engine.url.database
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET search_path = lagging, pg_catalog, public")

        with pytest.raises(StandbyError, match="set plannerUrl to the primary"):
            {"page": lambda: planner.page(window, 4), "tasks": lambda: planner.tasks(window)}[what]()


def test_every_column_comes_with_its_type(engine, planner):
    due = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    with engine.begin() as connection:
        id = Outbox(engine).send(
            connection, "orders", b"\x00\xff", key="k:a'\\", tags="t", headers={"n": "ä"}, content_type="text/plain",
            deliver_at=due, expires_at=due + timedelta(days=1),
        )  # fmt: skip

    tasks = planner.tasks(Window(EARLIEST, planner.now().position))
    table = tables_of(tasks)

    assert table.schema == arrow_schema("messages", tuple(columns_of("messages")))
    row = table.to_pylist()[0]
    assert abs(row.pop("created_at") - datetime.now(UTC)) < timedelta(minutes=1)
    assert 0 < row.pop("xact_id")
    assert 0 <= row.pop("slot") < 256
    assert row == {
        "id": 1, "message_id": str(id), "topic": "orders", "key": "k:a'\\", "tags": "t", "headers": '{"n":"ä"}',
        "content_type": "text/plain", "body": b"\x00\xff", "deliver_at": due, "expires_at": due + timedelta(days=1),
    }  # fmt: skip


ODD = ("a:b\\c'%s", "{now}", "{message}", "order-{1}", "{{x}}", "a}b")


@pytest.mark.storm
def test_rows_are_narrowed(engine, planner):
    odd = ODD[0]
    send(engine, "1", topic="orders", key=odd)
    send(engine, "2", topic="mails", key="other")
    send(engine, "3", topic="orders")
    window = Window(EARLIEST, planner.now().position)

    def found(**narrowing):
        wanted = Narrowing(**narrowing)
        page = planner.page(window, 10, narrowing=wanted)
        rows = bodies(read(planner.tasks(window, narrowing=wanted)))
        assert page.rows == len(rows)
        return rows

    created = read(planner.tasks(window))[1]["created_at"]
    assert found(topics=("orders",)) == [b"1", b"3"]
    assert found(keys=(odd, "nobody")) == [b"1"]
    assert found(created_from=created) == [b"2", b"3"]
    assert found(created_to=created) == [b"1"]
    assert found(where=(("id", ("2",)),)) == [b"2"]
    assert found(where=(("id", ("3", "1", "7")),)) == [b"1", b"3"]
    assert found(where=(("key", (odd, "nobody")),)) == [b"1"]
    assert found(where=(("key", ("other",)), ("topic", ("orders",)))) == []
    for number, key in enumerate(ODD[1:], 4):
        send(engine, str(number), key=key)
        window = Window(EARLIEST, planner.now().position)
        assert found(keys=(key,)) == found(where=(("key", (key, "nobody")),)) == [b"%d" % number]


def test_half_messages_come_only_when_they_are_asked_for(engine, planner):
    send(engine, "whole")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_message SET topic = :half"), {"half": HALF_TOPIC})
    send(engine, "other")
    window = Window(EARLIEST, planner.now().position)

    def found(**narrowing):
        return bodies(read(planner.tasks(window, narrowing=Narrowing(**narrowing))))

    assert found() == [b"other"]
    assert found(halves=True) == [b"whole", b"other"]
    assert found(topics=(HALF_TOPIC,)) == [b"whole"]
    assert found(topics=("orders",), halves=True) == [b"whole", b"other"]
    assert found(topics=("mails",), halves=True) == [b"whole"]


@pytest.mark.parametrize("table", ["progress", "subscription", "lease", "meta"])
def test_a_table_of_any_kind_of_database_is_read_with_all_columns(engine, planner, table):
    """Some columns are PostgreSQL's own, and null elsewhere. These tables have rows from the beginning."""
    assert [list(row) for row in read([planner.table_task(table)])] == [list(columns_of(table))]


def test_other_tables_are_read_whole(engine, planner):
    with engine.begin() as connection:
        insert = text("INSERT INTO outbox_op VALUES (:id, 'commit', 'me', :at)")
        connection.execute(insert, [{"id": f"t{n}", "at": "2026-01-02 03:04:05.678000"} for n in range(3)])

    task = planner.table_task("op", columns=("op", "decided_at"))
    rows = read([task])
    chosen = read([planner.table_task("op", narrowing=Narrowing(where=(("transaction_id", ("t1",)),)))])

    assert [row["op"] for row in rows] == ["commit"] * 3
    assert list(rows[0]) == ["op", "decided_at"]
    assert [row["transaction_id"] for row in chosen] == ["t1"]


def test_a_schema_of_its_own(postgres, pg_engine):
    from outbox import migrate

    with pg_engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA shop"))
    migrate.upgrade(pg_engine, schema="shop")
    with pg_engine.begin() as connection:
        Outbox(pg_engine, schema="shop").send(connection, "orders", b"1")

    with closing(Planner(place_of(pg_engine, "shop"))) as planner:
        window = Window(EARLIEST, planner.now().position)
        assert bodies(read(planner.tasks(window, whole=planner.whole(window)))) == [b"1"]


def test_a_planner_is_pickled_without_its_connection(engine, planner):
    send(engine, "a")
    now = planner.now()

    with closing(pickle.loads(pickle.dumps(planner))) as copy:
        rows = read(copy.tasks(Window(EARLIEST, now.position)))
        server = copy.now().server

    assert (bodies(rows), server) == ([b"a"], now.server)


def test_a_planner_connects_again(postgres, pg_engine):
    planner = Planner(place_of(pg_engine), retries=2)
    before = planner.now()

    with pg_engine.connect() as connection:
        pids = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox spark'"
        connection.execute(text(pids))
        connection.commit()

    assert planner.now().server == before.server
    planner.close()


def test_rows_that_were_purged_unread_are_missed(engine, planner):
    base = planner.now().position
    send(engine, "gone")
    target = planner.now().position
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET purged = :purged"), {"purged": str(target)})
    send(engine, "there")
    after = planner.now().position

    with pytest.raises(PurgedError, match="were purged unread from"):
        planner.require_unpurged(Window(base, after))
    planner.require_unpurged(Window(target, after))
    planner.require_unpurged(planner.whole(Window(EARLIEST, after)))
    with pytest.raises(PurgedError, match="were purged during the read"):
        read(planner.tasks(Window(base, after), whole=Window(base, after)))


def test_a_stamp_waits_until_the_log_is_on_disk(pg_engine):
    """An open transaction's rows stay in memory; without somebody's commit the position would wait for ever."""
    planner = Planner(place_of(pg_engine))
    with pg_engine.connect() as open, closing(planner):
        Outbox(pg_engine).send(open, "orders", b"x" * 100)
        before = time.monotonic()
        stamped = planner.now()

    assert time.monotonic() - before < 60
    assert stamped.server.system
    assert stamped.server.timeline == "00000001"


def test_a_stamp_is_not_released_before_the_flush(pg_engine: Engine) -> None:
    """Seen through the statements: capture, then the end of the log, then its flush."""
    database = Outbox(pg_engine).database
    words = {
        "pg_current_snapshot": "capture",
        "pg_walfile_name(pg_current_wal_insert_lsn()), 8), pg": "end",
        "flush_lsn": "is it flushed",
        "emit_message": "flush",
    }
    asked: list[str] = []

    class Spy:
        def __init__(self, channel):
            self._channel, self.database = channel, channel.database

        def rows(self, statement, /, **parameters):
            rows = self._channel.rows(statement, **parameters)
            asked.extend(name for word, name in words.items() if word in statement)
            return [(False,)] if asked[-1] == "is it flushed" and len(asked) < 20 else rows

    with closing(database.open()) as channel:
        stamp(cast("Channel", Spy(channel)), pause=lambda _: None)

    steps = [step for step, _ in itertools.groupby(asked)]
    assert steps == ["capture", "end", "is it flushed", "flush", "is it flushed", "capture"]


def test_a_stamp_from_before_a_crash_that_a_pooler_has_hidden_is_taken_again(pg_engine: Engine) -> None:
    """What is flushed by then is not what the captured position has seen."""
    database = Outbox(pg_engine).database

    class Pooler:
        """The server before its crash, for one capture, and the server after it."""

        captures = 0

        def __init__(self, channel, crashes):
            self._channel, self._crashes, self.database = channel, crashes, channel.database

        def rows(self, statement, /, **parameters):
            rows = self._channel.rows(statement, **parameters)
            if "pg_current_snapshot" in statement:
                self.captures += 1
                ((_, incarnation, *rest),) = rows
                if self.captures <= self._crashes:
                    return [("900000:900000:", f"before crash {self.captures} of {incarnation}", *rest)]
            return rows

    with closing(database.open()) as channel:
        once = Pooler(channel, crashes=1)
        stamped = stamp(cast("Channel", once))
        with pytest.raises(DatabaseError, match="5 times while its position was captured; if a pooler"):
            stamp(cast("Channel", Pooler(channel, crashes=10)))

    assert (stamped.position.head < 900_000, once.captures) == (True, 4)


@pytest.mark.parametrize(("url", "error", "words"), [
    ("postgresql://postgres@127.0.0.1:1/x", DatabaseError, "127.0.0.1:1/x cannot be reached"),
    ("sqlite:////nowhere/at/all.db", DatabaseError, "there is no file"),
])  # fmt: skip
def test_a_database_that_is_not_there(url, error, words):
    with pytest.raises(error, match=words):
        Planner(Place(rows=Address(url)), retries=0).now()


def test_tables_that_are_not_there(postgres):
    url = postgres.create_database("empty_for_spark")

    with pytest.raises(SchemaError, match="outbox db upgrade"):
        Planner(Place(rows=Address(url))).now()
    postgres.drop_database("empty_for_spark")


def test_tables_of_another_version(engine, planner):
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET version = 99"))

    with pytest.raises(SchemaError, match="of version 99, this is"):
        planner.now()


def test_a_password_in_a_url_is_refused_and_not_shown(monkeypatch):
    with pytest.raises(OptionError, match="holds a password") as caught:
        Address("postgresql://me:geheim@host/db")
    assert "geheim" not in str(caught.value)

    monkeypatch.setenv("SHOP_URL", "postgresql://me:geheim@host/db")
    assert Address("env:SHOP_URL").resolve().password == "geheim"
    assert "geheim" not in repr(Address("env:SHOP_URL"))
    with pytest.raises(OptionError, match="NO_SUCH_URL is not set"):
        Address("env:NO_SUCH_URL").resolve()


def test_a_role_that_may_read_two_tables_is_enough(postgres, pg_engine):
    with pg_engine.begin() as connection:
        connection.execute(text("CREATE ROLE spark_reader LOGIN"))
        connection.execute(text("GRANT SELECT ON outbox_message, outbox_meta TO spark_reader"))
    send(pg_engine, "a")
    url = pg_engine.url.set(username="spark_reader").render_as_string()

    try:
        with closing(Planner(Place(rows=Address(url)))) as planner, pg_engine.connect() as open:
            # Somebody's rows that are not on disk have to be waited for.
            Outbox(pg_engine).send(open, "orders", "b")
            window = Window(EARLIEST, planner.now().position)
            assert bodies(read(planner.tasks(window, whole=planner.whole(window)))) == [b"a"]
        with pytest.raises(DatabaseError, match=r"refuses to be read: .*permission denied"):
            read([Planner(Place(rows=Address(url))).table_task("op")])
    finally:
        with pg_engine.begin() as connection:
            connection.execute(text("DROP OWNED BY spark_reader; DROP ROLE spark_reader"))


@pytest.mark.parametrize("analysed", [False, True])
def test_tasks_stay_on_their_indexes(pg_engine, analysed):
    """Fresh rows by the primary key, as they are there; late ones by a probe of (xact_id, id) each."""
    with pg_engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox_message (message_id, topic, slot, body, xact_id) SELECT gen_random_uuid(), 't', 0,"
                " decode(repeat('78', 300), 'hex'), 1000 + n / 10 FROM generate_series(1, 30000) AS s(n)"
            )
        )
    if analysed:
        with pg_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("ANALYZE outbox_message"))

    def plan(span):
        wanted = Extraction(dialect="postgresql", columns=tuple(columns_of("messages")), span=span)
        with pg_engine.connect() as connection:
            for setting in part_of("postgresql", Speech).settings:
                connection.exec_driver_sql(setting)
            explained = connection.exec_driver_sql(f"EXPLAIN {wanted.statement()}".replace("%", "%%"))
            return "\n".join(row[0] for row in explained)

    base, target = Position(3000, (1200, 2100)), Position(4100, (3500,))
    fresh = plan(Span(Window(base, target), 20_000, 21_000))
    everything = plan(Span(Window(EARLIEST, Position(5000)), 1, 30_000))
    several = plan(Span(Window(base, target), 1, 30_000, late=True))
    one = plan(Span(Window(Position(3000, (1200,)), target), 1, 30_000, late=True))

    assert all(each.startswith("Index Scan using outbox_message_pkey") for each in (fresh, everything))
    assert all("outbox_message_xact_id" in each for each in (several, one))
    assert not any("Seq Scan" in each for each in (several, one))


def test_tasks_read_with_these_settings(pg_engine):
    with closing(AdbcConnection(pg_engine.url)) as connection:
        assert connection.row("SELECT current_setting('enable_seqscan'), current_setting('jit')") == ("off", "off")
