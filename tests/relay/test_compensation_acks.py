"""Acks decide what a compensation sends, however late they come and however long they have to wait."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import ClassVar

import pytest
from sqlalchemy import Engine

from outbox.model.lease import Lease
from outbox.model.position import Capture, Position
from outbox.store.database import Database
from outbox.store.log.grace import Grace
from outbox.store.subscriptions.acks import Acks
from tests.support.destination import Destination
from tests.support.direct import BRIEFLY, acked, declare_compensation, relay_of, write
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


class AskedAtCapture(Acks):
    """Asks for the acks together with the position."""

    database: ClassVar[Database]
    known: ClassVar[dict[Position, set[int]]] = {}
    ripe: ClassVar[Position | None] = None

    class Grace(Grace):
        """Remembers the acks, too."""

        def look(self, now: Callable[[], Capture]) -> Capture | None:
            """With the acks of that moment."""
            capture = super().look(now)
            if capture is not None:
                with closing(AskedAtCapture.database.open()) as channel:
                    acks = Acks(channel, "relay").among(range(1, 1000))
                AskedAtCapture.known.setdefault(capture.position, acks)
            return capture

        def ripen(self) -> Position | None:
            """With the acks from then."""
            AskedAtCapture.ripe = super().ripen()
            return AskedAtCapture.ripe

    def among(self, ids: Sequence[int]) -> set[int]:
        """From memory."""
        return set() if self.ripe is None else self.known[self.ripe] & set(ids)


class PrunedByAge(Acks):
    """Deletes acks that are older than the grace."""

    def prune(self, lease: Lease, stored_base: object) -> bool:
        """By their time."""
        time.sleep(BRIEFLY.total_seconds())
        statement = "DELETE FROM {ack} WHERE acked_at < {past}"
        self._channel.run(self._database.sql(statement, past=self._database.later(str(-BRIEFLY.total_seconds()))))
        return False


def acks_that_come_late(engine: Engine) -> list[bytes]:
    """A writer commits, is slow, and says within the grace that it has sent."""
    destination = Destination()
    grace = timedelta(seconds=3)
    declare_compensation(engine, grace)
    relay = relay_of(engine, destination)
    relay.start()
    ids = write(engine, "1", "2")
    time.sleep(1)
    acked(engine, ids[:1])
    ids = write(engine, "3", "4")
    time.sleep(1)
    acked(engine, ids[:1])
    # All that is before it has come by then.
    assert eventually(lambda: b"4" in destination.bodies)
    relay.stop()
    relay.join(60)
    return destination.bodies


def acks_that_wait_long(engine: Engine) -> list[bytes]:
    """Nobody compensates for longer than the grace."""
    destination = Destination()
    declare_compensation(engine)
    acked(engine, write(engine, "1", "2"))
    write(engine, "3")
    time.sleep(2 * BRIEFLY.total_seconds())
    relay_of(engine, destination).until_empty()
    return destination.bodies


def test_an_ack_that_comes_late_counts(engine):
    assert acks_that_come_late(engine) == [b"2", b"4"]


def test_an_ack_waits_for_as_long_as_its_messages(engine):
    assert acks_that_wait_long(engine) == [b"3"]


@pytest.mark.parametrize(
    ("twin", "script", "sound"),
    [(AskedAtCapture, acks_that_come_late, [b"2", b"4"]), (PrunedByAge, acks_that_wait_long, [b"3"])],
    ids=["asked at capture", "pruned by age"],
)
def test_the_obvious_ways_with_acks_send_twice(engine, monkeypatch, twin, script, sound):
    """So the scripts above would notice."""
    monkeypatch.setattr(AskedAtCapture, "database", Database(engine), raising=False)
    monkeypatch.setattr("outbox.worker.subscription.Acks", twin)
    monkeypatch.setattr("outbox.worker.subscription.Grace", getattr(twin, "Grace", Grace))

    assert set(script(engine)) > set(sound)
