"""What a front keeps of its clients: their messages as they were sent, and whose turn it is to be asked."""

from outbox.rocketmq.front.clients import Clients
from outbox.rocketmq.front.conversion import stored, wire_of
from outbox.rocketmq.front.protocol import RPCS
from outbox.rocketmq.front.settings import PRODUCER
from tests.rocketmq.front_probes import message

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


def test_producers_of_a_topic_are_asked_in_turn_and_the_next_one_instead_of_one_that_does_not_read():
    clients, streams = Clients(), [Stream(takes=True), Stream(takes=False), Stream(takes=True)]
    settings = RPCS["Telemetry"].request().settings
    settings.client_type = PRODUCER
    settings.publishing.topics.add(name="orders")
    for number, stream in enumerate(streams):
        clients.opened(str(number), stream)
        clients.declared(str(number), settings)

    asked = [clients.ask(topic, None) for topic in ("orders",) * 6 + ("other",)]

    assert (asked, [stream.written for stream in streams]) == ([True] * 6 + [False], [2, 2, 4])
