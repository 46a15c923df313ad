"""Webhooks: the contract, over a network that fails; and what a message looks like on its way."""

import logging
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from importlib import import_module
from urllib.parse import quote

import pytest

from outbox.errors import MissingExtraError, SenderError
from outbox.model.message import Message, stored_message, uuid7
from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.text import one_line
from outbox.senders.port import destination_of
from outbox.senders.webhook import WebhookSender
from outbox.senders.webhook_answer import MOST_SECONDS, Pause
from outbox.senders.webhook_answer import Answer as Answered
from outbox.senders.webhook_reading import read_message
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_eventually_done
from tests.support.pages import TOP
from tests.support.tls import CERTIFICATE, FOREIGN, server_context
from tests.support.webhook_endpoint import Answer, Endpoint
from tests.support.webhooks import Babbler, Parrot

FIX = "send the message anew without that, and discard this one"
SECRET = "s3cr3t/Sesame"

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


@pytest.fixture
def to() -> Iterator[Callable[..., WebhookSender]]:
    """Opens senders, and closes them in the end."""
    opened: list[WebhookSender] = []

    def open_one(url: str, *, seconds: float = 5.0) -> WebhookSender:
        opened.append(WebhookSender(url, timeout=timedelta(seconds=seconds)))
        return opened[-1]

    yield open_one
    for sender in opened:
        sender.close()


def told(url: str, what: str) -> str:
    """The text of a verdict that concerns the whole endpoint."""
    return f"Webhook: {url}: {what}"


# What arrives


def test_the_fields_of_a_message_travel_as_documented_headers(endpoint, to):
    sent = a_message(
        "orders",
        b"{}",
        key="order 7: ü%",
        tags="placed/päid",
        headers={"X-Trace": "a: b", "name": "Zoë"},
        content_type="application/json",
    )
    sent.created_at = datetime(2026, 1, 31, 14, 0, 0, 123456, tzinfo=UTC).astimezone(timezone(timedelta(hours=2)))

    check_all_done(to(f"{endpoint.url}/orders").send([sent]), [sent])

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


def test_a_field_that_a_message_has_not_is_not_sent(endpoint, to):
    sent = Message("orders", b"")

    check_all_done(to(endpoint.url).send([sent]), [sent])

    [received] = endpoint.kept
    ours = set(received.headers) - set(HTTP) - {"Host", "Content-Length"}
    assert ours == {"webhook-id", "webhook-timestamp", "Outbox-Topic"}
    assert received.target == "/"


@pytest.mark.parametrize("spelt", [str, str.lower, str.upper], ids=["as sent", "lower", "upper"])
def test_an_endpoint_reads_the_message_back(endpoint, to, spelt):
    """Also where a framework spells names in its own way, and proxies have added headers."""
    sent = a_message("orders", {"id": 7}, key="a b", tags="x", headers={"n": "Zoë", "X-Y": ""})
    to(endpoint.url).send([sent])
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


def test_the_url_is_called_as_it_is_written_but_for_our_options(endpoint, to):
    url = f"{endpoint.url}/a%20b/c?token=%2Fx&timeout=3&q=1&q=2&%66ormat=json&format=raw&most=4&empty="

    check_all_done(to(url).send(sent := [a_message("orders", 1)]), sent)

    assert endpoint.kept[0].target == "/a%20b/c?token=%2Fx&q=1&q=2&%66ormat=json&empty="


@pytest.mark.parametrize(
    ("credentials", "header"),
    [
        ("ann:pass", "Basic YW5uOnBhc3M="),
        ("ann:p%40ss%3Aw%2Frd%3F%23", "Basic YW5uOnBAc3M6dy9yZD8j"),
        ("token", "Basic dG9rZW46"),
    ],
)
def test_what_stands_before_the_at_is_basic_authentication(endpoint, to, credentials, header):
    sender = to(endpoint.url.replace("//", f"//{credentials}@"))

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

    assert endpoint.kept[0].headers["Authorization"] == header


