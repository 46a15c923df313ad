"""A consumer calls functions with the messages of the log, and what they raise or return decides about each message."""

import functools
import re
import threading
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any

import pytest

from outbox import Consumer, Done, Message, Outbox, Reject, Retry, RetryPolicy, SubscriptionError, Unavailable
from outbox.consumer.options import RETRIES
from outbox.store.subscriptions.subscriptions import Subscriptions
from tests.support.consumers import consumer_of, parked, texts, until_over, write
from tests.support.readers import next_moment
from tests.support.refusals import refusal
from tests.support.waiting import eventually


@pytest.fixture
def outbox(engine) -> Outbox:
    """An outbox on every supported database."""
    return Outbox(engine)


def test_messages_are_handled_once_and_in_order(outbox):
    write(outbox, "1", "2", "3", key="k")
    consumer, got = consumer_of(outbox), list[Message]()
    consumer.on("orders")(got.append)

    consumer.until_empty()
    write(outbox, "4", key="k")
    consumer.until_empty()

    assert texts(got) == ["1", "2", "3", "4"]
    assert [message.attempt for message in got] == [1, 1, 1, 1]


def nothing(_state: object) -> Any:
    """A retry strategy that forgets to return."""


def dividing(_state: object) -> float:
    """A retry strategy that raises."""
    return 1 / 0


@pytest.mark.parametrize("wait", [nothing, dividing])
def test_a_retry_strategy_that_fails_holds_nothing_up(outbox, wait):
    """The failed message waits for the default pause, and the others are handled once."""
    write(outbox, "1", "2", "3")
    consumer, got = consumer_of(outbox, retry=RetryPolicy(wait=wait)), list[Message]()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        got.append(message)
        if message.body == b"2":
            raise ValueError("no")

    consumer.once()

    assert (texts(got), parked(outbox)) == (["1", "2", "3"], [("retry", 1, "ValueError: no")])


def test_each_group_gets_every_message(outbox):
    write(outbox, "1", "2")
    got: dict[str, list[Message]] = {"billing": [], "mail": []}
    for name, messages in got.items():
        consumer = consumer_of(outbox, name)
        consumer.on()(messages.append)
        consumer.until_empty()

    assert {name: texts(messages) for name, messages in got.items()} == {"billing": ["1", "2"], "mail": ["1", "2"]}


def test_the_first_function_that_fits_gets_a_message(outbox):
    for topic in ("orders.eu", "orders.us", "mail", "elsewhere"):
        write(outbox, topic, topic=topic)
    consumer, got = consumer_of(outbox), list[tuple[str, str]]()
    for name, topics in (("us", ("orders.us",)), ("any", ("orders.*", "mail"))):
        consumer.on(*topics)(lambda message, name=name: got.append((name, message.topic)))

    consumer.until_empty()

    assert got == [("any", "orders.eu"), ("us", "orders.us"), ("any", "mail")]
    assert consumer.declared.topics == ("mail", "orders.*")


def test_a_topic_without_a_function_is_told_and_tried_again(outbox):
    write(outbox, "1")
    consumer = consumer_of(outbox, topics=["orders", "mail"])
    consumer.on("mail")(lambda _message: None)

    consumer.once()

    text = (
        "consumer billing has no handler for topic orders: write @consumer.on('orders'), or leave the topic out of"
        " topics="
    )
    assert parked(outbox) == [("retry", 1, text)]


def raising(_message: Message) -> None:
    raise ValueError("no stock")


def leaving(_message: Message) -> None:
    raise SystemExit(3)


async def forgotten() -> None:
    """Nobody awaits it."""


VERDICTS = "None, Done(), Retry(…), Reject(…) or Unavailable(…)"


def seven(_message: Message) -> Any:
    return 7


def coroutine(_message: Message) -> Any:
    return forgotten()


ANSWERS = [
    (raising, ("retry", 1, "ValueError: no stock")),
    (leaving, ("retry", 1, "SystemExit: 3")),
    (lambda _message: Retry("later", after=timedelta(hours=1)), ("retry", 1, "later")),
    (lambda _message: Retry("later", counts=False), ("retry", 0, "later")),
    (lambda _message: Reject("never"), ("dead", 1, "never")),
    (seven, ("retry", 1, f"{__name__}.seven returned int; let the handler return {VERDICTS}")),
    (coroutine, ("retry", 1, f"{__name__}.coroutine returned a coroutine, which nobody awaits; write async def")),
]


