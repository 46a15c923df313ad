"""What a front keeps of its clients: their messages as they were sent, and whose turn it is to be asked."""

import asyncio
from typing import Any

import grpc

from outbox.rocketmq.front.calls import Call
from outbox.rocketmq.front.clients import ClientPolicy, Clients
from outbox.rocketmq.front.conversion import stored, wire_of
from outbox.rocketmq.front.protocol import RPCS, SERVICE
from outbox.rocketmq.front.questions import Questions
from outbox.rocketmq.front.settings import PRODUCER
from outbox.rocketmq.front.statuses import Code, RefusedError
from outbox.rocketmq.front.telemetry import Telemetry
from tests.rocketmq.front_probes import message
from tests.rocketmq.fronts import listening

ODD = {
    "": "no name",
    "a": "1",
    "A": "other case",
    "Gr\u00f6\u00dfe": "x",
    "white": " x ",
    "content-type": "y",
    "empty": "",
}


def test_a_message_comes_back_as_the_client_has_sent_it():
    sent = message("fifo", b"body", "FIFO", keys=["k1", "k2"], tag="t", message_group="g", props=ODD)

    back = wire_of(stored(sent), "FIFO")

    system = back.system_properties
    assert (back.topic.name, back.body, system.message_group, system.tag, list(system.keys)) == (
        "oracle_fifo", b"body", "g", "t", ["k1", "k2"],
    )  # fmt: skip
    assert (system.message_id, system.born_host) == (sent.system_properties.message_id, "born-host")
    assert system.born_timestamp.ToMilliseconds() == sent.system_properties.born_timestamp.ToMilliseconds()
    assert dict(back.user_properties) == {**ODD, "__SHARDINGKEY": "g"}


def test_as_many_properties_as_rocketmq_allows_come_back():
    many = {f"p{number}": "v" * 100 for number in range(128)}

    assert dict(wire_of(stored(message("normal", props=many)), "NORMAL").user_properties) == many


class Stream:
    """A stream that takes commands, or none."""

    def __init__(self, *, takes: bool) -> None:
        self.takes, self.written = takes, 0

    def write(self, _command: object) -> bool:
        """Do as a stream to a client."""
        self.written += 1
        return self.takes


def producers(clients: Clients, *streams: Stream) -> Clients:
    """Have a producer of topic `orders` for each stream, with the number of the stream as its id."""
    for number, stream in enumerate(streams):
        clients.opened(str(number), stream)
        clients.declared(str(number), PRODUCER, frozenset({"orders"}))
    return clients


def test_each_question_about_a_transaction_goes_to_the_next_producer_of_the_topic():
    """However many transactions are asked about in between, so that none meets a silent producer for ever."""
    streams = [Stream(takes=True) for _ in range(3)]
    questions = Questions(producers(Clients(), *streams))

    met: dict[int, set[int]] = {7: set(), 8: set()}
    for attempt in range(3):
        for transaction, met_by in met.items():
            before = [stream.written for stream in streams]
            questions.ask("orders", None, turn=transaction + attempt)
            met_by |= {number for number, stream in enumerate(streams) if stream.written > before[number]}

    assert met == {7: {0, 1, 2}, 8: {0, 1, 2}}
    assert questions.ask("other", None, turn=0) is False


def test_the_next_producer_is_asked_instead_of_one_that_does_not_read():
    """Also where two do not, and each question tries no more than two."""
    streams = [Stream(takes=False), Stream(takes=False), Stream(takes=True)]
    questions = Questions(producers(Clients(), *streams))

    asked = [questions.ask("orders", None, turn=0) for _ in range(4)]

    assert (asked, streams[2].written) == ([False, True, True, True], 3)


def test_the_newest_stream_of_a_client_is_asked_and_the_older_one_after_the_end_of_the_newest():
    old, new = Stream(takes=True), Stream(takes=True)
    clients = producers(Clients(), old)
    written = []

    clients.opened("0", new)
    for closed in (new, old):
        Questions(clients).ask("orders", None, turn=0)
        written.append((old.written, new.written))
        clients.closed("0", closed)

    assert (written, Questions(clients).ask("orders", None, turn=0)) == ([(0, 1), (1, 1)], False)


