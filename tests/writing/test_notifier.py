"""Wake-ups go out after the real commit, and whatever happens to them, nobody's commit waits or fails."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Outbox, create_engine, migrate
from outbox.store.database import Channel
from outbox.store.dialects.dialect import Hint
from outbox.worker.settings import Settings
from outbox.writing.notifier import Notifier
from tests.support.readers import Collector, bodies, send, worker
from tests.support.servers.proxy import TcpProxy
from tests.support.several import behind
from tests.support.waiting import eventually


@contextmanager
def listening(outbox: Outbox) -> Iterator[Channel]:
    """Another process's ear."""
    with closing(outbox.database.open()) as channel:
        channel.listen()
        yield channel


def end_others(channel: Channel) -> None:
    """End all other connections to the database."""
    channel.rows("""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()""")


@contextmanager
def woken(outbox: Outbox) -> Iterator[list[float]]:
    """The moments of this process's wake-ups."""
    moments: list[float] = []
    listener = outbox.notifier.listen(lambda: moments.append(time.monotonic()))
    yield moments
    del listener


def test_a_commit_is_heard_in_other_processes(pg_engine):
    """After it: who hears it finds the message."""
    outbox = Outbox(pg_engine)
    with listening(outbox) as ear, Session(pg_engine) as session:
        outbox.send(session, "orders", b"1")
        assert not eventually(ear.hinted, 0.2)
        session.commit()
        session.close()
        assert eventually(ear.hinted)
        assert bodies(pg_engine) == [b"1"]


def test_the_commit_of_a_connection_that_is_kept_is_heard(pg_engine):
    """It never goes back to its pool."""
    outbox = Outbox(pg_engine)
    with listening(outbox) as ear, pg_engine.connect() as connection:
        outbox.send(connection, "orders", b"1")
        connection.commit()
        assert eventually(ear.hinted)


def test_what_is_not_committed_is_not_heard(engine):
    outbox = Outbox(engine)
    with listening(outbox) as ear, woken(outbox) as moments:
        with Session(engine) as session:
            outbox.send(session, "orders", b"rolled back")
            session.rollback()
            outbox.send(session, "orders", b"closed")
        with suppress(ZeroDivisionError), outbox.begin() as session:
            outbox.send(session, "orders", b"raised")
            _ = 1 / 0
        with Session(engine) as session:
            with session.begin_nested():
                outbox.send(session, "orders", b"released, then rolled back")
            session.rollback()
        with engine.connect() as connection:
            outbox.send(connection, "orders", b"rolled back")
            connection.rollback()
            connection.execute(text("SELECT 1"))
            connection.commit()
        assert not eventually(lambda: ear.hinted() or bool(moments), 0.3)


def test_a_transaction_without_messages_is_not_heard(engine):
    outbox = Outbox(engine)
    with listening(outbox) as ear, woken(outbox) as moments:
        with Session(engine) as session:
            outbox.send(session, "orders", b"rolled back")
            session.rollback()
            session.execute(text("CREATE TABLE business (id int)"))
            session.commit()
        assert not eventually(lambda: ear.hinted() or bool(moments), 0.3)


def test_a_commit_wakes_this_process(engine):
    outbox = Outbox(engine)
    with woken(outbox) as moments:
        send(outbox, "1")
        assert eventually(lambda: bool(moments))


def test_who_has_stopped_listening_is_not_woken(engine):
    outbox = Outbox(engine)
    with woken(outbox) as moments:
        send(outbox, "1")
        assert eventually(lambda: bool(moments))
    time.sleep(0.1)
    count = len(moments)
    send(outbox, "2")
    time.sleep(0.1)

    assert len(moments) == count


def test_many_commits_are_few_notifications(postgres, pg_engine):
    """What falls between two of them is one hint: here, all that is committed until the first of them is answered."""
    url = pg_engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with (
        TcpProxy("127.0.0.1", postgres.port) as proxy,
        behind(proxy, pg_engine) as through,
        closing(Outbox(pg_engine, worker_engine=through)) as outbox,
        psycopg.connect(url, autocommit=True) as ear,
    ):
        ear.execute(f"LISTEN {outbox.database.wake_up_name}")
        send(outbox, "1")
        assert list(ear.notifies(timeout=120, stop_after=1))
        proxy.hold_answers()
        with pg_engine.connect() as connection:
            for _ in range(200):
                outbox.send(connection, "orders", b"")
                connection.commit()
        proxy.pass_through()
        heard = [*ear.notifies(timeout=120, stop_after=1), *ear.notifies(timeout=1)]

    assert 1 <= len(heard) <= 2


