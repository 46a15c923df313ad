"""Limits of a front: of a message, of metadata, of a connection, and of calls that send nothing or take nothing."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest

from outbox import Message, Outbox
from outbox.model.encoding import MAX_BODY_BYTES
from outbox.model.filter.sql92 import MAX_DEPTH, MAX_LENGTH
from outbox.model.limits import MAX_KEY_BYTES, MAX_TAGS
from outbox.rocketmq.front.calls import MOST_WAITING, THREADS, Call, Handlers, Send, Streaming, Threads
from outbox.rocketmq.front.clients import MOST_CLIENTS, Clients
from outbox.rocketmq.front.limits import MORE_CONNECTIONS, Limits
from outbox.rocketmq.front.protocol import RPCS, SERVICE, numbers
from outbox.rocketmq.front.receiving import LONGEST_POLL, MOST_ENTRIES
from outbox.rocketmq.front.routing import Place
from outbox.rocketmq.front.security import Port
from outbox.rocketmq.front.sending import ALONE_SECONDS, MOST_BYTES, PATIENCE
from outbox.rocketmq.front.server import Server
from outbox.rocketmq.front.settings import MOST_RECEIVED, MOST_TOPICS
from outbox.rocketmq.front.statuses import Code, RefusedError, status
from outbox.rocketmq.front.telemetry import Telemetry
from outbox.rocketmq.front.unfinished import received
from outbox.rocketmq.front.untaken import OF_ALL, OF_CONNECTION, Untaken
from outbox.rocketmq.front.validation import (
    LEAST_INVISIBLE,
    MAX_DELAY,
    MAX_EXPRESSION,
    MAX_GROUP_BYTES,
    MAX_KEYS,
    MAX_MESSAGES,
    MAX_PROPERTIES,
    MAX_PROPERTY_BYTES,
    MAX_RECOVERY,
    MOST_INVISIBLE,
)
from outbox.rocketmq.limits import MAX_GROUP, MAX_TOPIC
from outbox.runtime.stop import Stop
from outbox.store.subscriptions.pops import MOST_BYTES as POPPED
from tests.rocketmq.front_probes import message as sent
from tests.rocketmq.fronts import called, listening
from tests.rocketmq.raw_http2 import (
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_STREAMS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    call,
    connected,
    encoded,
    message,
    payloads,
)  # fmt: skip
from tests.support.pages import TOP
from tests.support.waiting import eventually

SOON = timedelta(milliseconds=100)
MIB = 1024**2
_Beat, _Received = RPCS["Heartbeat"].response, RPCS["ReceiveMessage"].response


async def _beat(_call: Call, _request: Any) -> Any:
    return _Beat(status=status())


async def _receive(_call: Call, _request: Any, send: Send) -> None:
    for _ in range(100):
        await send(_Received(status=status(text="x" * 100_000)))


async def _look(_command: Any) -> None:
    """Look for nothing."""


async def _nothing() -> None:
    await asyncio.Event().wait()


@contextmanager
def serving(receive: Streaming = _receive, **limits: Any) -> Iterator[Place]:
    """A server without a database, with these limits; `Heartbeat` is answered, and `ReceiveMessage` with 10 MB."""
    handlers = Handlers(
        unary={"Heartbeat": _beat}, streaming={"ReceiveMessage": receive}, beside=_nothing, end=lambda: None
    )
    server = Server(
        [Port(Place.of("127.0.0.1:0"), None)], handlers, Telemetry(Clients(), {}, {}, _look), limits=Limits(**limits)
    )
    stop, bound, places = Stop(), threading.Event(), list[Place]()

    def note(found: Any) -> None:
        places.extend(found)
        bound.set()

    thread = threading.Thread(target=lambda: server.serve(stop, bound=note, beat=lambda: None))
    thread.start()
    try:
        assert bound.wait(60)
        yield places[0]
    finally:
        stop.ask()
        thread.join()


class Asking:
    """A connection of gRPC's own."""

    def __init__(self, place: Place) -> None:
        self._channel = grpc.insecure_channel(str(place))

    def code(self, body: bytes = b"", *, metadata: str = "") -> str:
        """Return the code of a heartbeat with these bytes."""
        ask = self._channel.unary_unary(f"/{SERVICE}/Heartbeat", None, _Beat.FromString)
        try:
            answer = ask(body, metadata=[("x-mq-client-id", "raw"), ("more", metadata)], timeout=60)
        except grpc.RpcError as error:
            return str(error.code().name)
        return Code(answer.status.code).name

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def of_group(size: int) -> bytes:
    """A heartbeat of so many bytes."""
    made = RPCS["Heartbeat"].request()
    made.group.name = "g" * size
    raw = bytes(made.SerializeToString())
    made.group.name = "g" * (2 * size - len(raw))
    return bytes(made.SerializeToString())


