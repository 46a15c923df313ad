"""Messages that are asked for, held for a time, and acknowledged: nobody holds another's, and none is lost."""

import os
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outbox import FilterError, Message, Outbox, SubscriptionError, create_engine
from outbox.admin.commands import drop
from outbox.rocketmq import (
    MessageExt,
    MessageSelector,
    MQClientError,
    SimpleConsumer,
    dead_letters,
    simple_consumer,
)
from outbox.rocketmq.partition_pops import MAX_BEHIND
from outbox.runtime import failpoints
from outbox.store.dialects.postgresql.channel import PostgresChannel
from tests.support.faults import arm_kill, arm_stop
from tests.support.leases import step_clock
from tests.support.parked import states
from tests.support.programs import Program
from tests.support.refusals import refusal
from tests.support.waiting import eventually

HOUR, NOW = timedelta(hours=1), timedelta(0)
AT_ONCE = timedelta(milliseconds=1)


def consumer_of(outbox: Outbox, *, await_duration: timedelta = AT_ONCE, **options) -> SimpleConsumer:
    """A consumer of orders that waits for nothing."""
    return SimpleConsumer("billing", outbox, {"orders": "*"}, await_duration=await_duration, **options)


def send(outbox: Outbox, *bodies: str, key: str | None = None) -> None:
    """Commit messages."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", body, key=key) for body in bodies])


def texts(messages: list[MessageExt]) -> list[str]:
    """The bodies, in the order of the log."""
    return [each.body.decode() for each in sorted(messages, key=lambda each: each.queue_offset)]


def refused(use) -> str:
    """The words by which a call is refused."""
    with pytest.raises(MQClientError) as raised:
        use()
    return str(raised.value)


EXPIRED = "receipt handle is expired"


def test_a_received_message_is_nobody_elses_and_is_done_when_it_is_acknowledged(engine, outbox):
    send(outbox, "1", "2", "3")
    mine, yours = consumer_of(outbox), consumer_of(outbox)

    first, second = mine.receive(2, HOUR), yours.receive(2, HOUR)
    nothing = mine.receive(2, HOUR)
    for each in (*first, *second):
        yours.ack(each)

    assert (texts(first), texts(second), nothing, states(engine)) == (["1", "2"], ["3"], [], {})
    assert mine.receive(2, HOUR) == []


def test_what_is_not_acknowledged_comes_again_and_the_old_receipt_is_worth_nothing(engine, outbox):
    send(outbox, "1")
    consumer = consumer_of(outbox)
    (first,) = consumer.receive(1, HOUR)
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    late = refused(lambda: consumer.ack(first))

    (second,) = consumer_of(outbox, await_duration=HOUR).receive(1, HOUR)
    stale = [
        refused(lambda: consumer.ack(first)),
        refused(lambda: consumer.change_invisible_duration(first, HOUR)),
    ]
    left = states(engine)
    consumer.ack(second)

    assert (late, stale, left) == (EXPIRED, [EXPIRED] * 2, {"retry": 1})
    assert (first.reconsume_times, second.reconsume_times, states(engine)) == (0, 1, {})
    assert refused(lambda: consumer.ack(second)) == EXPIRED


def test_a_receipt_is_for_its_own_message_and_no_other_of_the_same_id(engine, outbox):
    """The log ids of two outboxes are the same, and those of a log that was truncated come again."""
    send(outbox, "1", "2")
    consumer = consumer_of(outbox)
    (first,), (second,) = consumer.receive(1, HOUR), consumer.receive(1, HOUR)
    other = replace(first, receipt_handle=second.receipt_handle)

    answers = [refused(lambda: consumer.ack(other)), refused(lambda: consumer.change_invisible_duration(other, NOW))]

    assert (answers, states(engine)) == ([EXPIRED] * 2, {"retry": 2})


def test_a_receipt_of_before_a_replay_takes_no_message_from_the_next_holder(engine, outbox):
    """The attempts begin at 0 again, so the next delivery has the same number."""
    send(outbox, "1")
    mine, yours = consumer_of(outbox), consumer_of(outbox)
    (first,) = mine.receive(1, HOUR)
    outbox.admin.replay(all=True, state="retry", by="ann")
    (second,) = yours.receive(1, HOUR)

    stale = [refused(lambda: mine.ack(first)), refused(lambda: mine.change_invisible_duration(first, NOW))]
    left = states(engine)
    yours.ack(second)

    assert (stale, left, states(engine)) == ([EXPIRED] * 2, {"retry": 1}, {})


def test_a_group_that_was_dropped_is_not_created_again_by_a_consumer_that_knew_it(engine, outbox):
    send(outbox, "1")
    consumer = consumer_of(outbox)
    consumer.ack(consumer.receive(1, HOUR)[0])
    with closing(outbox.database.open()) as channel:
        drop(channel, "billing")

    with pytest.raises(SubscriptionError, match="dropped"):
        consumer.receive(1, HOUR)
    assert texts(consumer_of(outbox).receive(1, HOUR)) == ["1"]


def test_the_time_is_changed_by_whoever_holds_the_message(outbox):
    send(outbox, "1")
    consumer = consumer_of(outbox)
    (first,) = consumer.receive(1, timedelta(seconds=30))
    consumer.change_invisible_duration(first, HOUR)
    still = consumer.receive(1, HOUR)

    consumer.change_invisible_duration(first, NOW)
    (second,) = consumer_of(outbox, await_duration=HOUR).receive(1, HOUR)

    assert (still, second.reconsume_times, refused(lambda: consumer.ack(first))) == ([], 1, EXPIRED)


def test_a_message_that_comes_later_is_waited_for(outbox):
    found, looks = list[MessageExt](), list[str]()
    consumer = consumer_of(outbox, await_duration=HOUR)
    thread = threading.Thread(target=lambda: found.extend(consumer.receive(32, HOUR)))
    failpoints.arm(lambda point: looks.append(point) if point == "pop.after_commit" else None)
    try:
        thread.start()
        assert eventually(lambda: len(looks) > 1)
    finally:
        failpoints.arm(None)
    send(outbox, "1")
    thread.join()

    assert texts(found) == ["1"]


def test_a_call_that_waits_hears_of_a_commit_of_another_process(pg_engine, monkeypatch):
    """Looks without a hint are an hour apart. The other process is a second outbox, with a notifier of its own."""
    monkeypatch.setattr(simple_consumer, "POLL_SECONDS", (3600.0, 3600.0))
    mine, other = Outbox(pg_engine), Outbox(pg_engine)
    consumer = consumer_of(mine, await_duration=HOUR)
    assert consumer.receive(1, HOUR, NOW) == []
    found, listens = list[MessageExt](), threading.Event()
    real = PostgresChannel.listen

    def listen(channel: PostgresChannel) -> None:
        real(channel)
        listens.set()

    monkeypatch.setattr(PostgresChannel, "listen", listen)
    thread = threading.Thread(target=lambda: found.extend(consumer.receive(1, HOUR)))
    thread.start()

    assert listens.wait(120)
    send(other, "1")
    thread.join()

    assert texts(found) == ["1"]
    for each in (consumer, mine, other):
        each.close()


def test_nothing_comes_after_the_time_is_over(outbox):
    began = time.monotonic()

    assert consumer_of(outbox, await_duration=timedelta(seconds=1)).receive(1, HOUR) == []
    assert time.monotonic() - began >= 1


def bodies(messages: list[MessageExt]) -> str:
    """The bodies, as they came."""
    return " ".join(each.body.decode() for each in messages)


def test_in_order_a_call_gets_some_messages_of_a_key_and_the_next_come_after_all_of_them_are_done(engine, outbox):
    """As RocketMQ does: a call with room for two finds two of a key, although another key's message is between them."""
    for number in range(4):
        for key in "ab":
            send(outbox, f"{key}{number}", key=key)
    mine, yours = consumer_of(outbox, fifo=True), consumer_of(outbox, fifo=True)
    first = [mine.receive(2, HOUR), yours.receive(2, HOUR), mine.receive(2, HOUR)]

    # The second is done before the first.
    mine.ack(first[0][1])
    between = yours.receive(16, HOUR)
    mine.ack(first[0][0])
    second = yours.receive(16, HOUR)
    step_clock(engine, 2 * HOUR, "outbox_parked.due_at")
    third = [mine.receive(4, HOUR), yours.receive(4, HOUR), yours.receive(4, HOUR)]
    stale = refused(lambda: mine.ack(first[1][1]))
    for each in [*third[0], *third[1]]:
        mine.ack(each)

    assert ([bodies(each) for each in first], between, bodies(second)) == (["a0 a1", "b0 b1", ""], [], "a2 a3")
    assert sorted(bodies(each) for each in third) == ["", "a2 a3", "b0 b1 b2 b3"]
    times = {bodies([each]): each.reconsume_times for messages in third for each in messages}
    assert times == {"a2": 1, "a3": 1, "b0": 1, "b1": 1, "b2": 0, "b3": 0}
    assert (stale, states(engine)) == (EXPIRED, {})


