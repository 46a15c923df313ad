"""Webhooks: what each answer means for its message, and for those that wait."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import quote

import pytest

from outbox.model.verdict import DONE, Reject, Unavailable, Verdict
from outbox.runtime.text import one_line
from outbox.senders.key_order import EARLIER
from outbox.senders.webhook_answer import MOST_SECONDS, Pause
from outbox.senders.webhook_answer import Answer as Answered
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from tests.support.pages import TOP
from tests.support.tls import CERTIFICATE, server_context
from tests.support.waiting import eventually
from tests.support.webhook_endpoint import Answer, Endpoint, Received
from tests.support.webhooks import SECRET, Babbler, Parrot, told

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
    401: "HTTP 401 Unauthorized; check the credentials, and the secret",
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
def test_a_status_decides_about_its_message_alone(endpoint, to_webhook, status):
    endpoint.judge = lambda received: Answer(status if received.body == b"2" else 204)

    verdicts = to_webhook(endpoint.url).send([a_message("orders", n, key="k" if n == 2 else None) for n in range(5)])

    assert verdicts == [DONE, DONE, STATUSES[status], DONE, DONE]
    assert [each.everything for each in verdicts if isinstance(each, Unavailable)] in ([], [False])


@pytest.mark.parametrize("status", OF_THE_ENDPOINT)
def test_a_status_of_the_whole_endpoint_makes_all_messages_wait_and_ends_the_call(endpoint, to_webhook, status):
    """Otherwise a mistyped URL would make dead letters of them."""
    endpoint.judge = lambda received: Answer(status)

    verdicts = to_webhook(f"{endpoint.url}/?most=4").send([a_message("orders", n) for n in range(100)])

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


def test_a_redirect_is_not_followed_and_credentials_stay_here(endpoint, to_webhook):
    with Endpoint() as other:
        location = f"{other.url.replace('//', '//x:y@')}/new?token=1"
        endpoint.judge = lambda received: Answer(307, headers={"Location": location})
        sender = to_webhook(endpoint.url.replace("//", f"//ann:{quote(SECRET, safe='')}@"))

        [verdict] = sender.send([a_message("orders", 1)])

        advice = f"it redirects to {other.url}/new, which is not followed; correct the URL"
        assert verdict == Unavailable(told(endpoint.url, f"HTTP 307 Temporary Redirect; {advice}"))
        assert other.asked == []


def test_a_redirect_to_nowhere_is_unavailable(endpoint, to_webhook):
    endpoint.judge = lambda received: Answer(301, headers={"Location": "http://[:x"})

    [verdict] = to_webhook(endpoint.url).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)


def test_the_first_characters_of_an_answer_are_told_fit_for_a_terminal(endpoint, to_webhook):
    said = "field\x1b[31m 'x'\r\n\tis \u202emissing " + "y" * 500
    endpoint.judge = lambda received: Answer(422, said.encode() + b"\xff")

    [verdict] = to_webhook(endpoint.url).send([a_message("orders", 1)])

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
def test_what_is_no_complete_answer_is_unavailable(to_webhook, answer):
    """Any program may listen there. A status alone is no answer: what follows it may have been a failure."""
    with Parrot(answer) as parrot:
        [verdict] = to_webhook(parrot.url, seconds=2).send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error


def test_a_long_answer_is_not_read_to_its_end(to_webhook):
    """Its connection is closed, so that nothing of it passes for the next answer."""
    chunk = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n" * 5_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n"
    with Parrot(head, *[chunk] * 100) as parrot:
        sender = to_webhook(parrot.url, seconds=5)

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
def test_a_second_answer_to_one_request_is_not_that_to_the_next(to_webhook, said, is_safe):
    """That goes over another connection, where it is refused."""
    with Babbler(*said, tls=server_context() if is_safe else None) as babbler:
        sender = to_webhook(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else ""))
        first = sender.send([a_message("orders", 1)])
        assert babbler.has_answered.wait(60)
        second = sender.send([a_message("orders", 2)])

    assert second == [Unavailable("HTTP 500 Internal Server Error")]
    assert first in ([DONE], [doubted(babbler.url)])  # the second answer may have come in the first call


@pytest.mark.parametrize("is_safe", [False, True])
def test_a_second_answer_is_not_that_to_the_next_request_of_a_call(to_webhook, is_safe):
    """With TLS, it comes in a record of its own, and both records in one packet."""
    with Babbler([YES, YES], tls=server_context() if is_safe else None, pause=0) as babbler:
        sender = to_webhook(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else ""))
        verdicts = sender.send([a_message("orders", n) for n in range(2)])

    assert sorted(each.error for each in verdicts if isinstance(each, Unavailable)) == [
        "HTTP 500 Internal Server Error",
        doubted(babbler.url).error,
    ]


def test_after_an_answer_too_many_no_verdict_of_its_connection_counts_in_this_call(to_webhook, caplog):
    """Any of these answers may be that to another request."""
    with Babbler([YES], [YES], [YES + YES], pause=0) as babbler:
        verdicts = to_webhook(babbler.url).send([a_message("orders", n, key="k") for n in range(3)])

    assert verdicts == [doubted(babbler.url)] * 3
    assert [record.getMessage() for record in caplog.records] == [doubted(babbler.url).error]


def test_an_answer_too_many_also_takes_back_a_dead_letter(to_webhook):
    no = b"HTTP/1.1 422 Unprocessable Entity\r\nContent-Length: 0\r\n\r\n"
    with Babbler([no + YES], pause=0) as babbler:
        assert to_webhook(babbler.url).send([a_message("orders", 1)]) == [doubted(babbler.url)]


def test_no_message_passes_one_of_its_key_whose_verdict_was_taken_back(to_webhook):
    """The later ones were accepted over another connection."""
    with Babbler([YES + YES], pause=0, later=YES) as babbler:
        verdicts = to_webhook(babbler.url).send([a_message("orders", n, key="k") for n in range(3)])

    assert verdicts == [doubted(babbler.url), EARLIER, EARLIER]


@pytest.mark.parametrize("behind", [b"gone", b"\r\n", b"HTML/"])
def test_a_connection_with_anything_behind_an_answer_is_not_used_again(endpoint, to_webhook, behind):
    """A 204 has no body, so that another answer would begin there."""
    endpoint.judge = lambda received: Answer(204, behind)
    sent = [a_message("orders", n, key="k") for n in range(20)]

    check_all_done(to_webhook(endpoint.url).send(sent), sent)

    assert [each.body for each in endpoint.asked] == [message.body for message in sent]


@pytest.mark.parametrize("behind", [b"\r\n", b"more"])
def test_a_connection_with_anything_behind_a_body_is_not_used_again(to_webhook, behind):
    """Head, body and the rest come in one packet."""
    with Babbler([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" + behind], pause=0, later=YES) as babbler:
        sent = [a_message("orders", n, key="k") for n in range(3)]
        check_all_done(to_webhook(babbler.url).send(sent), sent)

    assert babbler.connections == 2


def test_an_answer_too_many_that_comes_after_the_call_is_logged(to_webhook, caplog):
    with Babbler([YES, YES], pause=None) as babbler:
        sender = to_webhook(babbler.url)
        check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
        babbler.go_on.set()
        assert babbler.has_answered.wait(60)
        sender.close()

    assert caplog.messages == [doubted(babbler.url).error]


def test_a_close_in_the_middle_of_a_call_keeps_the_verdicts_that_are_there(endpoint, to_webhook):
    """Or messages would be sent again that nothing has happened to. When 2 and 3 are sent, 0 and 1 are done."""
    release = threading.Event()

    def judge(received: Received) -> Answer:
        if received.body in (b"2", b"3"):
            release.wait(120)
        return Answer()

    endpoint.judge = judge
    sender = to_webhook(endpoint.url, seconds=120)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sender.send, [a_message("orders", n, key=f"k{n % 2}") for n in range(4)])
        assert eventually(lambda: len(endpoint.asked) == 4)
        sender.close()
        verdicts = call.result(60)
        release.set()

    assert verdicts == [DONE, DONE, *[Unavailable("Webhook: the sender was closed", everything=True)] * 2]


@pytest.mark.parametrize(("option", "connections"), [("", 3), ("?per-connection=10", 25), ("?per-connection=1", 250)])
def test_a_connection_carries_a_limited_number_of_requests(endpoint, to_webhook, option, connections):
    """So many verdicts, at the most, may be shifted by an answer too many that comes late."""
    sent = [a_message("orders", n, key="k") for n in range(250)]

    check_all_done(to_webhook(f"{endpoint.url}/{option}", seconds=60).send(sent), sent)

    assert endpoint.connections == connections


def doubted(url: str) -> Unavailable:
    """The verdict on a message whose connection had an answer too many."""
    return Unavailable(
        told(
            url,
            "an answer came without a request, so the answers of the connection prove nothing; mend the endpoint or the"
            " proxy, or use each connection once, with the option per-connection=1",
        )
    )


@pytest.mark.parametrize("is_safe", [False, True])
def test_one_answer_a_request_needs_one_connection(to_webhook, is_safe):
    """Also where it comes in parts, has a body like the beginning of an answer, or another one that says to go on."""
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    said = [[YES], [LONG_YES], [go_on + YES], [YES[:2], YES[2:]], [LONG_YES[:-3], LONG_YES[-3:]], [go_on, LONG_YES]]
    with Babbler(*said, tls=server_context() if is_safe else None) as babbler:
        sent = [a_message("orders", n, key="k") for n in range(len(said))]
        verdicts = to_webhook(babbler.url + (f"?ca={CERTIFICATE}" if is_safe else "")).send(sent)

    assert (verdicts, babbler.connections) == ([DONE] * len(said), 1)


@pytest.mark.storm
@pytest.mark.usefixtures("patient")
def test_an_answer_that_comes_too_slowly_is_unavailable(to_webhook):
    with Parrot(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *[b"x"] * 100, pause=1) as parrot:
        began = time.monotonic()
        [verdict] = to_webhook(parrot.url, seconds=27).send([a_message("orders", 1)])

    assert verdict == Unavailable(told(parrot.url, "no answer within 2.7 s"))
    assert time.monotonic() - began < 60


def test_a_refused_connection_is_told(to_webhook):
    with Endpoint() as gone:
        pass

    verdicts = to_webhook(gone.url).send([a_message("orders", n) for n in range(3)])

    assert verdicts == [Unavailable(told(gone.url, "connection refused"))] * 3
    assert all(isinstance(each, Unavailable) and each.everything for each in verdicts)


def test_an_unknown_host_is_told(to_webhook):
    [verdict] = to_webhook("http://no-such-host.invalid/x").send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith("Webhook: http://no-such-host.invalid/x: ")
    assert verdict.everything


# To be left alone


def test_no_request_goes_out_before_the_time_of_retry_after_is_over(endpoint, to_webhook):
    """Not even from another call, and calls meanwhile return at once."""
    endpoint.judge = lambda received: Answer(429, b"slow down", {"Retry-After": "300"})
    sender = to_webhook(f"{endpoint.url}?most=1", seconds=120)
    began = time.monotonic()

    verdicts = [sender.send([a_message("orders", n) for n in range(20)]) for _ in range(3)]

    what = "HTTP 429 Too Many Requests; Retry-After: 300 s; it says: slow down"
    assert verdicts == [[Unavailable(told(endpoint.url, what))] * 20] * 3
    assert all(isinstance(each, Unavailable) and each.everything for part in verdicts for each in part)
    assert len(endpoint.asked) == 1
    assert time.monotonic() - began < 100


@pytest.mark.storm
def test_after_the_time_of_retry_after_requests_go_out_again(endpoint, to_webhook):
    """The endpoint asks for a pause, which outlives the connections."""
    endpoint.judge = lambda received: Answer(429, headers={"Retry-After": "2"})
    sender = to_webhook(endpoint.url)
    began = time.monotonic()

    sender.send([a_message("orders", 1)])
    endpoint.judge = lambda received: Answer()
    sender.close()
    check_eventually_done(sender, [a_message("orders", 1)])

    assert (time.monotonic() - began >= 2, len(endpoint.asked)) == (True, 2)


@pytest.mark.storm
def test_what_is_under_way_when_the_endpoint_asks_for_a_pause_may_still_be_done(endpoint, to_webhook):
    """And nothing else is sent."""
    both_here = threading.Barrier(2, timeout=60)

    def judge(received):
        both_here.wait()
        if received.body == b"0":
            return Answer(503, headers={"Retry-After": "60"})
        time.sleep(2)  # while the other answer is read
        return Answer()

    endpoint.judge = judge
    verdicts = to_webhook(f"{endpoint.url}?most=2", seconds=60).send([a_message("orders", n) for n in range(5)])

    away = Unavailable(told(endpoint.url, "HTTP 503 Service Unavailable; Retry-After: 60 s"))
    assert verdicts == [away, DONE, away, away, away]
    assert len(endpoint.asked) == 2


@pytest.mark.storm
@pytest.mark.usefixtures("patient")
def test_a_refusal_of_the_whole_endpoint_counts_also_if_another_answer_never_comes(endpoint, to_webhook):
    """What was not sent is known to be refused, although the call ends by its time."""
    release = threading.Event()

    def judge(received: Received) -> Answer:
        if received.body == b"1":
            release.wait(60)
        return Answer(503 if received.body == b"2" else 200)

    endpoint.judge = judge
    verdicts = to_webhook(f"{endpoint.url}?most=2", seconds=27).send([a_message("orders", n) for n in range(5)])
    release.set()

    away = Unavailable(told(endpoint.url, "HTTP 503 Service Unavailable"), everything=True)
    late = Unavailable(told(endpoint.url, "no answer within 2.7 s"))
    assert verdicts == [DONE, late, away, away, away]
    assert [each.everything for each in verdicts if isinstance(each, Unavailable)] == [False, True, True, True]


def test_an_answer_that_cannot_be_judged_concerns_its_message_alone(endpoint, to_webhook, monkeypatch):
    """Whatever an endpoint writes, the others of the call have been taken."""

    def judge(answer: Answered) -> Verdict:
        if answer.status == 503:
            raise OverflowError("too large")
        return DONE

    endpoint.judge = lambda received: Answer(503 if received.body == b"2" else 200)
    monkeypatch.setattr(Answered, "verdict", judge)

    verdicts = to_webhook(f"{endpoint.url}?most=2").send([a_message("orders", n) for n in range(5)])

    assert verdicts == [DONE, DONE, Unavailable(told(endpoint.url, "too large")), DONE, DONE]


NOW = datetime(2026, 11, 1, 12, 0, 0, tzinfo=UTC)


#: Values of the header, with the seconds that they ask for: a number or a date, at most five minutes.
RETRY_AFTER = {
    "120": 120,
    " 7 ": 7,
    "0": 0,
    "301": MOST_SECONDS,
    "9" * 1000: MOST_SECONDS,
    format_datetime(NOW + timedelta(seconds=90), usegmt=True): 90,
    format_datetime(NOW + timedelta(days=900), usegmt=True): MOST_SECONDS,
    format_datetime(NOW - timedelta(days=1), usegmt=True): 0,
    "Sun, 01 Nov 2026 12:00:30 -0000": 30,
    "-5": 0,
    "1.5": 0,
    "soon": 0,
    "nan": 0,
    "\u0663": 0,
    "Mon, 01 Jan 99999999999999999999 00:00:00 GMT": 0,
    "Mon, 01 Jan 2026 00:00:00 +99999999999999999999": 0,
    f"Mon, 01 Jan {'9' * 5000} 00:00:00 GMT": 0,
    "": 0,
}


def test_retry_after_is_seconds_or_a_date_and_at_most_five_minutes():
    """With any other status the header means nothing."""
    meant = (408, 425, 429, 500, 503)
    asked = [(status, header) for status in (*meant, 200, 301, 400, 404, 413) for header in RETRY_AFTER]

    found = [Answered(status=status, retry_after=each).pause(now=lambda: NOW) for status, each in asked]

    expected = [RETRY_AFTER[each] if status in meant else 0 for status, each in asked]
    assert dict(zip(asked, found, strict=True)) == dict(zip(asked, expected, strict=True))


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
