"""Calls of `Outbox.admin` that share one connection, which is opened again when it is lost."""

import asyncio
import threading
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import DatabaseError, Outbox, SubscriptionError
from outbox.store.database import Channel, Database


@pytest.fixture
def opened(monkeypatch) -> list[Channel]:
    """The connections that were opened, in their order."""
    found: list[Channel] = []
    really = Database.open

    def open_and_note(database: Database) -> Channel:
        found.append(really(database))
        return found[-1]

    monkeypatch.setattr(Database, "open", open_and_note)
    return found


def test_calls_of_threads_and_tasks_share_one_connection(engine, opened):
    outbox = Outbox(engine)

    async def asked(admin):
        return await asyncio.gather(*(admin.astatuses("relay") for _ in range(4)))

    with outbox.admin.connected() as admin:
        found = [len(each) for each in asyncio.run(asked(admin))]
        names = [each.name for each in admin.subscriptions()]

    assert (found, names, len(opened)) == ([1] * 4, ["relay"], 1)
    with pytest.raises(Exception, match="closed"):
        opened[0].rows("SELECT 1")


def test_a_connection_that_the_server_has_ended_is_opened_again(pg_engine, opened, monkeypatch):
    monkeypatch.setattr("outbox.admin.kept._IDLE_SECONDS", 0.0)
    with Outbox(pg_engine).admin.connected() as admin:
        before = admin.subscriptions()
        ((backend,),) = opened[0].rows("SELECT pg_backend_pid()")
        with pg_engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": backend})

        assert [each.name for each in admin.subscriptions()] == [each.name for each in before]
    assert len(opened) == 2


def test_a_refused_call_leaves_no_half_done_connection_behind(engine, opened):
    with Outbox(engine).admin.connected() as admin:
        with pytest.raises(SubscriptionError, match="nope"):
            admin.statuses("nope")

        assert [each.name for each in admin.subscriptions()] == ["relay"]


def test_a_call_waits_for_the_calls_before_up_to_the_deadline(sqlite_engine):
    with Outbox(sqlite_engine).admin.connected(deadline=timedelta(0)) as admin:
        in_call, go_on = threading.Event(), threading.Event()

        def hold():
            with admin._channel():
                in_call.set()
                go_on.wait(30)

        thread = threading.Thread(target=hold)
        thread.start()
        in_call.wait(30)
        with pytest.raises(DatabaseError, match="busy with other calls for 0 s"):
            admin.subscriptions()
        go_on.set()
        thread.join()

        assert len(admin.subscriptions()) == 1