def test_in_order_no_message_of_a_key_comes_while_another_of_the_same_call_is_in_hands(engine, outbox):
    """The first of the two is over its time, and the second is not: its holder has prolonged it."""
    send(outbox, "1", "2", key="a")
    consumer = consumer_of(outbox, fifo=True)
    first, second = consumer.receive(2, HOUR)
    consumer.change_invisible_duration(second, 3 * HOUR)
    consumer.change_invisible_duration(first, NOW)

    nothing = consumer.receive(2, HOUR)
    consumer.change_invisible_duration(second, NOW)

    assert (nothing, texts(consumer.receive(2, HOUR))) == ([], ["1", "2"])


def test_without_order_all_messages_of_a_key_are_handed_out(outbox):
    send(outbox, "1", "2", "3", key="a")

    assert texts(consumer_of(outbox).receive(32, HOUR)) == ["1", "2", "3"]


def test_after_so_many_deliveries_a_message_is_a_dead_letter_and_its_key_goes_on(engine, outbox):
    send(outbox, "1", "2", key="a")
    consumer = consumer_of(outbox, fifo=True, max_attempts=2, await_duration=timedelta(seconds=30))
    found = [consumer.receive(1, AT_ONCE), consumer.receive(1, AT_ONCE), consumer.receive(1, HOUR)]

    (dead,) = dead_letters(outbox, "%DLQ%billing")
    assert [[(each.body, each.reconsume_times) for each in messages] for messages in found] == [
        [(b"1", 0)], [(b"1", 1)], [(b"2", 0)],
    ]  # fmt: skip
    assert (dead.body, dead.properties["RETRY_TOPIC"], states(engine)) == (b"1", "orders", {"dead": 1, "retry": 1})
    assert [each.attempts for each in outbox.admin.parked(state="dead")] == [2]


