"""Webhooks in bad weather: the contract, endpoints that are slow or answer at random, and the order of a key."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable
from outbox.senders.webhook import WebhookSender
from outbox.testing.sender_contract import a_message, check_all_done, check_stored
from tests.support.places import begun, opened, placed
from tests.support.remote import UNFIT_HEADERS, RemoteSenderContract, ended
from tests.support.webhook_endpoint import Answer
from tests.support.webhooks import EndpointProgram, Filed, Gate

#: It files what it accepts.
fragile, mortal = begun(EndpointProgram), placed(Filed, "fragile")
sender = opened("hook")


class TestBadWeather(RemoteSenderContract):
    """An answer is short, so that most cuts lie within the requests."""

    at = "hook"
    cuts = (*range(0, 130, 9), *range(131, 700, 41))
    full_cuts = range(700)
    unfit = (
        *UNFIT_HEADERS,
        ({"headers": '{"": "c"}'}, "headers['']: the name must be of letters, digits and -"),
        ({"headers": '{"a": "b\\r\\nwebhook-id: c"}'}, "headers['a']: must be one line of UTF-8"),
        ({"headers": '{"a": "b\\u0000"}'}, "headers['a']: must hold no control characters"),
        ({"headers": '{"a": "b\\u000b"}'}, "headers['a']: must hold no control characters"),
        ({"headers": '{"a": " b"}'}, "headers['a']: must hold no control characters, and neither begin nor end with a"),
        ({"headers": '{"A": "1", "a": "2"}'}, "headers: must not hold one name in two cases"),
        ({"headers": '{"Outbox_Key": "k"}'}, "headers['Outbox_Key']: servers read it as a reserved name"),
        ({"headers": '{"webhook_id": "k"}'}, "headers['webhook_id']: servers read it as a reserved name"),
        ({"topic": "a b"}, "topic: must be 1 to 249 characters of [A-Za-z0-9._%|-], not . or .., but is 'a b'; send"),
        ({"topic": ""}, "topic: must be 1 to 249 characters of"),
        ({"topic": "a\r\nHost: b"}, "topic: must be 1 to 249 characters of"),
        ({"topic": "\ud800"}, "topic: holds a lone surrogate"),
        ({"content_type": "a\r\nb: c"}, "content_type: must be one line of UTF-8"),
        ({"key": "\ud800"}, ""),
        ({"tags": "\ud800"}, ""),
    )


def deliver(sender: WebhookSender, sent: list[Message], *, seconds: float = 120.0) -> int:
    """Send messages until all are `Done`, as a worker does; return the number of calls. Nothing may be rejected."""
    left, calls, deadline = list(sent), 0, time.monotonic() + seconds
    while left:
        assert time.monotonic() < deadline, f"{len(left)} of {len(sent)} are not Done after {seconds} s"
        verdicts = sender.send(left)
        calls += 1
        assert {type(verdict) for verdict in verdicts} <= {Done, Unavailable}, verdicts
        left = [one for one, verdict in zip(left, verdicts, strict=True) if not isinstance(verdict, Done)]
        time.sleep(0.02 if left else 0)
    return calls


def numbered(number: int, *, keys: int = 0, first: int = 0) -> list[Message]:
    """So many messages, one in four without a key."""
    numbers = range(first, first + number)
    return [a_message("orders", n, key=f"k{n % keys}" if keys and n % 4 else None) for n in numbers]


def test_at_most_one_message_of_a_key_is_unacknowledged(endpoint):
    """Seen from the other side: no second message of a key arrives before the first is acknowledged."""
    keys = ["a", "b", None, "a", None, "a", "b", None]
    sent = [a_message("orders", n, key=key) for n, key in enumerate(keys)]
    gate, rounds = Gate(endpoint), []
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=120))

    with ThreadPoolExecutor(1) as pool:
        verdicts = pool.submit(sender.send, sent)
        for expected in (5, 2, 1):
            rounds.append(gate.arrivals(expected))
            gate.answer()
        check_all_done(verdicts.result(), sent)
    sender.close()

    assert rounds == [[b"0", b"1", b"2", b"4", b"7"], [b"3", b"6"], [b"5"]]


def test_what_waited_behind_big_bodies_is_under_way_at_once(endpoint):
    """Three big ones are as many bytes as may be under way; then all others may."""
    all_here = threading.Barrier(8, timeout=25)

    def judge(received):
        if len(received.body) < 100:
            all_here.wait()
        return Answer()

    endpoint.judge = judge
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=30))
    sent = [a_message("orders", bytes(size)) for size in [3 * 1024 * 1024] * 3 + [0] * 8]

    check_all_done(sender.send(sent), sent)
    sender.close()


@pytest.mark.parametrize(("option", "most"), [("?most=8", 8), ("", 32)])
def test_not_everything_is_under_way_at_once(endpoint, option, most):
    gate = Gate(endpoint)
    sender = WebhookSender(f"{endpoint.url}/x{option}", timeout=timedelta(seconds=120))

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(sender.send, numbered(200)) for _ in range(2)]  # also by two calls together
        assert len(gate.arrivals(most)) == most
        assert {type(verdict) for verdicts in ended(sender, calls) for verdict in verdicts} == {Unavailable}
    gate.answer()


@pytest.mark.storm
def test_an_answer_that_is_lost_is_followed_by_the_same_request(hook, sender):
    message = a_message("orders", b"\x00body", key="k", headers={"X-Y": "z"})
    check_all_done(sender.send(first := [a_message("orders", 0)]), first)

    hook.lose_next_answer()
    [verdict] = sender.send([message])
    hook.recover()
    assert sender.send([message]) == [DONE]

    lost, repeated = hook.endpoint.kept[1:]
    assert isinstance(verdict, Unavailable)
    assert (repeated.target, repeated.body) == (lost.target, lost.body)
    times = "webhook-timestamp"
    assert {**repeated.headers, times: ""} == {**lost.headers, times: ""}


@pytest.mark.storm
def test_an_endpoint_that_answers_at_random_gets_everything_in_order(hook, endpoint):
    """Statuses for which a message waits, among them those of the whole endpoint."""
    chance, lock = random.Random(2), threading.Lock()

    def judge(received):
        with lock:
            return Answer(chance.choice((204, 204, 204, 200, 408, 429, 500, 502, 503, 404, 401, 302)))

    endpoint.judge = judge
    sender = hook.open(seconds=60)  # an answer that came too late would be followed by the same request
    sent = numbered(300, keys=20)

    deliver(sender, sent)

    sender.close()
    check_stored(hook, sent)
    assert len(hook.stored()) == len(sent)


@pytest.mark.storm
def test_a_slow_endpoint_gets_no_message_twice(hook, endpoint):
    """What cannot be answered within the time of a call is not begun in it."""

    def judge(received):
        time.sleep(0.3)
        return Answer()

    endpoint.judge = judge
    sender = hook.open(seconds=8)  # the last quarter of it is for an answer, also on a busy machine
    sent = [a_message("orders", n, key="k") for n in range(30)]

    calls = deliver(sender, sent)

    sender.close()
    check_stored(hook, sent)
    assert (len(hook.stored()), calls > 1) == (30, True)


@pytest.mark.storm
@pytest.mark.usefixtures("patient")
def test_a_message_that_is_never_answered_holds_up_no_other(endpoint):
    """It takes the time of its calls, and the others are `Done`."""
    over = threading.Event()

    def judge(received):
        if received.body == b"3":
            over.wait(120)
        return Answer()

    endpoint.judge = judge
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=36))
    left, deadline = numbered(20), time.monotonic() + 120
    while len(left) > 1 and time.monotonic() < deadline:
        verdicts = dict(zip(left, sender.send(left), strict=True))
        left = [one for one, verdict in verdicts.items() if verdict is not DONE]
    over.set()
    sender.close()

    assert [one.body for one in left] == [b"3"]
    # Others were accepted in the same call.
    [unanswered] = (verdicts[one] for one in left)
    assert unanswered == Unavailable(f"Webhook: {endpoint.url}: no answer within 3.6 s")
    assert isinstance(unanswered, Unavailable)
    assert not unanswered.everything


@pytest.mark.storm
@pytest.mark.usefixtures("patient")
def test_connections_that_died_unnoticed_cost_one_call(endpoint):
    """As when a firewall has forgotten them: the first that is not answered takes the others with it."""
    opened: set[threading.Thread] = set()
    several_here, over = threading.Barrier(4, timeout=60), threading.Event()

    def judge(received):
        if received.body == b"first":
            opened.add(threading.current_thread())  # the endpoint has a thread for each connection
            several_here.wait()
        elif threading.current_thread() in opened:
            over.wait(120)
        return Answer()

    endpoint.judge = judge
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=90))
    check_all_done(sender.send(sent := [a_message("orders", "first") for _ in range(4)]), sent)

    verdicts = [sender.send([a_message("orders", "later")])[0] for _ in range(2)]
    over.set()
    sender.close()

    assert len(opened) == 4
    assert verdicts == [Unavailable(f"Webhook: {endpoint.url}: no answer within 9 s"), DONE]
