"""The address of the database leads new connections to a standby that lags behind."""

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from outbox import Outbox, create_engine, migrate
from outbox.store.log.log import Limits
from outbox.testing.servers import PostgresServer
from outbox.worker.settings import Settings
from tests.support.readers import Collector, send, texts, worker
from tests.support.servers.postgresql import Standby
from tests.support.waiting import eventually


def count(engine: Engine) -> int:
    """How many messages a server has; 0 without the tables."""
    with engine.connect() as connection:
        if connection.scalar(text("SELECT to_regclass('outbox_message') IS NULL")):
            return 0
        return int(connection.scalar(text("SELECT count(*) FROM outbox_message")) or 0)


@pytest.mark.storm
def test_a_backlog_is_delivered_whole_while_its_reader_meets_a_lagging_standby():
    sent, handler = [str(n) for n in range(1000)], Collector()
    with PostgresServer() as server:
        primary = create_engine(server.url())
        migrate.upgrade(primary)
        outbox = Outbox(primary)
        send(outbox, *sent[:150])
        with Standby(server) as standby:
            copy = create_engine(standby.url())
            assert eventually(lambda: count(copy) == 150)
            with copy.connect() as connection:
                connection.execute(text("SELECT pg_wal_replay_pause()"))
                paused = text("SELECT pg_get_wal_replay_pause_state()")
                assert eventually(lambda: connection.scalar(paused) == "paused")
            send(outbox, *sent[150:])

            @event.listens_for(primary, "do_connect")
            def lead(_dialect: Any, _record: object, _arguments: object, named: dict[str, Any]) -> None:
                if threading.current_thread().name == "outbox-reader":
                    named["port"] = standby.port

            worker(outbox.database, handler, settings=Settings(limits=Limits(rows=100))).until_empty()
            behind = count(copy)
            copy.dispose()
        outbox.close()
        primary.dispose()

    assert behind == 150
    assert sorted(set(texts(handler.messages)), key=int) == sent