def test_many_commits_say_for_how_long_no_hint_will_follow(pg_engine):
    """Workers look by themselves meanwhile."""
    outbox = Outbox(pg_engine)
    with listening(outbox) as ear, pg_engine.connect() as connection:
        send(outbox, "1")
        assert eventually(lambda: ear.hinted() == Hint(0.0))

        def busy() -> bool:
            for _ in range(20):
                outbox.send(connection, "orders", b"")
                connection.commit()
            return ear.hinted() == Hint(0.05)

        assert eventually(busy)


@pytest.mark.parametrize(
    ("payload", "pause"),
    [("", 0.0), ("50", 0.05), ("-1", 0.0), ("1e3", 0.0), ("9999999", 0.0), ("soon", 0.0), ("☃", 0.0)],
)
@pytest.mark.parametrize("with_an_answer", [False, True], ids=["alone", "with an answer"])
def test_anybody_may_notify(pg_engine, payload, pause, with_an_answer):
    outbox = Outbox(pg_engine)
    with listening(outbox) as ear:
        with pg_engine.begin() as connection:
            connection.execute(
                text("SELECT pg_notify(:name, :payload)"), {"name": outbox.database.wake_up_name, "payload": payload}
            )
        if with_an_answer:
            ear.rows("SELECT 1")
            heard = ear.hinted()
        else:
            heard = next(hint for hint in iter(ear.hinted, Hint(-1.0)) if hint is not None)

    assert heard == Hint(pause)


def test_outboxes_in_one_database_wake_their_own_listeners(pg_engine):
    """Also when they share an engine."""
    migrate.upgrade(pg_engine, schema="events")
    one, other = Outbox(pg_engine), Outbox(pg_engine, schema="events")
    with listening(one) as ear, listening(other) as other_ear, woken(one) as moments, woken(other) as other_moments:
        send(other, "1")
        assert eventually(lambda: other_ear.hinted() and bool(other_moments))
        assert not eventually(lambda: ear.hinted() or bool(moments), 0.2)


