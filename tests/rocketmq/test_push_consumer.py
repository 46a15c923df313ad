"""Listeners in RocketMQ's shape: their answers and contexts, retries and dead letters, order, and who gets what."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from outbox import FilterError, Message, Outbox, SubscriptionError, create_engine
from outbox.model.limits import DELAY_LEVELS
from outbox.model.verdict import DONE, Reject, Retry
from outbox.rocketmq import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyStatus,
    DefaultMQPushConsumer,
    MessageExt,
    MessageListenerConcurrently,
    MessageListenerOrderly,
    MessageModel,
    MessageSelector,
    MQClientError,
    dead_letters,
)
from outbox.rocketmq.consuming import ListenerCalls
from outbox.rocketmq.expressions import selection_of
from tests.support.parked import states
from tests.support.refusals import refusal
from tests.support.waiting import eventually

SUCCESS, LATER = ConsumeConcurrentlyStatus.CONSUME_SUCCESS, ConsumeConcurrentlyStatus.RECONSUME_LATER
DONE_IN_ORDER, SUSPEND = ConsumeOrderlyStatus.SUCCESS, ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT
FIRST = ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def message(attempt: int = 1, **fields) -> Message:
    """A message as a listener gets it."""
    made = Message("orders", "1", **fields)
    made.attempt = attempt
    return made


def verdicts_of(listener: Any, messages: list[Message], pause: int = 1000) -> list[Any]:
    """What becomes of the messages of a call."""
    return ListenerCalls("billing", listener, pause).handle(messages)


# The answers


@pytest.mark.parametrize(
    ("level", "after"),
    [
        (0, None),
        (1, timedelta(seconds=1)),
        (16, timedelta(minutes=30)),
        (18, timedelta(hours=2)),
        (19, timedelta(hours=2)),
    ],
)
def test_the_level_of_the_context_says_when_a_message_comes_again(level, after):
    def consume(messages, context):
        context.delay_level_when_next_consume = level
        return LATER

    verdicts = verdicts_of(MessageListenerConcurrently(consume), [message()])

    assert verdicts == [Retry("the listener returned RECONSUME_LATER", after=after)]


def test_level_minus_one_makes_a_dead_letter_at_once():
    def consume(messages, context):
        context.delay_level_when_next_consume = -1
        raise RuntimeError("no such order")

    verdicts = verdicts_of(MessageListenerConcurrently(consume), [message()])

    assert verdicts == [Reject("RuntimeError: no such order")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (LATER, "the listener returned RECONSUME_LATER"),
        (None, "the listener returned None"),
        (True, "the listener returned True"),
        (DONE_IN_ORDER, "the listener returned SUCCESS"),
    ],
)
def test_only_success_is_a_success(answer, why):
    listener = MessageListenerConcurrently(lambda messages, context: answer)

    assert verdicts_of(listener, [message(), message()]) == [Retry(why)] * 2


@pytest.mark.parametrize(("index", "done"), [(-1, 0), (0, 1), (1, 2), (2, 3), (9, 3)])
def test_messages_behind_the_ack_index_of_a_batch_come_again(index, done):
    def consume(messages, context):
        context.ack_index = index
        return SUCCESS

    verdicts = verdicts_of(MessageListenerConcurrently(consume), [message() for _ in range(3)])

    assert verdicts == [DONE] * done + [Retry("behind the ack_index of its batch")] * (3 - done)


@pytest.mark.parametrize(
    ("millis", "pause"),
    [(-1, 1000), (1, 10), (10, 10), (500, 500), (30_000, 30_000), (30_001, 30_000), (0, 10), (-2, 10)],
)
def test_a_queue_is_suspended_for_ten_milliseconds_to_half_a_minute(millis, pause):
    def consume(messages, context):
        context.suspend_current_queue_time_millis = millis
        return SUSPEND

    verdicts = verdicts_of(MessageListenerOrderly(consume), [message(), message()], 1000)

    why = "the listener returned SUSPEND_CURRENT_QUEUE_A_MOMENT"
    assert verdicts == [Retry(why, after=timedelta(milliseconds=pause))] * 2


def test_a_listener_is_a_class_with_the_method_or_a_function():
    class Mine(MessageListenerOrderly):
        def consume_message(self, messages, context):
            return DONE_IN_ORDER

    assert verdicts_of(Mine(), [message()], 1000) == [DONE]
    assert verdicts_of(MessageListenerOrderly(lambda messages, context: None), [message()], 10) == [
        Retry("the listener returned None", after=timedelta(milliseconds=10))
    ]


def test_a_listener_without_the_method_is_refused_where_it_is_made():
    class Java(MessageListenerConcurrently):
        def consumeMessage(self, messages, context):  # noqa: N802 - the mistake
            return SUCCESS

    with pytest.raises(TypeError, match=r"Java has no consume_message\(messages, context\): write the method, or pass"):
        Java()
    with pytest.raises(TypeError, match=r"let the function take \(messages, context\)"):
        MessageListenerOrderly(lambda messages: DONE_IN_ORDER)  # type: ignore[arg-type, misc]  # the mistake


def test_what_a_listener_raises_is_logged_and_not_for_each_message(caplog):
    def consume(messages, context):
        raise RuntimeError("no such order")

    calls = ListenerCalls("billing", MessageListenerOrderly(consume), 1000)
    for _ in range(3):
        calls.handle([message()])

    (logged,) = caplog.records
    assert logged.getMessage() == "billing: the listener raised RuntimeError: no such order"
    assert logged.exc_info is not None


@pytest.mark.parametrize("answer", [True, None, "CONSUME_SUCCESS", DONE_IN_ORDER])
def test_what_is_no_status_is_logged_and_not_for_each_message(caplog, answer):
    calls = ListenerCalls("billing", MessageListenerConcurrently(lambda messages, context: answer), 1000)
    for _ in range(3):
        calls.handle([message()])

    (logged,) = caplog.messages
    assert logged == f"billing: the listener returned {answer!r}; let the listener return a ConsumeConcurrentlyStatus"


def test_a_message_has_rocketmqs_names_for_its_parts():
    first = MessageExt.of(message(key="order-1", tags="paid", headers={"region": "eu"}))
    third = MessageExt.of(message(attempt=3))

    assert (first.topic, first.body, first.keys, first.tags) == ("orders", b"1", "order-1", "paid")
    assert (first.msg_id, first.reconsume_times, third.reconsume_times) == (str(first.message.message_id), 0, 2)
    assert first.properties == {"region": "eu", "UNIQ_KEY": first.msg_id, "KEYS": "order-1", "TAGS": "paid"}
    assert third.properties == {
        "UNIQ_KEY": third.msg_id, "RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": third.msg_id, "RECONSUME_TIME": "2",
    }  # fmt: skip


# At work


def send(outbox: Outbox, *messages: Message) -> None:
    """Commit messages."""
    with outbox.begin() as session:
        outbox.send_all(session, messages)


@contextmanager
def consuming(outbox: Outbox, listener, **options) -> Iterator[DefaultMQPushConsumer]:
    """A consumer of orders at work."""
    consumer = DefaultMQPushConsumer("billing", outbox, **{"consume_from_where": FIRST, **options})
    consumer.subscribe("orders")
    consumer.register_message_listener(listener)
    with consumer:
        yield consumer


class Noted:
    """Notes what it gets; answers as it is told to."""

    def __init__(self, answer: Callable[[MessageExt], object]) -> None:
        self.answer = answer
        self.got: list[tuple[str, int]] = []
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, messages, context) -> object:
        """Note, and answer."""
        with self._lock:
            self.sizes.append(len(messages))
            self.got += [(each.body.decode(), each.reconsume_times) for each in messages]
        if hasattr(context, "delay_level_when_next_consume"):
            context.delay_level_when_next_consume = 1
        return self.answer(messages[0])


@pytest.mark.storm
def test_a_message_is_delivered_max_reconsume_times_and_once_more(engine, outbox):
    """Then it is a dead letter of the group, under RocketMQ's name, and holds nothing back."""
    noted = Noted(lambda each: LATER if each.body == b"bad" else SUCCESS)
    send(outbox, Message("orders", "bad", key="a"), Message("orders", "good", key="a"))
    with consuming(outbox, MessageListenerConcurrently(noted), max_reconsume_times=2):
        assert eventually(lambda: states(engine) == {"dead": 1} and len(noted.got) == 4)

    (dead,) = dead_letters(outbox, "%DLQ%billing")
    assert [each for each in noted.got if each[0] == "bad"] == [("bad", 0), ("bad", 1), ("bad", 2)]
    assert (("good", 0) in noted.got, dead.body) == (True, b"bad")


