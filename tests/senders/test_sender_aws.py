"""SQS and SNS: the contract, over a network that fails; what a message looks like; and the answers of AWS."""

import json
import logging
import random
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Reject, Unavailable
from outbox.senders import aws
from outbox.senders.aws import SnsSender, SqsSender
from outbox.senders.aws_message import read_message
from outbox.senders.key_order import Chains
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done
from tests.support.aws_queues import Queues
from tests.support.places import opened
from tests.support.servers.aws import ACCOUNT, CREDENTIALS, REGION
from tests.support.waiting import eventually
from tests.support.webhook_endpoint import Answer, Endpoint, Received

sender = opened("fifo_queues")


class AwsContract(SenderContract):
    """What both pass."""

    def test_a_big_call_is_stored_completely(self, destination, sender) -> None:
        """Store 2 000 messages of one call."""
        with closing(destination.open(seconds=Queues.patience)) as patient:
            super().test_a_big_call_is_stored_completely(destination, patient)


class TestSqs(AwsContract):
    """Standard queues pass the contract; moto keeps the order where AWS would not."""

    @pytest.fixture
    def destination(self, queues):
        """Queues of each test's own."""
        return queues


class TestSns(AwsContract):
    """FIFO topics pass the contract."""

    @pytest.fixture
    def destination(self, fifo_topics):
        """Topics of each test's own."""
        return fifo_topics


def test_the_fields_of_a_message_travel_as_documented(fifo_queues, sender):
    headers = {"X-Trace": "a: b", "name": "Zoë"}
    sent = a_message("orders", b"{}", key="order 7: ü%", tags="x/y", headers=headers, content_type="application/json")
    sent.created_at = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)

    check_all_done(sender.send([sent]), [sent])

    [taken] = fifo_queues.taken()
    attributes = {name: value["StringValue"] for name, value in taken.pop("MessageAttributes").items()}
    assert taken == {
        "queue": f"{fifo_queues.prefix}-orders.fifo",
        "group": "030c13ec8aadac73154b482f38f1d69b2b597327481babf93b352fcb96b450b0",
        "deduplication": str(sent.message_id),
        "Body": "{}",
    }
    assert json.loads(attributes.pop("outbox")) == {
        "X-Trace": "a: b",
        "name": "Zoë",
        "Outbox-Id": str(sent.message_id),
        "Outbox-Key": "order%207%3A%20%C3%BC%25",
        "Outbox-Tags": "x%2Fy",
        "Outbox-Created-At": "2026-01-31T12:00:00.123456+00:00",
        "Content-Type": "application/json",
        "Outbox-Topic": "orders",
    }
    assert attributes == {"Outbox-Tags": "x%2Fy"}


def test_a_topic_without_raw_delivery_is_read_in_the_same_way(aws, fifo_topics):
    """Its queue gets the notification as text."""
    name, plain = fifo_topics.name("orders"), f"{fifo_topics.prefix}-plain.fifo"
    aws.make(plain)
    arn = f"arn:aws:sqs:{REGION}:{ACCOUNT}:{plain}"
    aws.sns.subscribe(TopicArn=f"arn:aws:sns:{REGION}:{ACCOUNT}:{name}", Protocol="sqs", Endpoint=arn)
    sent = a_message("orders", b"\x00", key="k")

    with closing(fifo_topics.open()) as sender:
        check_all_done(sender.send([sent]), [sent])

    [received] = aws.sqs.receive_message(QueueUrl=aws.queue_url(plain))["Messages"]
    message = read_message(received)
    assert (message.message_id, message.topic, message.body) == (sent.message_id, "orders", b"\x00")
    aws.remove(plain)


@pytest.mark.parametrize("place", ["queues", "sns_topics"])
def test_a_missing_queue_or_topic_is_named_and_stops_only_its_topic(request, place):
    there = request.getfixturevalue(place)
    sent = [a_message(topic, n) for n, topic in enumerate(["orders", "odrers", "alpha"] * 10)]

    with closing(there.open()) as sender:
        verdicts = sender.send(sent)

    service, noun = {"queues": ("SQS", "queue"), "sns_topics": ("SNS", "topic")}[place]
    missing = Unavailable(f"{service}: no {noun} '{there.prefix}-odrers' in {REGION}; create it")
    assert verdicts == [DONE, missing, DONE] * 10


@pytest.mark.parametrize(
    ("topic", "line"),
    [
        ("orders.placed", '"orders.*" = "orders-*"'),
        ("orders.eu.placed", '"orders.eu.placed" = "orders-eu-placed"'),
        ("a%", '"a%" = "a-"'),
        ("a" * 100, f'"{"a" * 100}" = "{"a" * 61}"'),
    ],
)
def test_a_topic_that_is_no_name_of_a_queue_waits_for_a_line_of_configuration(fifo_queues, sender, topic, line):
    name = f"{fifo_queues.prefix}-{topic}.fifo"

    assert sender.send([a_message(topic, 1), a_message("orders", 2)]) == [
        Unavailable(
            f"SQS cannot carry it: {name!r} is no name of a queue, which has at most 80 letters, digits, - and _, and"
            f" perhaps .fifo; write in the route of outbox.toml: rename = {{{line}}}"
        ),
        DONE,
    ]