@pytest.mark.parametrize("how", ["refuse", "black_hole"])
def test_a_commit_does_not_wait_for_its_hint(postgres, pg_engine, how):
    """Hints go through a connection of their own; that it hangs, or cannot be had, is nobody's business."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        elsewhere = create_engine(pg_engine.url.set(port=proxy.port))
        outbox = Outbox(elsewhere)
        send(outbox, "1")
        getattr(proxy, how)()
        with woken(outbox) as moments:
            before = time.monotonic()
            for _ in range(20):
                with Session(pg_engine) as session, session.begin():
                    outbox.send(session, "orders", b"")
            took = time.monotonic() - before
            assert len(moments) >= 20, "the wake-ups of this process need no connection"
        proxy.pass_through()
        elsewhere.dispose()

    assert took < 30
    assert len(bodies(pg_engine)) == 21


def test_a_lost_notify_connection_is_opened_again(pg_engine, monkeypatch):
    monkeypatch.setattr(Notifier, "reconnect_seconds", 0.05)
    outbox = Outbox(pg_engine)
    send(outbox, "1")
    with listening(outbox) as ear:
        end_others(ear)
        pg_engine.dispose()

        def heard() -> Hint | None:
            send(outbox, "again")
            return ear.hinted()

        assert eventually(heard)


def test_the_hint_that_finds_its_connection_ended_goes_out_on_another_one(pg_engine, monkeypatch):
    """At once, as after an `idle_session_timeout` of the server."""
    monkeypatch.setattr(Notifier, "reconnect_seconds", 3600.0)
    outbox = Outbox(pg_engine)
    with listening(outbox) as ear:
        send(outbox, "1")
        assert eventually(ear.hinted)
        end_others(ear)
        pg_engine.dispose()
        send(outbox, "2")
        assert eventually(ear.hinted)


def test_a_listener_that_raises_does_not_reach_the_caller_of_commit(engine):
    """The data is committed; an exception would tell the caller otherwise."""
    outbox = Outbox(engine)

    def broken() -> None:
        raise LookupError

    listener = outbox.notifier.listen(broken)
    with woken(outbox) as moments:
        send(outbox, "1")
        assert eventually(lambda: bool(moments))
    del listener

    assert bodies(engine) == [b"1"]


def test_a_commit_succeeds_where_no_thread_can_be_started(engine, monkeypatch):
    """As at the end of the interpreter; the message is found by the next poll, the next hint tries again."""

    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    outbox = Outbox(engine)
    with monkeypatch.context() as patched, woken(outbox) as moments:
        patched.setattr(Thread, "start", refuse)
        send(outbox, "1")
        assert moments
    with listening(outbox) as ear:
        send(outbox, "2")
        assert not outbox.database.dialect.driving.notifies or eventually(ear.hinted)

    assert bodies(engine) == [b"1", b"2"]


def test_a_worker_in_this_process_is_woken(sqlite_engine):
    """Nothing but the wake-up could be so quick: the worker would sleep for a minute."""
    outbox = Outbox(sqlite_engine)
    handler = Collector()
    relay = worker(outbox.database, handler, settings=Settings(poll=(timedelta(seconds=60), timedelta(seconds=60))))
    listener = outbox.notifier.listen(relay.hint)
    thread = Thread(target=relay.run)
    thread.start()
    time.sleep(0.5)
    try:
        for n in range(3):
            send(outbox, str(n))
            assert eventually(lambda: len(handler.messages) == n + 1)  # noqa: B023 - asked at once
    finally:
        relay.stop()
        thread.join(60)
        del listener


def test_a_child_process_sends_while_a_lock_of_its_parent_is_held(pg_engine):
    """A fork copies locks in any state, and no thread that could release them."""
    outbox = Outbox(pg_engine)
    send(outbox, "parent")
    with listening(outbox) as ear:
        assert eventually(lambda: ear.hinted() or True)
        with outbox.notifier._lock:
            child = os.fork()
            if child == 0:
                status = 1
                with suppress(BaseException):
                    pg_engine.dispose(close=False)
                    send(outbox, "child")
                    status = 0 if eventually(outbox.notifier._rung.empty) else 2
                    time.sleep(0.2)
                os._exit(status)
        assert ended(child) == 0
        assert eventually(ear.hinted)
        send(outbox, "parent again")
        assert eventually(ear.hinted)

    assert bodies(pg_engine) == [b"parent", b"child", b"parent again"]


def ended(child: int) -> int:
    """How a child ended; one that hangs is killed."""
    result: list[int] = []

    def over() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            result.append(os.waitstatus_to_exitcode(status))
        return bool(result)

    if not eventually(over, 120):
        os.kill(child, 9)
        os.waitpid(child, 0)
        return -9
    return result[0]


#: Another hint comes in between, before one line of a hint after the other, as from a signal handler that commits.
INTERRUPTED = """
import sys, threading, time
from outbox import Outbox, create_engine

notifier = Outbox(create_engine(sys.argv[1])).notifier
line = 0

def interrupted(frame, event, argument):
    global line
    line += event == "line"
    if event == "line" and line == chosen:
        notifier.hint()
    return interrupted

for chosen in range(1, 50):
    line = 0
    sys.settrace(interrupted)
    notifier.hint()
    sys.settrace(None)
    time.sleep(0.06)
print([each.name for each in threading.enumerate()].count("outbox-hints"))
"""


@pytest.mark.storm
def test_signal_handlers_commit_in_the_middle_of_a_hint(engine):
    url = engine.url.render_as_string(hide_password=False)
    program = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, url], timeout=60, capture_output=True, text=True, check=True
    )

    assert program.stdout.split() == ["1"], program.stderr


def test_closed_hints_end_their_thread_however_long_it_takes_to_connect(pg_engine, monkeypatch):
    monkeypatch.setattr(Notifier, "reconnect_seconds", 0.05)
    outbox, answered, others = Outbox(pg_engine), Event(), set(enumerate_threads())

    def away() -> Channel:
        answered.wait(60)
        raise ConnectionError

    monkeypatch.setattr(outbox.database, "open_plainly", away)
    for _ in range(3):
        outbox.notifier.hint()
        time.sleep(0.1)
        outbox.notifier.close()

    def left() -> list[str]:
        return [each.name for each in set(enumerate_threads()) - others if each.name == "outbox-hints"]

    assert left()
    answered.set()
    assert eventually(lambda: not left())
