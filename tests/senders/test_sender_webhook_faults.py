"""Webhooks in bad weather: servers that die, pause and come back, threads, forks, and the order of a key."""

import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.model.message import Message
from outbox.model.verdict import DONE, Done, Unavailable
from outbox.senders.webhook import WebhookSender
from outbox.testing.sender_contract import a_message, check_all_done, check_stored
from tests.support.pausing import paused
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually
from tests.support.webhook_endpoint import Answer
from tests.support.webhooks import EndpointProgram, Filed, Gate, Hook


@pytest.fixture
def sender(hook: Hook) -> Iterator[WebhookSender]:
    """A sender to that path."""
    sender = hook.open()
    yield sender
    sender.close()


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
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=15))

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
    sender = WebhookSender(f"{endpoint.url}/x{option}", timeout=timedelta(seconds=5))

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(sender.send, numbered(200)) for _ in range(2)]  # also by two calls together
        assert len(gate.arrivals(most)) == most
        assert {type(verdict) for call in calls for verdict in call.result()} == {Unavailable}
    gate.answer()
    sender.close()


def test_a_server_that_is_killed_loses_and_reorders_nothing():
    """In mid-stream, again and again; what it accepted in its earlier lives is in its file."""
    with EndpointProgram() as server:
        sender = WebhookSender(server.url, timeout=timedelta(seconds=2))
        sent: list[Message] = []
        with ThreadPoolExecutor(1) as pool:
            killer = pool.submit(kill_and_start, server, times=4)
            while not killer.done():
                part = numbered(100, keys=7, first=len(sent))
                sent += part
                deliver(sender, part)
            killer.result()
        sender.close()

        check_stored(Filed(server), sent)


def kill_and_start(server: EndpointProgram, *, times: int) -> None:
    """End the server as a crash does, and start it again."""
    for _ in range(times):
        time.sleep(0.5)
        server.kill()
        time.sleep(0.2)
        server.start()


def test_a_server_that_comes_back_is_found_again_with_few_words(caplog):
    caplog.set_level(logging.INFO, logger="outbox")
    began = time.monotonic()  # which nobody sets back, unlike the time of a record
    with EndpointProgram() as server:
        sent = numbered(50)
        sender = WebhookSender(server.url, timeout=timedelta(seconds=4))
        check_all_done(sender.send(sent[:1]), sent[:1])

        server.kill()
        for _ in range(100):
            assert {type(verdict) for verdict in sender.send(sent)} == {Unavailable}
        server.start()

        deliver(sender, sent)
        sender.close()
    first, *outage, last = caplog.records
    assert first.getMessage() == last.getMessage() == f"Webhook: connected to {server.url}"
    assert {record.levelname for record in outage} == {"WARNING"}
    assert len(outage) <= 1 + (time.monotonic() - began) / 60


def test_a_paused_server_is_unavailable_in_time_and_found_again():
    with EndpointProgram() as server:
        sender = WebhookSender(server.url, timeout=timedelta(seconds=1))
        sent = [a_message("orders", bytes(100_000), key=f"k{n % 10}") for n in range(100)]
        deliver(sender, sent[:10])

        with paused(server):
            for _ in range(3):
                began = time.monotonic()
                verdicts = sender.send(sent)
                assert time.monotonic() - began < 10
                assert {type(verdict) for verdict in verdicts} == {Unavailable}

        deliver(sender, sent)
        sender.close()
        check_stored(Filed(server), sent)


@pytest.mark.parametrize(("direction", "offsets"), [("to_server", range(0, 700, 23)), ("to_client", range(0, 130, 5))])
def test_a_connection_that_is_cut_anywhere_loses_and_reorders_nothing(hook, sender, direction, offsets):
    """A message is sent again until a whole answer has come, with the same id and the same bytes."""
    sent: list[Message] = []
    for offset in offsets:
        part = [a_message("orders", f"{offset}-{n}", key="k") for n in range(3)]
        sent += part
        hook.cut_after(offset, direction)

        deliver(sender, part)

    hook.recover()
    check_stored(hook, sent)
    if direction == "to_client":
        assert len(hook.stored()) > len(sent)


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


def test_bad_weather_loses_and_reorders_nothing(hook, full):
    """Connections are refused, silent or cut at random."""
    sender = hook.open(seconds=1)
    sent: list[Message] = []

    with ThreadPoolExecutor(1) as pool:
        storm = pool.submit(rage, hook, seconds=60 if full else 6)
        while not storm.done():
            part = numbered(100, keys=20, first=len(sent))
            sent += part
            deliver(sender, part, seconds=90)
        storm.result()

    sender.close()
    check_stored(hook, sent)


def rage(hook: Hook, *, seconds: float) -> None:
    """Break something every now and then, and mend it."""
    chance = random.Random(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chance.choice((hook.disappear, hook.fall_silent, hook.lose_next_answer))()
        time.sleep(chance.uniform(0, 1.4))  # often longer than the deadline of the sender
        hook.recover()
        time.sleep(chance.uniform(0, 0.7))


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


def test_a_slow_endpoint_gets_no_message_twice(hook, endpoint):
    """What cannot be answered within the time of a call is not begun in it."""

    def judge(received):
        time.sleep(0.1)
        return Answer()

    endpoint.judge = judge
    sender = hook.open(seconds=3)  # the last quarter of it is for an answer, also on a busy machine
    sent = [a_message("orders", n, key="k") for n in range(60)]

    calls = deliver(sender, sent)

    sender.close()
    check_stored(hook, sent)
    assert (len(hook.stored()), 2 < calls < 20) == (60, True)


def test_a_message_that_is_never_answered_holds_up_no_other(endpoint):
    """It takes the time of its calls, and the others are `Done`."""
    over = threading.Event()

    def judge(received):
        if received.body == b"3":
            over.wait(120)
        return Answer()

    endpoint.judge = judge
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=4))
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


