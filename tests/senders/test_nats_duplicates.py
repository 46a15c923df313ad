"""What a stream drops as a duplicate is done only if the copy that it has is of the same subject."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest

from outbox import Outbox
from outbox.model.verdict import DONE, Unavailable
from outbox.senders.nats import NatsSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done, check_stored
from outbox.testing.servers import NatsServer
from outbox.testing.servers.process import free_port
from tests.support.destination import fill
from tests.support.nats_streams import Stream, Witness, make_stream
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

EARLIER = Unavailable("an earlier message of its key was not stored")
TAKEN = "the copy is sent again, and taken when the stream's duplicate_window is over"


@pytest.fixture
def pair(stream: Stream) -> Iterator[tuple[NatsSender, NatsSender]]:
    """Two senders with a prefix each, into the same stream."""
    first, second = (NatsSender(f"{stream.url}/{prefix}") for prefix in "ab")
    yield first, second
    first.close()
    second.close()


def subjects(stream: Stream) -> list[str]:
    """Of what the stream holds, without its prefix."""
    return [subject for subject, _ in stream.held()]


def of_another(stream: Stream) -> Unavailable:
    """What is said of a message that the stream has of the first sender's subject."""
    return Unavailable(
        f"stream '{stream.prefix}' dropped it on subject '{stream.prefix}.b.orders' because it has the same message"
        f" from '{stream.prefix}.a.orders', and drops by the id alone; give each of the two subjects a stream,"
        f" or run one relay only; {TAKEN}"
    )


def doubtful(stream: str, subject: str, why: str) -> Unavailable:
    """What is said of a message that nobody knows the first copy of."""
    return Unavailable(
        f"stream {stream!r} dropped it on subject {subject!r} as a duplicate, and cannot tell of which subject the"
        f" first copy was: {why}; {TAKEN}"
    )


def test_a_copy_of_another_subject_is_not_done(stream, pair):
    sent = [a_message("orders", n) for n in range(100)]
    check_all_done(pair[0].send(sent), sent)

    assert pair[1].send(sent) == [of_another(stream)] * 100
    assert subjects(stream) == ["a.orders"] * 100


def test_both_subjects_have_everything_when_the_window_is_over(engine, stream):
    """Two relays of one outbox: the second waits, and loses nothing."""
    stream.take(">", duplicate_window=2)
    fill(Outbox(engine), 100, keys=5)
    for prefix in "ab":
        with Outbox(engine).running(f"{stream.url}/{prefix}", name=prefix):
            assert eventually(lambda: subjects(stream).count(f"{prefix}.topic0") == 100)  # noqa: B023

    held = stream.held()
    for prefix in "ab":
        bodies = [int(body) for subject, body in held if subject == f"{prefix}.topic0"]
        assert sorted(bodies) == list(range(100))
        for key in range(5):
            assert [body for body in bodies if body % 5 == key] == list(range(key, 100, 5))


def test_one_of_another_subject_holds_back_its_key_and_nothing_else(stream, pair):
    there, *rest = [a_message("orders", n, key=key) for n, key in enumerate(["k", "k", "other", None])]
    check_all_done(pair[0].send([there]), [there])

    verdicts = pair[1].send([there, *rest])

    assert verdicts == [of_another(stream), EARLIER, DONE, DONE]


@pytest.mark.parametrize("size", [10, 900_000])
def test_what_was_stored_before_a_crash_is_done_and_its_key_goes_on(stream, size):
    """Another process sends it again: there is one copy of each, in order, whatever the size."""
    sent = [a_message("orders", bytes([n]) * size, key=f"k{n % 3}") for n in range(30)]
    with closing(NatsSender(stream.url)) as before:
        check_all_done(before.send(sent[:15]), sent[:15])

    with closing(NatsSender(stream.url)) as after:
        check_all_done(after.send(sent), sent)

    assert len(stream.held()) == 30
    check_stored(stream, sent)


def test_any_number_of_duplicates_is_asked_about_in_one_call(stream):
    sent = [a_message("orders", n, key=f"k{n % 700}" if n % 2 else None) for n in range(3_000)]
    with closing(NatsSender(stream.url)) as sender:
        check_all_done(sender.send(sent), sent)

        check_all_done(sender.send(sent), sent)

    assert len(stream.received()) == 3_000