def test_no_cookie_is_kept(endpoint, to):
    endpoint.judge = lambda received: Answer(200, headers={"Set-Cookie": "session=1; Path=/"})
    sender = to(endpoint.url)

    for n in range(2):
        sender.send([a_message("orders", n)])

    assert ["Cookie" in received.headers for received in endpoint.kept] == [False, False]


# What is refused

WRONG_URL = "check the URL"
STATUSES: dict[int, Verdict] = {
    200: DONE,
    201: DONE,
    202: DONE,
    204: DONE,
    299: DONE,
    400: Reject("HTTP 400 Bad Request"),
    406: Reject("HTTP 406 Not Acceptable"),
    409: Reject("HTTP 409 Conflict"),
    413: Reject("HTTP 413 Request Entity Too Large"),
    415: Reject("HTTP 415 Unsupported Media Type"),
    422: Reject("HTTP 422 Unprocessable Entity"),
    431: Reject("HTTP 431 Request Header Fields Too Large"),
    499: Reject("HTTP 499"),
    408: Unavailable("HTTP 408 Request Timeout"),
    425: Unavailable("HTTP 425 Too Early"),
    500: Unavailable("HTTP 500 Internal Server Error"),
    502: Unavailable("HTTP 502 Bad Gateway"),
    504: Unavailable("HTTP 504 Gateway Timeout"),
    507: Unavailable("HTTP 507 Insufficient Storage"),
    599: Unavailable("HTTP 599"),
}
#: Those that concern every message, with what is said of the whole endpoint.
OF_THE_ENDPOINT = {
    300: "HTTP 300 Multiple Choices; it redirects, which is not followed; correct the URL",
    304: "HTTP 304 Not Modified; it redirects, which is not followed; correct the URL",
    401: "HTTP 401 Unauthorized; check the user and the password in the URL, and the secret",
    402: "HTTP 402 Payment Required; the endpoint wants to be paid",
    403: "HTTP 403 Forbidden; check what the user may do",
    404: "HTTP 404 Not Found; check the URL",
    405: "HTTP 405 Method Not Allowed; the URL takes no POST; check it",
    407: "HTTP 407 Proxy Authentication Required; check the user and the password of the proxy",
    410: "HTTP 410 Gone; the endpoint wants no more messages; drop the subscription, or give it another URL",
    421: "HTTP 421 Misdirected Request; check the URL",
    426: "HTTP 426 Upgrade Required; the endpoint wants another protocol",
    429: "HTTP 429 Too Many Requests",
    501: "HTTP 501 Not Implemented; the URL takes no POST; check it",
    503: "HTTP 503 Service Unavailable",
    505: "HTTP 505 HTTP Version Not Supported; the endpoint does not speak HTTP/1.1",
    511: "HTTP 511 Network Authentication Required; the network wants a login",
}


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_decides_about_its_message_alone(endpoint, to, status):
    endpoint.judge = lambda received: Answer(status if received.body == b"2" else 204)

    verdicts = to(endpoint.url).send([a_message("orders", n, key="k" if n == 2 else None) for n in range(5)])

    assert verdicts == [DONE, DONE, STATUSES[status], DONE, DONE]
    assert [each.everything for each in verdicts if isinstance(each, Unavailable)] in ([], [False])


@pytest.mark.parametrize("status", OF_THE_ENDPOINT)
def test_a_status_of_the_whole_endpoint_makes_all_messages_wait_and_ends_the_call(endpoint, to, status):
    """Otherwise a mistyped URL would make dead letters of them."""
    endpoint.judge = lambda received: Answer(status)

    verdicts = to(f"{endpoint.url}/?most=4").send([a_message("orders", n) for n in range(100)])

    assert verdicts == [Unavailable(told(f"{endpoint.url}/", OF_THE_ENDPOINT[status]))] * 100
    assert all(isinstance(each, Unavailable) and each.everything for each in verdicts)
    assert len(endpoint.asked) <= 4


