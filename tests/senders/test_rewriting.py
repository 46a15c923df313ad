"""Messages under other topics and in envelopes, as real brokers store them and their own clients read them."""

import json
from contextlib import closing

import pytest

from outbox.senders.opening import open_sender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from tests.support.kafka_topics import Topics


@pytest.mark.storm
def test_kafka_has_debeziums_topic_key_and_headers(kafka):
    topics = Topics(kafka)
    topics.make("outbox.event.orders")
    sent = a_message("orders", {"id": 7}, key="order-7", tags="placed")
    with closing(open_sender(topics.open(), envelope="debezium")) as sender:
        check_eventually_done(sender, [sent])

    (record,) = topics.records()

    headers = dict(record.headers() or [])
    assert (record.topic(), record.key(), record.value()) == (
        f"{topics.prefix}.outbox.event.orders", b"order-7", b'{"id":7}',
    )  # fmt: skip
    assert (headers["id"], headers["eventType"]) == (str(sent.message_id).encode(), b"placed")
    topics.close()


def test_nats_has_a_structured_event_under_another_subject(stream):
    sent = a_message("orders", {"id": 7}, key="order-7")
    with closing(open_sender(stream.open(), rename={"orders": "people"}, envelope="cloudevents")) as sender:
        check_all_done(sender.send([sent]), [sent])

    (stored,) = stream.stored()

    event = json.loads(stored.body)
    assert (stored.topic, stored.content_type) == ("people", "application/cloudevents+json")
    assert (stored.message_id, stored.key) == (sent.message_id, "order-7")
    assert (event["id"], event["type"], event["subject"], event["data"]) == (
        str(sent.message_id), "orders", "order-7", {"id": 7},
    )  # fmt: skip
