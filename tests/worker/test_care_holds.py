"""Care after the end of a process: a mark counts the ends of processes, and nothing else."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Message, Outbox, Reject, Retry, Verdict
from outbox.model.lease import Partition
from outbox.model.verdict import DONE
from outbox.store.log.log import Log
from outbox.store.subscriptions.leases import Leases
from outbox.store.subscriptions.progress import ProgressLog
from tests.support.destination import Destination, fill, relay_to
from tests.support.parked import decide, states
from tests.support.readers import at_work
from tests.support.waiting import eventually
from tests.worker.test_pausing import pause, resume


def abandon(outbox: Outbox) -> None:
    """As if a process had taken the lease, begun, and ended, with nothing settled."""
    with closing(outbox.database.open()) as channel:
        partition, progress = Partition("relay"), ProgressLog(channel)
        lease = Leases(channel).acquire(partition, "a process that ended", timedelta(milliseconds=1))
        newest = progress.newest(partition)
        assert lease is not None
        assert newest is not None
        assert progress.settle(lease, 1, newest.progress, Log().now(channel).incarnation)


def looks(engine: Engine) -> int:
    """How often the lease was taken."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT epoch FROM outbox_lease")).scalar_one())


def error(engine: Engine) -> str | None:
    with engine.connect() as connection:
        found: str | None = connection.scalar(text("SELECT error FROM outbox_parked"))
        return found


@pytest.mark.storm
def test_a_lost_connection_is_no_end_of_a_process(pg_engine):
    """The call of the marked message outlasts the connection; the process reads the message again, and waits."""
    outbox, released = Outbox(pg_engine), threading.Event()
    fill(outbox, 1)
    abandon(outbox)
    destination = Destination()
    destination.hanging = lambda _messages: not released.is_set()
    with at_work(relay_to(destination, outbox)):  # type: ignore[arg-type]  # it runs and stops as a worker does
        assert eventually(lambda: destination.calls == 1)
        before = looks(pg_engine)
        with pg_engine.begin() as connection:
            others = "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity {others}"))
        assert eventually(lambda: looks(pg_engine) > before)
        # Three looks, of which each takes a second at most.
        ended = eventually(lambda: states(pg_engine) == {"dead": 1}, 4)
        found = (ended, error(pg_engine))
        released.set()
        assert eventually(lambda: destination.bodies == [b"0"] and not states(pg_engine))

    assert found == (False, "under way alone, because a process ended")
    assert destination.calls == 1


@pytest.mark.storm
def test_behind_a_marked_message_that_hangs_the_others_go_on(pg_engine):
    """Its call outlasts the connection and the deadline; another message has failed once."""
    outbox, released = Outbox(pg_engine), threading.Event()
    fill(outbox, 1)
    abandon(outbox)
    failed: list[bytes] = []

    def answer(message: Message) -> Verdict:
        if message.body == b"1" and not failed:
            failed.append(message.body)
            return Retry("not now")
        return DONE

    destination = Destination(answer)
    destination.deadline = timedelta(seconds=0.5)
    destination.hanging = lambda messages: messages[0].body == b"0" and not released.is_set()
    with at_work(relay_to(destination, outbox)):  # type: ignore[arg-type]  # it runs and stops as a worker does
        assert eventually(lambda: destination.calls == 1)
        before = looks(pg_engine)
        with pg_engine.begin() as connection:
            others = "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity {others}"))
        assert eventually(lambda: looks(pg_engine) > before)
        fill(outbox, 1, first=1)
        arrived = eventually(lambda: destination.bodies == [b"1"], 8)
        released.set()

    assert (failed, arrived) == ([b"1"], True)


def test_a_replayed_message_is_handled_again_whatever_ended_before(engine):
    """Its process ended three times, and the next one has not begun when a person wants the message sent."""
    outbox = Outbox(engine)
    fill(outbox, 1)
    abandon(outbox)
    with closing(outbox.database.open()) as channel:
        columns = "message_id, topic, key, slot, tags, headers, body, content_type, created_at, deliver_at, expires_at"
        channel.run(
            f"INSERT INTO {{parked}} (subscription, id, {columns}, state, unit, place, attempts, due_at, error,"
            f" parked_at) SELECT 'relay', id, {columns}, 'retry', key, 1, 3, {channel.database.dialect.clock.now},"
            f" 'under way alone; its process ended twice before', {channel.database.dialect.clock.now} FROM {{message}}"
        )
        channel.run("UPDATE {lease} SET owner = NULL, lease_until = NULL")
        (id,) = (row[0] for row in channel.rows("SELECT id FROM {parked}"))
    outbox.admin.replay(id, state="retry", by="ann")
    destination = Destination()

    relay_to(destination, outbox).until_empty()

    assert states(engine) == {}


@pytest.mark.parametrize("again", [False, True], ids=["the same process", "another process"])
def test_care_is_not_over_with_a_lease_that_was_taken_for_a_decision_alone(engine, again):
    """People decide during a pause, after a process has ended."""
    outbox, destination = Outbox(engine), Destination(lambda each: Reject("never") if each.body == b"0" else DONE)
    fill(outbox, 1)
    relay_to(destination, outbox).until_empty()
    fill(outbox, 3, first=1)
    pause(outbox)
    abandon(outbox)
    decide(engine, "discard")
    with at_work(relay_to(destination, outbox)):  # type: ignore[arg-type]  # it runs and stops as a worker does
        assert eventually(lambda: not states(engine))
        if not again:
            resume(outbox)
            assert eventually(lambda: len(destination.bodies) == 3)
    if again:
        resume(outbox)
        relay_to(destination, Outbox(engine)).until_empty()

    assert (sorted(destination.bodies), destination.calls) == ([b"1", b"2", b"3"], 4)