def test_one_whose_first_copy_is_gone_is_sent_until_the_window_is_over(stream):
    """A consumer of a work queue took it, perhaps; or it was of another subject."""
    sent = [a_message("orders", 1), a_message("orders", 2)]
    with closing(NatsSender(stream.url)) as sender:
        check_all_done(sender.send(sent), sent)
        stream.remove(1)

        first, second = sender.send(sent)
        stream.take("orders", duplicate_window=0.1)
        check_eventually_done(sender, sent[:1])

    assert first == doubtful(stream.prefix, f"{stream.prefix}.orders", "the first copy is gone")
    assert second == DONE
    assert stream.held() == [("orders", b"2"), ("orders", b"1")]


def test_another_message_in_the_place_of_the_first_copy_is_not_it(stream, nats):
    """The stream was made anew since."""
    stream.publish("orders", b"something else")
    answer = b'{"stream": "%s", "seq": 1, "duplicate": true}' % stream.prefix.encode()

    verdict = answered(nats, answer)

    assert verdict[0] == doubtful(stream.prefix, verdict[1], "the first copy is gone")


def test_a_stream_that_cannot_be_asked_leaves_it_waiting(nats):
    verdict = answered(nats, b'{"stream": "nowhere", "seq": 1, "duplicate": true}')

    assert verdict[0] == doubtful("nowhere", verdict[1], "stream not found")


def test_a_domain_that_nobody_knows_leaves_it_waiting(nats):
    verdict = answered(nats, b'{"stream": "S", "seq": 1, "duplicate": true, "domain": "nowhere"}')

    assert verdict[0] == doubtful("S", verdict[1], "JetStream is silent")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"stream": "S 0\\r\\nPUB x", "seq": 1, "duplicate": true}',
        b'{"stream": ">", "seq": 1, "duplicate": true}',
        b'{"stream": "S", "seq": "1", "duplicate": true}',
        b'{"stream": "S", "seq": 1, "duplicate": true, "domain": "a b"}',
        b'{"seq": 1, "duplicate": true}',
    ],
)
def test_what_speaks_like_jetstream_and_is_not_gets_no_question(nats, answer):
    verdict, subject = answered(nats, answer)

    assert verdict == Unavailable(f"NATS: what answers on subject {subject!r} is not JetStream")


def answered(server: NatsServer, answer: bytes) -> tuple[object, str]:
    """The verdict on a message that is answered so, and its subject."""
    with (
        Witness(server) as witness,
        ThreadPoolExecutor(1) as pool,
        closing(NatsSender(witness.url, timeout=timedelta(seconds=60))) as sender,
    ):
        verdicts = pool.submit(sender.send, [a_message("orders", 1)])
        witness.arrivals(1)
        witness.answer(answer)
        return verdicts.result()[0], f"{witness.prefix}.orders"


@pytest.mark.parametrize("jetstream", ["enabled", "{ domain: hub }"])
def test_who_may_not_ask_is_told_which_permission_is_missing_at_once(jetstream):
    """What is new in the call is stored as ever. A server names no domain where it speaks of its own."""
    users = '{ users: [{ user: ann, password: p, permissions: { publish: { deny: "$JS.API.STREAM.MSG.GET.>" } } }] }'
    with NatsServer(settings={"authorization": users, "jetstream": jetstream}) as server:
        make_stream(server.url, "orders", user="ann", password="p")
        again, new = a_message("orders", 1), a_message("orders", 2)
        with closing(NatsSender(server.url.replace("//", "//ann:p@"), timeout=timedelta(seconds=120))) as sender:
            check_all_done(sender.send([again]), [again])
            began = time.monotonic()
            verdicts = sender.send([again, new])
            took = time.monotonic() - began

    missing = "the user may not publish to '$JS.API.STREAM.MSG.GET.S'"
    assert verdicts == [doubtful("S", "orders", missing), DONE]
    assert took < 60


def test_a_stream_of_another_domain_is_asked_there():
    """The sender is connected to a leaf node, the stream lives in the hub."""
    port = free_port()
    hub_settings = {"jetstream": "{ domain: hub }", "leafnodes": f'{{ host: "127.0.0.1", port: {port} }}'}
    remotes = f'{{ remotes: [{{ url: "nats-leaf://127.0.0.1:{port}" }}] }}'
    with (
        NatsServer(settings=hub_settings) as hub,
        NatsServer(settings={"jetstream": "{ domain: leaf }", "leafnodes": remotes}) as leaf,
    ):
        make_stream(hub.url, "orders")
        sent = [a_message("orders", n) for n in range(3)]
        with closing(NatsSender(leaf.url, timeout=timedelta(seconds=2))) as sender:
            check_eventually_done(sender, sent)

            check_all_done(sender.send(sent), sent)
