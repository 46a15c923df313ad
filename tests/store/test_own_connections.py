"""Connections of our own are made as the application's are, and leave its pool alone."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event, text
from sqlalchemy.pool import NullPool, QueuePool

from outbox import Outbox
from outbox.cli.connection import engine_of
from outbox.store.dialects.postgresql.silence import WATCH
from outbox.store.dialects.statements import Statement
from outbox.store.idempotency import inbox
from tests.support.servers.proxy import TcpProxy
from tests.support.sessions import terminate
from tests.support.several import behind
from tests.support.waiting import eventually


def backends_of(engine, transactions):
    """The server's processes that serve so many transactions in a row."""
    found = set()
    for _ in range(transactions):
        with engine.begin() as connection:
            found.add(connection.scalar(text("SELECT pg_backend_pid()")))
    return found


@pytest.fixture
def application(pg_engine):
    """An engine that has been used, with the pool that SQLAlchemy gives it."""
    engine = sqlalchemy.create_engine(pg_engine.url)
    yield engine
    engine.dispose()


def test_the_pool_is_left_as_it_was(application):
    before = backends_of(application, 3)
    with closing(Outbox(application).database.open()), closing(Outbox(application).database.open()):
        during = backends_of(application, 6)
    after = backends_of(application, 6)

    assert len(before) == 1
    assert during == before
    assert after == before
    assert application.pool.checkedout() == 0


def test_a_pool_without_a_free_place_is_not_waited_for(pg_engine):
    engine = sqlalchemy.create_engine(pg_engine.url, poolclass=QueuePool, pool_size=1, max_overflow=0, pool_timeout=1)
    with engine.connect() as taken:
        taken.execute(text("SELECT 1"))
        with closing(Outbox(engine).database.open()) as channel:
            assert channel.rows("SELECT 1") == [(1,)]


@pytest.mark.parametrize("pool", [QueuePool, NullPool])
def test_what_the_application_does_to_each_connection_is_done_to_ours(pg_engine, pool):
    """Also when it says so after the outbox was made."""
    engine = sqlalchemy.create_engine(pg_engine.url, poolclass=pool)
    outbox = Outbox(engine)
    seen = []

    @event.listens_for(engine, "do_connect")
    def _dial(dialect, record, arguments, options):
        seen.append("dialled")

    @event.listens_for(engine, "connect")
    def _open_channel(driver, record):
        with driver.cursor() as cursor:
            cursor.execute("SET application_name = 'shop'")
        driver.commit()

    with closing(outbox.database.open()) as channel:
        assert channel.rows("SELECT current_setting('application_name')") == [("shop",)]
    assert seen == ["dialled"]


def test_a_plain_connection_leaves_the_settings_of_its_session(pg_engine):
    """A pooler in transaction mode gives the session to an application next."""
    engine = sqlalchemy.create_engine(pg_engine.url)
    drivers = []
    event.listen(engine, "connect", lambda driver, _record: drivers.append(driver))

    with closing(Outbox(engine).database.open_plainly()) as channel:
        inbox.prune(channel)
        channel.notify()
        channel.notify(0.05)
        changed = drivers[0].execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()

    assert changed == []


def test_a_network_that_is_gone_is_noticed_from_the_first_statement_on(pg_engine, monkeypatch):
    did = []
    execute = psycopg.Connection.execute

    def run(driver, *args, **kwargs):
        did.append("statement")
        return execute(driver, *args, **kwargs)

    monkeypatch.setattr("outbox.store.dialects.postgresql.channel._watch_over", lambda _: did.append("watch"))
    monkeypatch.setattr(psycopg.Connection, "execute", run)
    with closing(Outbox(pg_engine).database.open()):
        assert did[:2] == ["watch", "statement"]


def test_statements_that_are_sent_together_are_one_transaction(engine):
    """Alone, and as a part of one that is open."""
    write = Statement("UPDATE outbox_meta SET slots = slots + 1")
    read = Statement("SELECT slots FROM outbox_meta", returns=True)
    wrong = Statement("SELECT nothing FROM outbox_meta", returns=True)
    with closing(Outbox(engine).database.open()) as channel:
        found = channel.rows_of_last([write, write, read])
        with pytest.raises((psycopg.Error, sqlite3.Error)):
            channel.rows_of_last([write, wrong])
        with pytest.raises(ZeroDivisionError), channel.transaction():
            inside = channel.rows_of_last([write, read])
            raise ZeroDivisionError
        after = channel.rows(read.sql)

    assert (found, inside, after) == ([(258,)], [(259,)], [(258,)])


