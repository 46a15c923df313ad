"""What a message of SQS or SNS looks like, and the message that a consumer makes of it wherever it comes from."""

import json
from typing import Any

import pytest

from outbox.model.message import Message
from outbox.senders.aws_message import group_of, read_message, text_of
from outbox.testing.sender_contract import a_message


@pytest.mark.parametrize(
    ("body", "text", "encoding"),
    [
        (b'{"id":7}', '{"id":7}', None),
        ("é 😀\t\r\n".encode(), "é 😀\t\r\n", None),
        (b"a\x00b", "YQBi", "base64"),
        (b"a\x1bb", "YRti", "base64"),
        ("\ufffe".encode(), "77++", "base64"),
        (b"\xff", "/w==", "base64"),
        (b"", "empty", "empty"),
        (b"empty", "empty", None),
    ],
)
def test_a_body_is_text_where_it_can_be(body, text, encoding):
    message = Message("orders", body)

    found, attributes = text_of(message)

    headers = {"Outbox-Id": str(message.message_id), "Outbox-Topic": "orders"}
    assert found == text
    assert json.loads(attributes.pop("outbox")) == headers | ({"Outbox-Encoding": encoding} if encoding else {})
    assert attributes == {}
    assert read_message(as_boto3(message)).body == body


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("order-7", "order-7"),
        ("!~" * 64, "!~" * 64),
        ("!~" * 64 + "x", "65f6c78d84923eb512761dc75f914cfdc36248c00cc3acd0a624314a8bb3458f"),
        ("order 7", "0fc89f8ae19394b48debd6353bb9ad3393f3bc791931519f19d176a7e5513ebc"),
    ],
)
def test_the_group_is_the_key_or_stands_for_it(key, group):
    assert group_of(Message("orders", b"", key=key)) == group


def test_a_message_without_a_key_is_a_group_of_its_own():
    message = Message("orders", b"")

    assert group_of(message) == str(message.message_id)


def as_boto3(message: Message) -> dict[str, Any]:
    """What `receive_message` returns."""
    text, attributes = text_of(message)
    found = {name: {"StringValue": value, "DataType": "String"} for name, value in attributes.items()}
    return {"MessageId": "1", "ReceiptHandle": "2", "Body": text, "MessageAttributes": found}


def notification(message: Message) -> dict[str, Any]:
    """What SNS sends to a URL, to a queue without raw delivery, and to Lambda."""
    text, attributes = text_of(message)
    found = {name: {"Type": "String", "Value": value} for name, value in attributes.items()}
    return {"Type": "Notification", "TopicArn": "arn:aws:sns:x", "Message": text, "MessageAttributes": found}


def as_lambda(message: Message) -> dict[str, Any]:
    """A record of an event that SQS is the source of."""
    text, attributes = text_of(message)
    found = {name: {"stringValue": value, "dataType": "String"} for name, value in attributes.items()}
    return {"messageId": "1", "body": text, "messageAttributes": found, "eventSource": "aws:sqs"}


@pytest.mark.parametrize(
    "received",
    [
        as_boto3,
        as_lambda,
        notification,
        lambda message: {"Body": json.dumps(notification(message))},
        lambda message: {"body": json.dumps(notification(message)), "messageAttributes": {}},
    ],
)
def test_a_consumer_reads_the_message_back_wherever_it_comes_from(received):
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "v", "m": "Zoë"})

    message = read_message(received(sent))

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "orders", "a b", "x")
    assert (message.headers, message.body, message.content_type) == (sent.headers, b'{"id":7}', "application/json")
    assert (message.created_at, message.id) == (sent.created_at, None)


@pytest.mark.parametrize(
    ("received", "missing"),
    [
        ({"Body": "{}"}, "outbox"),
        ({"Body": '{"TopicArn": "arn", "Message": "x"}'}, "outbox"),
        ({"Body": "[" * 100_000, "MessageAttributes": {}}, "outbox"),
        ({"Body": "x", "MessageAttributes": {"outbox": {"StringValue": "x"}}}, "Outbox-Topic"),
    ],
)
def test_what_no_outbox_wrote_is_not_read_as_a_message(received, missing):
    with pytest.raises(KeyError, match=missing):
        read_message(received)