def test_the_page_says_what_each_status_means():
    """Each status that the tests know stands in the row of its verdict."""
    page = (TOP / "docs" / "webhooks.md").read_text()
    rows = {
        verdict: "".join(line for line in page.splitlines() if f"| {verdict} |" in line)
        for verdict in ("every message waits", "this message waits", "a dead letter")
    }
    expected = {status: "every message waits" for status in OF_THE_ENDPOINT if status >= 400}
    for status, meant in STATUSES.items():
        if status not in (499, 507, 599) and meant is not DONE:
            expected[status] = "a dead letter" if isinstance(meant, Reject) else "this message waits"

    for status, verdict in expected.items():
        assert [each for each, row in rows.items() if f"`{status}`" in row] == [verdict], status


def test_a_redirect_is_not_followed_and_credentials_stay_here(endpoint, to):
    with Endpoint() as other:
        location = f"{other.url.replace('//', '//x:y@')}/new?token=1"
        endpoint.judge = lambda received: Answer(307, headers={"Location": location})
        sender = to(endpoint.url.replace("//", f"//ann:{quote(SECRET, safe='')}@"))

        [verdict] = sender.send([a_message("orders", 1)])

        advice = f"it redirects to {other.url}/new, which is not followed; correct the URL"
        assert verdict == Unavailable(told(endpoint.url, f"HTTP 307 Temporary Redirect; {advice}"))
        assert other.asked == []


def test_a_redirect_to_nowhere_is_unavailable(endpoint, to):
    endpoint.judge = lambda received: Answer(301, headers={"Location": "http://[:x"})

    [verdict] = to(endpoint.url).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)


def test_the_first_characters_of_an_answer_are_told_fit_for_a_terminal(endpoint, to):
    said = "field\x1b[31m 'x'\r\n\tis \u202emissing " + "y" * 500
    endpoint.judge = lambda received: Answer(422, said.encode() + b"\xff")

    [verdict] = to(endpoint.url).send([a_message("orders", 1)])

    assert isinstance(verdict, Reject)
    shown = verdict.error.removeprefix("HTTP 422 Unprocessable Entity; it says: ")
    assert shown.startswith("field\ufffd[31m 'x' is \ufffdmissing yyy")
    assert (len(shown), shown.isprintable(), shown) == (200, True, one_line(said, 200))


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02F",
        b"",
        b"HTTP/1.1 ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
    ],
    ids=lambda answer: repr(answer[:40]),
)
def test_what_is_no_complete_answer_is_unavailable(to, answer):
    """Any program may listen there. A status alone is no answer: what follows it may have been a failure."""
    with Parrot(answer) as parrot:
        [verdict] = to(parrot.url, seconds=2).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error


def test_a_long_answer_is_not_read_to_its_end(to):
    """Its connection is closed, so that nothing of it passes for the next answer."""
    chunk = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 5_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n"
    with Parrot(head, *[chunk] * 100) as parrot:
        sender = to(parrot.url, seconds=5)

        verdicts = [sender.send([a_message("orders", n)])[0] for n in range(2)]

        assert verdicts == [DONE, DONE]
        assert parrot.connections == 2


YES = b"HTTP/1.1 204 No Content\r\n\r\n"
LONG_YES = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP/"


@pytest.mark.parametrize(
    "said",
    [
        [[YES + YES]],
        [[YES, YES]],  # the second when the first was read
        [[YES + b"HTTP/1.1 408 Request Timeout\r\n\r\n"]],
        [[LONG_YES + YES]],
        [[LONG_YES + LONG_YES]],
        *([[YES + YES[:cut]], [YES[cut:]]] for cut in (1, 4, 5, 20)),  # the rest when there is another request
    ],
)
@pytest.mark.parametrize("is_safe", [False, True])
def test_a_second_answer_to_one_request_is_not_that_to_the_next(to, said, is_safe):
    """That goes over another connection, where it is refused."""
    with Babbler(*said, tls=server_context() if is_safe else None) as babbler:
        sender = to(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else ""))
        first = sender.send([a_message("orders", 1)])
        time.sleep(0.1)
        second = sender.send([a_message("orders", 2)])

    assert (first, second) == ([DONE], [Unavailable("HTTP 500 Internal Server Error")])