def test_without_another_number_there_are_16_retries_at_rocketmqs_levels(outbox):
    consumer = DefaultMQPushConsumer("billing", outbox)
    consumer.subscribe("orders")
    consumer.register_message_listener(MessageListenerConcurrently(lambda *_: SUCCESS))
    retry = consumer.consumer._options.retry

    assert [retry.exhausted(deliveries) for deliveries in (16, 17)] == [False, True]
    assert [retry.delay(failures) for failures in range(1, 17)] == list(DELAY_LEVELS.values())[2:]


def test_in_order_the_queue_waits_until_the_message_succeeds(engine, outbox):
    noted = Noted(lambda each: SUSPEND if each.body == b"b1" and each.reconsume_times < 3 else DONE_IN_ORDER)
    for body in ("a1", "b1", "a2", "b2"):
        send(outbox, Message("orders", body, key=body[0]))
    listener = MessageListenerOrderly(noted)
    with consuming(outbox, listener, suspend_current_queue_time_millis=20, consume_thread_max=1):
        assert eventually(lambda: len(noted.got) == 7)

    assert noted.got == [("a1", 0), ("b1", 0), ("b1", 1), ("b1", 2), ("b1", 3), ("a2", 0), ("b2", 0)]


def test_with_suspend_key_other_keys_go_on(outbox):
    noted = Noted(lambda each: SUSPEND if each.body == b"b1" and len(noted.got) < 5 else DONE_IN_ORDER)
    for body in ("a1", "b1", "a2", "b2"):
        send(outbox, Message("orders", body, key=body[0]))
    with consuming(outbox, MessageListenerOrderly(noted), suspend="key", suspend_current_queue_time_millis=20):
        assert eventually(lambda: ("b2", 0) in noted.got)

    of_b = [body for body, _ in noted.got if body[0] == "b"]
    assert noted.got.index(("a2", 0)) < noted.got.index(("b2", 0))
    assert (of_b[0], of_b[-2:], set(of_b[:-1])) == ("b1", ["b1", "b2"], {"b1"})