HOUR = timedelta(hours=1)


def ends(stream: int) -> Any:
    """A function that knows the frame with which the server ends a call."""
    return lambda frame: (
        frame.stream == stream and ((frame.kind == HEADERS and frame.flags & END_STREAM) or frame.kind == RST_STREAM)
    )


def test_the_limits_are_those_of_the_page():
    limits = Limits()
    said = {
        f"a request of messages | {limits.message_bytes // 1024**2} MiB",
        f"a request of acknowledgements | {limits.list_bytes // 1024**2} MiB",
        f"the settings of a client | {limits.command_bytes // 1024} KiB",
        f"any other request | {limits.call_bytes // 1024} KiB",
        f"unfinished requests of all connections | {limits.unfinished_bytes // 1024**2} MiB",
        f"connections at a port | `--max-clients`, and {MORE_CONNECTIONS:,} more",
        f"the metadata of a call | {limits.metadata_bytes // 1024} KiB",
        f"a request that does not come | {limits.read_within.seconds} s",
        f"a response that the client does not take | {limits.take_within.seconds} s",
        f"calls at once on a connection | {limits.streams}",
        f"a client that answers no ping | {limits.keepalive.seconds} s, and {limits.keepalive.seconds} s more",
        f"a connection without calls | {limits.idle.seconds // 60} minutes",
        f"clients of a front | `--max-clients`, {MOST_CLIENTS:,}",
        f"calls of the database | {THREADS}, and {MOST_WAITING:,} that wait",
        f"messages that wait for the database | {MOST_BYTES // 1024**2} MiB together",
        (
            f"a send whose message another transaction is storing, or a locked table | {PATIENCE.replace('s', ' s')},"
            f" {ALONE_SECONDS:g} s for all that wait with it"
        ),
        f"messages on the way to clients | {OF_CONNECTION // MIB} MiB of a connection, {OF_ALL // MIB} MiB together",
        f"messages of one receive | {POPPED // MIB} MiB of bodies, or one message",
    }

    assert {row.rpartition(" | ")[0] for row in rows("of")} == said


def test_a_connection_that_takes_no_messages_gets_no_more_and_then_nobody_does():
    untaken, large = Untaken(of_connection=10, of_all=15), [Message("orders", b"1234567890")]

    with untaken.sending("a", large):
        one = [untaken.allows(each) for each in "ab"]
        with untaken.sending("b", large):
            both = [untaken.allows(each) for each in "abc"]
    none = [untaken.allows(each) for each in "abc"]

    assert (one, both, none) == ([False, True], [False] * 3, [True] * 3)


def test_the_limits_of_what_clients_send_are_those_of_the_page():
    said = {
        (
            f"name of a topic | {MAX_TOPIC} letters, digits, percent signs, bars, hyphens and underscores"
            f" | {Code.ILLEGAL_TOPIC}"
        ),
        f"name of a consumer group | {MAX_GROUP} of the same characters | {Code.ILLEGAL_CONSUMER_GROUP}",
        f"message group | {MAX_GROUP_BYTES - 1} bytes | {Code.ILLEGAL_MESSAGE_GROUP}",
        f"body | from 1 byte | {Code.MESSAGE_BODY_EMPTY}",
        f"body | up to {MAX_BODY_BYTES // 1024**2} MiB | {Code.MESSAGE_BODY_TOO_LARGE}",
        f"bodies of a call together | {MAX_BODY_BYTES // 1024**2} MiB | {Code.INTERNAL_SERVER_ERROR}",
        f"messages of a call | {MAX_MESSAGES:,} | {Code.PAYLOAD_TOO_LARGE}",
        f"messages of a transaction in a call | 1 | {Code.INTERNAL_SERVER_ERROR}",
        f"properties | {MAX_PROPERTIES} | {Code.MESSAGE_PROPERTIES_TOO_LARGE}",
        f"properties, tag and keys together | {MAX_PROPERTY_BYTES // 1024} KiB | {Code.MESSAGE_PROPERTIES_TOO_LARGE}",
        f"keys of the messages of a call | {MAX_KEYS:,} | {Code.MESSAGE_PROPERTIES_TOO_LARGE}",
        f"tag | {MAX_TAGS} characters, without a bar | {Code.ILLEGAL_MESSAGE_TAG}",
        f"message id | {MAX_KEY_BYTES:,} bytes | {Code.ILLEGAL_MESSAGE_ID}",
        f"delivery time | {MAX_DELAY // HOUR} hours ahead | {Code.ILLEGAL_DELIVERY_TIME}",
        f"recovery time of a transaction | {MAX_RECOVERY // HOUR} hour | {Code.BAD_REQUEST}",
        (
            f"invisible time | from {LEAST_INVISIBLE.seconds} s to {MOST_INVISIBLE // HOUR} hours; a change may be 0"
            f" | {Code.ILLEGAL_INVISIBLE_TIME}"
        ),
        f"messages of a receive | {MOST_RECEIVED}, also where more are asked for |",
        f"wait of a receive | {LONGEST_POLL.seconds} s, also where more is asked for |",
        f"acknowledgements of a call | {MOST_ENTRIES:,} | {Code.BAD_REQUEST}",
        f"tag expression | {MAX_EXPRESSION:,} characters | {Code.ILLEGAL_FILTER_EXPRESSION}",
        f"SQL filter | {MAX_LENGTH:,} characters, {MAX_DEPTH} levels | {Code.INTERNAL_SERVER_ERROR}",
        f"topics in the settings of a client | {MOST_TOPICS:,} | {Code.BAD_REQUEST}",
        f"topics that clients make | {MOST_TOPICS:,} | {Code.TOO_MANY_REQUESTS}",
    }

    assert rows("in a call") == said


