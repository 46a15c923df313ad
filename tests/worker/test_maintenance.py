"""A lease holder tidies up: what has expired goes, and nothing else."""

import time
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outbox import Inbox, Outbox, Relay
from outbox.rocketmq import SimpleConsumer
from outbox.store.idempotency import dedup, inbox
from outbox.worker import upkeep
from tests.support.waiting import eventually


def keys(engine) -> list[str]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT dedup_key FROM outbox_dedup")).scalars()
        handled = connection.execute(text("SELECT consumer FROM outbox_inbox")).scalars()
        return sorted([*found, *handled])


def leave_behind(engine: Engine) -> None:
    """Three dedup keys and rows of the inbox that have expired, and three that have not."""
    for name, window in (("soon", timedelta(milliseconds=1)), ("later", timedelta(days=1))):
        outbox = Outbox(engine, dedup_window=window)
        with outbox.begin() as session:
            for number in range(3):
                id = outbox.send(session, "orders", b"", dedup_key=f"key {name} {number}")
                Inbox(engine, f"consumer {name} {number}", retention=window).once(session, id)
    time.sleep(0.05)


LATER = sorted(f"{kind} later {number}" for kind in ("key", "consumer") for number in range(3))


def test_expired_dedup_keys_and_inbox_rows_go_while_a_relay_works(engine, monkeypatch):
    monkeypatch.setattr(upkeep, "PRUNE_EXPIRED", 0.1)
    leave_behind(engine)

    with Outbox(engine).running(lambda message: None):
        gone = eventually(lambda: not any("soon" in key for key in keys(engine)))

    assert gone
    assert keys(engine) == LATER


@pytest.fixture
def portions_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there is always more to delete."""
    for table in (inbox, dedup):
        monkeypatch.setattr(table, "PRUNED_AT_ONCE", 1)


@pytest.mark.usefixtures("portions_of_one")
@pytest.mark.parametrize("run", [Relay.until_empty, Relay.once])
def test_a_relay_that_runs_for_a_moment_deletes_what_has_expired(engine, run):
    """Run from cron, it never has its lease for the minutes after which one that goes on deletes."""
    leave_behind(engine)

    run(Relay(Outbox(engine), lambda message: None))

    assert keys(engine) == LATER


@pytest.mark.usefixtures("portions_of_one")
def test_a_short_run_ends_after_so_many_portions_of_what_has_expired(engine, monkeypatch):
    """The next run goes on."""
    monkeypatch.setattr(upkeep, "LAST_PORTIONS", 1)
    monkeypatch.setattr(upkeep, "PRUNE_AGAIN", 3_600.0)
    leave_behind(engine)
    relay = Relay(Outbox(engine), lambda message: None)

    left = []
    for _ in range(2):
        relay.until_empty()
        left.append(len(keys(engine)) - len(LATER))

    assert left == [2, 0]


def test_a_receive_deletes_nothing_by_the_way(engine):
    leave_behind(engine)
    before = keys(engine)

    SimpleConsumer("billing", Outbox(engine), {"orders": "*"}).receive(1, timedelta(hours=1))

    assert keys(engine) == before
