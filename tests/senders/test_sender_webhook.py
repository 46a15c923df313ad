"""Webhooks: the contract, over a network that fails; and what a message looks like on its way."""

import logging
import subprocess
import sys
import time
from importlib import import_module
from urllib.parse import quote

import pytest

from outbox.errors import MissingExtraError
from outbox.model.message import Message, uuid7
from outbox.model.verdict import DONE, Reject, Unavailable
from outbox.senders.webhook_reading import read_message
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done
from tests.support.remote import a_full_message
from tests.support.webhook_endpoint import Answer
from tests.support.webhooks import SECRET, told

FIX = "send the message anew without that, and discard this one"

#: What every request has.
HTTP = {
    "Accept": "*/*",
    "Accept-Encoding": "identity",
    "Connection": "keep-alive",
    "User-Agent": "outbox",
}


class TestWebhookSender(SenderContract):
    """An endpoint passes the contract."""

    @pytest.fixture
    def destination(self, hook):
        """A path of its own for each test."""
        return hook

    def test_a_big_call_is_stored_completely(self, destination, sender):
        """A request for each of so many messages takes longer than the other tests allow."""
        patient = destination.open(seconds=60)
        super().test_a_big_call_is_stored_completely(destination, patient)
        patient.close()


# What arrives


def test_the_fields_of_a_message_travel_as_documented_headers(endpoint, to_webhook):
    sent = a_full_message()

    check_all_done(to_webhook(f"{endpoint.url}/orders").send([sent]), [sent])

    [received] = endpoint.kept
    headers = dict(received.headers)
    assert abs(int(headers.pop("webhook-timestamp")) - time.time()) < 10
    assert (received.target, received.body) == ("/orders", b"{}")
    assert headers == HTTP | {
        "Host": endpoint.url.removeprefix("http://"),
        "Content-Length": "2",
        "webhook-id": str(sent.message_id),
        "Outbox-Topic": "orders",
        "Outbox-Key": "order%207%3A%20%C3%BC%25",
        "Outbox-Tags": "placed%2Fp%C3%A4id",
        "Outbox-Created-At": "2026-01-31T14:00:00.123456+00:00",
        "Outbox-Headers": "X-Trace,name",
        "Content-Type": "application/json",
        "X-Trace": "a: b",
        "name": "Zoë".encode().decode("latin-1"),
    }


def test_a_field_that_a_message_has_not_is_not_sent(endpoint, to_webhook):
    sent = Message("orders", b"")

    check_all_done(to_webhook(endpoint.url).send([sent]), [sent])

    [received] = endpoint.kept
    ours = set(received.headers) - set(HTTP) - {"Host", "Content-Length"}
    assert ours == {"webhook-id", "webhook-timestamp", "Outbox-Topic"}
    assert received.target == "/"


@pytest.mark.parametrize("spelt", [str, str.lower, str.upper], ids=["as sent", "lower", "upper"])
def test_an_endpoint_reads_the_message_back(endpoint, to_webhook, spelt):
    """Also where a framework spells names in its own way, and proxies have added headers."""
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "Zoë", "X-Y": ""})
    to_webhook(endpoint.url).send([sent])
    [received] = endpoint.kept
    headers = {spelt(name): value for name, value in received.headers.items()}

    message = read_message({**headers, "X-Forwarded-For": "10.0.0.1", "traceparent": "00-1"}, received.body)

    assert (message.message_id, message.topic, message.key, message.tags) == (sent.message_id, "orders", "a b", "x")
    assert (message.headers, message.body) == ({"n": "Zoë", "X-Y": ""}, b'{"id":7}')
    assert (message.content_type, message.created_at, message.id) == ("application/json", sent.created_at, None)


def test_headers_that_a_framework_has_decoded_are_not_decoded_again():
    headers = {"webhook-id": str(uuid7()), "outbox-topic": "orders", "outbox-headers": "name", "name": "Zoé Ω"}

    assert read_message(headers, b"").headers == {"name": "Zoé Ω"}


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"outbox-topic": "orders"}, KeyError),
        ({"webhook-id": str(uuid7())}, KeyError),
        ({"webhook-id": "msg_1", "outbox-topic": "orders"}, ValueError),
        ({"webhook-id": str(uuid7()), "outbox-topic": "a b"}, ValueError),
        ({"webhook-id": str(uuid7()), "outbox-topic": "orders", "outbox-created-at": "now"}, ValueError),
        ({"webhook-id": str(uuid7()), "outbox-topic": "orders", "outbox-key": "%ff"}, ValueError),
    ],
)
def test_what_no_outbox_wrote_is_not_read_as_a_message(headers, error):
    with pytest.raises(error):
        read_message(headers, b"hello")


def test_the_url_is_called_as_it_is_written_but_for_our_options(endpoint, to_webhook):
    url = f"{endpoint.url}/a%20b/c?token=%2Fx&timeout=3&q=1&q=2&%6Dost=json&format=json&most=4&empty="

    check_all_done(to_webhook(url).send(sent := [a_message("orders", 1)]), sent)

    assert endpoint.kept[0].target == "/a%20b/c?token=%2Fx&q=1&q=2&%6Dost=json&format=json&empty="