def test_connections_that_died_unnoticed_cost_one_call(endpoint):
    """As when a firewall has forgotten them: the first that is not answered takes the others with it."""
    opened: set[threading.Thread] = set()
    several_here = threading.Barrier(4, timeout=30)

    def judge(received):
        if received.body == b"first":
            opened.add(threading.current_thread())  # the endpoint has a thread for each connection
            several_here.wait()
        elif threading.current_thread() in opened:
            time.sleep(10)
        return Answer()

    endpoint.judge = judge
    sender = WebhookSender(endpoint.url, timeout=timedelta(seconds=4))
    check_all_done(sender.send(sent := [a_message("orders", "first") for _ in range(4)]), sent)

    verdicts = [sender.send([a_message("orders", "later")])[0] for _ in range(2)]
    sender.close()

    assert len(opened) == 4
    assert verdicts == [Unavailable(f"Webhook: {endpoint.url}: no answer within 3.6 s"), DONE]


def test_big_bodies_go_through_in_one_call(hook):
    sender = hook.open(seconds=20)
    sent = [a_message("orders", bytes(900_000), key=f"k{n % 5}" if n % 2 else None) for n in range(40)]

    check_all_done(sender.send(sent), sent)

    check_stored(hook, sent)
    sender.close()


def test_several_threads_may_send_at_once(hook):
    sender = hook.open(seconds=20)
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(50)] for call in range(8)]

    with ThreadPoolExecutor(8) as pool:
        for verdicts, sent in zip(pool.map(sender.send, calls), calls, strict=True):
            check_all_done(verdicts, sent)

    check_stored(hook, [message for sent in calls for message in sent])
    sender.close()


def test_several_threads_in_bad_weather_lose_and_reorder_nothing(hook):
    sender = hook.open(seconds=1)
    calls = [[a_message("orders", n, key=f"{call}-{n % 3}") for n in range(60)] for call in range(4)]

    with ThreadPoolExecutor(5) as pool:
        storm = pool.submit(rage, hook, seconds=3)
        for _ in pool.map(lambda sent: deliver(sender, sent), calls):
            pass
        storm.result()

    sender.close()
    check_stored(hook, [message for sent in calls for message in sent])


def test_closing_ends_a_call_that_waits(hook):
    sender = hook.open(seconds=30)
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    hook.fall_silent()

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(sender.send, numbered(50)) for _ in range(2)]
        time.sleep(0.3)
        began = time.monotonic()
        sender.close()
        verdicts = [call.result(60) for call in waiting]
    assert time.monotonic() - began < 15
    assert verdicts == [[Unavailable(f"Webhook: {hook.url.partition('?')[0]}: the sender was closed")] * 50] * 2


def test_closing_leaves_no_thread_behind(hook):
    before = threading.active_count()
    sender = hook.open()
    sender.send([a_message("orders", 1)])
    assert "outbox-webhook" in {thread.name for thread in threading.enumerate()}

    sender.close()
    hook.disappear()  # the endpoint has a thread for each connection
    time.sleep(0.3)

    assert threading.active_count() == before


def test_a_closed_sender_begins_anew(hook, sender):
    check_all_done(sender.send(sent := [a_message("orders", 0)]), sent)
    sender.close()

    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)


SCRIPT = """
import os, sys
from outbox.model.message import Message
from outbox.senders.webhook import WebhookSender
from outbox.model.verdict import DONE

def send():
    assert list(sender.send([Message("orders", b"x", key="k") for _ in range(20)])) == [DONE] * 20

def wait(pid):
    assert os.waitpid(pid, 0)[1] == 0

sender = WebhookSender(sys.argv[1])
send()
"""


@pytest.mark.parametrize(
    ("rest", "sent"),
    [
        ("", 20),  # nobody closes it
        ("sender.close()", 20),
        ("pid = os.fork(); send(); send(); pid and wait(pid)", 100),
        ("pid = os.fork(); send(); sender.close(); pid and wait(pid)", 60),
        ("pid = os.fork(); pid or sys.exit(); wait(pid); send()", 40),
        ("pid = os.fork(); pid or (sender.close(), sys.exit()); wait(pid); send()", 40),
    ],
)
def test_a_process_may_fork_and_end_as_it_likes(hook, rest, sent):
    """Each process has connections of its own, and none has a word to say at its end."""
    command = [sys.executable, "-W", "default", "-c", SCRIPT + rest, hook.url]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(hook.stored()) == sent


def test_outages_leave_nothing_behind():
    """Connections that failed do not pile up."""
    with EndpointProgram() as server, TcpProxy("127.0.0.1", server.port) as proxy:
        sender = WebhookSender(f"http://127.0.0.1:{proxy.port}/x?most=4", timeout=timedelta(seconds=3))
        check_all_done(sender.send(sent := numbered(40)), sent)
        before = open_files()

        for _ in range(5):
            for break_it in (proxy.refuse, proxy.black_hole):
                break_it()
                sender.send([a_message("orders", bytes(10_000)) for _ in range(50)])
                proxy.pass_through()
                deliver(sender, numbered(40))

        # The proxy notices a little later that a connection was closed.
        assert eventually(lambda: open_files() <= before + 1, 60)
        sender.close()


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