@pytest.mark.parametrize(("function", "parking"), ANSWERS)
def test_a_failure_is_the_messages_and_no_exception_ends_the_worker(outbox, function, parking):
    write(outbox, "1")
    consumer = consumer_of(outbox)
    consumer.on("orders")(function)

    consumer.once()

    assert parked(outbox) == [parking]


def test_an_answer_that_is_none_is_logged_and_not_for_each_message(outbox, caplog):
    """Such an error in the code shows at once, and not only when the tries of a message are used up."""
    write(outbox, "1", "2")
    consumer = consumer_of(outbox)
    consumer.on("orders")(seven)

    consumer.once()

    logged = [text for _, _, text in caplog.record_tuples if "seven" in text]
    assert logged == [f"{__name__}.seven returned int; let the handler return {VERDICTS}"]


@pytest.mark.parametrize("answer", [None, Done()])
def test_nothing_is_parked_after_success(outbox, answer):
    write(outbox, "1")
    consumer = consumer_of(outbox)
    consumer.on("orders")(lambda _message: answer)

    consumer.until_empty()

    assert parked(outbox) == []


def test_an_unavailable_service_costs_no_attempt(outbox):
    write(outbox, "1")
    consumer, answers = consumer_of(outbox), [Unavailable("away"), Unavailable("away"), None]
    attempts: list[int] = []

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        attempts.append(message.attempt)
        return answers[len(attempts) - 1]

    until_over(consumer)

    assert attempts == [1, 1, 1]


def test_the_rest_of_a_key_waits_for_a_failed_message_and_other_keys_go_on(outbox):
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", f"{key}{n}", key=key) for n in range(3) for key in ("a", "b")])
    consumer, got = consumer_of(outbox), list[str]()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        body = message.body.decode()
        got.append(f"{body}#{message.attempt}")
        if body == "a0" and message.attempt < 3:
            raise ValueError("not yet")

    until_over(consumer)

    assert [each for each in got if each.startswith("a")] == ["a0#1", "a0#2", "a0#3", "a1#1", "a2#1"]
    assert [each for each in got if each.startswith("b")] == ["b0#1", "b1#1", "b2#1"]
    assert got[:4] == ["a0#1", "b0#1", "b1#1", "b2#1"]


def test_a_message_without_tries_left_is_a_dead_letter_of_the_group(outbox):
    write(outbox, "1", "2", key="k")
    consumer = consumer_of(outbox)
    consumer.on("orders")(raising)

    until_over(consumer)

    assert parked(outbox) == [("dead", 3, "ValueError: no stock"), ("behind", 0, None)]


def test_a_dead_letter_may_let_its_key_go_on(outbox):
    write(outbox, "1", "2", key="k")
    consumer, got = consumer_of(outbox, on_dead="continue"), list[Message]()

    @consumer.on("orders")
    def handle(message: Message) -> Any:
        got.append(message)
        return Reject("never") if message.body == b"1" else None

    until_over(consumer)

    assert texts(got) == ["1", "2"]


def test_the_retry_levels_are_those_of_rocketmq():
    delays = [RETRIES.delay(attempt) for attempt in range(1, 17)]

    minutes = [*range(1, 11), 20, 30, 60, 120]
    assert delays == [timedelta(seconds=10), timedelta(seconds=30), *(timedelta(minutes=each) for each in minutes)]
    assert [RETRIES.exhausted(attempts) for attempts in (16, 17)] == [False, True]


STARTS = [("earliest", ["old", "before", "after"]), ("latest", ["after"])]


@pytest.mark.parametrize(("start", "expected"), STARTS)
def test_a_new_group_begins_at_an_end_of_the_log(outbox, start, expected):
    write(outbox, "old", "before")
    consumer, got = consumer_of(outbox, start=start), list[Message]()
    consumer.on("orders")(got.append)

    consumer.until_empty()
    write(outbox, "after")
    consumer.until_empty()

    assert texts(got) == expected


def test_a_new_group_begins_at_a_moment(outbox):
    write(outbox, "old")
    with closing(outbox.database.open()) as channel:
        moment = next_moment(channel)
        next_moment(channel)
    write(outbox, "before")
    consumer, got = consumer_of(outbox, start=moment), list[Message]()
    consumer.on("orders")(got.append)

    consumer.until_empty()

    assert texts(got) == ["before"]