@pytest.mark.parametrize(
    ("credentials", "header"),
    [
        ("ann:pass", "Basic YW5uOnBhc3M="),
        ("ann:p%40ss%3Aw%2Frd%3F%23", "Basic YW5uOnBAc3M6dy9yZD8j"),
        ("token", "Basic dG9rZW46"),
    ],
)
def test_what_stands_before_the_at_is_basic_authentication(endpoint, to_webhook, credentials, header):
    sender = to_webhook(endpoint.url.replace("//", f"//{credentials}@"))

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

    assert endpoint.kept[0].headers["Authorization"] == header


def test_no_cookie_is_kept(endpoint, to_webhook):
    endpoint.judge = lambda received: Answer(200, headers={"Set-Cookie": "session=1; Path=/"})
    sender = to_webhook(endpoint.url)

    for n in range(2):
        sender.send([a_message("orders", n)])

    assert ["Cookie" in received.headers for received in endpoint.kept] == [False, False]


# Rows that another hand wrote


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "content-length",
        "Transfer-Encoding",
        "Connection",
        "Authorization",
        "Cookie",
        "Content-Encoding",
        "Expect",
        "X-HTTP-Method-Override",
        "X-Forwarded-For",
        "X-Original-URL",
        "webhook-signature",
        "Webhook-Id",
        "ce-id",
        "If-Match",
    ],
)
def test_a_header_that_orders_servers_about_is_rejected(endpoint, to_webhook, name):
    sent = [a_message("orders", 1, headers={name: "0"}), a_message("orders", 2, headers={f"My-{name}": "0"})]

    refused, done = to_webhook(endpoint.url).send(sent)

    assert refused == Reject(f"headers[{name!r}]: the name is reserved by HTTP; {FIX}")
    assert done is DONE


# Secrets


def test_secrets_are_never_told(endpoint, to_webhook, caplog, tmp_path):
    """Not even when the endpoint repeats them, at any level of logging, nor by the text of the sender."""
    caplog.set_level(logging.DEBUG)
    whsec = "whsec_c2Vzc2FtZXNlc2FtZXNlc2FtZXNlc2FtZQ=="
    (tmp_path / "secret").write_text(whsec)
    query = f"token={quote(SECRET, safe='')}&key=K3y%2BK3y"
    said = f"no user ann with {SECRET} in /x?{query}, token K3y+K3y, YW5uOnMzY3IzdC9TZXNhbWU="
    statuses = iter((401, 422, 500, 204))
    endpoint.judge = lambda received: Answer(next(statuses), said.encode())
    credentials = f"ann:{quote(SECRET, safe='')}"
    url = endpoint.url.replace("//", f"//{credentials}@")
    sender = to_webhook(f"{url}/x?{query}&secret-file={tmp_path}/secret")

    verdicts = [sender.send([a_message("orders", n)]) for n in range(4)]

    texts = caplog.text + repr(verdicts) + repr(sender) + repr(vars(sender)) + sender.destination
    assert "it says: no user ann with … in /x?token=…&key=…, token …, …" in repr(verdicts)
    assert [each for each in ("s3cr3t", "Sesame", "K3y", "c2Vzc2FtZ", "YW5uOn") if each in texts] == []
    assert "httpcore" in caplog.text
    assert len(endpoint.asked) == 4


def test_wrong_credentials_are_unavailable_and_never_told(endpoint, to_webhook, caplog):
    caplog.set_level(logging.DEBUG)
    endpoint.judge = lambda received: Answer(401, b"who are you?")

    [verdict] = to_webhook(endpoint.url.replace("//", "//ann:s3cr3t@")).send([a_message("orders", 1)])

    what = "HTTP 401 Unauthorized; check the credentials, and the secret; it says: who are you?"
    assert verdict == Unavailable(told(endpoint.url, what))
    assert "s3cr3t" not in caplog.text + repr(verdict)


def test_a_request_has_no_line_in_the_log(endpoint, to_webhook, caplog):
    """The driver's client would write one for each, at the level of what an operator reads."""
    caplog.set_level(logging.INFO)

    check_all_done(to_webhook(endpoint.url).send(sent := [a_message("orders", n) for n in range(10)]), sent)

    assert caplog.messages == [f"Webhook: connected to {endpoint.url}"]


# Packaging


def test_a_receiver_needs_no_driver():
    script = """
import sys
sys.modules["httpcore2"] = sys.modules["httpx"] = None
from outbox.senders.webhook_reading import read_message, verify
"""

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_missing_driver_is_named_by_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "outbox.senders.webhook")
    monkeypatch.setitem(sys.modules, "httpcore2", None)

    with pytest.raises(MissingExtraError, match=r"webhooks need an extra: pip install 'outbox-log\[http\]'"):
        import_module("outbox.senders.webhook")
