"""URLs of SQS and SNS: what they say, and which cannot be meant."""

import pytest

from outbox.errors import SenderError
from outbox.senders import aws
from outbox.senders.aws import SqsSender
from outbox.senders.opening import open_sender

OPTIONS = "its options are timeout, fifo, endpoint, as, each once"
FORM = "write sqs://eu-central-1/123456789012/prefix"
FORM_OF_SNS = "write sns://eu-central-1/123456789012/prefix"
CHAIN = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the machine a role"
ENDPOINT = "endpoint must be an http:// or https:// URL without a user"
PATH = "the path is an account of 12 digits and a prefix of letters, digits, - and _"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("sqs://", f"sqs://: {FORM}"),
        ("sqs://localhost:4566", f"sqs://localhost:4566: the host is a region of AWS; {FORM}"),
        ("sqs://eu-central-1,eu-west-1", f"sqs://eu-central-1,eu-west-1: the host is a region of AWS; {FORM}"),
        ("sqs://AKID:s3cr3t@eu-central-1", f"sqs://eu-central-1: credentials are not taken from the URL: {CHAIN}"),
        ("sqs://eu-central-1/a/b", f"sqs://eu-central-1/a/b: {PATH}"),
        ("sqs://eu-central-1/a.fifo", f"sqs://eu-central-1/a.fifo: {PATH}"),
        ("sqs://eu-central-1?fifo=yes", "sqs://eu-central-1: fifo must be 1 or 0"),
        ("sqs://eu-central-1?endpoint=host", f"sqs://eu-central-1: {ENDPOINT}"),
        ("sqs://eu-central-1?endpoint=http://ann:s3cr3t%40host", f"sqs://eu-central-1: {ENDPOINT}"),
        ("sqs://eu-central-1?queue=x", f"sqs://eu-central-1: {OPTIONS}; 'queue' is none of them"),
        ("sqs://eu-central-1?timeout=0", "sqs://eu-central-1: timeout must be a number of seconds"),
        (
            "sns://eu-central-1/shop",
            f"sns://eu-central-1/shop: the path begins with the account of the topics, of 12 digits; {FORM_OF_SNS}",
        ),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused(url, text):
    with pytest.raises(SenderError) as refused:
        open_sender(url)

    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("url", "topic", "name"),
    [
        ("sqs://eu-central-1", "orders", "orders"),
        ("sqs://us-gov-west-1/123456789012", "orders", "orders"),
        ("sqs://eu-central-1/shop", "orders", "shop-orders"),
        ("sqs://eu-central-1/123456789012/shop?fifo=1", "orders", "shop-orders.fifo"),
        ("sqs://eu-central-1/shop?fifo=1", "orders.fifo", "shop-orders.fifo"),
        ("sns://cn-north-1/123456789012/shop?fifo=0", "orders.fifo", "shop-orders.fifo"),
    ],
)
def test_a_topic_is_a_queue_with_the_prefix(url, topic, name):
    kind = aws._Topics if url.startswith("sns") else aws._Queues

    assert aws._Target.of(url, kind).name(topic) == name


def test_the_destination_is_what_decides_where_and_no_secret():
    url = "sqs://eu-central-1/123456789012/shop?endpoint=http://localhost:4566&fifo=1&timeout=7"

    where = "sqs://eu-central-1/123456789012/shop?endpoint=http%3A%2F%2Flocalhost%3A4566&fifo=1"
    assert SqsSender(url).destination == where