@pytest.mark.parametrize("is_safe", [False, True])
def test_a_second_answer_is_not_that_to_the_next_request_of_a_call(to, is_safe):
    """With TLS, it comes in a record of its own, and both records in one packet."""
    with Babbler([YES, YES], tls=server_context() if is_safe else None, pause=0) as babbler:
        sender = to(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else ""))
        verdicts = sender.send([a_message("orders", n, key="k") for n in range(2)])

    assert verdicts == [DONE, Unavailable("HTTP 500 Internal Server Error")]


@pytest.mark.parametrize("is_safe", [False, True])
def test_one_answer_a_request_needs_one_connection(to, is_safe):
    """Also where it comes in parts, has a body like the beginning of an answer, or another one that says to go on."""
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    said = [[YES], [LONG_YES], [go_on + YES], [YES[:2], YES[2:]], [LONG_YES[:-3], LONG_YES[-3:]], [go_on, LONG_YES]]
    with Babbler(*said, tls=server_context() if is_safe else None) as babbler:
        sent = [a_message("orders", n, key="k") for n in range(len(said))]
        verdicts = to(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else "")).send(sent)

    assert (verdicts, babbler.connections) == ([DONE] * len(said), 1)


def test_an_answer_that_comes_too_slowly_is_unavailable(to):
    with Parrot(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *[b"x"] * 100, pause=0.1) as parrot:
        began = time.monotonic()
        [verdict] = to(parrot.url, seconds=3).send([a_message("orders", 1)])

    assert verdict == Unavailable(told(parrot.url, "no answer within 2.7 s"))
    assert time.monotonic() - began < 4.5


def test_a_refused_connection_is_told(to):
    with Endpoint() as gone:
        pass

    verdicts = to(gone.url).send([a_message("orders", n) for n in range(3)])

    assert verdicts == [Unavailable(told(gone.url, "connection refused"))] * 3
    assert all(isinstance(each, Unavailable) and each.everything for each in verdicts)


def test_an_unknown_host_is_told(to):
    [verdict] = to("http://no-such-host.invalid/x").send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith("Webhook: http://no-such-host.invalid/x: ")
    assert verdict.everything


# Rows that another hand wrote


