"""Each message takes effect once per consumer, however it is delivered: at the same time, or again after a crash."""

import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Inbox, Message, Outbox, Relay, Retry
from outbox import create_engine as create_outbox_engine
from tests.support.effects import billing, effects, handle_once, take_effect
from tests.support.faults import arm_kill
from tests.support.leases import end_lease
from tests.support.programs import Program
from tests.support.readers import QUICK
from tests.support.waiting import eventually

# At the same time


def in_background(work: Callable[[], bool]) -> "Future[bool]":
    """Start it on a thread of its own."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_concurrent_delivery_waits_and_answers_by_the_outcome_of_the_first(engine, inbox, message, end):
    started = threading.Event()

    def second() -> bool:
        started.set()
        return handle_once(engine, inbox, message)

    with Session(engine) as session:
        assert inbox.once(session, message)
        take_effect(session)
        answer = in_background(second)
        started.wait()
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.5)
        getattr(session, end)()

    assert answer.result(timeout=60) is (end == "rollback")
    assert effects(engine) == ["booked"]


def test_how_long_it_waits_is_the_callers_to_say(pg_engine):
    inbox, message = Inbox(pg_engine, "billing"), Message("orders", b"1")

    with pg_engine.connect() as first, pg_engine.connect() as second:
        inbox.once(first, message)
        second.execute(text("SET LOCAL lock_timeout = '100ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            inbox.once(second, message)


def test_a_snapshot_from_before_the_first_delivery_is_an_error_of_the_database(pg_engine):
    """It cannot see that the message was handled, and must not answer that it was not."""
    inbox, message = billing(pg_engine), Message("orders", b"1")
    repeatable = pg_engine.execution_options(isolation_level="REPEATABLE READ")

    with repeatable.connect() as second:
        second.execute(text("SELECT count(*) FROM outbox_inbox"))
        assert handle_once(pg_engine, inbox, message)
        with pytest.raises(OperationalError, match="could not serialize"):
            inbox.once(second, message)


def test_of_many_threads_with_the_same_message_one_handles_it(engine, inbox, message):
    ready = threading.Barrier(8)

    def deliver(_: int) -> bool:
        ready.wait()
        return handle_once(engine, inbox, message)

    with ThreadPoolExecutor(max_workers=8) as pool:
        answers = list(pool.map(deliver, range(8)))

    assert sorted(answers) == [False] * 7 + [True]
    assert effects(engine) == ["booked"]


# In processes, some of which die


def url_of(engine: Engine) -> str:
    """Where a process of its own finds the database."""
    return engine.url.render_as_string(hide_password=False)


def child(argument: str) -> None:
    """What a process of these tests does."""
    task = json.loads(argument)
    engine = create_outbox_engine(task["url"])
    inbox = Inbox(engine, "billing")
    match task["role"]:
        case "consume":
            for id in task["ids"]:
                handle_once(engine, inbox, id, what=id)
        case "hang before the commit":
            with Session(engine) as session:
                first = inbox.once(session, task["id"])
                take_effect(session)
                session.flush()
                Path(task["path"]).write_text(str(first))
                signal.pause()
        case "relay":
            if task["point"] is not None:
                arm_kill(task["point"])
            relay(engine, inbox).until_empty()


def started(**task: Any) -> Program:
    program = "import sys; from tests.consumer.test_inbox_deliveries import child; child(sys.argv[1])"
    return Program(["-c", program, json.dumps(task)])


def test_of_many_processes_with_the_same_messages_one_handles_each(engine, inbox):
    ids = [str(Message("orders", b"").message_id) for _ in range(40)]

    consumers = [started(role="consume", url=url_of(engine), ids=ids[n * 10 :] + ids[: n * 10]) for n in range(4)]

    assert [consumer.wait(120) for consumer in consumers] == [0] * 4
    assert effects(engine) == sorted(ids)


def test_a_consumer_that_is_killed_before_its_commit_has_handled_nothing(engine, inbox, message, tmp_path):
    path = tmp_path / "first"
    consumer = started(role="hang before the commit", url=url_of(engine), id=str(message.message_id), path=str(path))
    assert eventually(lambda: path.exists() and path.read_text() == "True")

    consumer.kill()
    consumer.wait(60)

    assert handle_once(engine, inbox, message)
    assert effects(engine) == ["booked"]


def relay(engine: Engine, inbox: Inbox) -> Relay:
    """A relay whose destination is the handler itself."""

    @inbox.idempotent
    def handle(session: Session, message: Message) -> None:
        take_effect(session, message.text())

    return Relay(Outbox(engine), handle, settings=QUICK)


@pytest.mark.parametrize("point", ["relay.after_send", "worker.before_settle", "worker.after_settle"])
def test_a_relay_that_died_delivers_again_and_the_effect_is_there_once(engine, inbox, point):
    outbox = Outbox(engine)
    texts = [f"{n:02}" for n in range(20)]
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", each) for each in texts])

    killed = started(role="relay", url=url_of(engine), point=point).wait(60)
    end_lease(engine)
    ended = started(role="relay", url=url_of(engine), point=None).wait(60)

    assert (killed, ended) == (-signal.SIGKILL, 0)
    assert effects(engine) == texts


def test_a_relay_tries_again_what_the_handler_could_not_do_yet(engine, inbox):
    answers = iter([Retry("later", timedelta(0)), None])
    outbox = Outbox(engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")

    @inbox.idempotent
    def book(session: Session, message: Message) -> Any:
        take_effect(session, f"attempt {message.attempt}")
        return next(answers)

    relay = Relay(outbox, book, settings=QUICK)

    def booked() -> bool:
        relay.until_empty()
        return effects(engine) != []

    assert eventually(booked)
    assert effects(engine) == ["attempt 2"]
