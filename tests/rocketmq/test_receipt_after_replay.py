"""A receipt is worth nothing once the message is handed out again, also when a person has ordered that."""

from __future__ import annotations

from datetime import timedelta

from outbox.rocketmq import SimpleConsumer
from tests.rocketmq.test_simple_consumer import EXPIRED, HOUR, consumer_of, refused, send, texts


def test_a_receipt_of_before_a_replay_takes_no_message_from_the_next_holder(engine, outbox):
    send(outbox, "1")
    mine, yours = consumer_of(outbox), consumer_of(outbox)
    assert isinstance(mine, SimpleConsumer)
    (first,) = mine.receive(1, HOUR)
    outbox.admin.replay(all=True, state="retry", by="ann")
    (second,) = yours.receive(1, HOUR)

    stale = refused(lambda: mine.change_invisible_duration(first, timedelta(0)))
    nothing = texts(mine.receive(1, HOUR))
    yours.ack(second)

    assert (EXPIRED in stale, nothing) == (True, [])
