"""A message that has expired when its turn comes is not delivered, however early it was read."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from outbox import Message, Outbox, Unavailable, Verdict
from outbox.store.log.log import Limits
from outbox.worker.settings import Settings
from tests.support.destination import Destination, accepted
from tests.support.parked import states
from tests.support.readers import Collector, worker
from tests.support.waiting import eventually


class Slow(Collector):
    """Takes its time."""

    def __call__(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Done, in the end."""
        time.sleep(0.6)
        return super().__call__(messages)


def test_what_expires_while_it_is_read_ahead_is_a_dead_letter(engine):
    outbox, handler = Outbox(engine), Slow()
    with outbox.begin() as session:
        # The first batch takes two calls, and longer than that; the two behind it are read meanwhile.
        moment = datetime.now(UTC) + timedelta(seconds=1)
        outbox.send_all(session, [Message("orders", str(n), expires_at=moment) for n in range(30)])

    worker(outbox.database, handler, settings=Settings(limits=Limits(rows=10))).until_empty()

    with engine.connect() as connection:
        dead = connection.scalar(text("SELECT count(*) FROM outbox_parked WHERE state = 'dead'"))
    assert len(handler.messages) + dead == 30
    # Two calls begin in time, with one message and with two.
    assert {int(body) for body in handler.bodies} <= set(range(3))


@pytest.mark.storm
def test_what_expires_while_the_destination_is_away_is_a_dead_letter(engine):
    """However many came together: the batch is in the worker's hands all the time."""
    outbox, destination = Outbox(engine), Destination(lambda _: Unavailable("away"))
    moment = datetime.now(UTC) + timedelta(seconds=1)
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"%d" % n, expires_at=moment) for n in range(30)])
        outbox.send(session, "orders", b"in time")
    with outbox.running(destination):
        assert eventually(lambda: destination.calls > 0)
        time.sleep(1.5)
        destination.answer = accepted
        assert eventually(lambda: bool(destination.messages) and states(engine) == {"dead": 30})

    assert destination.bodies == [b"in time"]