def test_a_client_that_said_good_bye_is_asked_no_more_and_again_after_it_has_declared_itself_anew():
    clients, stream = Clients(), Stream(takes=True)
    producers(clients, stream).gone("0")

    before = Questions(clients).ask("orders", None, turn=0)
    clients.declared("0", PRODUCER, frozenset({"orders"}))

    assert (before, Questions(clients).ask("orders", None, turn=0)) == (False, True)


def test_clients_without_a_stream_make_place_after_half_a_minute_and_those_that_are_there_stay():
    now = [0.0]
    clients = Clients(3, clock=lambda: now[0])
    here = producers(clients, Stream(takes=True))
    refused = []

    def comes(id: str) -> None:
        try:
            clients.declared(id, PRODUCER, frozenset())
        except RefusedError as error:
            refused.append((id, error.code, error.text))

    for id in ("beats", "stranger", "other"):
        comes(id)
    now[0] = 31.0
    beats = clients.beat("beats")
    comes("late")

    assert refused == [("other", Code.TOO_MANY_REQUESTS, "the front has 3 clients, as many as --max-clients allows")]
    assert (beats, [here.alive(id) for id in ("0", "beats", "stranger", "late")]) == (True, [True, True, False, True])


def test_each_open_stream_of_a_client_counts_as_a_client():
    clients, streams = Clients(3), [Stream(takes=True) for _ in range(4)]
    opened: list[str] = []

    def opens(id: str, stream: Stream) -> None:
        try:
            clients.opened(id, stream)
        except RefusedError as error:
            opened.append(error.code.name)
        else:
            opened.append(id)

    for stream in streams:
        opens("a", stream)
    opens("b", streams[3])
    clients.closed("a", streams[0])
    opens("b", streams[3])
    opens("b", streams[0])
    for stream in streams[1:3]:
        clients.closed("a", stream)
    opens("b", streams[0])
    opens("b", streams[1])

    full = "TOO_MANY_REQUESTS"
    assert opened == ["a", "a", "a", full, full, "b", full, "b", "b"]


def test_a_stream_that_ends_without_settings_leaves_nothing():
    clients, stream = Clients(1), Stream(takes=True)
    clients.opened("stranger", stream)

    clients.closed("stranger", stream)

    assert (clients.alive("stranger"), producers(clients, stream).alive("0")) == (False, True)


def test_a_front_with_too_many_clients_says_so_in_its_log(outbox, caplog):
    """Most clients tell nobody: a producer goes on to send, and is not asked about transactions."""
    rpc = RPCS["Telemetry"]
    command = rpc.request()
    command.settings.client_type = PRODUCER
    command.settings.publishing.topics.add(name="orders")
    with (
        listening(outbox, clients=ClientPolicy(most=1)) as front,
        grpc.insecure_channel(str(front.listening)) as channel,
    ):
        talk = channel.stream_stream(f"/{SERVICE}/Telemetry", rpc.request.SerializeToString, rpc.response.FromString)
        codes = []
        for client in ("first", "second"):
            # A client counts for half a minute after the end of its stream.
            stream = talk(iter([command]), metadata=(("x-mq-client-id", client),))
            codes += [answer.status.code for answer in stream]

    assert codes == [Code.OK, Code.TOO_MANY_REQUESTS]
    assert caplog.messages == ["front: a client is refused: the front has 1 clients, as many as --max-clients allows"]


def test_of_the_settings_of_a_client_the_topics_that_are_there_are_kept():
    clients, stream = Clients(), Stream(takes=True)
    looked: list[object] = []

    async def look(asked: object) -> None:
        looked.append(asked)

    telemetry = Telemetry(clients, {"orders": "TRANSACTION"}, {}, look)
    command = RPCS["Telemetry"].request()
    command.settings.client_type = PRODUCER
    for name in ("orders", "other"):
        command.settings.publishing.topics.add(name=name)
    clients.opened("0", stream)

    answer: Any = asyncio.run(telemetry.hear(Call("0", {}), command))

    assert looked == [command]
    assert [topic.name for topic in answer.settings.publishing.topics] == ["orders", "other"]
    assert [Questions(clients).ask(topic, None, turn=0) for topic in ("orders", "other")] == [True, False]