def test_in_order_a_dead_letter_lets_the_queue_go_on(engine, outbox):
    noted = Noted(lambda each: SUSPEND if each.body == b"a1" else DONE_IN_ORDER)
    for body in ("a1", "a2"):
        send(outbox, Message("orders", body, key="a"))
    listener = MessageListenerOrderly(noted)
    with consuming(outbox, listener, max_reconsume_times=1, suspend_current_queue_time_millis=20):
        assert eventually(lambda: ("a2", 0) in noted.got)

    assert (noted.got, states(engine)) == ([("a1", 0), ("a1", 1), ("a2", 0)], {"dead": 1})


def test_in_order_a_message_that_fails_and_fails_is_never_a_dead_letter(outbox):
    consumer = DefaultMQPushConsumer("billing", outbox)
    consumer.subscribe("orders")
    consumer.register_message_listener(MessageListenerOrderly(lambda *_: SUSPEND))

    assert consumer.consumer._options.retry.attempts == 2**31 - 1


def test_a_call_has_at_most_so_many_messages(outbox):
    noted = Noted(lambda each: SUCCESS)
    send(outbox, *(Message("orders", str(number)) for number in range(7)))
    with consuming(outbox, MessageListenerConcurrently(noted), consume_message_batch_max_size=3, consume_thread_max=1):
        assert eventually(lambda: len(noted.got) == 7)

    assert (max(noted.sizes), sorted(body for body, _ in noted.got)) == (3, list("0123456"))


