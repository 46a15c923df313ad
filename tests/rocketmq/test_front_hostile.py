"""Hostile HTTP/2 at a front: what breaks the rules, sends too much, or takes nothing; other clients are served."""

import gzip
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import grpc
import psutil
import pytest
from sqlalchemy import Engine

from outbox.rocketmq.front.protocol import RPCS, SERVICE, numbers
from outbox.rocketmq.front.routing import Place
from tests.rocketmq.front_probes import message as sent
from tests.rocketmq.raw_http2 import (
    DATA,
    END_HEADERS,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    call,
    connected,
    encoded,
    fields,
    message,
    payloads,
)  # fmt: skip

pytestmark = pytest.mark.storm

SERVE = """
import sys, time
from outbox import Outbox, create_engine
from outbox.rocketmq.front import Front
from outbox.rocketmq.front.clients import ClientPolicy
outbox = Outbox(create_engine(sys.argv[1]))
front = Front(outbox, topics={"orders": "NORMAL"}, listen="127.0.0.1:0", clients=ClientPolicy(most=20_000))
with front:
    while front.listening is None:
        time.sleep(0.01)
    print(front.listening, flush=True)
    sys.stdin.read()
"""
#: Seconds in which another client is served, and MiB by which the process may grow.
#: In a crowd of tests nobody is served soon.
SOON, GROWTH = 60.0 if "PYTEST_XDIST_WORKER" in os.environ else 5.0, 200
MIB = 1024**2

#: Attacks a front, and keeps its connections open in the stack.
Attack = Callable[[Place, ExitStack], None]