def test_the_last_delivery_is_acknowledged_like_any_other(engine, outbox):
    send(outbox, "1")
    consumer = consumer_of(outbox, max_attempts=1)
    (only,) = consumer.receive(1, HOUR)
    consumer.ack(only)

    assert states(engine) == {}


def test_pages_of_dead_letters_are_complete_where_a_group_is_also_at_a_front(outbox):
    """The two have positions of their own, so a message may be a letter of both."""
    send(outbox, "1", "2")

    def has_given_up(consumer: SimpleConsumer) -> bool:
        consumer.receive(2, AT_ONCE)
        return len(outbox.admin.parked(name=consumer.group, state="dead")) == 2

    for group in ("billing", "billing|orders"):
        with SimpleConsumer(group, outbox, {"orders": "*"}, max_attempts=1, await_duration=NOW) as consumer:
            assert eventually(lambda: has_given_up(consumer))

    pages = [dead_letters(outbox, "%DLQ%billing", limit=1)]
    pages.append(dead_letters(outbox, "%DLQ%billing", limit=1, after=pages[0][-1].queue_offset))

    assert [[each.body for each in page] for page in pages] == [[b"1", b"1"], [b"2", b"2"]]


def test_dead_letters_are_asked_for_by_rocketmqs_name(outbox):
    with pytest.raises(MQClientError, match=r"%DLQ%<group>"):
        dead_letters(outbox, "billing")


