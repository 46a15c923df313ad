"""Verdicts say why in words that every database takes, whatever a handler gave them to say."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from tenacity import wait_fixed

from outbox import Done, Message, Outbox, Reject, Relay, Retry, RetryPolicy, Unavailable
from outbox.model.limits import MAX_DELAY
from outbox.model.verdict import DONE, describe
from tests.support.destination import Destination, relay_to
from tests.support.parked import states
from tests.support.readers import bodies
from tests.support.refusals import refusal


class UnspeakableError(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


#: What handlers say, or raise.
SAID = {
    "NUL": "cannot parse 'ab\0c'",
    "a lone surrogate": os.fsdecode(b"no file \xff"),
    "an exception": ValueError("oops"),
    "an exception without words": UnspeakableError(),
    "bytes": b"abc",
    "nothing": None,
    "other alphabets": "не вышло 🙁",
}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("plain", "plain"),
        (SAID["NUL"], "cannot parse 'ab\\x00c'"),
        (SAID["a lone surrogate"], "no file \\udcff"),
        (SAID["an exception"], "ValueError: oops"),
        (SAID["an exception without words"], "UnspeakableError"),
        (SAID["other alphabets"], "не вышло 🙁"),
    ],
)
def test_what_is_said_becomes_text(said, text):
    assert describe(said) == Retry(said).error == Reject(said).error == Unavailable(said).error == text


def test_there_is_one_done():
    assert Done() is Done() is DONE


@pytest.mark.parametrize(
    ("after", "kept"),
    [(timedelta(-1), timedelta(0)), (timedelta(5), timedelta(5)), (timedelta.max, MAX_DELAY), (None, None)],
)
def test_a_pause_is_one_that_a_database_can_add_to_its_clock(after, kept):
    assert Retry("not now", after).after == kept


def test_a_pause_has_a_unit():
    with pytest.raises(TypeError, match="after must be a timedelta, not int"):
        Retry("not now", after=5)  # type: ignore[arg-type]  # as someone without a type checker writes it


@pytest.mark.parametrize("how", [Reject, Retry, None], ids=["rejected", "retried", "raised"])
def test_nothing_that_a_handler_says_stops_its_relay(engine, how):
    """It would hand over what is good again and again, in every process that is started in its place."""

    def answer(message):
        if message.text() not in SAID:
            return DONE
        said = SAID[message.text()]
        if how is None:
            raise said if isinstance(said, Exception) else ValueError(said)
        return how(said)

    outbox, destination = Outbox(engine), Destination(answer)
    relay = relay_to(destination, outbox, retry=RetryPolicy(attempts=1, wait=wait_fixed(0)))
    stopped = {}
    for name in SAID:
        with outbox.begin() as session:
            outbox.send_all(session, [Message("orders", body) for body in (f"before {name}", name, f"after {name}")])
        stopped[name] = refusal(relay.until_empty)

    assert {name: error for name, error in stopped.items() if error} == {}
    good = [f"{place} {name}".encode() for name in SAID for place in ("before", "after")]
    assert sorted(destination.bodies) == sorted(good)
    assert len(bodies(engine)) == 3 * len(SAID)
    assert set(states(engine)) <= {"dead", "waiting"}


@pytest.mark.storm
@pytest.mark.parametrize(
    "answer", [lambda messages: [DONE], lambda messages: None, lambda messages: ["done"] * len(messages)]
)
def test_a_handler_that_does_not_answer_for_each_message_is_told_of(engine, caplog, answer):
    """At once: batches that get smaller and smaller until they fit would hide it, and repeat what was sent."""
    outbox, destination = Outbox(engine), Destination()
    destination.send = answer  # type: ignore[method-assign]  # that is the mistake
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"%d" % number) for number in range(3)])
    relay = Relay(outbox, destination)
    with caplog.at_level("WARNING", "outbox"):
        relay.until_empty()

    assert "StrangeAnswerError" in caplog.text
    assert "verdicts" in caplog.text


class Unordered(Destination):
    """Returns what is no sequence."""

    def send(self, messages: Sequence[Message]) -> Any:
        """As the values of a dict."""
        return dict(enumerate(super().send(messages))).values()


def test_any_collection_of_verdicts_will_do(engine):
    outbox, destination = Outbox(engine), Unordered()
    with outbox.begin() as session:
        outbox.send_all(session, [Message("orders", b"%d" % number) for number in range(3)])
    Relay(outbox, destination).until_empty()

    assert destination.bodies == [b"0", b"1", b"2"]
