"""Kafka with a transactional id: each call is one transaction, and a sender that comes late stores nothing."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.errors import SenderError
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders import kafka_transactions
from outbox.senders.kafka import KafkaSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from tests.support.kafka_topics import Topics
from tests.support.remote import ended

EARLIER = Unavailable("an earlier message of its key was not stored")


@pytest.fixture
def to(topics: Topics) -> Iterator[Callable[[str], KafkaSender]]:
    """Opens senders with a transactional id, and closes them in the end."""
    opened: list[KafkaSender] = []

    def open_one(name: str, *, seconds: float = 60.0) -> KafkaSender:
        opened.append(KafkaSender(f"{topics.url}?transactional.id={name}", timeout=timedelta(seconds=seconds)))
        return opened[-1]

    yield open_one
    for sender in opened:
        sender.close()


@pytest.fixture
def name() -> str:
    """A transactional id of this test."""
    return f"relay-{uuid.uuid4().hex[:8]}"


def shut_out(topics: Topics, name: str) -> Unavailable:
    """The verdict on a message of a sender that another one has replaced."""
    where = topics.url.rpartition("/")[0]
    return Unavailable(f"Kafka: {where}: another sender has the transactional id {name!r} now", everything=True)


@pytest.mark.storm
def test_a_call_is_stored_as_a_whole_and_in_the_order_of_its_keys(topics, to, name):
    sender = to(name)
    calls = [[a_message("alpha", f"{call}-{n}", key=f"k{n % 7}") for n in range(200)] for call in range(3)]

    for sent in calls:
        check_all_done(sender.send(sent), sent)

    for key in range(7):
        expected = [f"{call}-{n}".encode() for call in range(3) for n in range(200) if n % 7 == key]
        assert [each.value() for each in topics.committed("alpha") if each.key() == f"k{key}".encode()] == expected


def test_a_late_batch_of_a_relay_that_was_replaced_is_not_stored(topics, to, name):
    late, new = to(name), to(name)
    check_all_done(late.send(sent := [a_message("alpha", "early")]), sent)
    check_all_done(new.send(sent := [a_message("alpha", "new")]), sent)

    assert late.send([a_message("alpha", "late") for _ in range(3)]) == [shut_out(topics, name)] * 3

    check_all_done(new.send(sent := [a_message("alpha", "newer")]), sent)
    assert sorted(each.value() for each in topics.committed("alpha")) == [b"early", b"new", b"newer"]


@pytest.mark.storm
def test_a_sender_that_was_replaced_stays_away_for_a_while(topics, to, name, monkeypatch):
    """Otherwise two of them would take the name from each other by turns."""
    monkeypatch.setattr(kafka_transactions, "STAY_AWAY", 2.0)
    late, new = to(name), to(name)
    for sender in (late, new):
        check_all_done(sender.send(sent := [a_message("alpha", 1)]), sent)

    assert [late.send([a_message("alpha", 2)]) for _ in range(2)] == [[shut_out(topics, name)]] * 2
    check_all_done(new.send(sent := [a_message("alpha", 3)]), sent)
    time.sleep(2)

    check_all_done(late.send(sent := [a_message("alpha", 4)]), sent)


def test_a_sender_that_was_replaced_and_closed_begins_anew(topics, to, name):
    late, new = to(name), to(name)
    for sender in (late, new):
        check_all_done(sender.send(sent := [a_message("alpha", 1)]), sent)
    assert late.send([a_message("alpha", 2)]) == [shut_out(topics, name)]

    late.close()

    check_all_done(late.send(sent := [a_message("alpha", 3)]), sent)


def test_what_is_refused_is_left_out_and_the_rest_is_stored_once(topics, to, name):
    topics.make("narrow", max_message_bytes="5000")
    sent = [a_message("narrow", f"{n} ".encode().ljust(6_000 if n in (3, 40) else 300), key=f"k{n}") for n in range(60)]
    sent += [a_message("odrers", 1, key="k7"), a_message("narrow", "later", key="k7"), a_message("a|b", 2)]

    verdicts = to(name).send(sent)

    what, do = "the topic's max.message.bytes of 5000", "raise that setting, or send a smaller body"
    too_large = [
        Reject(f"Kafka on topic '{topics.prefix}.narrow': a record of {size} bytes is larger than {what}; {do}")
        for size in (6_096, 6_097)  # the body, the key, and headers
    ]
    missing = Unavailable(f"Kafka has no topic '{topics.prefix}.odrers'; create it")
    assert {n: verdict for n, verdict in enumerate(verdicts[:-1]) if verdict != DONE} == {
        3: too_large[0], 40: too_large[1], 60: missing, 61: EARLIER,
    }  # fmt: skip
    assert isinstance(verdicts[-1], Unavailable)
    stored = sorted(int(each.value().split()[0]) for each in topics.committed("narrow"))
    assert stored == [n for n in range(60) if n not in (3, 40)]


def test_the_client_may_know_by_itself_that_a_topic_is_missing(topics, to, name, monkeypatch):
    """It then takes no record, and so reports none."""

    class Knowing(Producer):
        def produce(self, topic, *arguments, **more):
            if topic.endswith(".missing"):
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))
            super().produce(topic, *arguments, **more)

    monkeypatch.setattr(kafka_transactions, "Producer", Knowing)
    sent = [
        a_message("alpha", 1),
        a_message("missing", 2, key="k"),
        a_message("alpha", 3),
        a_message("alpha", 4, key="k"),
    ]

    verdicts = to(name).send(sent)

    missing = Unavailable(f"Kafka has no topic '{topics.prefix}.missing'; create it")
    assert verdicts == [DONE, missing, DONE, EARLIER]
    assert sorted(each.value() for each in topics.committed("alpha")) == [b"1", b"3"]


def test_a_topic_that_is_made_later_is_found(topics, to, name):
    sender = to(name)
    [verdict, other] = sender.send([a_message("later", 1), a_message("alpha", 1)])
    assert (verdict, other) == (Unavailable(f"Kafka has no topic '{topics.prefix}.later'; create it"), DONE)

    topics.make("later")

    check_eventually_done(sender, [a_message("later", 2)])


@pytest.mark.storm
def test_a_call_that_runs_out_of_time_stores_nothing_and_the_next_one_does(topics, to, name):
    """Nothing of it, once its time is over: the producer that follows has aborted it."""
    sender = to(name, seconds=2)
    check_all_done(sender.send(sent := [a_message("alpha", "first")]), sent)

    topics.fall_silent()
    began = time.monotonic()
    verdicts = sender.send([a_message("alpha", "lost") for _ in range(3)])
    topics.disappear()
    topics.recover()
    assert time.monotonic() - began < 60

    assert {type(verdict) for verdict in verdicts} == {Unavailable}
    check_eventually_done(sender, [a_message("alpha", "last")])
    assert sorted(each.value() for each in topics.committed("alpha")) == [b"first", b"last"]


def test_closing_ends_a_call_that_waits(topics, to, name):
    sender = to(name, seconds=120)
    check_all_done(sender.send(sent := [a_message("alpha", 1)]), sent)
    topics.fall_silent()

    with ThreadPoolExecutor(1) as pool:
        [[verdict]] = ended(sender, [pool.submit(sender.send, [a_message("alpha", 2)])])

    assert isinstance(verdict, Unavailable)


def test_brokers_that_are_not_there_are_told_at_once():
    sender = KafkaSender("kafka://127.0.0.1:1?transactional.id=relay", timeout=timedelta(seconds=120))

    began = time.monotonic()
    [verdict] = sender.send([a_message("alpha", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith("Kafka: kafka://127.0.0.1:1: ")
    assert time.monotonic() - began < 60
    sender.close()


def test_a_transactional_id_has_to_be_a_name():
    with pytest.raises(SenderError, match=r"^kafka://a: transactional\.id must be a name$"):
        KafkaSender("kafka://a?transactional.id=")