@contextmanager
def front_of(url: str) -> Iterator[tuple[Place, psutil.Process]]:
    """A front in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        yield Place.of(program.stdout.readline().strip()), psutil.Process(program.pid)
        assert program.stdin is not None
        program.stdin.close()


def received(group: str) -> bytes:
    """The request of a receive."""
    request = RPCS["ReceiveMessage"].request(group={"name": group}, batch_size=32, invisible_duration={"seconds": 600})
    request.message_queue.topic.name = "orders"
    return bytes(request.SerializeToString())


def serve_another(place: Place, bodies: Sequence[bytes] = (b"x",)) -> None:
    """Send messages as a client that keeps the rules, and that tries again while the front is overrun; raise in time.

    gRPC cancels calls while more than a thousand wait to begin.
    """
    rpc = RPCS["SendMessage"]
    with grpc.insecure_channel(str(place), [("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/SendMessage", rpc.request.SerializeToString, rpc.response.FromString)
        for body in bodies:
            request, until = rpc.request(messages=[sent("=orders", body)]), time.monotonic() + SOON
            while True:
                try:
                    answer = ask(request, metadata=[("x-mq-client-id", "good")], timeout=until - time.monotonic())
                    break
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.CANCELLED:
                        raise
            assert answer.status.code == 20000


def broken(place: Place, open: ExitStack) -> None:
    """Frames that are cut off, of wrong kinds, and on wrong streams; and what is no HTTP/2 at all."""
    chance = random.Random(1)
    for raw in (
        b"GET / HTTP/1.1\r\nHost: front\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400),
        chance.randbytes(10_000),
        encoded(Frame(HEADERS, END_HEADERS, 1, b"\x00\x10cut"), length=5000),
        call(1, "Heartbeat") + encoded(Frame(DATA, 0, 1, b"\0"), length=16_000),
        call(1, "Heartbeat") + message(1, b"", size=5)[:-3],
        encoded(Frame(HEADERS, END_HEADERS, 0, fields({":method": "POST"}))),
        encoded(Frame(HEADERS, 0, 1, fields({":method": "POST"}))) + call(3, "Heartbeat"),
        call(2, "Heartbeat") + message(2, b""),
        encoded(Frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff")),
        encoded(Frame(SETTINGS, 0, 1, bytes(6))),
        encoded(Frame(SETTINGS, 0, 0, bytes(5))),
        encoded(Frame(WINDOW_UPDATE, 0, 0, bytes(4))),
        encoded(Frame(PING, 0, 0, bytes(3))),
        encoded(Frame(GOAWAY, 0, 0, bytes(3))),
        encoded(Frame(0xBB, 0xFF, 0x7FFF_FFFF, b"unknown")),
        encoded(Frame(DATA, 0, 5, b"of no call")),
        *(call(1, "Heartbeat") + message(1, chance.randbytes(100)) for _ in range(20)),
    ):
        with suppress(OSError), connected(place) as peer:
            peer.send(raw)
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            peer.send(raw)


def huge(place: Place, open: ExitStack) -> None:
    """Messages that say they are huge, are huge, or are of huge metadata."""
    for raw in (
        call(1, "SendMessage") + message(1, b"x", size=2**32 - 1, flags=0),
        call(1, "SendMessage") + message(1, bytes(9 * MIB)),
        call(1, "Heartbeat", more="m" * 16_000) + message(1, b""),
        encoded(Frame(HEADERS, 0, 1, fields({f"name-{n}": "v" * 100 for n in range(100)})))
        + b"".join(encoded(Frame(9, 0, 1, fields({"more": "m" * 16_000}))) for _ in range(500)),
    ):
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            peer.send(raw)


def unfinished(place: Place, open: ExitStack, name: str, *, connections: int = 1, size: int = 8 * MIB) -> None:
    """Calls of which each lacks the last byte of a message, or all behind so many bytes."""
    calls, body = range(1, 200, 2), b"".join(payloads(message(1, bytes(size - 1), size=8 * MIB)))
    for _ in range(connections):
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            peer.send(*(call(stream, name) for stream in calls))
            peer.pour(dict.fromkeys(calls, body), 0.5)


def settled(place: Place, open: ExitStack) -> None:
    """Settings of many topics, whose answers nobody reads."""
    request = RPCS["Telemetry"].request()
    request.settings.client_type = numbers("ClientType")["PRODUCER"]
    for number in range(2400):
        request.settings.publishing.topics.add(name=f"{number:0100}")
    calls, body = range(1, 200, 2), b"".join(payloads(message(1, request.SerializeToString())))
    for number in range(10):
        peer = open.enter_context(connected(place, {INITIAL_WINDOW: 0}))
        with suppress(OSError):
            peer.send(*(call(stream, "Telemetry", client=f"{number}-{stream}") for stream in calls))
            peer.pour(dict.fromkeys(calls, body), 0.5)


def bombs(place: Place, open: ExitStack) -> None:
    """Small messages that become large ones."""
    body = b"\1" + b"".join(payloads(message(1, gzip.compress(bytes(100 * MIB)))))[1:]
    for _ in range(5):
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            peer.send(*(call(stream, "SendMessage", encoding="gzip") for stream in range(1, 40, 2)))
            peer.pour(dict.fromkeys(range(1, 40, 2), body), 0.5)


def many(place: Place, open: ExitStack, name: str, more: str = "") -> None:
    """10 000 calls that send nothing, a hundred on each connection. `more`: metadata of each call."""
    for number in range(100):
        peer = open.enter_context(connected(place))
        peer.send(*(call(stream, name, client=f"{number}-{stream}", more=more) for stream in range(1, 200, 2)))


def slow(place: Place, open: ExitStack) -> None:
    """Calls whose answers nobody reads."""
    request = RPCS["QueryRoute"].request(topic={"name": "orders"}).SerializeToString()
    for _ in range(10):
        peer = open.enter_context(connected(place, {INITIAL_WINDOW: 0}))
        with suppress(OSError):
            peer.send(*(call(n, "QueryRoute") + message(n, request) for n in range(1, 200, 2)))


def untaken(place: Place, open: ExitStack) -> None:
    """Receives of large messages, which nobody reads."""
    serve_another(place, [bytes(4 * MIB)] * 60)
    for _ in range(8):
        peer = open.enter_context(connected(place, {INITIAL_WINDOW: 0}))
        with suppress(OSError):
            peer.send(*(call(n, "ReceiveMessage") + message(n, received("billing")) for n in range(1, 200, 2)))


def untaken_by_groups(place: Place, open: ExitStack) -> None:
    """Receives of a large message, each of a group of its own, which nobody reads."""
    serve_another(place, [bytes(4 * MIB - 1000)])
    for number in range(8):
        peer = open.enter_context(connected(place, {INITIAL_WINDOW: 0}))
        with suppress(OSError):
            peer.send(*(
                call(n, "ReceiveMessage") + message(n, received(f"group-{number}-{n}")) for n in range(1, 200, 2)
            ))  # fmt: skip
    # More and more would be handed out as time goes by.
    time.sleep(5)


def strange(place: Place, open: ExitStack) -> None:
    """Receives of groups of which nobody has heard."""
    for number in range(20):
        peer = open.enter_context(connected(place))
        peer.send(*(
            call(stream, "ReceiveMessage", client=f"{number}-{stream}")
            + message(stream, received(f"group-{number}-{stream}"))
            for stream in range(1, 200, 2)
        ))  # fmt: skip


def resets(place: Place, open: ExitStack) -> None:
    """Calls that are reset at once, for as long as the server takes them."""
    for _ in range(10):
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            for at in range(1, 4000, 200):
                peer.send(*(
                    call(stream, "Heartbeat") + message(stream, b"") + encoded(Frame(RST_STREAM, 0, stream, bytes(4)))
                    for stream in range(at, at + 200, 2)
                ))  # fmt: skip


def floods(place: Place, open: ExitStack) -> None:
    """Pings and settings without end."""
    for frame in (Frame(PING, 0, 0, bytes(8)), Frame(SETTINGS, 0, 0, bytes(6)), Frame(DATA, 0, 1, b"")):
        peer = open.enter_context(connected(place))
        with suppress(OSError):
            peer.send(call(1, "Telemetry"), encoded(frame) * 20_000)


ATTACKS: dict[str, Attack] = {
    "broken": broken,
    "huge": huge,
    "unfinished messages": partial(unfinished, name="SendMessage"),
    "unfinished commands": partial(unfinished, name="Telemetry"),
    "unread messages": partial(unfinished, name="SendMessage", connections=30, size=70_000),
    "settings": settled,
    "bombs": bombs,
    "metadata": partial(many, name="SendMessage", more="m" * 7_000),
    "streams": partial(many, name="Telemetry"),
    "half-open calls": partial(many, name="SendMessage"),
    "slow readers": slow,
    "receives that nobody reads": untaken,
    "receives of many groups that nobody reads": untaken_by_groups,
    "strange groups": strange,
    "resets": resets,
    "floods": floods,
}


@contextmanager
def measuring(process: psutil.Process) -> Iterator[list[int]]:
    """The MiB by which a process has grown at most, as the only item."""
    before, most, stop = process.memory_info().rss, [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            most[0] = max(most[0], (process.memory_info().rss - before) // MIB)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_front_serves_others_during_and_after_an_attack_and_grows_by_little(sqlite_engine: Engine, attack):
    with front_of(sqlite_engine.url.render_as_string(hide_password=False)) as (place, process):
        serve_another(place)
        with measuring(process) as grown:
            with ExitStack() as open:
                ATTACKS[attack](place, open)
                serve_another(place)
            serve_another(place)

    print(f"{attack}: {grown[0]} MiB")
    assert grown[0] <= GROWTH