@pytest.mark.parametrize("format", ["raw", "cloudevents", "cloudevents-structured"])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"headers": '{"a b": "c"}'}, "headers['a b']: the name must be of letters, digits and -"),
        ({"headers": '{"": "c"}'}, "headers['']: the name must be of letters, digits and -"),
        ({"headers": '{"a": "b\\r\\nwebhook-id: c"}'}, "headers['a']: must be one line of UTF-8"),
        ({"headers": '{"a": "\\ud800"}'}, "headers['a']: must be one line of UTF-8"),
        ({"headers": '{"a": "b\\u0000"}'}, "headers['a']: must hold no control characters"),
        ({"headers": '{"a": "b\\u000b"}'}, "headers['a']: must hold no control characters"),
        ({"headers": '{"a": " b"}'}, "headers['a']: must hold no control characters, and neither begin nor end with a"),
        ({"headers": '{"A": "1", "a": "2"}'}, "headers: must not hold one name in two cases"),
        ({"headers": "[oops"}, "headers: must be a JSON object of strings, not '[oops'"),
        ({"headers": '{"Outbox_Key": "k"}'}, "headers['Outbox_Key']: servers read it as a reserved name"),
        ({"headers": '{"webhook_id": "k"}'}, "headers['webhook_id']: servers read it as a reserved name"),
        ({"topic": "a b"}, "topic: must be 1 to 249 characters of [A-Za-z0-9._%|-], not . or .., but is 'a b'; send"),
        ({"topic": ""}, "topic: must be 1 to 249 characters of"),
        ({"topic": "a\r\nHost: b"}, "topic: must be 1 to 249 characters of"),
        ({"topic": "\ud800"}, "topic: holds a lone surrogate"),
        ({"content_type": "a\r\nb: c"}, "content_type: must be one line of UTF-8"),
        ({"key": "\ud800"}, ""),
        ({"tags": "\ud800"}, ""),
    ],
)
def test_a_row_that_another_hand_wrote_is_rejected_alone(endpoint, to, fields, reason, format):
    """The limits of `Message` are no limits of the table."""
    row = {"topic": "orders", "key": None, "tags": None, "headers": None, "body": b"", "content_type": None}
    times = {"created_at": datetime.now(UTC), "deliver_at": None, "expires_at": None}
    strange = stored_message(1, uuid7(), **(row | fields | times))

    sent = [a_message("orders", 1), strange, a_message("orders", 2)]
    [before, refused, after] = to(f"{endpoint.url}?format={format}").send(sent)

    assert (before, after) == (DONE, DONE)
    assert isinstance(refused, Reject)
    assert refused.error.startswith(reason)
    assert sorted(received.body for received in endpoint.kept if format != "cloudevents-structured") in (
        [],
        [b"1", b"2"],
    )


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
def test_a_header_that_orders_servers_about_is_rejected(endpoint, to, name):
    sent = [a_message("orders", 1, headers={name: "0"}), a_message("orders", 2, headers={f"My-{name}": "0"})]

    refused, done = to(endpoint.url).send(sent)

    assert refused == Reject(f"headers[{name!r}]: the name is reserved by HTTP; {FIX}")
    assert done is DONE


# To be left alone


def test_no_request_goes_out_before_the_time_of_retry_after_is_over(endpoint, to):
    """Not even from another call, and calls meanwhile return at once."""
    endpoint.judge = lambda received: Answer(429, b"slow down", {"Retry-After": "2"})
    sender = to(f"{endpoint.url}?most=1", seconds=5)
    began = time.monotonic()

    verdicts = [sender.send([a_message("orders", n) for n in range(20)]) for _ in range(3)]
    returned = time.monotonic() - began
    endpoint.judge = lambda received: Answer()
    sender.close()  # a pause is the endpoint's wish, and outlives the connections
    check_eventually_done(sender, [a_message("orders", 1)])

    what = "HTTP 429 Too Many Requests; Retry-After: 2 s; it says: slow down"
    assert verdicts == [[Unavailable(told(endpoint.url, what))] * 20] * 3
    assert all(isinstance(each, Unavailable) and each.everything for part in verdicts for each in part)
    assert (returned < 1.5, len(endpoint.asked)) == (True, 2)
    assert 2 <= time.monotonic() - began < 4


def test_what_is_under_way_when_the_endpoint_asks_for_a_pause_may_still_be_done(endpoint, to):
    """And nothing else is sent."""
    both_here = threading.Barrier(2, timeout=5)

    def judge(received):
        both_here.wait()
        if received.body == b"0":
            return Answer(503, headers={"Retry-After": "60"})
        time.sleep(0.3)
        return Answer()

    endpoint.judge = judge
    verdicts = to(f"{endpoint.url}?most=2").send([a_message("orders", n) for n in range(5)])

    away = Unavailable(told(endpoint.url, "HTTP 503 Service Unavailable; Retry-After: 60 s"))
    assert verdicts == [away, DONE, away, away, away]
    assert len(endpoint.asked) == 2


def test_an_answer_that_cannot_be_judged_concerns_its_message_alone(endpoint, to, monkeypatch):
    """Whatever an endpoint writes, the others of the call have been taken."""

    def judge(answer: Answered) -> Verdict:
        if answer.status == 503:
            raise OverflowError("too large")
        return DONE

    endpoint.judge = lambda received: Answer(503 if received.body == b"2" else 200)
    monkeypatch.setattr(Answered, "verdict", judge)

    verdicts = to(f"{endpoint.url}?most=2").send([a_message("orders", n) for n in range(5)])

    assert verdicts == [DONE, DONE, Unavailable(told(endpoint.url, "too large")), DONE, DONE]