def test_members_of_a_group_share_its_messages_or_each_gets_all(outbox):
    """A group that broadcasts begins with what is committed from then on."""
    shared, all_of_one, all_of_other = (Noted(lambda each: SUCCESS) for _ in range(3))
    one, other = (
        DefaultMQPushConsumer("news", outbox, instance_name=name, message_model=MessageModel.BROADCASTING)
        for name in ("one", "other")
    )
    for consumer, noted in ((one, all_of_one), (other, all_of_other)):
        consumer.subscribe("orders")
        consumer.register_message_listener(MessageListenerConcurrently(noted))
        consumer.consumer.until_empty()
    send(outbox, Message("orders", "1"), Message("orders", "2"))
    listener = MessageListenerConcurrently(shared)
    with one, other, consuming(outbox, listener), consuming(outbox, listener):
        assert eventually(lambda: all(len(each.got) >= 2 for each in (shared, all_of_one, all_of_other)))

    assert [sorted(each.got) for each in (shared, all_of_one, all_of_other)] == [[("1", 0), ("2", 0)]] * 3


@pytest.mark.parametrize(
    ("where", "moment", "found"),
    [
        (ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET, None, ["1", "2"]),
        (ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET, None, ["2"]),
        (ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, None, ["1", "2"]),
        (ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, "20131223171201", ["1", "2"]),
    ],
)
def test_a_new_group_begins_where_it_is_told_to(outbox, where, moment, found):
    noted = Noted(lambda each: SUCCESS)
    send(outbox, Message("orders", "1"))
    consumer = DefaultMQPushConsumer("billing", outbox, consume_from_where=where, consume_timestamp=moment)
    consumer.subscribe("orders")
    consumer.register_message_listener(MessageListenerConcurrently(noted))
    consumer.consumer.until_empty()
    send(outbox, Message("orders", "2"))
    consumer.consumer.until_empty()

    assert [body for body, _ in noted.got] == found


def test_a_second_subscription_to_a_topic_replaces_the_first_and_each_topic_has_its_own(outbox):
    noted = Noted(lambda each: SUCCESS)
    consumer = DefaultMQPushConsumer("billing", outbox, consume_from_where=FIRST)
    consumer.subscribe("orders", "placed")
    consumer.subscribe("orders", "paid || shipped")
    consumer.subscribe("users", MessageSelector.by_sql("region = 'eu'"))
    consumer.register_message_listener(MessageListenerConcurrently(noted))
    send(
        outbox,
        Message("orders", "1", tags="placed"),
        Message("orders", "2", tags="paid"),
        Message("users", "3", headers={"region": "eu"}),
        Message("users", "4", tags="paid"),
    )
    consumer.consumer.until_empty()

    assert sorted(body for body, _ in noted.got) == ["2", "3"]


# What is refused


def started(outbox: Outbox, *, topic="orders", listener: Any = None, group="billing", **options) -> None:
    """Make and start a consumer."""
    consumer = DefaultMQPushConsumer(group, outbox, **options)
    if topic:
        consumer.subscribe(topic)
    if listener is not None:
        consumer.register_message_listener(listener)
    consumer.start()


NO_LISTENER = "messageListener must be instanceof MessageListenerOrderly or MessageListenerConcurrently"
CONCURRENTLY = MessageListenerConcurrently(lambda messages, context: SUCCESS)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messageListener is null"),
    (
        {"listener": print},
        f"{NO_LISTENER}: for a function write MessageListenerOrderly(function)",
    ),
    ({"topic": "", "listener": CONCURRENTLY}, "subscription is null: subscribe to a topic before the start"),
    ({"topic": "a.b"}, "The specified topic[a.b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
    ({"topic": " "}, "The specified topic is blank"),
    ({"topic": "t" * 128}, "The specified topic is longer than topic max length 127."),
    ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, "cannot access system topic"),
    ({"group": " "}, "the specified group is blank"),
    ({"group": "g" * 256}, "the specified group is longer than group max length 255."),
    ({"group": "DEFAULT_CONSUMER"}, "consumerGroup can not equal DEFAULT_CONSUMER, please specify another one."),
    ({"consume_thread_max": 0, "listener": CONCURRENTLY}, "consumeThreadMax Out of range [1, 1000]"),
    ({"consume_thread_max": 1001, "listener": CONCURRENTLY}, "consumeThreadMax Out of range [1, 1000]"),
    (
        {"consume_message_batch_max_size": 1025, "listener": CONCURRENTLY},
        "consumeMessageBatchMaxSize Out of range [1, 1024]",
    ),
    (
        {
            "consume_from_where": ConsumeFromWhere.CONSUME_FROM_TIMESTAMP,
            "consume_timestamp": "yesterday",
            "listener": CONCURRENTLY,
        },
        "consumeTimestamp is invalid, the valid format is yyyyMMddHHmmss,but received yesterday",
    ),
]