@pytest.mark.parametrize("filter_", ["a = 1 OR " * 1000, "(" * 20 + "a = 1" + ")" * 20])
def test_a_filter_beyond_the_limits_is_refused(sqlite_engine, filter_):
    request = RPCS["ReceiveMessage"].request(
        group={"name": "billing"}, message_queue={"topic": {"name": "orders"}}, invisible_duration={"seconds": 30}
    )
    request.filter_expression.type = numbers("FilterType")["SQL"]
    request.filter_expression.expression = filter_
    with listening(Outbox(sqlite_engine)) as front:
        answers = called(front, "ReceiveMessage", request)

    assert answers[0].status.code == Code.INTERNAL_SERVER_ERROR


def rows(heading: str) -> set[str]:
    """The rows of the page's table whose first column has a heading, without the bars at the ends."""
    page = (TOP / "docs" / "rocketmq-fronts.md").read_text()
    table = page.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return {line.removeprefix("| ").removesuffix(" |") for line in table.splitlines()[2:]}


def test_a_message_or_metadata_above_the_limit_are_refused_and_the_connection_serves_on():
    with serving(message_bytes=100_000, call_bytes=100_000, metadata_bytes=20_000) as place:
        client = Asking(place)
        codes = [
            client.code(of_group(100_000)), client.code(of_group(100_001)),
            client.code(metadata="m" * 19_000), client.code(metadata="m" * 300_000), client.code(),
        ]  # fmt: skip
        client.close()

    assert codes == ["OK", "RESOURCE_EXHAUSTED", "OK", "RESOURCE_EXHAUSTED", "OK"]


def test_a_request_without_messages_has_a_limit_of_its_own():
    with serving(call_bytes=100) as place:
        client = Asking(place)
        codes = [client.code(of_group(100)), client.code(of_group(101))]
        client.close()

    assert codes == ["OK", "PAYLOAD_TOO_LARGE"]