def test_latest_is_exact_for_a_transaction_that_is_open_then(pg_engine):
    """The message has a lower id than those that were passed, and commits after the group exists."""
    outbox, got = Outbox(pg_engine), list[Message]()
    consumer = consumer_of(outbox, start="latest")
    consumer.on("orders")(got.append)
    with outbox.begin() as session:
        outbox.send(session, "orders", "open")
        with outbox.begin("requires_new") as other:
            outbox.send(other, "orders", "passed")
        consumer.until_empty()
    consumer.until_empty()

    assert texts(got) == ["open"]


def test_only_chosen_tags_come(outbox):
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", tag, tags=tag) for tag in ("a", "b", "c")])
    consumer, got = consumer_of(outbox, tags="a || c"), list[Message]()
    consumer.on("orders")(got.append)

    consumer.until_empty()

    assert texts(got) == ["a", "c"]


def test_another_selection_under_the_same_name_is_refused(outbox):
    first = consumer_of(outbox)
    first.on("orders")(lambda _message: None)
    first.until_empty()
    second = consumer_of(outbox)
    second.on("mail")(lambda _message: None)

    with pytest.raises(
        SubscriptionError,
        match=r"'billing' has topics orders, this worker asks for mail; .* another name, or run: .* alter",
    ):
        second.until_empty()


def test_partitions_belong_to_the_group(outbox):
    consumer = consumer_of(outbox, partitions=4)
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()

    with closing(outbox.database.open()) as channel:
        stored = Subscriptions(channel).get("billing")
    assert (stored.kind, stored.partitions) == ("consumer", 4)


# The life of a consumer


def test_a_consumer_runs_in_a_thread_while_its_block_lasts(outbox):
    got: list[Message] = []
    consumer = consumer_of(outbox)
    consumer.on("orders")(got.append)

    with consumer as entered:
        write(outbox, "1", "2")
        assert eventually(lambda: len(got) == 2)
    write(outbox, "3")
    after, others = consumer_of(outbox, "another"), list[Message]()
    after.on("orders")(others.append)
    after.until_empty()

    assert texts(others) == ["1", "2", "3"]
    assert (texts(got), entered) == (["1", "2"], consumer)


def test_a_stop_lets_the_call_under_way_end(outbox):
    write(outbox, "1", "2")
    begun, go_on, got = threading.Event(), threading.Event(), list[Message]()
    consumer = consumer_of(outbox)

    @consumer.on("orders")
    def handle(message: Message) -> None:
        begun.set()
        go_on.wait(60)
        got.append(message)

    consumer.start()
    assert begun.wait(60)
    consumer.stop()
    go_on.set()
    consumer.join(60)
    handled = len(got)
    begun.clear()
    consumer.until_empty()

    assert texts(got) == ["1", "2"]
    assert handled in (1, 2)


def test_a_consumer_works_in_one_way_at_a_time(outbox):
    consumer = consumer_of(outbox)
    consumer.on("orders")(lambda _message: None)

    with (
        consumer,
        pytest.raises(SubscriptionError, match=r"this consumer is at work .* make another Consumer"),
    ):
        assert eventually(consumer._at_work.locked)
        consumer.until_empty()


def test_a_consumer_without_a_function_does_not_begin(outbox):
    for begin in (Consumer.until_empty, Consumer.run, Consumer.start):
        with pytest.raises(SubscriptionError, match=r"billing has no function: write @consumer\.on\('orders'\)"):
            begin(consumer_of(outbox))


def test_a_function_is_added_before_the_consumer_begins(outbox):
    consumer = consumer_of(outbox)
    consumer.on("orders")(lambda _message: None)
    consumer.until_empty()

    with pytest.raises(SubscriptionError, match="billing has begun; add functions and options before"):
        consumer.on("mail")(lambda _message: None)
    with pytest.raises(SubscriptionError, match="billing has begun"):
        consumer.configure(concurrency=2)


# Mistakes