def test_a_call_returns_no_more_than_it_is_asked_for_also_when_some_come_again(engine, outbox):
    """Messages that come again come first, and alone."""
    send(outbox, *map(str, range(3)))
    consumer = consumer_of(outbox)
    again = consumer.receive(3, HOUR)
    for each in again:
        consumer.change_invisible_duration(each, NOW)
    send(outbox, *map(str, range(3, 9)))

    found = [consumer.receive(5, HOUR), consumer.receive(5, HOUR), consumer.receive(5, HOUR)]

    assert [texts(each) for each in found] == [list("012"), list("34567"), ["8"]]
    assert sorted(each.reconsume_times for messages in found for each in messages) == [0] * 6 + [1] * 3


# What is stored by the way


def stored(engine: Engine) -> int:
    """How many rows of progress there are."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox_progress")).scalar_one())


def test_calls_that_find_nothing_store_no_progress(engine, outbox):
    consumer = consumer_of(outbox)
    consumer.receive(1, HOUR)
    before = stored(engine)

    found = [consumer.receive(1, HOUR) for _ in range(3)]

    assert (found, stored(engine)) == ([[], [], []], before)


def test_a_call_that_finds_nothing_stores_progress_that_is_older_than_half_a_minute(pg_engine):
    """Retention keeps everything from the stored position on."""
    consumer = consumer_of(Outbox(pg_engine))
    consumer.receive(1, HOUR)
    before = stored(pg_engine)
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = settled_at - interval '31 seconds'"))

    for _ in range(3):
        consumer.receive(1, HOUR)

    assert stored(pg_engine) == before + 1


def test_a_look_sets_a_bounded_number_of_messages_aside_behind_a_key_in_other_hands(engine, outbox):
    """The rest of the backlog stays in the log, until later looks come to it."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", str(n), key="hot") for n in range(1_000)])
        outbox.send(session, "orders", "other", key="other")
    consumer = consumer_of(outbox, fifo=True)
    first = consumer.receive(32, HOUR)

    nothing, parked = consumer.receive(32, HOUR, NOW), states(engine)
    (other,) = consumer_of(outbox, fifo=True, await_duration=HOUR).receive(32, HOUR)

    assert (nothing, parked) == ([], {"retry": 1, "behind": 63 + MAX_BEHIND})
    assert texts([*first, other]) == [*map(str, range(32)), "other"]


def test_a_call_that_hands_out_what_was_set_aside_reads_no_further(engine, outbox):
    send(outbox, *map(str, range(100)), key="hot")
    consumer = consumer_of(outbox, fifo=True)
    (first,) = consumer.receive(1, HOUR)
    consumer.ack(first)

    (second,) = consumer.receive(1, HOUR)

    assert (texts([second]), states(engine)) == (["1"], {"retry": 1})


# The end of a process


def holder(url: str, point: str | None) -> None:
    """Receive a message in a process of its own, which is killed at a point, or with the message in hand."""
    if point is not None:
        arm_kill(point)
    consumer_of(Outbox(create_engine(url)), await_duration=HOUR).receive(1, timedelta(seconds=0.5))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.storm
