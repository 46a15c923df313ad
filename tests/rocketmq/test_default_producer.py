"""Plain messages in RocketMQ's shape: queues, selectors, batches, and what RocketMQ would refuse, in its words."""

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Message, NoTransactionError, Outbox
from outbox.model.slots import slot_of
from outbox.rocketmq import (
    DefaultMQProducer,
    MessageQueue,
    MQClientError,
    SelectMessageQueueByHash,
    SelectMessageQueueByRandom,
    SendResult,
    SendStatus,
    split_batch,
)
from outbox.rocketmq.selectors import java_hash
from tests.support.readers import bodies

MAX = 4 * 1024 * 1024
FOUR = [MessageQueue("orders", number) for number in range(4)]


@pytest.fixture
def producer(outbox: Outbox) -> DefaultMQProducer:
    """A producer of plain messages."""
    return DefaultMQProducer("shop", outbox)


def refused(producer: DefaultMQProducer, *sent) -> str:
    """The words by which a message is refused."""
    with producer._outbox.begin(), pytest.raises(MQClientError) as raised:
        producer.send(*sent)
    return str(raised.value)


def rows(engine) -> list[tuple[str, str | None, int]]:
    """Body, key and slot of each message of the log."""
    with engine.connect() as connection:
        found = connection.execute(text("SELECT body, key, slot FROM outbox_message ORDER BY id"))
        return [(bytes(body).decode(), key, slot) for body, key, slot in found]


# Selectors


def test_strings_numbers_and_bools_have_javas_hash():
    """As `hashCode` of String, Integer, Long and Boolean; the last string is a pair of UTF-16 units."""
    values = ["order-1", "TagA", "", "Aa", "BB", "😀", 7, -7, 2**31, -(2**33), True, False]

    assert [java_hash(value) for value in values] == [
        -1207111310, 2598919, 0, 2112, 2112, 1772899, 7, -7, -(2**31), -2, 1231, 1237,
    ]  # fmt: skip


@pytest.mark.parametrize(("arg", "queue"), [("order-1", 2), ("user:42", 3), ("TagA", 3), (-7, 3), (-(2**31), 0)])
def test_the_hash_selects_the_queue_that_rocketmq_selects(arg, queue):
    assert SelectMessageQueueByHash().select(FOUR, Message("orders", "1"), arg) == FOUR[queue]


def test_random_selects_every_queue():
    select = SelectMessageQueueByRandom().select

    assert {select(FOUR, Message("orders", "1"), None) for _ in range(1000)} == set(FOUR)


def test_messages_with_one_argument_have_one_key_whose_slot_is_the_selected_queue(engine, outbox, producer):
    with outbox.begin():
        results = [
            producer.send(Message("orders", f"{step} {order}"), SelectMessageQueueByHash(), order)
            for step in ("placed", "paid")
            for order in ("order-1", "order-2")
        ]

    one, two = (abs(java_hash(order)) % 256 for order in ("order-1", "order-2"))
    assert [result.message_queue for result in results] == [MessageQueue("orders", slot) for slot in (one, two) * 2]
    found = rows(engine)
    assert [(body, slot) for body, _, slot in found] == [
        ("placed order-1", one), ("placed order-2", two), ("paid order-1", one), ("paid order-2", two),
    ]  # fmt: skip
    assert (found[0][1], found[1][1]) == (found[2][1], found[3][1])
    assert [slot_of(key, 256) for _, key, _ in found] == [one, two, one, two]


def test_a_selector_may_be_an_object_or_a_function_of_the_users(outbox, producer):
    class ByRegion:
        def select(self, queues, message, arg):
            return queues[{"eu": 0, "us": 1}[arg]]

    with outbox.begin():
        sent = [
            producer.send(Message("orders", "1"), ByRegion(), "us"),
            producer.send(Message("orders", "2"), lambda queues, message, arg: queues[arg % len(queues)], 300),
        ]

    assert [result.message_queue for result in sent] == [MessageQueue("orders", 1), MessageQueue("orders", 44)]


def test_a_selector_that_fails_or_returns_no_queue_is_told_in_rocketmqs_words(engine, producer):
    message = Message("orders", "1")
    found = [
        refused(producer, message, SelectMessageQueueByHash(), None),
        refused(producer, message, lambda *_: None),
        refused(producer, message, lambda *_: MessageQueue("other", 1)),
    ]

    assert (found, rows(engine)) == (
        [
            (
                "select message queue threw exception. TypeError: a str, an int or a bool has a hash here, not"
                " NoneType: pass str(…)"
            ),
            "select message queue return null.",
            "select message queue return MessageQueue(topic='other', queue_id=1), which is none of the queues.",
        ],
        [],
    )


def test_a_message_with_a_key_has_its_order_and_takes_no_selector(producer):
    """Its messages would be in the order of the key, and not in that of the queue, and nobody would be told."""
    assert refused(producer, Message("orders", "1", key="KEY0"), SelectMessageQueueByHash(), "order-1") == (
        "the message has the key 'KEY0', by which it is ordered already: send it without a selector, or without the key"
    )


# Sending


