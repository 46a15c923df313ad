"""Who listens is told what a worker reads, hands over, settles, parks and gives up; and of every outage."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from tenacity import wait_fixed

from outbox import (
    Done,
    Message,
    Outbox,
    Reject,
    Relay,
    Retry,
    RetryPolicy,
    Settings,
    Unavailable,
    Verdict,
    create_engine,
)
from outbox.telemetry import events
from outbox.testing.scripted import ScriptedSender
from tests.support.deadlines import overdue_when_hanging
from tests.support.destination import LONG_LEASE, Destination
from tests.support.waiting import eventually

BRISK = Settings(
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=LONG_LEASE,
    renew_every=timedelta(milliseconds=200),
)
AT_ONCE = RetryPolicy(attempts=2, wait=wait_fixed(0))


def listening(outbox: Outbox) -> list[events.Event]:
    """What is told from now on, without what the writing tells, and without beats."""
    told: list[events.Event] = []

    @outbox.listen
    def note(event: events.Event) -> None:
        if not isinstance(event, events.Written | events.Committed | events.RolledBack | events.Beat):
            told.append(event)

    return told


def send(outbox: Outbox, *bodies: str, **fields: Any) -> list[Message]:
    messages = [Message("orders", body, **fields) for body in bodies]
    with outbox.begin() as session:
        outbox.send_all(session, messages)
    return messages


def ids(messages: Sequence[Message] | Sequence[tuple[Message, object]]) -> list[str]:
    """Their bodies."""
    return [(each[0] if isinstance(each, tuple) else each).body.decode() for each in messages]


def shown(event: events.Event) -> tuple[Any, ...]:
    """What an event says, without what differs from run to run; and that the rest is there."""
    name, about = type(event).__name__, ("relay", 0)
    match event:
        case events.LeaseTaken() | events.LeaseLost():
            assert (event.subscription, event.partition) == about
            return name, event.epoch
        case events.BatchRead() | events.Settled():
            assert (event.subscription, event.partition) == about
            return name, ids(event.messages)
        case events.Parked() | events.Dead():
            assert (event.subscription, event.partition) == about
            return name, ids(event.messages), [parking.state for _, parking in event.messages]
        case events.HandedOver():
            assert event.subscription == "relay"
            assert 0 <= event.seconds < 60
            return name, ids(event.messages), event.verdicts, event.error
        case _:
            return (name,)


def test_a_batch_is_told_from_the_lease_on(engine):
    outbox = Outbox(engine)
    told = listening(outbox)
    send(outbox, "1", "2")

    Relay(outbox, ScriptedSender()).until_empty()

    assert [shown(event) for event in told] == [
        ("LeaseTaken", 1),
        ("BatchRead", ["1", "2"]),
        ("HandedOver", ["1"], [Done()], None),
        ("HandedOver", ["2"], [Done()], None),
        ("Settled", ["1", "2"]),
        ("LeaseLost", 1),
    ]
    assert {event.database for event in told} == {outbox.database}
    read, lost = told[1], told[-1]
    assert isinstance(read, events.BatchRead)
    assert isinstance(lost, events.LeaseLost)
    assert lost.error is None
    created = [message.created_at for message in read.messages]
    assert all(at is not None and timedelta(0) <= read.now - at < timedelta(minutes=10) for at in created)


def test_what_is_not_done_is_told_when_it_is_stored(engine):
    """The rejected one is a dead letter, and what stands behind it in its key is blocked."""
    outbox = Outbox(engine)
    told = listening(outbox)
    send(outbox, "bad", "behind", key="k")
    send(outbox, "again")

    def handle(messages: Sequence[Message]) -> list[Verdict]:
        answers: dict[bytes, Verdict] = {b"bad": Reject("broken"), b"again": Retry("busy")}
        return [answers.get(message.body, Retry("behind")) for message in messages]

    sender = ScriptedSender()
    sender.send = handle  # type: ignore[method-assign]
    Relay(outbox, sender, retry=AT_ONCE).once()

    found = [shown(event) for event in told if isinstance(event, events.Parked | events.Dead | events.Settled)]
    assert found == [
        ("Parked", ["behind", "again"], ["behind", "retry"]),
        ("Dead", ["bad"], ["dead"]),
    ]


def test_a_handler_that_raises_is_told_with_its_error_and_its_success_as_settled(engine):
    outbox, failing = Outbox(engine), [ValueError("no\nway")]
    told = listening(outbox)
    send(outbox, "1")

    def send_it(message: Message) -> None:
        if failing:
            raise failing.pop()

    Relay(outbox, send_it, settings=BRISK).until_empty()

    over = [event for event in told if isinstance(event, events.HandedOver)]
    assert [(ids(event.messages), event.verdicts, event.error) for event in over][-1] == (["1"], [Done()], None)
    assert [ids(event.messages) for event in told if isinstance(event, events.Settled)] == [["1"]]


def test_a_call_is_told_on_the_thread_that_made_it_and_a_batch_where_it_was_read(engine):
    outbox, threads = Outbox(engine), dict[str, set[str]]()
    outbox.listen(lambda event: threads.setdefault(type(event).__name__, set()).add(threading.current_thread().name))
    send(outbox, "1")
    here = threading.current_thread().name

    Relay(outbox, ScriptedSender()).until_empty()

    assert threads == {
        **{key: {here} for key in ("Written", "Committed", "LeaseTaken", "BatchRead", "Settled", "LeaseLost", "Beat")},
        "HandedOver": {"outbox-handler"},
    }


def test_a_worker_beats_while_a_call_hangs(sqlite_engine):
    outbox, beats, end, destination = Outbox(sqlite_engine), list[events.Beat](), threading.Event(), Destination()
    destination.hanging = lambda _messages: not end.is_set()
    outbox.listen(lambda event: beats.append(event) if destination.calls and isinstance(event, events.Beat) else None)
    send(outbox, "1")

    with outbox.running(overdue_when_hanging(destination), settings=BRISK):
        assert eventually(lambda: len(beats) >= 2)
        before = destination.bodies
        end.set()

    assert before == []


@pytest.mark.storm
def test_a_destination_that_is_away_is_told_again_and_again_and_its_return_once(engine):
    outbox = Outbox(engine)
    told = listening(outbox)
    send(outbox, "1")

    sender = ScriptedSender(*[Unavailable("no route", everything=True)] * 3)
    with outbox.running(sender, settings=BRISK):
        assert eventually(lambda: any(isinstance(event, events.Settled) for event in told))

    away = [event for event in told if isinstance(event, events.DestinationAway)]
    back = [event for event in told if isinstance(event, events.DestinationBack)]
    assert len(away) >= 3
    assert {(e.subscription, e.destination, len(e.outages)) for e in away} == {("relay", sender.destination, 1)}
    assert away[0].pauses
    assert {replace(e.outages[0], seconds=0) for e in away} == {events.Outage(topic=None, error="no route", seconds=0)}
    assert [outage.seconds for e in away for outage in e.outages] == sorted(e.outages[0].seconds for e in away)
    assert [(e.outage.topic, e.outage.error) for e in back] == [(None, "no route")]
    assert told.index(away[-1]) < told.index(back[0])


def test_a_lease_that_another_takes_is_told_as_lost(engine):
    outbox = Outbox(engine)
    told = listening(outbox)
    with outbox.running(ScriptedSender(), settings=BRISK):
        assert eventually(lambda: any(isinstance(event, events.LeaseTaken) for event in told))
        with engine.begin() as connection:
            connection.execute(text("UPDATE outbox_lease SET epoch = epoch + 1, owner = 'another', lease_until = NULL"))
        assert eventually(lambda: sum(isinstance(event, events.LeaseTaken) for event in told) == 2)

    leases = [event for event in told if isinstance(event, events.LeaseTaken | events.LeaseLost)]
    assert [shown(event) for event in leases] == [
        ("LeaseTaken", 1), ("LeaseLost", 1), ("LeaseTaken", 3), ("LeaseLost", 3),
    ]  # fmt: skip
    errors = [event.error for event in leases if isinstance(event, events.LeaseLost)]
    assert errors[0] is not None
    assert errors[1] is None


@pytest.fixture
def apart(pg_engine: Engine) -> Engine:
    """An engine whose connections can be told from the test's own."""
    url = pg_engine.url.update_query_dict({"application_name": "apart"})
    return create_engine(url.render_as_string(hide_password=False))