NOW = datetime(2026, 11, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        (" 7 ", 7),
        ("0", 0),
        ("301", MOST_SECONDS),
        ("9" * 1000, MOST_SECONDS),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOW + timedelta(days=900), usegmt=True), MOST_SECONDS),
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0),
        ("Sun, 01 Nov 2026 12:00:30 -0000", 30),
        ("-5", 0),
        ("1.5", 0),
        ("soon", 0),
        ("nan", 0),
        ("\u0663", 0),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", 0),
        ("Mon, 01 Jan 2026 00:00:00 +99999999999999999999", 0),
        (f"Mon, 01 Jan {'9' * 5000} 00:00:00 GMT", 0),
        ("", 0),
    ],
)
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_retry_after_is_seconds_or_a_date_and_at_most_five_minutes(header, seconds, status):
    assert Answered(status=status, retry_after=header).pause(now=lambda: NOW) == seconds


@pytest.mark.parametrize("status", [200, 301, 400, 404, 413])
def test_retry_after_means_nothing_with_another_status(status):
    assert Answered(status=status, retry_after="60").pause() == 0


def test_a_pause_becomes_longer_and_never_shorter():
    now = [0.0]
    pause = Pause(clock=lambda: now[0])
    seen = [pause.why]

    pause.begin(10, "ten")
    pause.begin(5, "five")
    for moment in (0, 9, 10):
        now[0] = moment
        seen.append(pause.why)

    assert seen == [None, "ten", "ten", None]


# Secrets


def test_secrets_are_never_told(endpoint, to, caplog, tmp_path):
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
    sender = to(f"{url}/x?{query}&secret-file={tmp_path}/secret")

    verdicts = [sender.send([a_message("orders", n)]) for n in range(4)]

    texts = caplog.text + repr(verdicts) + repr(sender) + repr(vars(sender)) + sender.destination
    assert "it says: no user ann with … in /x?token=…&key=…, token …, …" in repr(verdicts)
    assert [each for each in ("s3cr3t", "Sesame", "K3y", "c2Vzc2FtZ", "YW5uOn") if each in texts] == []
    assert "httpx" in caplog.text
    assert len(endpoint.asked) == 4


def test_wrong_credentials_are_unavailable_and_never_told(endpoint, to, caplog):
    caplog.set_level(logging.DEBUG)
    endpoint.judge = lambda received: Answer(401, b"who are you?")

    [verdict] = to(endpoint.url.replace("//", "//ann:s3cr3t@")).send([a_message("orders", 1)])

    what = "HTTP 401 Unauthorized; check the user and the password in the URL, and the secret; it says: who are you?"
    assert verdict == Unavailable(told(endpoint.url, what))
    assert "s3cr3t" not in caplog.text + repr(verdict)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:host/path",
        "https:///path",
        "https://ann:s3cr3t",
        f"https://ann:{SECRET}@host,other/path",
        f"https://ann:{SECRET}@host:99999/",
        f"https://ann:{SECRET}@host:0/",
        f"https://ann:{SECRET}@[::1/",
        f"https://ann:{SECRET}@ho st/",
        f"https://host/#{SECRET}",
        f"https://host/?format={SECRET}",
        f"https://host/?timeout={SECRET}",
        f"https://host/?timeout=0&token={SECRET}",
        f"https://host/?timeout=1&timeout=2&token={SECRET}",
        f"https://host/?most={SECRET}",
        "https://host/?most=0",
        "https://host/?most=1001",
        "https://host/?most=٣",
        "https://host/?secret-file=",
        "https://host/?secret-file=relative",
        "https://host/?ca=",
        "http://host/?ca=/etc/ssl/cert.pem",
        "https://host/?source=/shop",
        "https://host/?format=cloudevents&source=a%20b",
        "https://host/?format=cloudevents&source=",
        f"https://host/?proxy=http://ann:{SECRET}",
        f"https://host/?proxy=socks5://ann:{quote(SECRET, safe='')}%40proxy:1",
        "https://host/?proxy=http://proxy",
        "https://host/?proxy=http://pro%20xy:1",
        "https://host/?proxy=http://a,b:1",
        f"https://host/?proxy={SECRET}://%40%40",
        f"https://host/\x01?token={SECRET}",
        f"https://host/?token={SECRET}@",
    ],
)
def test_a_bad_url_is_an_error_without_its_secrets(url):
    with pytest.raises(SenderError) as caught:
        WebhookSender(url)

    assert [each for each in ("s3cr3t", "Sesame") if each in str(caught.value)] == []