def test_a_message_above_the_limit_is_rejected_before_it_is_sent(fifo_queues, sender):
    """Body and attributes count together."""
    small = Message("orders", b"x")
    size = len("outbox") + len("String") + len(json.dumps({"Outbox-Id": small.id_text, "Outbox-Topic": "orders"})) - 3
    fits, exceeds = Message("orders", b"x" * (1_048_576 - size)), Message("orders", b"x" * (1_048_577 - size))

    verdicts = sender.send([exceeds, fits, small])

    reason = "SQS cannot carry it: 1048577 bytes with attributes are more than 1048576; send a link to the data"
    assert verdicts == [Reject(reason), DONE, DONE]


def test_missing_credentials_are_unavailable_in_plain_words(monkeypatch, queues):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")

    with closing(queues.open()) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    fix = "set AWS_ACCESS_KEY_ID, AWS_PROFILE, or give a role"
    assert verdict == Unavailable(f"SQS: {queues.endpoint}: AWS's own chain finds no credentials; {fix}")


class Sqs:
    """Stands in for SQS where single entries are to fail: `judge` says of each call what becomes of its entries."""

    def __init__(self, endpoint: Endpoint, judge: Callable[[list[dict[str, Any]]], Answer]) -> None:
        self.url = f"sqs://{REGION}/{ACCOUNT}/shop?fifo=1&endpoint={endpoint.url}"
        #: The entries of each call.
        self.calls: list[list[dict[str, Any]]] = []
        self._judge = judge
        self._lock = threading.Lock()
        endpoint.judge = self._answer

    def _answer(self, received: Received) -> Answer:
        asked = json.loads(received.body)
        with self._lock:
            if "Entries" not in asked:
                return Answer(200, json.dumps({"QueueUrl": f"http://aws/{asked['QueueName']}"}).encode())
            self.calls.append(asked["Entries"])
            return self._judge(asked["Entries"])


def answered(stored: list[dict[str, Any]], failed: list[tuple[dict[str, Any], str, bool]] | None = None) -> Answer:
    """SQS's answer: which entries it has stored, and which not, with a code and whose fault that is."""
    refused = [
        {"Id": entry["Id"], "Code": code, "SenderFault": fault, "Message": "no"} for entry, code, fault in failed or []
    ]
    found = [{"Id": entry["Id"], "MessageId": "1", "MD5OfMessageBody": "2"} for entry in stored]
    return Answer(200, json.dumps({"Successful": found, "Failed": refused}).encode())


def refused(code: str, text: str = "no", status: int = 400) -> Answer:
    """SQS's answer to a call that it refuses as a whole."""
    body = json.dumps({"__type": f"com.amazonaws.sqs#{code}", "message": text}).encode()
    return Answer(status, body, {"x-amzn-query-error": f"{code};Sender"})


@pytest.fixture
def to_sqs(endpoint):
    """Opens a sender to a stand-in."""
    opened: list[SqsSender] = []

    def open_one(judge: Callable[[list[dict[str, Any]]], Answer]) -> tuple[Sqs, SqsSender]:
        sqs = Sqs(endpoint, judge)
        opened.append(SqsSender(sqs.url, timeout=timedelta(seconds=30)))
        return sqs, opened[-1]

    yield open_one
    for sender in opened:
        sender.close()


def test_each_entry_has_a_verdict_of_its_own(to_sqs):
    """Only what AWS blames on the message is a dead letter, and only by codes that are known to mean that."""
    codes = {
        "1": ("InvalidMessageContents", True),
        "2": ("InternalError", False),
        "3": ("AWS.SimpleQueueService.InvalidParameterValue", True),
        "4": ("KMS.AccessDeniedException", True),
        "5": ("ThrottlingException", False),
    }

    def judge(entries: list[dict[str, Any]]) -> Answer:
        failed = [(entry, *codes[entry["MessageBody"]]) for entry in entries if entry["MessageBody"] in codes]
        return answered([entry for entry in entries if entry["MessageBody"] not in {*codes, "6"}], failed)

    _, sender = to_sqs(judge)
    verdicts = sender.send([a_message("orders", n) for n in range(8)])

    where = "SQS on queue 'shop-orders.fifo'"
    assert verdicts == [
        DONE,
        Reject(f"{where}: InvalidMessageContents: no"),
        Unavailable(f"{where}: InternalError: no"),
        Reject(f"{where}: InvalidParameterValue: no"),
        Unavailable(f"{where}: KMS.AccessDeniedException: no"),
        Unavailable(f"{where}: ThrottlingException: no"),
        Unavailable(f"{where}: no answer about the message"),
        DONE,
    ]


def test_a_call_holds_ten_messages_of_ten_keys_and_256_kib(to_sqs):
    """The next message of a key waits for the answer."""
    sqs, sender = to_sqs(answered)
    sent = [a_message("orders", n, key=f"k{n % 3}") for n in range(6)] + [a_message("orders", n) for n in range(6, 20)]
    sent += [a_message("alpha", "x" * 100_000) for _ in range(3)]

    check_all_done(sender.send(sent), sent)

    sizes = sorted((len(call), len({entry["MessageGroupId"] for entry in call})) for call in sqs.calls)
    assert sizes == [(1, 1), (2, 2), (3, 3), (7, 7), (10, 10)]