def generator(_message: Message) -> Any:
    yield


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"concurrency": 0}, ValueError, "concurrency must be a whole number from 1 on, not 0"),
    ({"partitions": "2"}, ValueError, "partitions must be a whole number from 1 on, not '2'"),
    ({"partitions": 0}, ValueError, "partitions must be a whole number from 1 on, not 0"),
    ({"batch_size": True}, ValueError, "batch_size must be a whole number from 1 on, not True"),
    ({"batch_size": 0}, ValueError, "batch_size must be a whole number from 1 on, not 0"),
    ({"start": "now"}, ValueError, "start must be 'earliest', 'latest' or a moment, not 'now'"),
    ({"start": datetime(2026, 1, 1)}, ValueError, "start must have a time zone, .* tzinfo=UTC"),  # noqa: DTZ001
    ({"suspend": "group"}, ValueError, "suspend must be 'key' or 'queue', not 'group'"),
    ({"on_dead": "drop"}, ValueError, "on_dead must be 'block' or 'continue', not 'drop'"),
    ({"deadline": 30}, TypeError, "deadline must be a timedelta greater than 0, not 30"),
    ({"retry": 3}, TypeError, r"retry must be a RetryPolicy\(attempts=…, wait=…\), not int"),
    ({"inbox": True, "batch_size": 10}, ValueError, "inbox=True has a transaction for each message, .*; leave"),
    ({"broadcast": True, "partitions": 2}, ValueError, "partitions: an instance .* has one partition; leave"),
    ({"instance": "a"}, ValueError, "instance is for broadcast=True; leave instance out"),
    ({"ordered": "no"}, TypeError, "ordered must be True or False, not 'no'"),
    ({"compact": 0}, TypeError, "compact must be True or False, not 0"),
    ({"inbox": "no"}, TypeError, "inbox must be True or False, not 'no'"),
    ({"broadcast": None}, TypeError, "broadcast must be True or False, not None"),
    ({"ordered": False, "suspend": "queue"}, ValueError, "suspend='queue' is for .* order; leave out suspend"),
    ({"topics": "orders"}, SubscriptionError, r"topics: must be a list of topics, .* pass \['orders'\]"),
    ({"topics": []}, SubscriptionError, "topics: must not be empty"),
    ({"name": "a@b"}, ValueError, "consumer 'a@b' must have no @"),
    ({"name": ""}, ValueError, "consumer '' must be 1 to 255 printable characters"),
    ({"name": "relay:backfill"}, SubscriptionError, "is the backfill of 'relay'"),
    ({"deadlin": 1}, TypeError, "consumer 'billing' has no option deadlin; there are topics, .*, deadline, retry, "),
]


def test_a_mistake_in_an_option_names_the_option_before_anything_is_opened(sqlite_engine):
    outbox = Outbox(sqlite_engine)
    told = [
        (options, refusal(outbox.consumer, **{"name": "billing", **options}), f"{error.__name__}: .*{text}")
        for options, error, text in MISTAKES
    ]

    assert [each for each in told if not re.match(each[2], each[1] or "", re.DOTALL)] == []


def without_arguments() -> None:
    """No message fits."""


FUNCTIONS = [
    (
        without_arguments,
        r"without_arguments is called with \(message\): too many positional .*; let the function take \(message\)",
    ),
    (
        lambda _session, message: None,
        r"is called with \(message\): missing a required argument: 'message'; let the function take \(message\)",
    ),
    (generator, "generator is a generator; write the handler without yield"),
    (7, "a handler is a function of a message, not 7"),
    (Message, "a handler is a function of a message, not <class"),
]


@pytest.mark.parametrize(("function", "text"), FUNCTIONS)
def test_what_is_no_handler_is_refused(sqlite_engine, function, text):
    consumer = Outbox(sqlite_engine).consumer("billing")
    consumer.on("mail")(lambda _message: None)

    with pytest.raises(TypeError, match=text):
        consumer.on("orders")(function)


def test_the_arguments_of_a_decorated_function_are_those_of_its_decorator(outbox):
    """A decorator may add a session, which the function takes and a caller of the decorated function does not pass."""

    def with_session(function: Any) -> Any:
        return functools.wraps(function)(lambda message: function("session", message))

    write(outbox, "1")
    consumer, got = consumer_of(outbox), list[tuple[str, Message]]()

    @consumer.on("orders")
    @with_session
    def handle(session: str, message: Message) -> None:
        got.append((session, message))

    consumer.until_empty()

    assert [(session, message.body) for session, message in got] == [("session", b"1")]


def test_a_decorator_without_topics_in_brackets_is_refused(sqlite_engine):
    consumer = Outbox(sqlite_engine).consumer("billing")

    with pytest.raises(TypeError, match=r"write @consumer\.on\('orders'\)"):
        consumer.on(lambda _message: None)  # type: ignore[arg-type]


def test_exceptions_of_several_functions_make_no_list(sqlite_engine):
    consumer = Outbox(sqlite_engine).consumer("billing", retry=RetryPolicy())
    consumer.on("mail")(lambda _message: None)
    consumer.on("orders.*", "!orders.eu")(lambda _message: None)

    with pytest.raises(SubscriptionError, match=r"make no list of topics; give topics=\[…\]"):
        consumer.until_empty()