FIXES = {
    "https://host/x?format=json": "format must be raw, cloudevents or cloudevents-structured; a parameter of the"
    " endpoint that has this name is written %66ormat",
    "https://host/x?source=a": "source belongs to the formats of CloudEvents; one of the endpoint is written %73ource",
    "https://host/x?format=cloudevents&source=a%20b": "source must be a URI, such as /shop or https://shop.example.org",
    "https://host/x?most=no": "most must be a number of requests from 1 to 1000",
    "https://host/x?timeout=no": "timeout must be a number of seconds",
    "https://host/x?timout=3": "did you mean the option timeout? A parameter of the endpoint with the name 'timout' is"
    " written %74imout",
    "https://host/x?a=b&Secret_File=/x": (
        "did you mean the option secret-file? A parameter of the endpoint with the name 'Secret_File' is written"
        " %53ecret_File"
    ),
    "https://host/x?secret-file=x": "secret-file must be the absolute path of a file",
    "http://host/x?ca=/x": "ca is for https",
    "https://host/x?proxy=x": "proxy must be http://host:port or https://host:port",
    "https://host/x#y": "leave out the # and what follows, which is never sent",
    "https://host:0/x": "the port must be a number from 1 to 65535",
    "https://a,b/x": "write one host",
    "https:///x": "write https://host/path",
    "https://host/x?most=1&most=2": (
        "its options are secret-file, format, source, timeout, most, ca, proxy, as, each once; 'most' is given twice"
    ),
}


@pytest.mark.parametrize("url", FIXES)
def test_a_bad_url_is_told_what_to_write(url):
    with pytest.raises(SenderError) as caught:
        WebhookSender(url)

    shown = url.partition("?")[0].partition("#")[0]
    assert str(caught.value) == f"{shown}: {FIXES[url]}"


def test_the_destination_is_the_url_without_credentials_and_query():
    url = f"https://ann:{SECRET.replace('/', '%2F')}@Shop.example.org:8443/hooks/?token=1&timeout=3"

    sender = WebhookSender(url)

    assert sender.destination == destination_of(url) == "https://shop.example.org:8443/hooks"
    assert sender.deadline == timedelta(seconds=3)


# Connections


@pytest.fixture
def safe_endpoint() -> Iterator[Endpoint]:
    with Endpoint(tls=server_context()) as endpoint:
        yield endpoint


def test_a_certificate_that_ca_names_is_trusted(safe_endpoint, to):
    sender = to(f"{safe_endpoint.url}/x?ca={CERTIFICATE}")

    check_all_done(sender.send(sent := [a_message("orders", n) for n in range(3)]), sent)

    assert len(safe_endpoint.kept) == 3


def test_a_certificate_that_nobody_vouches_for_is_refused_before_anything_is_sent(safe_endpoint, to):
    [verdict] = to(safe_endpoint.url.replace("//", "//ann:s3cr3t@")).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(safe_endpoint.url, "its certificate is refused: "))
    assert verdict.everything
    assert safe_endpoint.asked == []