def test_what_rocketmq_would_refuse_is_refused_in_its_words(outbox):
    found = [(options, refusal(started, outbox, **options)) for options, _ in REFUSED]

    assert found == [(options, f"MQClientError: {words}") for options, words in REFUSED]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"consume_from_where": "first"}, "consume_from_where must be a ConsumeFromWhere, not 'first'; there are Cons"),
        (
            {"message_model": "BROADCASTING"},
            "message_model must be a MessageModel, not 'BROADCASTING'; there are Messa",
        ),
    ],
)
def test_a_word_in_place_of_a_member_is_refused(outbox, options, words):
    """Taken as another member, the word would change what the group reads."""
    with pytest.raises(TypeError, match=words):
        started(outbox, listener=CONCURRENTLY, **options)


def test_an_expression_that_cannot_be_read_is_refused(outbox):
    with pytest.raises(FilterError, match="subString split error"):
        DefaultMQPushConsumer("billing", outbox).subscribe("orders", "||")


def test_after_the_start_nothing_is_subscribed(outbox):
    """The subscription of a group is stored, and another one would be refused anyway."""
    with consuming(outbox, CONCURRENTLY) as consumer:
        for change in (lambda: consumer.subscribe("users"), lambda: consumer.register_message_listener(CONCURRENTLY)):
            with pytest.raises(MQClientError, match="consumer billing has begun: subscribe and register"):
                change()


def test_a_shutdown_before_the_start_does_nothing(outbox):
    DefaultMQPushConsumer("billing", outbox).shutdown()


def test_another_subscription_of_the_group_is_refused_at_the_start_and_may_be_changed(outbox):
    first = DefaultMQPushConsumer("billing", outbox)
    first.subscribe("orders")
    first.register_message_listener(CONCURRENTLY)
    first.consumer.once()
    other = DefaultMQPushConsumer("billing", outbox)
    other.subscribe("users")
    other.register_message_listener(CONCURRENTLY)

    with pytest.raises(SubscriptionError, match="billing"):
        other.start()

    other.subscribe("orders")


def test_a_consumer_starts_while_its_database_is_away(tmp_path):
    """As at any other time, the thread tries again."""
    away = Outbox(create_engine(f"sqlite:///{tmp_path}/none/never.sqlite3"))
    consumer = DefaultMQPushConsumer("billing", away)
    consumer.subscribe("orders")
    consumer.register_message_listener(CONCURRENTLY)

    with consumer, pytest.raises(MQClientError, match="has begun"):
        consumer.subscribe("users")


@pytest.mark.parametrize(
    ("conditions", "named"),
    [
        ({"orders": "a = 1", "users": "(" * 14 + "a = 1" + ")" * 14}, "topic users: "),
        (
            {"orders": f"a = '{'x' * 2_500}'", "users": f"a = '{'y' * 2_500}'"},
            "the conditions of orders, users ",
        ),
    ],
    ids=["deep", "long"],
)
def test_conditions_that_cannot_be_joined_are_refused_with_their_topics(conditions, named):
    """Each is taken alone."""
    subscribed = {topic: MessageSelector.by_sql(each) for topic, each in conditions.items()}

    with pytest.raises(FilterError) as raised:
        selection_of(subscribed)

    assert str(raised.value).startswith(named)
