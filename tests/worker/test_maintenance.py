"""A lease holder tidies up: what has expired goes, and nothing else."""

import time
from datetime import timedelta

from sqlalchemy import text

from outbox import Inbox, Outbox
from outbox.worker import upkeep
from tests.support.waiting import eventually


def keys(engine) -> list[str]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT dedup_key FROM outbox_dedup")).scalars()
        handled = connection.execute(text("SELECT consumer FROM outbox_inbox")).scalars()
        return sorted([*found, *handled])


def test_expired_dedup_keys_and_inbox_rows_go_while_a_relay_works(engine, monkeypatch):
    monkeypatch.setattr(upkeep, "PRUNE_EXPIRED", 0.1)
    short, long = timedelta(milliseconds=1), timedelta(days=1)
    for name, window in (("soon", short), ("later", long)):
        outbox = Outbox(engine, dedup_window=window)
        with outbox.begin() as session:
            for number in range(3):
                id = outbox.send(session, "orders", b"", dedup_key=f"key {name} {number}")
                Inbox(engine, f"consumer {name} {number}", retention=window).once(session, id)
    time.sleep(0.05)

    with Outbox(engine).running(lambda message: None):
        gone = eventually(lambda: not any("soon" in key for key in keys(engine)))

    assert gone
    assert keys(engine) == sorted(f"{kind} later {number}" for kind in ("key", "consumer") for number in range(3))