def test_a_message_is_part_of_the_running_transaction(engine, outbox, producer):
    message = Message("orders", "1", key="order-1", tags="placed")
    with outbox.begin():
        result = producer.send(message)
    with pytest.raises(ValueError, match="rolled back"), outbox.begin():
        producer.send(Message("orders", "2"))
        raise ValueError("rolled back")

    queue = MessageQueue("orders", slot_of("order-1", 256))
    assert result == SendResult(msg_id=str(message.message_id), message_queue=queue, send_status=SendStatus.SEND_OK)
    assert rows(engine) == [("1", "order-1", queue.queue_id)]


def test_a_session_of_the_callers_own_is_passed(engine, producer):
    with Session(engine) as session, session.begin():
        result = producer.send(Message("orders", "1"), session=session)

    assert (result.message_queue, bodies(engine)) == (None, [b"1"])


def test_without_a_transaction_nothing_is_sent(engine, producer):
    """To commit by itself would be what an outbox is there against."""
    with pytest.raises(NoTransactionError, match="pass a session"):
        producer.send(Message("orders", "1"))

    assert bodies(engine) == []


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (None, "CODE: 13  DESC: the message is null"),
        (Message("orders", b""), "CODE: 13  DESC: the message body length is zero"),
        (
            Message("o.r", b"1"),
            "The specified topic[o.r] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        (Message("t" * 128, b"1"), "The specified topic is longer than topic max length 127."),
        (Message("SCHEDULE_TOPIC_XXXX", b"1"), "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden."),
        (
            Message("orders", b"1", headers={"KEYS": "1"}),
            "CODE: 13  DESC: The Property<KEYS> is used by system, input another please",
        ),
        (
            Message("orders", b"1", headers={"region": ""}),
            "CODE: 13  DESC: The name or value of property can not be null or blank string!",
        ),
    ],
)
def test_a_message_that_rocketmq_would_refuse_is_refused_in_its_words(engine, outbox, producer, message, words):
    with outbox.begin(), pytest.raises(MQClientError) as raised:
        producer.send_batch([message])

    assert (refused(producer, message), str(raised.value), rows(engine)) == (words, words, [])


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (" ", "the specified group is blank"),
        ("g" * 256, "the specified group is longer than group max length 255."),
        ("a.b", "the specified group['a.b'] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("DEFAULT_PRODUCER", "producerGroup can not equal DEFAULT_PRODUCER, please specify another one."),
    ],
)
def test_a_group_that_rocketmq_would_refuse_is_refused_in_its_words(outbox, group, words):
    with pytest.raises(MQClientError) as raised:
        DefaultMQProducer(group, outbox)

    assert str(raised.value) == words


# Batches


def test_a_batch_is_written_in_its_order_and_has_all_ids(engine, outbox, producer):
    batch = [Message("orders", str(number)) for number in range(3)]
    with outbox.begin():
        result = producer.send_batch(batch)

    assert (result.msg_id, bodies(engine)) == (",".join(str(each.message_id) for each in batch), [b"0", b"1", b"2"])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([], "Failed to initiate the MessageBatch: there is no message"),
        (
            [Message("orders", "1"), Message("users", "2")],
            "Failed to initiate the MessageBatch: The topic of the messages in one batch should be the same",
        ),
        (
            [Message("orders", "1", delay="30m")],
            "Failed to initiate the MessageBatch: TimeDelayLevel is not supported for batching",
        ),
        (
            [Message("%RETRY%shop", "1")],
            "Failed to initiate the MessageBatch: Retry Group is not supported for batching",
        ),
        (
            [Message("orders", b"1" * (MAX // 2 - 26)), Message("orders", b"1" * (MAX // 2 - 25))],
            f"CODE: 13  DESC: the message body size over max value, MAX: {MAX}",
        ),
    ],
    ids=["nothing", "two topics", "delay level", "retry topic", "one byte too much"],
)
def test_a_batch_that_rocketmq_would_refuse_is_refused_in_its_words(engine, outbox, producer, batch, words):
    with outbox.begin(), pytest.raises(MQClientError) as raised:
        producer.send_batch(batch)

    assert (str(raised.value), bodies(engine)) == (words, [])


def test_a_batch_of_exactly_the_most_bytes_is_sent(engine, outbox, producer):
    with outbox.begin():
        producer.send_batch(
            [Message("orders", b"1" * (MAX // 2 - 26))] * 1 + [Message("orders", b"2" * (MAX // 2 - 26))]
        )

    assert [len(body) for body in bodies(engine)] == [MAX // 2 - 26] * 2


def test_a_batch_is_split_as_by_the_splitter_of_rocketmqs_examples():
    """A message has 6 bytes of topic and 20 more, and headers count; the third one fits nowhere and travels alone."""
    sizes = [24, 24, 200, 75, 1]
    messages = [Message("orders", b"1" * size) for size in sizes]
    messages[4] = Message("orders", b"1", headers={"region": "eu"})

    assert [[len(each.body) for each in batch] for batch in split_batch(messages, 100)] == [[24, 24], [200], [75], [1]]
    assert [len(batch) for batch in split_batch([Message("orders", b"1" * 499_974)] * 5)] == [2, 2, 1]
    assert list(split_batch([])) == []


def test_it_may_be_started_and_shut_down(producer, outbox, engine):
    producer.start()
    with outbox.begin():
        producer.send(Message("orders", "1"))
    producer.shutdown()

    assert len(rows(engine)) == 1