@pytest.mark.parametrize(
    ("point", "times"),
    [("pop.before_write", 0), ("pop.before_commit", 0), ("pop.after_commit", 1), (None, 1)],
)
def test_what_a_killed_process_has_received_comes_again(engine, outbox, point, times):
    """It was stored before anybody got it; what was not stored was handed out to nobody."""
    send(outbox, "1")
    url = engine.url.render_as_string(hide_password=False)
    program = f"from tests.rocketmq.test_simple_consumer import holder; holder({url!r}, {point!r})"
    with Program(["-c", program]) as killed:
        assert killed.wait(120) == -9

    (found,) = consumer_of(outbox, await_duration=HOUR).receive(1, HOUR)

    assert (found.body, found.reconsume_times) == (b"1", times)


def sleeper(url: str, found: str) -> None:
    """Receive in a process that stops before it stores what it has; write how many messages it got in the end."""
    arm_stop("pop.before_write")
    messages = consumer_of(Outbox(create_engine(url)), await_duration=AT_ONCE).receive(1, HOUR)
    Path(found).write_text(str(len(messages)))


@pytest.mark.storm
def test_who_slept_too_long_gets_nothing_that_another_has_received(pg_engine, tmp_path):
    """The server ends a transaction that stands still for 5 s. On SQLite every writer waits for one that is stopped."""
    outbox = Outbox(pg_engine)
    send(outbox, "1")
    url, found = pg_engine.url.render_as_string(hide_password=False), tmp_path / "found"
    code = f"from tests.rocketmq.test_simple_consumer import sleeper; sleeper({url!r}, {str(found)!r})"
    with Program(["-c", code]) as program:
        assert eventually(lambda: "State:\tT" in Path(f"/proc/{program.pid}/status").read_text())
        (mine,) = consumer_of(outbox, await_duration=HOUR).receive(1, HOUR)
        program.send_signal(signal.SIGCONT)
        assert program.wait(120) == 0

    consumer_of(outbox).ack(mine)
    outbox.close()
    assert (found.read_text(), mine.reconsume_times, states(pg_engine)) == ("0", 0, {})


@pytest.mark.storm
def test_a_connection_that_is_lost_before_the_message_is_stored_costs_nothing(pg_engine):
    """The same call hands it out, for the first time, on another connection."""
    outbox, lost = Outbox(pg_engine), threading.Event()
    send(outbox, "1")

    def lose(point: str) -> None:
        if point == "pop.before_write" and not lost.is_set():
            lost.set()
            with pg_engine.connect() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )

    failpoints.arm(lose)
    try:
        (found,) = consumer_of(outbox).receive(1, HOUR)
    finally:
        failpoints.arm(None)
    consumer_of(outbox).ack(found)
    outbox.close()

    assert (lost.is_set(), found.reconsume_times, states(pg_engine)) == (True, 0, {})


