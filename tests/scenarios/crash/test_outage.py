"""A destination that is away, in every form: nothing is counted, nothing dies, and then all of it arrives in order."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from outbox import Message, Outbox, Relay, Unavailable, Verdict
from outbox.model.verdict import DONE
from tests.support.destination import Destination, expected, fill, relay_to
from tests.support.nats_streams import Stream
from tests.support.parked import attempts, states
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually

KEYS = 20


def refuse(destination: Destination) -> None:
    destination.answer = lambda _message: Unavailable("connection refused")


def raise_always(destination: Destination) -> None:
    def answer(_message: Message) -> Verdict:
        raise OSError("connection reset")

    destination.answer = answer


def swallow(destination: Destination) -> None:
    destination.hanging = lambda _messages: True


def heal(destination: Destination) -> None:
    destination.answer = lambda _message: DONE
    destination.hanging = lambda _messages: False


@pytest.mark.parametrize("outage", [
    # The pauses of a refused topic grow to seconds.
    pytest.param(refuse, id="refused", marks=pytest.mark.storm),
    pytest.param(raise_always, id="raising"),
    pytest.param(swallow, id="black-holed", marks=pytest.mark.storm),
])  # fmt: skip
def test_an_outage_counts_nothing_and_the_backlog_drains_in_order(engine, full, outage):
    outbox, count = Outbox(engine), 10_000 if full else 600
    fill(outbox, count, keys=KEYS)
    destination = Destination()
    outage(destination)
    relay = relay_to(destination, outbox, deadline=timedelta(seconds=1))

    relay.start()
    # A destination that never answers has one call; any other is tried again and again.
    tried = eventually(lambda: destination.calls >= (1 if outage is swallow else 4))
    during = (states(engine).get("dead", 0), attempts(engine), len(destination.messages))
    heal(destination)
    drained = eventually(lambda: len(set(destination.bodies)) >= count)
    relay.stop()
    relay.join(60)

    assert (tried, during, drained) == (True, (0, 0, 0), True)
    # A call that never answers may be given up and made again, and both be accepted in the end.
    arrived = {key: destination.of_key(f"k{key}") for key in range(KEYS)}
    if outage is swallow:
        arrived = {key: list(dict.fromkeys(bodies)) for key, bodies in arrived.items()}
    assert arrived == {key: expected(key, count, KEYS) for key in range(KEYS)}
    assert states(engine) == {}


def test_one_missing_topic_among_three_stops_only_itself(engine, full):
    outbox, count = Outbox(engine), 9_000 if full else 900
    # Keys and topics coincide, so that no key spreads over topics.
    fill(outbox, count, keys=3, topics=3)
    destination = Destination(lambda m: Unavailable("no stream") if m.topic == "topic1" else DONE)
    relay = relay_to(destination, outbox)

    relay.start()
    others = eventually(lambda: len(destination.messages) >= count * 2 // 3)
    waits = eventually(lambda: states(engine) == {"waiting": 1, "behind": count // 3 - 1})
    during = (attempts(engine), destination.of_key("k1"))
    heal(destination)
    drained = eventually(lambda: len(destination.messages) >= count)
    relay.stop()
    relay.join(60)

    assert (others, waits, drained) == (True, True, True)
    assert during == (0, [])
    assert destination.of_key("k1") == expected(1, count, 3)


@pytest.mark.storm
def test_a_partition_pauses_when_too_many_wait(pg_engine, monkeypatch):
    """Beyond its waiting room a missing topic is not parked any more: the rest of the batch stays where it is."""
    outbox = Outbox(pg_engine)
    with outbox.begin() as session:
        outbox.send_all(session, [Message(f"topic{n % 2}", str(n)) for n in range(400)])
    destination = Destination(lambda m: Unavailable("no stream") if m.topic == "topic1" else DONE)
    monkeypatch.setattr("outbox.worker.partition.MAX_WAITING", 50)
    relay = relay_to(destination, outbox)

    relay.start()
    paused = eventually(lambda: len(destination.messages) == 100 and states(pg_engine) == {"waiting": 50})
    time.sleep(1)
    during = (len(destination.messages), states(pg_engine))
    heal(destination)
    drained = eventually(lambda: len(destination.messages) >= 400)
    relay.stop()
    relay.join(60)

    assert paused
    assert during == (100, {"waiting": 50})
    assert drained
    assert sorted(map(int, destination.bodies)) == list(range(400))


@pytest.fixture
def stream(nats):
    with TcpProxy("127.0.0.1", int(nats.url.rpartition(":")[2])) as proxy:
        found = Stream(nats, proxy)
        yield found
        found.close()


@pytest.mark.storm
@pytest.mark.parametrize("trouble", [Stream.disappear, Stream.fall_silent], ids=["refused", "black-holed"])
def test_jetstream_may_go_away_for_a_while(pg_engine, stream, full, trouble):
    outbox, count = Outbox(pg_engine), 10_000 if full else 1_000
    relay = Relay(outbox, stream.open())
    trouble(stream)
    fill(outbox, count)

    relay.start()
    time.sleep(4)
    during = (states(pg_engine), attempts(pg_engine))
    stream.recover()
    drained = eventually(lambda: len(stream.received()) >= count, 120)
    relay.stop()
    relay.join(60)

    assert during == ({}, 0)
    assert drained
    bodies = [(message.key, message.body) for message in stream.stored()]
    assert {key: [body for of, body in bodies if of == f"k{key}"] for key in range(20)} == {
        key: expected(key, count) for key in range(20)
    }


@pytest.mark.storm
def test_a_stream_that_is_missing_holds_up_its_own_topic_only(pg_engine, stream):
    outbox = Outbox(pg_engine)
    stream.take("topic0", "topic2")
    fill(outbox, 300, keys=3, topics=3)
    relay = Relay(outbox, stream.open())

    relay.start()
    others = eventually(lambda: len(stream.received()) >= 200)
    waits = eventually(lambda: states(pg_engine) == {"waiting": 1, "behind": 99})
    counted = attempts(pg_engine)
    stream.take("topic0", "topic1", "topic2")
    drained = eventually(lambda: len(stream.received()) >= 300)
    relay.stop()
    relay.join(60)

    assert (others, waits, counted, drained) == (True, True, 0, True)
    assert [m.body for m in stream.stored() if m.key == "k1"] == expected(1, 300, 3)