def test_a_certificate_of_another_host_is_refused(safe_endpoint, to):
    url = safe_endpoint.url.replace("127.0.0.1", "localhost")
    [verdict] = to(f"{url}/x?ca={CERTIFICATE}").send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(f"{url}/x", "its certificate is refused: "))
    assert safe_endpoint.asked == []


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "no such file or directory"), ("no certificate", "it holds no certificates")]
)
def test_a_file_of_certificates_that_is_none_is_told_and_read_again(safe_endpoint, to, tmp_path, content, reason):
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_text(content)
    sender = to(f"{safe_endpoint.url}/x?ca={ca}")

    [verdict] = sender.send([a_message("orders", 1)])
    ca.write_text(CERTIFICATE.read_text())

    assert verdict == Unavailable(told(f"{safe_endpoint.url}/x", f"ca {ca}: {reason}"))
    check_all_done(sender.send(sent := [a_message("orders", 2)]), sent)


def test_a_file_of_certificates_may_be_replaced(safe_endpoint, to, tmp_path):
    ca = tmp_path / "ca.pem"
    ca.write_text(FOREIGN.read_text())
    sender = to(f"{safe_endpoint.url}/x?ca={ca}")

    [verdict] = sender.send([a_message("orders", 1)])
    ca.write_text(CERTIFICATE.read_text())

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(told(f"{safe_endpoint.url}/x", "its certificate is refused: "))
    check_all_done(sender.send(sent := [a_message("orders", 2)]), sent)


def test_a_server_without_tls_is_unavailable_and_gets_no_credentials(to):
    with Parrot(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as parrot:
        url = parrot.url.replace("http://", "https://")
        [verdict] = to(url.replace("//", "//ann:s3cr3t@"), seconds=2).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert b"s3cr3t" not in parrot.heard
    assert b"Basic" not in parrot.heard


def test_proxies_of_the_environment_are_not_used(endpoint, to, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")

    check_all_done(to(endpoint.url).send(sent := [a_message("orders", 1)]), sent)


def test_a_proxy_of_the_url_is_used_with_its_credentials(to):
    with Parrot(b"HTTP/1.1 204 No Content\r\n\r\n", closes=False) as proxy:
        host = proxy.url.removesuffix("/hook").replace("//", f"//bob:{quote(SECRET, safe='')}@")
        sender = to(f"http://ann:pw@shop.example.org/x?token=1&proxy={quote(host, safe='')}")

        check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

        head = proxy.heard.split(b"\r\n")
        assert head[0] == b"POST http://shop.example.org/x?token=1 HTTP/1.1"
        assert {b"Proxy-Authorization: Basic Ym9iOnMzY3IzdC9TZXNhbWU=", b"Authorization: Basic YW5uOnB3"} <= set(head)


def test_a_proxy_that_refuses_is_told_without_its_password(to):
    with Parrot(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n") as proxy:
        host = proxy.url.removesuffix("/hook").replace("//", f"//bob:{quote(SECRET, safe='')}@")
        sender = to(f"https://shop.example.org/x?proxy={quote(host, safe='')}")

        [verdict] = sender.send([a_message("orders", 1)])

    assert verdict == Unavailable(told("https://shop.example.org/x", "407 Proxy Authentication Required"))
    assert "s3cr3t" not in repr(verdict) + repr(vars(sender))


# Packaging


def test_a_receiver_needs_no_driver():
    script = """
import sys
sys.modules["httpx2"] = sys.modules["httpx"] = None
from outbox.senders.webhook_reading import read_message, verify
"""

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_missing_driver_is_named_by_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "outbox.senders.webhook")
    monkeypatch.setitem(sys.modules, "httpx2", None)

    with pytest.raises(MissingExtraError, match=r"webhooks need an extra: pip install 'outbox-log\[http\]'"):
        import_module("outbox.senders.webhook")


def test_both_schemes_are_offered():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    offers = project["entry-points"]["outbox.senders"]

    assert {scheme: offers[scheme] for scheme in ("http", "https")} == dict.fromkeys(
        ("http", "https"), f"{WebhookSender.__module__}:{WebhookSender.__qualname__}"
    )