def test_a_call_that_is_refused_for_one_message_is_sent_apart(to_sqs):
    """As with a queue that takes less than AWS's own limit."""

    def judge(entries: list[dict[str, Any]]) -> Answer:
        if sum(len(entry["MessageBody"]) for entry in entries) > 100:
            return refused("AWS.SimpleQueueService.BatchRequestTooLong", "Batch requests cannot be longer than 100")
        return answered(entries)

    _, sender = to_sqs(judge)
    verdicts = sender.send([a_message("orders", "x" * size) for size in (60, 101, 60)])

    reason = "SQS on queue 'shop-orders.fifo': BatchRequestTooLong: Batch requests cannot be longer than 100"
    assert verdicts == [DONE, Reject(reason), DONE]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (refused("RequestThrottled", "slow down"), "{url}: RequestThrottled: slow down"),
        (refused("InvalidClientTokenId", "wrong", 403), "{url}: InvalidClientTokenId: wrong"),
        (refused("SignatureDoesNotMatch", "x-amz-security-token:t0ken", 403), "{url}: SignatureDoesNotMatch"),
        (refused("AccessDenied", "not yours", 403), "SQS on queue 'shop-orders.fifo': AccessDenied: not yours"),
        (Answer(503, b"<html>busy</html>"), "{url}: 503: Service Unavailable"),
        (Answer(307, b"", {"Location": "http://127.0.0.1:1/"}), "{url}: 307"),
        (Answer(200, b"thank you"), "SQS on queue 'shop-orders.fifo': no answer about the message"),
        (Answer(200, b"{}"), "SQS on queue 'shop-orders.fifo': no answer about the message"),
    ],
)
def test_an_answer_that_is_no_success_is_unavailable_and_tells_no_secret(to_sqs, endpoint, caplog, answer, text):
    caplog.set_level(logging.DEBUG, logger="outbox")
    _, sender = to_sqs(lambda entries: answer)

    [verdict] = sender.send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(text.format(url=f"SQS: {endpoint.url}"))
    assert verdict.everything is text.startswith("{url}")
    assert not [
        each for each in ("t0ken", *CREDENTIALS.values()) if len(each) > 4 and each in caplog.text + str(verdict)
    ]


@pytest.mark.parametrize("order", ["each", "never"])
def test_a_key_keeps_its_order_while_entries_fail_at_random(monkeypatch, to_sqs, order):
    """The twin hands over a message before the one before it, of the same key, is stored; the test catches that."""
    monkeypatch.setattr(aws, "Chains", partial(Chains, order=order))
    chance = random.Random(1)
    stored: list[str] = []

    def judge(entries: list[dict[str, Any]]) -> Answer:
        lucky = [entry for entry in entries if chance.random() < 0.7]
        stored.extend(entry["MessageDeduplicationId"] for entry in lucky)
        return answered(lucky, [(entry, "InternalError", False) for entry in entries if entry not in lucky])

    sent = [a_message("orders", n, key=f"k{n % 12}") for n in range(240)]
    _, sender = to_sqs(judge)
    left = sent
    while left:
        left = [one for one, verdict in zip(left, sender.send(left), strict=True) if not isinstance(verdict, Done)]

    arrived = list(dict.fromkeys(stored))
    kept = [[n for n in arrived if n in {str(one.message_id) for one in sent[key::12]}] for key in range(12)]
    assert (kept == [[str(one.message_id) for one in sent[key::12]] for key in range(12)]) is (order == "each")


@pytest.mark.timed("an answer that trickles outlives a call by its time alone")
def test_a_server_that_trickles_its_answer_keeps_no_thread():
    """The driver's time-outs begin anew with each piece."""
    before = set(threading.enumerate())
    trickle = b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(90))
    ended = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            for piece in range(len(trickle)):
                connection.sendall(trickle[piece : piece + 1])
                if ended.wait(0.05):
                    break

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        threading.Thread(target=serve, name="server").start()
        url = f"sqs://{REGION}/{ACCOUNT}/shop?endpoint=http://127.0.0.1:{server.getsockname()[1]}"
        with closing(SqsSender(url, timeout=timedelta(seconds=1))) as sender:
            [verdict] = sender.send([a_message("orders", 1)])
        left = eventually(lambda: {each.name for each in set(threading.enumerate()) - before} <= {"server"})
        ended.set()

    assert (type(verdict), left) == (Unavailable, True)


def test_sns_is_asked_by_the_arn_of_its_partition(endpoint):
    endpoint.judge = lambda received: Answer(503)
    with closing(SnsSender(f"sns://cn-north-1/{ACCOUNT}/shop?endpoint={endpoint.url}")) as sender:
        sender.send([a_message("orders", 1)])

    assert b"TopicArn=arn%3Aaws-cn%3Asns%3Acn-north-1%3A123456789012%3Ashop-orders&" in endpoint.asked[0].body