@pytest.fixture
def far(postgres, pg_engine):
    """The proxy and an engine of the database behind it."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy, behind(proxy, pg_engine) as engine:
        yield proxy, engine


def in_transaction(channel):
    with channel.transaction():
        raise AssertionError("silent")


@pytest.mark.parametrize(
    "ask",
    [
        lambda channel: channel.rows("SELECT 1"),
        lambda channel: channel.run("SELECT 1"),
        lambda channel: channel.rows_of_last([Statement("SELECT 1", returns=True)]),
        lambda channel: channel.listen(),
        lambda channel: channel.notify(),
        in_transaction,
    ],
    ids=["rows", "run", "together", "listen", "notify", "transaction"],
)
def test_a_silent_connection_is_given_up(far, caplog, ask):
    """No packet is refused, and none is lost: the system's own settings would wait for ever."""
    proxy, engine = far
    with closing(Outbox(engine).database.open()) as channel:
        proxy.hold_answers()
        ended = watched_until_the_end(ask, channel)
        proxy.pass_through()

    assert ended == [psycopg.OperationalError]
    assert "the database has not answered for 70 s; its connection is shut down" in caplog.text


def watched_until_the_end(ask, channel):
    """The errors of a call, under a watch that does not wait between its looks."""
    ended = []

    def call():
        try:
            ask(channel)
        except Exception as error:
            ended.append(type(error))

    thread = threading.Thread(target=call)
    thread.start()

    def over():
        WATCH.look()
        return not thread.is_alive()

    assert eventually(over)
    thread.join()
    return ended


@pytest.fixture
def of_a_command(far):
    """The proxy and an engine as a command has it, which has met the server."""
    proxy, engine = far
    made = engine_of(engine.url.render_as_string(hide_password=False), make="")
    with made.connect():
        yield proxy, made
    made.dispose()


@pytest.mark.parametrize(
    "ask",
    [
        lambda connection: connection.execute(text("SELECT 1")),
        lambda connection: sqlalchemy.inspect(connection).get_table_names(),
        lambda connection: connection.commit(),
    ],
    ids=["execute", "inspect", "commit"],
)
def test_a_silent_server_is_given_up_under_the_statements_of_doctor_and_upgrade(of_a_command, caplog, ask):
    proxy, engine = of_a_command
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        proxy.hold_answers()
        ended = watched_until_the_end(ask, connection)
        proxy.pass_through()

    assert ended == [sqlalchemy.exc.OperationalError]
    assert caplog.text.count("the database has not answered for 70 s; its connection is shut down") == 1


def test_a_channel_of_a_command_decides_itself_how_long_it_waits(of_a_command):
    proxy, engine = of_a_command
    with closing(Outbox(engine).database.open()) as channel, channel.transaction():
        channel.unlimited()
        proxy.hold_answers()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(channel.rows, "SELECT 1")
            look_often()
            proxy.pass_through()
            answered = found.result(60)

    assert answered == [(1,)]


def test_looks_at_a_connection_that_rests_shut_nothing_down(pg_engine):
    """Also between the statements of a transaction, where a handler of ours works."""
    with closing(Outbox(pg_engine).database.open()) as channel:
        look_often()
        with channel.transaction():
            look_often()
            found = channel.rows("SELECT 1")
        look_often()

        assert (found, channel.rows("SELECT 2")) == ([(1,)], [(2,)])


def test_what_may_take_as_long_as_it_needs_is_not_given_up(far):
    """Until the end of its transaction, which is the next one's no more."""
    proxy, engine = far
    with closing(Outbox(engine).database.open()) as channel:
        with channel.transaction():
            channel.unlimited()
            proxy.hold_answers()
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(channel.rows, "SELECT 1")
                look_often()
                proxy.pass_through()
                answered = found.result(60)
        proxy.hold_answers()
        after = watched_until_the_end(lambda channel: channel.rows("SELECT 1"), channel)
        proxy.pass_through()

    assert (answered, after) == ([(1,)], [psycopg.OperationalError])


def look_often():
    for _ in range(20):
        WATCH.look()


def test_a_lost_connection_is_one_error_and_no_line_of_the_driver(pg_engine, caplog):
    """The driver logs the second error at the end of a pipeline, on stderr where nobody has set a log up."""
    with closing(Outbox(pg_engine).database.open()) as channel:
        statement = Statement(channel.database.sql("SELECT 1"), {})
        pid = channel.rows("SELECT pg_backend_pid()")[0][0]
        terminate(pg_engine, "pid = :pid", pid=pid)

        with pytest.raises(psycopg.OperationalError):
            channel.rows_of_last([statement, statement])

    assert [record.getMessage() for record in caplog.records if record.name.startswith("psycopg")] == []


def test_a_statement_that_fails_among_several_undoes_those_before(pg_engine):
    with closing(Outbox(pg_engine).database.open()) as channel:
        write = "INSERT INTO outbox_op (transaction_id, op, decided_by, decided_at) VALUES ('t', 'commit', '', now())"
        statements = [Statement(channel.database.sql(each), {}) for each in (write, "SELECT 1 / 0")]

        with pytest.raises(psycopg.errors.DivisionByZero):
            channel.rows_of_last(statements)

        assert channel.rows("SELECT transaction_id FROM {op}") == []