@pytest.mark.storm
def test_no_two_consumers_hold_a_message_at_a_time(engine, outbox):
    """Four threads with two consumers acknowledge two of three messages; the others come again when it is time."""
    number, invisible = 60, timedelta(seconds=2)
    send(outbox, *map(str, range(number)))
    lock, done, until = threading.Lock(), set[str](), dict[str, float]()
    broken: list[str] = []
    consumers = [consumer_of(outbox), consumer_of(outbox)]
    chance = random.Random(1)

    def receive(consumer: SimpleConsumer) -> None:
        while len(done) < number and not broken:
            began = time.monotonic()
            for each in consumer.receive(8, invisible):
                with lock:
                    if each.msg_id in done or time.monotonic() < until.get(each.msg_id, 0.0):
                        broken.append(each.msg_id)
                    # Its time began after the call did.
                    until[each.msg_id] = began + invisible.total_seconds()
                    keeps = chance.random() < 1 / 3
                if not keeps:
                    try:
                        consumer.ack(each)
                    except MQClientError:
                        continue
                    with lock:
                        done.add(each.msg_id)

    threads = [threading.Thread(target=receive, args=(consumers[at % 2],)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (broken, len(done), states(engine)) == ([], number, {})


# Subscriptions


def test_each_topic_has_an_expression_of_its_own(outbox):
    consumer = SimpleConsumer(
        "billing",
        outbox,
        {
            "orders": "paid || shipped",
            "users": MessageSelector.by_sql("region = 'eu' AND age > 17 -- adults)"),
            "it-s": MessageSelector.by_tag("it's"),
            "all": "*",
        },
        await_duration=AT_ONCE,
    )
    eu, us = {"region": "eu", "age": "18"}, {"region": "us", "age": "18"}
    with outbox.begin() as session:
        outbox.send_all(
            session,
            [
                Message("orders", "1", tags="paid"), Message("orders", "2", tags="placed"), Message("orders", "3"),
                Message("orders", "4", tags="shipped", headers=us), Message("users", "5", headers=eu),
                Message("users", "6", headers=us), Message("users", "7", tags="paid"),
                Message("it-s", "8", tags="it's"), Message("it-s", "9", tags="paid"),
                Message("all", "10"), Message("others", "11", tags="paid"),
            ],
        )  # fmt: skip

    assert texts(consumer.receive(32, HOUR)) == ["1", "4", "5", "8", "10"]


def test_one_expression_for_all_topics_is_stored_as_it_is(engine, outbox):
    SimpleConsumer("billing", outbox, {"b": "B || A", "a": "A||B"}, await_duration=AT_ONCE).receive(1, HOUR)

    with engine.connect() as connection:
        stored = connection.execute(text("SELECT kind, tags, filter FROM outbox_subscription WHERE name = 'billing'"))
        kind, tags, condition = stored.one()
    assert (kind, "A" in tags and "B" in tags, condition) == ("consumer", True, None)


def test_another_subscription_of_the_group_is_refused(outbox):
    """RocketMQ lets the last heartbeat win, and loses messages."""
    consumer_of(outbox).receive(1, HOUR)

    with pytest.raises(SubscriptionError, match="billing"):
        SimpleConsumer("billing", outbox, {"orders": "paid"}, await_duration=AT_ONCE).receive(1, HOUR)


LONG = "t" * 128
LISTS = "dead_letters(outbox, '%DLQ%<group>') lists the dead letters; to send them again, run: outbox parked replay"
LEGAL = "^[%|a-zA-Z0-9_-]+$"


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("", {"orders": "*"}, "the specified group is blank"),
    ("g" * 256, {"orders": "*"}, "the specified group is longer than group max length 255."),
    ("a b", {"orders": "*"}, f"the specified group['a b'] contains illegal characters, allowing only {LEGAL}"),
    (
        "DEFAULT_CONSUMER",
        {"orders": "*"},
        "consumerGroup can not equal DEFAULT_CONSUMER, please specify another one.",
    ),
    ("billing", {" ": "*"}, "The specified topic is blank"),
    ("billing", {LONG: "*"}, "The specified topic is longer than topic max length 127."),
    ("billing", {"o.r" * 50: "*"}, "The specified topic is longer than topic max length 127."),
    ("billing", {"o.r": "*"}, f"The specified topic[o.r] contains illegal characters, allowing only {LEGAL}"),
    ("billing", {"RMQ_SYS_TRANS_HALF_TOPIC": "*"}, "cannot access system topic"),
    ("billing", {"rmq_sys_wheel_timer": "*"}, "cannot access system topic"),
    ("billing", {"TBW102": "*"}, "cannot access system topic"),
    ("billing", {"SCHEDULE_TOPIC_XXXX": "*"}, "cannot access system topic"),
    (
        "billing",
        {"%DLQ%billing": "*"},
        f"%DLQ%billing is no topic here: {LISTS} --all --name billing",
    ),
    ("billing", {}, "subscription is null: subscribe to a topic before the start"),
]


def test_what_rocketmq_would_refuse_is_refused_in_its_words(outbox):
    found = [(group, topics, refusal(SimpleConsumer, group, outbox, topics)) for group, topics, _ in REFUSED]

    assert found == [(group, topics, f"MQClientError: {words}") for group, topics, words in REFUSED]


def test_the_longest_names_with_all_characters_that_rocketmq_allows_are_taken(outbox):
    group, topic = ("g%|_-09" * 40)[:255], ("T%|_-09" * 40)[:127]
    with outbox.begin() as session:
        outbox.send(session, topic, "1")
    consumer = SimpleConsumer(group, outbox, {topic: "*"}, await_duration=AT_ONCE)
    (found,) = consumer.receive(1, HOUR)
    consumer.ack(found)

    assert (found.topic, found.body) == (topic, b"1")


@pytest.mark.parametrize(
    ("expression", "words"),
    [(lambda: "||", "subString split error"), (lambda: MessageSelector.by_sql("a ="), "a =\n")],
    ids=["only separators", "no condition"],
)
def test_an_expression_that_cannot_be_read_is_refused(outbox, expression, words):
    with pytest.raises(FilterError) as raised:
        SimpleConsumer("billing", outbox, {"orders": expression()})

    assert words in str(raised.value)


def test_a_condition_is_no_empty_text():
    assert refused(lambda: MessageSelector.by_sql("")) == "Expression can't be null! SQL92"


@pytest.mark.parametrize(("number", "duration"), [(0, HOUR), (33, HOUR), (1, NOW), (1, 5)])
def test_numbers_outside_their_limits_are_refused(outbox, number, duration):
    with pytest.raises(ValueError, match=r"max_message_num is a number|invisible_duration is a timedelta"):
        consumer_of(outbox).receive(number, duration)


def test_no_delivery_at_all_is_refused(outbox):
    with pytest.raises(ValueError, match="max_attempts is a number from 1 on, not 0"):
        consumer_of(outbox, max_attempts=0)


@pytest.mark.parametrize("subscriptions", ["orders", ["orders"]])
def test_topics_without_expressions_are_refused(outbox, subscriptions):
    with pytest.raises(TypeError, match=r"subscriptions is a dict of topics, not .*; write \{'orders': '\*'\}"):
        SimpleConsumer("billing", outbox, subscriptions)


def test_a_number_in_place_of_a_time_to_wait_is_refused(outbox):
    with pytest.raises(ValueError, match="await_duration is a timedelta of at least 0:00:00, not 3"):
        consumer_of(outbox, await_duration=3)  # type: ignore[arg-type]


def test_many_messages_of_others_are_passed(outbox):
    """More than one call reads at once, and more than it would pass in the time to wait with a pause for each."""
    with outbox.begin() as session:
        outbox.send_all(session, [Message("others", str(number)) for number in range(1000)])
    send(outbox, "1")

    assert texts(consumer_of(outbox, await_duration=timedelta(minutes=1)).receive(1, HOUR)) == ["1"]


def test_many_messages_of_a_key_that_waits_are_passed(outbox):
    send(outbox, *map(str, range(1000)), key="a")
    send(outbox, "b", key="b")
    consumer = consumer_of(outbox, fifo=True, await_duration=timedelta(minutes=1))

    assert texts(consumer.receive(1, HOUR)) == ["0"]
    assert texts(consumer.receive(1, HOUR)) == ["b"]


@pytest.mark.every_database
def test_what_stands_behind_an_acknowledged_message_comes_before_what_is_sent_later(engine, outbox):
    """Each acknowledgement lets the next one of its key be tried."""
    send(outbox, "1", "2", key="k")
    consumer = consumer_of(outbox, fifo=True, await_duration=HOUR)
    (first,) = consumer.receive(1, HOUR)
    consumer.ack(first)
    send(outbox, "3", key="k")

    received = list[str]()
    for _ in range(2):
        (message,) = consumer.receive(1, HOUR)
        received += texts([message])
        consumer.ack(message)

    assert received == ["2", "3"]
    assert states(engine) == {}
