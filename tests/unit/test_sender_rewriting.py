"""Messages under other topics and in envelopes: what the destination gets, and what stays as it was."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from hypothesis import given
from hypothesis import strategies as st

from outbox import Done, Message, Outbox, Reject, Relay, SenderError, Unavailable
from outbox.model.limits import MAX_TOPIC
from outbox.model.verdict import DONE
from outbox.senders.key_order import EARLIER
from outbox.senders.new_topics import NewTopics
from outbox.senders.opening import open_sender
from outbox.senders.port import deadline_of, destination_of
from outbox.testing.sender_contract import TOPICS, SenderContract, a_message
from tests.support.destination import Destination
from tests.support.waiting import eventually
from tests.unit.test_sender_async import Shelf


def full(topic: str = "orders.placed", **fields) -> Message:
    """A message with all its fields, as it comes out of the log."""
    fields = {"key": "k-1", "tags": "placed", "headers": {"X-Trace": "a"}, **fields}
    message = Message(topic, {"id": 7}, **fields)
    message.created_at = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    message.id, message.attempt = 42, 3
    return message


def sent_as(*messages: Message, **options) -> list[Message]:
    """What the destination gets of them."""
    destination = Destination()
    open_sender(destination, **options).send(messages)
    return destination.messages


def fields(message: Message) -> dict[str, object]:
    """All that a message holds."""
    names = ("id", "message_id", "topic", "key", "tags", "headers", "body", "content_type", "created_at", "attempt")
    return {name: getattr(message, name) for name in names}


@pytest.mark.parametrize(
    ("options", "topic"),
    [
        ({"prefix": "shop."}, "shop.orders.placed"),
        ({"rename": {"orders.placed": "placed-orders"}}, "placed-orders"),
        ({"rename": {"orders.placed": "placed-orders"}, "prefix": "shop."}, "shop.placed-orders"),
        ({"rename": {"users": "people"}}, "orders.placed"),
        ({"rename": {"orders.*": "orders-*"}}, "orders-placed"),
        ({"rename": {"orders.*": "orders-*", "orders.placed": "new"}}, "new"),
        ({"rename": {"*.placed": "*"}}, "orders"),
        ({"rename": {"users.*": "users-*"}}, "orders.placed"),
    ],
    ids=["prefix", "rename", "both", "another topic", "pattern", "name first", "pattern in front", "another pattern"],
)
def test_only_the_topic_changes(options, topic):
    message = full()

    (arrived,) = sent_as(message, **options)

    assert fields(arrived) == {**fields(message), "topic": topic}
    assert message.topic == "orders.placed"


def test_an_event_in_structured_mode_is_read_by_the_sdk():
    message = full()

    (arrived,) = sent_as(message, prefix="shop.", envelope="cloudevents")
    event = from_http_event(HTTPMessage({"content-type": arrived.content_type or ""}, arrived.body))

    assert arrived.content_type == "application/cloudevents+json"
    assert event.get_attributes() == {
        "specversion": "1.0", "id": str(message.message_id), "source": "/outbox", "type": "orders.placed",
        "subject": "k-1", "time": message.created_at, "datacontenttype": "application/json", "tags": "placed",
    }  # fmt: skip
    assert event.get_data() == {"id": 7}
    kept: dict[str, object] = {
        "body": arrived.body,
        "content_type": arrived.content_type,
        "topic": "shop.orders.placed",
    }
    assert fields(arrived) == {**fields(message), **kept}


def test_debezium_has_the_id_and_the_type_as_headers():
    message = full()

    (arrived,) = sent_as(message, envelope="debezium")

    headers = {"X-Trace": "a", "id": str(message.message_id), "eventType": "placed"}
    assert fields(arrived) == {**fields(message), "topic": "outbox.event.orders.placed", "headers": headers}


@pytest.mark.parametrize(
    ("options", "topic"),
    [
        ({"prefix": "shop."}, "shop.orders.placed"),
        ({"prefix": ""}, "orders.placed"),
        ({"rename": {"orders.placed": "Order"}}, "outbox.event.Order"),
    ],
)
def test_debezium_puts_its_prefix_where_no_other_is_given(options, topic):
    (arrived,) = sent_as(full(tags=None, headers=None), envelope="debezium", **options)

    assert (arrived.topic, list(arrived.headers)) == (topic, ["id"])


def test_a_header_of_the_message_does_not_replace_debeziums():
    message = full(headers={"ID": "mine", "EventType": "mine", "other": "stays"})

    (arrived,) = sent_as(message, envelope="debezium")

    assert arrived.headers == {"other": "stays", "id": str(message.message_id), "eventType": "placed"}


@given(text=st.text(min_size=1, max_size=20).filter(lambda text: text.strip() == text and text.isprintable()))
def test_headers_of_debezium_are_the_json_that_they_were(text):
    message = full(headers={"x": text})

    (arrived,) = sent_as(message, envelope="debezium")

    assert json.loads(arrived.headers_json or "") == {"x": text, "id": str(message.message_id), "eventType": "placed"}


def test_a_message_whose_topic_gets_no_name_waits_and_so_does_its_key():
    destination = Destination()
    long = "x" * MAX_TOPIC
    messages = [full(topic, key=key) for topic, key in (("a", "k"), (long, "k"), ("a", "k"), (long, None), ("b", "l"))]

    verdicts = open_sender(destination, prefix="p.").send(messages)

    assert [type(verdict) for verdict in verdicts] == [Done, Unavailable, type(EARLIER), Unavailable, Done]
    assert verdicts[2] is EARLIER
    assert "topic: must be 1 to 249 characters" in str(verdicts[1])
    assert [message.topic for message in destination.messages] == ["p.a", "p.b"]


def test_what_cloudevents_cannot_carry_is_rejected():
    bad, good = full(key="a\tb"), full()

    first, second = open_sender(Destination(), envelope="cloudevents").send([bad, good])

    assert (type(first), second) == (Reject, Done())


def test_verdicts_and_exceptions_are_handed_back_untouched():
    destination = Destination(answer=lambda _message: verdict)
    verdict = Reject("never")
    sender = open_sender(destination, prefix="p.")

    assert sender.send([full()])[0] is verdict

    destination.answer = lambda _message: 1 / 0  # type: ignore[assignment,return-value]  # it raises
    with pytest.raises(ZeroDivisionError):
        sender.send([full()])


def test_it_is_the_destination_that_it_sends_to():
    inner = Destination()
    inner.deadline = timedelta(seconds=30)

    sender = open_sender(inner, prefix="p.")

    assert (destination_of(sender), deadline_of(sender)) == ("test", timedelta(seconds=30))
    assert destination_of(open_sender("nats://u:pw@h:4222", prefix="p.")) == "nats://h:4222"


def test_only_what_is_asked_to_be_rewritten_is():
    asked: list[dict[str, Any]] = [
        {}, {"prefix": ""}, {"rename": {}}, {"prefix": "p."}, {"envelope": "debezium", "prefix": ""},
    ]  # fmt: skip
    message, destination = full(), Destination()
    for options in asked:
        open_sender(destination, **options).send([message])

    assert [each is message for each in destination.messages] == [True, True, True, False, False]


def test_a_relay_sends_under_other_topics(sqlite_engine, destination):
    outbox = Outbox(sqlite_engine)
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")

    Relay(outbox, destination, prefix="shop.").until_empty()

    assert [(message.topic, message.body) for message in destination.messages] == [("shop.orders", b"1")]


def test_the_sender_of_an_outbox_may_rewrite_and_its_relay_too(sqlite_engine, destination):
    outbox = Outbox(sqlite_engine, sender=open_sender(destination, prefix="shop."))
    with outbox.begin() as session:
        outbox.send(session, "orders", b"1")
    with outbox.running(prefix="eu."):
        assert eventually(lambda: destination.messages)
    outbox.close()

    assert [message.topic for message in destination.messages] == ["shop.eu.orders"]


def test_a_topic_with_a_name_that_a_pattern_gives_to_another_one_waits_until_somebody_says_that_both_may_have_it():
    destination, rename = Destination(), {"orders.*": "orders-*"}
    sent = [full("orders-placed", key=None), full("orders.placed", key=None), full("users", key=None)]

    verdicts = open_sender(destination, rename=rename).send(sent)
    joined = open_sender(Destination(), rename={**rename, "orders-placed": "orders-placed"}).send(sent)

    problem = "the topic 'orders-placed' has the name that rename gives to 'orders.placed'"
    fix = 'to let both have it, add "orders-placed" = "orders-placed" to rename in the route'
    assert verdicts == [Unavailable(f"{problem}; {fix}"), DONE, DONE]
    assert [message.topic for message in destination.messages] == ["orders-placed", "users"]
    assert joined == [DONE] * 3


@given(
    old=st.text("ab.-", max_size=4), new=st.text("ab.-", max_size=4),
    before=st.text("ab.-", min_size=1, max_size=6), after=st.text("ab.-", min_size=1, max_size=6),
)  # fmt: skip
def test_no_two_topics_get_one_name_by_a_pattern(old, new, before, after):
    """All that is sent by one pattern, or under its own name, is told apart by the new topics."""
    topics = NewTopics({f"x{old}*": f"x{new}*"})

    def name(topic: str) -> object:
        try:
            return topics.of(f"x{topic}")
        except ValueError:
            return (topic, "waits")

    assert (name(before) == name(after)) is (before == after)


def test_a_topic_that_gets_too_long_waits_and_a_foreign_row_is_rejected():
    foreign_row = full(key=None)
    foreign_row.topic = "a b"
    sent = [full("t" * MAX_TOPIC, key=None), foreign_row, full(key=None)]

    long, foreign, done = open_sender(Destination(), prefix="p.").send(sent)

    assert (type(long), type(foreign), done) == (Unavailable, Reject, DONE)


WRONG = {
    "a prefix of other characters": ({"prefix": "a b"}, "prefix: makes a topic that must be 1 to 249 characters"),
    "a prefix of another type": ({"prefix": 5}, "prefix: must be text, not int"),
    "a pattern to one name": (
        {"rename": {"orders.*": "x"}},
        "= 'x': a pattern has one star on each side",
    ),
    "two stars": ({"rename": {"*.*": "*-*"}}, "a pattern has one star on each side"),
    "a pattern of other characters": ({"rename": {"a b*": "x*"}}, r"rename: makes a topic .* but is 'a bx'"),
    "patterns that meet": (
        {"rename": {"orders.*": "orders-*", "orders.eu.*": "orders-eu-*"}},
        r"'orders\.\*' and 'orders\.eu\.\*' may make the same topic, of 'orders-\*' and 'orders-eu-\*'",
    ),
    "an empty topic": ({"rename": {"orders": ""}}, "rename: makes a topic"),
    "a list": ({"rename": ["a"]}, "rename: must be a mapping of topics to topics, not list"),
    "an unknown envelope": ({"envelope": "avro"}, "envelope: must be one of raw, cloudevents, debezium, not 'avro'"),
}


@pytest.mark.parametrize(("options", "error"), WRONG.values(), ids=WRONG)
def test_what_makes_no_topic_is_refused_at_once(options, error):
    with pytest.raises(SenderError, match=error):
        open_sender(Destination(), **options)


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_wrong_number_of_verdicts_is_seen_also_beside_a_message_without_the_new_form(wrong):
    """The first message's topic gets too long."""

    class Wrong(Destination):
        def send(self, messages):
            return [DONE] * wrong

    sent = [full("t" * MAX_TOPIC, key=None), full(key=None)]
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer)"):
        open_sender(Wrong(), prefix="p.").send(sent)


class Elsewhere(Shelf):
    """An async destination behind other topics."""

    new = {topic: f"elsewhere.{topic}" for topic in TOPICS}

    def open(self):
        """A sender that renames the topics of the suite."""
        return open_sender(super().open(), rename=self.new)

    def stored(self):
        """All copies, by the topics that they had."""
        return [replace(copy, topic=(copy.topic or "").removeprefix("elsewhere.")) for copy in self.copies]

    def fail(self, topic):
        """Take the others only."""
        super().fail(self.new[topic])


class TestRewriting(SenderContract):
    """A sender behind other topics passes the contract."""

    @pytest.fixture
    def destination(self):
        """A shelf of its own for each test."""
        return Elsewhere()


def test_the_suite_sees_other_topics():
    """Else it would say nothing of them."""
    shelf = Elsewhere()
    sender = shelf.open()
    sender.send([a_message("alpha", 1)])
    sender.close()

    assert [copy.topic for copy in shelf.copies] == ["elsewhere.alpha"]