def test_unfinished_requests_of_the_connection_with_the_most_bytes_are_ended_and_others_go_on(caplog):
    """Of 1 MiB that is announced each stream sends half."""
    half = message(1, bytes(MIB // 2 - 5), size=MIB)
    with serving(unfinished_bytes=MIB) as place, connected(place) as large, connected(place) as small:
        small.send(call(1, "Telemetry"))
        small.pour({1: b"".join(payloads(half))[: MIB // 4]}, 0.2)
        large.send(*(call(stream, "Telemetry") for stream in (1, 3, 5)))
        large.pour(dict.fromkeys((1, 3, 5), b"".join(payloads(half))), 10)
        ended = 5 in large.over or large.first(ends(5)) is not None
        small.send(call(3, "Heartbeat"), message(3, b""))
        others = [frame.stream for frame in small.until(ends(3))]

    assert (ended, 1 in others) == (True, False)
    assert caplog.messages == [f"front: unfinished requests have more than {MIB} bytes; those of 127.0.0.1 are ended"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_says_how_many_bytes_a_connection_to_a_port_has_received(host):
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection((host, port)) as client, server.accept()[0] as accepted:
            client.sendall(b"x" * 1000)
            accepted.recv(1000, socket.MSG_WAITALL)

            assert received({port}) == {(host, client.getsockname()[1]): 1000}


def test_a_connection_above_the_limit_is_closed_before_it_says_anything_and_makes_place_when_it_ends():
    with serving(connections=1) as place:
        with connected(place) as first:
            first.send(call(1, "Heartbeat"), message(1, b""))
            served = first.first(ends(1))
            with socket.create_connection((place.host, place.port), 60) as second:
                closed = second.recv(1)
        assert eventually(lambda: Asking(place).code() == "OK")

    assert (served is not None, closed) == (True, b"")


def test_a_message_that_cannot_be_read_is_refused_and_the_log_has_no_line(caplog):
    with serving() as place:
        client = Asking(place)
        code = client.code(b"\xff\xff\xff")
        client.close()
        with connected(place) as peer:
            peer.send(call(1, "Telemetry"), message(1, b"\xff\xff\xff", flags=0))
            ended = peer.first(ends(1))

    assert (code, ended is not None, caplog.records) == ("BAD_REQUEST", True, [])


def test_a_connection_may_have_so_many_calls():
    with serving(streams=7) as place, connected(place) as peer:
        said = peer.first(lambda frame: frame.kind == SETTINGS and not frame.flags)

    assert said is not None
    assert struct.pack(">HI", MAX_STREAMS, 7) in said.payload


@pytest.mark.parametrize("sent", [
    call(1, "Heartbeat"),
    call(1, "Heartbeat") + message(1, b"half", size=1000, flags=0),
    call(1, "Heartbeat", flags=END_STREAM),
    call(1, "ReceiveMessage"),
])  # fmt: skip
def test_a_call_without_a_request_is_ended_and_the_connection_serves_on(sent):
    with serving(read_within=SOON) as place, connected(place) as peer:
        peer.send(sent)
        ended = peer.first(ends(1))
        peer.send(call(3, "Heartbeat"), message(3, b""))
        served = peer.first(ends(3))

    assert (ended is not None, served is not None) == (True, True)


def test_a_call_whose_client_takes_no_response_is_left_and_ends_as_soon_as_the_client_takes_again():
    left = threading.Event()

    async def receive(call: Call, request: Any, send: Send) -> None:
        try:
            await _receive(call, request, send)
        except asyncio.CancelledError:
            left.set()
            raise

    with serving(receive, take_within=SOON) as place, connected(place, {INITIAL_WINDOW: 1000}) as peer:
        peer.send(call(1, "ReceiveMessage"), message(1, b""))

        assert left.wait(60)
        peer.send(call(3, "Heartbeat"), message(3, b""))
        assert peer.first(ends(3)) is not None
        peer.send(*(encoded(Frame(WINDOW_UPDATE, 0, stream, MIB.to_bytes(4))) for stream in (0, 1)))
        assert peer.first(ends(1)) is not None


def test_a_connection_without_calls_is_closed():
    with serving(idle=SOON) as place, connected(place) as peer:
        peer.send(call(1, "Heartbeat"), message(1, b""))

        assert peer.first(lambda frame: frame.kind == GOAWAY) is not None
        assert peer.first(lambda _frame: False) is None


def test_a_silent_client_is_asked_for_a_sign_of_life():
    with serving(keepalive=SOON) as place, connected(place) as peer:
        peer.send(call(1, "Telemetry"))

        assert peer.first(lambda frame: frame.kind == PING and not frame.flags) is not None


def test_calls_of_the_database_wait_for_a_thread_and_further_ones_are_refused():
    running, go_on = threading.Semaphore(0), threading.Event()

    def work() -> bool:
        running.release()
        return go_on.wait(60)

    async def story() -> list[Any]:
        threads = Threads(2, 3)
        calls = [asyncio.create_task(threads.run(work)) for _ in range(7)]
        for _ in range(2):
            await asyncio.to_thread(running.acquire)
        refused = [each.exception() for each in calls if each.done()]
        go_on.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        again = await threads.run(lambda: "again")
        threads.close()
        return [
            [each.code for each in refused if isinstance(each, RefusedError)],
            sum(each is True for each in answers),
            again,
        ]

    assert asyncio.run(story()) == [[Code.TOO_MANY_REQUESTS] * 2, 5, "again"]


def test_calls_that_wait_for_messages_hold_no_thread(outbox):
    """More calls wait than there are threads, of one group each, and a message is stored meanwhile."""
    groups = {f"g{number}" for number in range(2 * THREADS)}
    minute = {"seconds": 60}
    rpc = RPCS["ReceiveMessage"]
    with listening(outbox) as front, grpc.insecure_channel(str(front.listening)) as channel:
        receive = channel.unary_stream(
            f"/{SERVICE}/ReceiveMessage", rpc.request.SerializeToString, rpc.response.FromString
        )
        waiting = [
            receive(
                rpc.request(
                    group={"name": group},
                    message_queue={"topic": {"name": "orders"}},
                    long_polling_timeout=minute,
                    invisible_duration=minute,
                    batch_size=1,
                ),
                metadata=[("x-mq-client-id", group)],
            )
            for group in groups
        ]
        assert eventually(lambda: {f"{each}|orders" for each in groups} <= {
            each.name for each in outbox.admin.subscriptions()})  # fmt: skip

        request = RPCS["SendMessage"].request(messages=[sent("=steps", type_="FIFO", message_group="g")])
        answer = called(front, "SendMessage", request)
        open = [each.is_active() for each in waiting]
        for each in waiting:
            each.cancel()

    assert (answer.status.code, open) == (20000, [True] * len(groups))
