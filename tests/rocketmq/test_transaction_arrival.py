"""What a consumer gets of transactions of the 5.x shape: messages, moments, ids and order."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from outbox import Message
from outbox.model.slots import slot_of
from outbox.rocketmq import MessageQueue
from tests.rocketmq.parts import (
    COMMIT,
    arrived,
    check_back,
    halves,
    one,
    wait_until_old_enough,
)
from tests.support.leases import step_clock
from tests.support.readers import delivered
from tests.support.waiting import eventually

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"


def test_what_arrives_is_what_was_sent(outbox, producer):
    """Byte for byte, with the id of its transaction besides."""
    body, headers = bytes(range(256)), {"trace": "ä \"quoted\" \\ 'x' 😀", "A": "1"}
    message = Message(
        "orders", body, key="k-\u00e4'\"", tags="tag a", headers=headers, content_type="application/x-thing; v=1"
    )
    plain = Message("orders", {"a": [1, None]})
    with producer.begin_transaction() as transaction:
        transaction.store(message)
        transaction.store(plain)

    found = delivered(outbox.database)
    own = {"__transactionId__": transaction.id}
    assert [
        (m.message_id, m.topic, m.key, m.tags, m.headers, m.body, m.content_type, m.deliver_at, m.expires_at, m.attempt)
        for m in found
    ] == [
        (
            message.message_id, "orders", "k-\u00e4'\"", "tag a", {**headers, **own}, body, "application/x-thing; v=1",
            None, None, 1,
        ),
        (plain.message_id, "orders", None, None, own, b'{"a":[1,null]}', "application/json", None, None, 1),
    ]  # fmt: skip
    assert {m.transaction_id for m in found} == {transaction.id}


def test_the_message_of_the_caller_stays_as_it_was(outbox, producer):
    message = Message("orders", "1", headers={"a": "b"}, delay=timedelta(seconds=3))
    with producer.begin_transaction() as transaction:
        transaction.store(message)

    kept = (message.headers, message.delay, message.topic, message.id)
    assert kept == ({"a": "b"}, timedelta(seconds=3), "orders", None)


def log_of(engine, topic="orders"):
    """Slot, commit and times of what was restored."""
    columns = "slot, created_at, deliver_at, expires_at"
    statement = text(f"SELECT {columns} FROM outbox_message WHERE topic = :topic ORDER BY id")
    with engine.connect() as connection:
        rows = connection.execute(statement, {"topic": topic}).all()
    return [(row[0], *(in_utc_of(moment) for moment in row[1:])) for row in rows]


def in_utc_of(moment):
    """SQLite keeps texts, without a zone, because it is UTC."""
    found = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return found if found is None else found.replace(tzinfo=found.tzinfo or UTC)


def test_a_delay_counts_from_the_commit(engine, outbox, producer):
    transaction = producer.begin_transaction()
    transaction.send("orders", "1", delay=timedelta(hours=1))
    transaction.send("orders", "2", delay="10s")
    transaction.send("orders", "3", delay=timedelta(0))
    step_clock(engine, timedelta(minutes=5), "outbox_message.created_at")
    ((_, stored, *_), *_) = log_of(engine, HALF_TOPIC)
    wait_until_old_enough(outbox)

    transaction.commit()

    found = log_of(engine)
    assert [deliver_at - committed for _, committed, deliver_at, _ in found] == [
        timedelta(hours=1),
        timedelta(seconds=10),
        timedelta(0),
    ]
    assert all(committed - stored >= timedelta(minutes=5) for _, committed, *_ in found)
    assert arrived(outbox) == ["3"]


@pytest.mark.parametrize("by", ["producer", "check back"])
def test_a_half_message_with_a_delay_is_delivered_when_it_is_due(outbox, producer, by):
    transaction = producer.begin_transaction()
    transaction.send("orders", "1", delay=timedelta(seconds=0.2))
    if by == "producer":
        transaction.commit()
    else:
        check_back(outbox, COMMIT)
    found: list[str] = []

    def look() -> bool:
        found.extend(arrived(outbox))
        return bool(found)

    assert eventually(look)
    assert (found, check_back(outbox, COMMIT), arrived(outbox)) == (["1"], [], [])


def test_moments_stay_as_they_were_given(engine, outbox, producer):
    """To the millisecond."""
    past, future = datetime(2020, 2, 29, 1, 2, 3, 4000, UTC), datetime(2999, 12, 31, 23, 59, 59, 999000, UTC)
    with producer.begin_transaction() as transaction:
        transaction.send("orders", "1", deliver_at=past, expires_at=future)
        transaction.send("orders", "2", deliver_at=future)
        transaction.send("orders", "3", expires_at=past)

    assert [times for _, _, *times in log_of(engine)] == [[past, future], [future, None], [None, past]]
    assert all(times == [None, None] for _, _, *times in log_of(engine, HALF_TOPIC))
    assert arrived(outbox) == ["1"]


def test_a_send_tells_the_queue_to_which_the_message_will_go(engine, outbox, producer):
    """Also of a message without a key, which may go to any."""
    with producer.begin_transaction() as transaction:
        told = [producer.send(Message("orders", "1", key=key), transaction).message_queue for key in [None] * 5 + ["a"]]

    slots = [slot for slot, *_ in log_of(engine)]
    assert told == [MessageQueue("orders", slot) for slot in slots]
    assert slots[-1] == slot_of("a", 256)


def test_an_id_that_is_sent_twice_is_one_message(engine, outbox, producer):
    """A client that was not sure whether the first send worked."""
    message = Message("orders", "1", key="a")
    with producer.begin_transaction() as transaction:
        places = [transaction.store(message).queue_offset for _ in range(3)]
        transaction.send("orders", "2", key="a")

    assert (len(set(places)), halves(engine)) == (3, 4)
    assert arrived(outbox) == ["1", "2"]


def test_the_same_id_in_two_transactions_is_a_message_of_each(outbox, producer):
    message = Message("orders", "1")
    first, second = producer.begin_transaction(), producer.begin_transaction()
    first.store(message)
    second.store(message)
    first.rollback()
    second.commit()

    assert arrived(outbox) == ["1"]


@pytest.mark.parametrize("topics", [None, ("orders",), ("orders", "mail")])
def test_nobody_but_check_back_reads_half_messages(outbox, producer, topics):
    one(producer, "open")
    one(producer, "rolled back").rollback()
    one(producer, "committed").commit()

    found = delivered(outbox.database, name="other", topics=topics)

    assert [(message.topic, message.body) for message in found] == [("orders", b"committed")]


def test_messages_arrive_in_the_order_of_their_commits(outbox, producer):
    first, second, third = (one(producer, body) for body in "123")
    third.commit()
    first.commit()
    second.commit()

    assert arrived(outbox) == ["3", "1", "2"]
