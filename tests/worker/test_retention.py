"""A relay with a retention deletes what is old and passed by all, between two reads, and never beside a backlog."""

import time
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import text

from outbox import Outbox, Relay, SchemaError
from outbox.model.position import Position
from outbox.model.subscription import Declaration
from outbox.model.verdict import DONE
from outbox.store.log.log import Limits
from outbox.store.operations.purge import Purge
from outbox.store.subscriptions.subscriptions import Subscriptions
from outbox.worker import upkeep
from outbox.worker.settings import Settings
from outbox.worker.subscription import retention_task
from tests.support.destination import Destination, fill, relay_to
from tests.support.waiting import eventually

MOMENT = timedelta(milliseconds=1)


@pytest.fixture
def outbox(engine):
    return Outbox(engine)


def rows(outbox) -> int:
    with outbox.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox_message")).scalar_one())


@pytest.fixture
def often(monkeypatch):
    """Old messages are looked for often."""
    monkeypatch.setattr(upkeep, "PURGE", 0.05)
    monkeypatch.setattr(upkeep, "PRUNE_AGAIN", 0.01)


def noted(outbox) -> tuple[bool, int]:
    """Whether a purge has ended, and its retention."""
    with outbox.engine.connect() as connection:
        at, keep = connection.execute(text("SELECT purged_at, keep_ms FROM outbox_meta")).one()
        return at is not None, keep


def test_a_relay_that_runs_for_a_moment_deletes_more_than_one_batch(outbox):
    """Run from cron, a batch at each run would not keep up with the writers."""
    fill(outbox, 5_000)
    relay_to(Destination(), outbox).until_empty()

    relay_to(Destination(), outbox, keep=MOMENT).until_empty()

    assert rows(outbox) == 0


@pytest.mark.usefixtures("often")
def test_a_relay_deletes_what_every_subscription_has_passed(outbox):
    """The slow reader holds the second half back until its subscription is dropped."""
    destination = Destination()
    with closing(outbox.database.open()) as channel:
        fill(outbox, 5_000)
        Subscriptions(channel).declare(Declaration(name="slow", destination="test:slow"), "latest")
        fill(outbox, 500, first=5_000)
        relay = relay_to(destination, outbox, keep=MOMENT)
        relay.start()
        try:
            held_back = eventually(lambda: rows(outbox) == 500) and eventually(lambda: noted(outbox)[0])
            time.sleep(0.3)
            still = rows(outbox)
            with Subscriptions(channel).changing():
                Subscriptions(channel).drop("slow")
            gone = eventually(lambda: rows(outbox) == 0)
        finally:
            relay.stop()
            relay.join(60)

    assert (held_back, still, gone, len(destination.messages), noted(outbox)) == (True, 500, True, 5_500, (True, 1))


@pytest.mark.usefixtures("often")
def test_nothing_is_deleted_while_more_waits_than_one_read_takes(outbox):
    """Of 100 old messages none goes before the relay has come to the end of its backlog."""
    fill(outbox, 100)
    relay_to(Destination(), outbox).until_empty()
    fill(outbox, 400, first=100)
    counts = list[int]()

    def counted(message):
        counts.append(rows(outbox))
        return DONE

    destination = Destination(counted)
    settings = Settings(limits=Limits(rows=50), poll=(timedelta(milliseconds=10),) * 2)
    relay = relay_to(destination, outbox, settings=settings, keep=MOMENT)
    relay.start()
    gone = eventually(lambda: rows(outbox) == 0)
    relay.stop()
    relay.join(60)

    assert (gone, len(destination.messages), set(counts)) == (True, 400, {500})


def test_a_round_does_not_look_at_what_is_held_back(outbox):
    """The cost of a round is bounded by what goes: of 4 100 old rows 100 are passed, and one batch is looked at."""
    fill(outbox, 100)
    relay_to(Destination(), outbox).until_empty()
    fill(outbox, 4_000, first=100)
    time.sleep(0.01)
    with closing(outbox.database.open()) as channel:
        found = list(Purge(channel, batch=100).batches(MOMENT))

    assert (found, rows(outbox)) == ([100, 0, 0, 0], 4_000)


def test_a_refused_round_is_begun_anew(outbox):
    """The task ends with its round, also by an error, and the next one begins with a new look."""
    fill(outbox, 10)
    relay_to(Destination(), outbox).until_empty()
    time.sleep(0.01)
    here = Position.of(0, [])
    with closing(outbox.database.open()) as channel:
        task = retention_task(channel, MOMENT)
        channel.run("ALTER TABLE {meta} RENAME TO other_meta")
        with pytest.raises(SchemaError, match="the outbox tables are not there"):
            task.do(here)
        channel.run("ALTER TABLE other_meta RENAME TO outbox_meta")
        steps = [task.do(here) for _ in range(5)]

    assert (steps, rows(outbox)) == ([False, True, True, True, False], 0)


@pytest.mark.parametrize("keep", [timedelta(0), timedelta(days=-1), 7])
def test_a_retention_is_a_time_above_zero(outbox, keep):
    with pytest.raises(ValueError, match="keep must be a timedelta above 0"):
        Relay(outbox, Destination(), keep=keep)