def test_a_database_that_is_away_and_back_is_told_and_logged(pg_engine, apart, caplog):
    """Between the two the lease is lost, and it is taken again."""
    outbox = Outbox(apart)
    told = listening(outbox)
    with outbox.running(ScriptedSender(), settings=BRISK):
        assert eventually(lambda: any(isinstance(event, events.LeaseTaken) for event in told))
        with pg_engine.connect() as connection:
            theirs = "application_name = 'apart' AND datname = current_database()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {theirs}"))
        assert eventually(lambda: any(isinstance(event, events.DatabaseBack) for event in told))
        assert eventually(lambda: sum(isinstance(event, events.LeaseTaken) for event in told) == 2)
    apart.dispose()

    away = [event for event in told if isinstance(event, events.DatabaseAway)]
    (back,) = [event for event in told if isinstance(event, events.DatabaseBack)]
    assert away[0].seconds == 0
    assert back.seconds > 0
    assert all(event.error for event in away)
    lines = [record.outbox for record in caplog.records if hasattr(record, "outbox")]
    (end,) = [line for line in lines if line["event"] == "database_back"]
    begin = next(line for line in lines if line["event"] == "database_away")
    assert end["seconds"] == back.seconds
    assert begin["error"] in [event.error for event in away]
    names = [type(event).__name__ for event in told if not isinstance(event, events.DatabaseAway)]
    assert sorted(names[:4]) == sorted(["LeaseTaken", "LeaseLost", "DatabaseBack", "LeaseTaken"])


def test_a_listener_that_raises_disturbs_no_worker(engine):
    outbox = Outbox(engine)

    @outbox.listen
    def broken(event: events.Event) -> None:
        raise ZeroDivisionError

    told, sender = listening(outbox), ScriptedSender()
    send(outbox, "1")
    Relay(outbox, sender).until_empty()

    assert [message.body for message in sender.stored] == [b"1"]
    assert [type(event).__name__ for event in told] == [
        "LeaseTaken", "BatchRead", "HandedOver", "Settled", "LeaseLost",
    ]  # fmt: skip
