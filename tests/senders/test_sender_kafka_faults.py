"""Kafka in bad weather: the contract, and the order of a key behind a refused record."""

import logging
import time

import pytest
from confluent_kafka import KafkaError

from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders import kafka as kafka_sender
from outbox.senders.kafka import KafkaSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, outcome_of
from tests.support.kafka_topics import FarKafka, Topics
from tests.support.places import begun, opened, placed
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract

fragile, mortal = begun(FarKafka), placed(Topics, "fragile", port=None)
sender = opened("topics")


class TestBadWeather(RemoteSenderContract):
    """Calls take turns, and a producer has threads of its own."""

    at = "topics"
    calls = 1
    kills = 1
    slack = 3
    unfit = (
        *UNFIT_HEADERS,
        ({"topic": "a b"}, "Kafka has no topic "),
        ({"topic": "a\ud800"}, "Kafka has no topic "),
        ({"key": "\ud800"}, "Kafka cannot carry it: 'utf-8' codec can't encode character"),
    )


@pytest.mark.storm
def test_an_outage_and_a_message_that_is_too_large_are_no_fatal_errors_in_the_log(topics, sender, caplog):
    """The client calls it one when records behind a refused one are thrown away, which is what keeps their order."""
    caplog.set_level(logging.INFO)
    topics.make("narrow", max_message_bytes="5000")
    check_eventually_done(sender, [a_message("alpha", n, key=f"k{n % 7}") for n in range(60)])
    sender.send([a_message("narrow", str(n).ljust(6_000 if n == 30 else 300), key=f"k{n % 7}") for n in range(60)])
    topics.fall_silent()
    outcome_of(sender, [a_message("alpha", n, key=f"k{n % 7}") for n in range(60)])
    topics.recover()
    check_eventually_done(sender, [a_message("alpha", n, key=f"k{n % 7}") for n in range(60)])
    topics.disappear()
    outcome_of(sender, [a_message("alpha", n, key=f"k{n % 7}") for n in range(60)])

    assert [record.getMessage() for record in caplog.records if record.name.endswith(".client")] == []
    assert {record.levelname for record in caplog.records} == {"INFO", "WARNING"}


def test_what_follows_a_refused_message_of_its_key_is_not_stored_before_it(topics, sender):
    """The broker refuses one message of many that are under way; those behind it must not pass it."""
    topics.make("narrow", max_message_bytes="5000")
    sent = [a_message("narrow", str(n).ljust(6_000 if n == 30 else 300), key=f"k{n % 7}") for n in range(60)]

    verdicts = sender.send(sent)

    behind = [n for n in range(31, 60) if n % 7 == 30 % 7]
    assert [n for n, verdict in enumerate(verdicts) if verdict != DONE] == [30, *behind]
    assert isinstance(verdicts[30], Reject)
    stored = [record.value() for record in topics.records()]
    assert sorted(stored) == sorted(sent[n].body for n, verdict in enumerate(verdicts) if verdict == DONE)


@pytest.mark.storm
def test_a_refused_batch_beside_a_silent_partition_makes_no_dead_letters(monkeypatch):
    """One of a batch is too large, which one is not known yet, and then time runs out for another partition."""
    made: list[str] = []

    class HalfSilent(kafka_sender._Connection):
        def __init__(self, settings: object, prefix: str, *, streams: bool) -> None:
            super().__init__({}, prefix, streams=streams)
            made.append("stream" if streams else "careful")
            self._topics = {"alpha"}
            self._handed_over: list[int] = []

        def hand_over(self, call, until):
            while not call.is_refused and (index := call.take()) is not None:
                self._handed_over.append(index)

        def wait(self, call, seconds):
            for index in [index for index in self._handed_over if index < 3]:
                self._handed_over.remove(index)
                self._report(index, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)  # type: ignore[arg-type]
            time.sleep(min(seconds, 0.02))

    monkeypatch.setattr(kafka_sender, "_Connection", HalfSilent)
    sender = KafkaSender("kafka://localhost:9092?timeout=1")

    for _ in range(2):
        verdicts = sender.send([a_message("alpha", n, key=f"k{n}") for n in range(4)])
        assert {type(verdict) for verdict in verdicts} == {Unavailable}
    sender.close()

    assert made == ["stream", "careful"]


def test_the_first_message_that_a_partition_gets_may_be_refused(topics, sender):
    """A broker takes any record as the first one of a producer that it does not know, also one behind a gap."""
    sizes = [1_100_000, 400_000, 400_000, 400_000, 400_000]
    sent = [a_message("alpha", b"x" * size, key="a") for size in sizes]

    verdicts = sender.send(sent)

    assert [type(verdict) for verdict in verdicts] == [Reject] + [Unavailable] * 4
    assert topics.records() == []


def test_messages_that_are_too_large_only_together_keep_their_order(topics, sender):
    """The client puts three into one request, which the broker refuses."""
    topics.make("narrow", max_message_bytes="700000")
    sent = [a_message("narrow", bytes([n]) * 300_000, key="a") for n in range(5)]

    check_all_done(sender.send(sent), sent)

    assert [record.value()[0] for record in topics.records()] == [0, 1, 2, 3, 4]


@pytest.mark.storm
def test_after_a_refusal_at_most_one_message_of_a_key_is_unacknowledged(kafka, topics, sender):
    """Without the guarantee of a stream, each message of a key waits until the one before it is stored."""
    topics.make("single", partitions=1, max_message_bytes="5000")
    refused, first = sender.send([a_message("single", b"x" * 6_000), a_message("single", "first")])
    assert (type(refused), first) == (Reject, DONE)
    sent = [a_message("single", n, key=key) for n, key in enumerate(["a", "b", None, "a", None, "a", "b", None])]

    kafka.proxy.hold_answers()
    assert outcome_of(sender, sent) == [Unavailable] * 8
    topics.recover()

    arrived = sorted(record.value() for record in topics.records())
    assert arrived == [b"0", b"1", b"2", b"4", b"7", b"first"]


def test_no_report_on_a_message_of_an_interrupted_call_counts_for_the_next(monkeypatch):
    """The next call has another producer: reports name only the place of a message in its call."""
    made: list[object] = []

    class Interrupted(kafka_sender._Connection):
        def __init__(self, settings: object, prefix: str, *, streams: bool) -> None:
            super().__init__({}, prefix, streams=streams)
            made.append(self)

        def hand_over(self, call, until):
            call.take()

        def wait(self, call, seconds):
            raise KeyboardInterrupt

    monkeypatch.setattr(kafka_sender, "_Connection", Interrupted)
    sender = KafkaSender("kafka://localhost:9092?timeout=1")

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sender.send([a_message("alpha", 1)])
    sender.close()

    assert len(made) == 2
