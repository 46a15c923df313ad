"""The address of the database may lead each new connection to another server, which has other rows, or not all."""

import threading
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine, event

from outbox import LeaseLostError, Outbox, StandbyError, create_engine
from outbox.model.position import EARLIEST, Position, Window
from outbox.store.database import Channel
from outbox.store.log.log import Extent, Limits, Log
from outbox.store.operations.check import findings
from outbox.worker.settings import Settings
from tests.support.readers import Collector, send, texts, worker

SMALL = Limits(rows=5, bytes=100)
#: What another server says of itself: functions that are found before those of the system.
STANDBY = "pg_is_in_recovery() RETURNS boolean LANGUAGE sql STABLE AS 'SELECT true'"
PRIMARY = "pg_postmaster_start_time() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT timestamptz ''2000-01-01'''"
ELSEWHERE = {"a standby": (STANDBY, StandbyError), "another primary": (PRIMARY, LeaseLostError)}


def lead_elsewhere(engine: Engine, function: str) -> None:
    """Let the connections of the reading thread lead to a server that has only the first nine messages yet."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        connection.exec_driver_sql("CREATE TABLE elsewhere.outbox_message (LIKE outbox_message INCLUDING ALL)")
        connection.exec_driver_sql("INSERT INTO elsewhere.outbox_message SELECT * FROM outbox_message WHERE id < 10")
        connection.exec_driver_sql(f"CREATE FUNCTION elsewhere.{function}")
    event.listen(engine.pool, "connect", _to_its_server)


def _to_its_server(driver: Any, _record: object) -> None:
    if threading.current_thread().name == "outbox-reader":
        driver.execute("SET search_path = elsewhere, pg_catalog, public")
        driver.commit()


@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_backlog_loses_nothing_when_its_reader_meets_another_server(pg_engine, where):
    """The rows that the other server lacks would count as passed."""
    outbox, handler = Outbox(pg_engine), Collector()
    sent = [str(n) for n in range(15)]
    send(outbox, *sent)
    lead_elsewhere(pg_engine, ELSEWHERE[where][0])

    worker(outbox.database, handler, settings=Settings(limits=SMALL)).until_empty()

    assert sorted(set(texts(handler.messages)), key=int) == sent


def reads(channel: Channel, log: Log) -> dict[str, Any]:
    """Each way to read rows for a position."""
    window = Window(Position(1, (0,)), Position(10**9))
    late, fresh = Extent((2, 9), (1, 1)), Extent((1, 9), None)
    return {
        "now": lambda: log.now(channel),
        "read_on": lambda: log.read_on(channel, EARLIEST),
        "ends": lambda: log.extent(channel, Window(EARLIEST, Position(10))),
        "extent": lambda: log.extent(channel, window),
        "last": lambda: log.last(channel),
        "page": lambda: log.page(channel, window, fresh, 0, 9),
        "page with late rows": lambda: log.page(channel, window, late, 0, 9),
        "bodies": lambda: log._large_bodies(channel, [1]),
    }


@pytest.mark.parametrize("where", ELSEWHERE)
def test_no_read_of_a_bound_log_is_answered_by_another_server(pg_engine, where):
    function, refused = ELSEWHERE[where]
    outbox = Outbox(pg_engine)
    send(outbox, "x" * 200)
    with closing(outbox.database.open()) as channel:
        log = Log(SMALL).bound_to(Log().now(channel).incarnation)
        at_home = {name: read() for name, read in reads(channel, log).items()}
        lead_elsewhere(pg_engine, function)
        channel.rows("SELECT set_config('search_path', 'elsewhere, pg_catalog, public', false)")
        for name, read in reads(channel, log).items():
            with pytest.raises(refused):
                pytest.fail(f"{name} was answered: {read()}")

    assert all(at_home.values())


# The address


def both_hosts(engine: Engine, **asked: str) -> Engine:
    """The same database, by an address of two hosts."""
    port, name = engine.url.port, engine.url.database
    options = "".join(f"&{option}={value}" for option, value in asked.items())
    return create_engine(f"postgresql://postgres@/{name}?host=127.0.0.1:{port}&host=127.0.0.2:{port}{options}")


@pytest.mark.parametrize(("asked", "warned"), [({}, 1), ({"target_session_attrs": "read-write"}, 0)])
def test_an_address_that_may_lead_to_a_standby_is_told_at_the_start_and_by_doctor(pg_engine, caplog, asked, warned):
    engine = both_hosts(pg_engine, **asked)
    outbox = Outbox(engine)

    worker(outbox.database, Collector()).until_empty()
    with closing(outbox.database.open()) as channel:
        found = [str(finding) for finding in findings(channel)]
    logged = [line for line in caplog.messages if line.startswith("address: ")]
    outbox.close()
    engine.dispose()

    port = pg_engine.url.port
    text = (
        "address: names several servers, and a new connection may reach a standby, or a primary of before"
        f" (127.0.0.1:{port}, 127.0.0.2:{port}); add target_session_attrs=read-write to the URL"
    )
    assert (found, logged) == (warned * [text], warned * [text])
