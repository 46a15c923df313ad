"""Redis Cluster and Sentinel: the contract, failovers, and streams that move to other nodes while messages are sent."""

import time
import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest
from redis import Redis
from redis.crc import key_slot

from outbox.model.verdict import DONE, Done, Reject, Unavailable
from outbox.senders import redis as redis_module
from outbox.senders.key_order import Chains
from outbox.senders.redis import RedisSender
from outbox.testing.sender_contract import SenderContract, a_message, check_all_done, check_eventually_done
from tests.conftest import started
from tests.support.places import begun, opened, placed
from tests.support.redis_streams import ArrivingRedis, ClusterStreams, SentinelStreams
from tests.support.remote import RemoteSenderContract, send_through
from tests.support.servers.redis import RedisServer
from tests.support.servers.redis_cluster import RedisCluster, Watched
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

cluster = begun(lambda: RedisCluster(settings={"appendfsync": "always"}))
streams = mortal = placed(ClusterStreams, "cluster", port=None)
sender = opened("streams")


class TestRedisCluster(SenderContract):
    """Streams of a cluster pass the contract. An entry looks like one of a single server."""

    test_whatever_may_be_sent_arrives_exactly_or_is_rejected = None  # type: ignore[assignment]

    @pytest.fixture
    def destination(self, streams):
        """Streams of each test's own."""
        return streams


class TestBadWeather(RemoteSenderContract):
    """As in front of a single server; there strange rows, big bodies and forks are tried, too."""

    test_rows_that_another_hand_wrote_are_rejected_alone = None  # type: ignore[assignment]
    test_big_bodies_go_through_in_one_call = None  # type: ignore[assignment]
    test_a_process_may_fork_and_end_as_it_likes = None  # type: ignore[assignment]

    at = "streams"
    closing_ends_calls = False
    body = 5_000
    topics = ("alpha", "beta")
    cuts = range(0, 900, 129)
    slack = 4


def test_streams_that_move_to_other_nodes_keep_the_order_of_a_key(cluster, streams, sender):
    """Twelve times, while messages are sent."""
    names = [f"{streams.prefix}:{topic}" for topic in ("alpha", "beta")]

    def reshard() -> None:
        for _ in range(6):
            for name in names:
                cluster.move(name)
                time.sleep(0.05)

    sent, _ = send_through(sender, reshard, topics=("alpha", "beta"))

    streams.check_streams(sent)


def test_a_refused_message_of_a_stream_that_has_moved_stops_its_key_alone(cluster, streams, sender):
    """The transaction with the refused message is sent on to the new node, which carries out nothing of it."""
    check_all_done(sender.send(first := [a_message("alpha", "first")]), first)
    cluster.move(f"{streams.prefix}:alpha")
    sent = [a_message("alpha", n, key=f"k{n % 2}") for n in range(6)]
    sent[2]._headers = "[]"

    verdicts = sender.send(sent)

    assert [type(verdict) for verdict in verdicts] == [Done, Done, Reject, Done, Unavailable, Done]
    bodies = [entry[b"Outbox-Body"] for entry in streams.entries("alpha")]
    assert bodies == [first[0].body, b"0", b"1", b"3", b"5"]


def test_a_stream_that_is_on_its_way_is_begun_where_it_goes(cluster, streams, sender):
    """The other node takes it from those alone who have been sent there."""
    name = f"{streams.prefix}:alpha"
    target = cluster.begin_move(name)
    sent = [a_message("alpha", n, key="k" if n < 3 else None) for n in range(5)]

    check_all_done(sender.send(sent[:3]), sent[:3])  # in a transaction
    check_all_done(sender.send(sent[3:]), sent[3:])
    cluster.end_move(name, target)

    with Redis(port=target.port) as client:
        assert [fields[b"Outbox-Body"] for _, fields in client.xrange(name)] == [message.body for message in sent]


@pytest.mark.parametrize(("together", "stored"), [(True, [b"0", b"1", b"2"]), (False, [b"1", b"2", b"0"])])
def test_a_slot_that_arrives_between_two_commands_lets_no_message_of_a_key_pass(together, stored, monkeypatch):
    """Without the transaction, the first is sent away, the others are taken, and the first comes after them."""

    def chains(messages, **options) -> Chains:
        made = Chains(messages, **options)
        made.overlap &= together
        return made

    monkeypatch.setattr(redis_module, "_chains", lambda messages, order="each": chains(messages, order=order))
    sent = [a_message("orders", n, key="k") for n in range(3)]
    with ArrivingRedis() as node, closing(RedisSender(node.url.replace("redis:", "redis+cluster:"))) as sender:
        check_all_done(sender.send(sent), sent)

    assert node.stored == stored


def test_a_replica_that_takes_over_has_everything_that_is_done_in_order(cluster):
    """With `wait=1`. The streams are on the node that is killed."""
    tags = (f"{{{uuid.uuid4().hex}}}" for _ in range(1_000))
    tag = next(tag for tag in tags if cluster.owner(tag) is cluster.masters[0])
    cluster.begin_replica()

    def disaster() -> None:
        time.sleep(0.3)
        cluster.fail_over()

    with closing(ClusterStreams(cluster, tag=tag)) as streams:
        with closing(RedisSender(f"{streams.url}?wait=1&timeout=2")) as sender:
            sent, _ = send_through(sender, disaster, topics=("alpha", "beta"))
        streams.check_streams(sent)
    cluster.replica.stop()


def test_a_node_that_is_away_holds_up_its_own_streams_alone(cluster, streams, sender):
    topics = [f"t{n}" for n in range(40)]
    away = cluster.masters[1]
    there = [topic for topic in topics if cluster.owner(f"{streams.prefix}:{topic}") is not away]
    check_all_done(sender.send(sent := [a_message(topic, 1, key=topic) for topic in topics]), sent)

    away.proxy.refuse()
    verdicts = dict(zip(topics, sender.send([a_message(topic, 2, key=topic) for topic in topics]), strict=True))
    away.proxy.pass_through()

    assert [topic for topic, verdict in verdicts.items() if verdict is DONE] == there
    [refused] = {verdict for verdict in verdicts.values() if verdict is not DONE}
    assert refused == Unavailable(f"Redis: redis://127.0.0.1:{away.proxy.port}: connection refused")
    assert isinstance(refused, Unavailable)
    assert not refused.everything


def test_the_right_to_append_is_enough(cluster, streams):
    """No list of slots is read."""
    for node in cluster.masters:
        node.run("ACL SETUSER", "carl", "on", ">p", "~*", "+xadd")
    sent = [a_message(f"t{n % 5}", n, key=f"k{n % 5}") for n in range(20)]

    with closing(RedisSender(streams.url.replace("://", "://carl:p@"))) as sender:
        check_all_done(sender.send(sent), sent)

    streams.check_stored(sent)


def test_a_server_in_no_cluster_is_refused_and_a_node_is_no_single_server(redis, streams):
    with closing(RedisSender(f"redis+cluster://127.0.0.1:{redis.port}")) as sender:
        [alone] = sender.send([a_message("orders", 1)])
    elsewhere = next(node for node in streams.cluster.masters if node is not streams.server)
    with closing(RedisSender(f"redis://127.0.0.1:{elsewhere.port}/{streams.prefix}")) as sender:
        [moved] = sender.send([a_message("alpha", 1)])

    why = "the server is in no cluster; leave +cluster out of the URL, and write one host"
    assert alone == Unavailable(f"Redis: redis://127.0.0.1:{redis.port}: {why}")
    name = f"{streams.prefix}:alpha"
    there = f"{key_slot(name.encode())} 127.0.0.1:{streams.server.proxy.port}"
    fix = "the server is a node of a cluster: write redis+cluster://"
    assert moved == Unavailable(f"Redis on stream {name!r}: {there}; {fix}")


open_ones, guarded = begun(Watched), begun(lambda: Watched(password="pass"))
watched_streams = placed(SentinelStreams, "open_ones", port=None)


class TestRedisSentinel(SenderContract):
    """Streams of a master that sentinels know pass the contract. An entry looks like one of a single server."""

    test_whatever_may_be_sent_arrives_exactly_or_is_rejected = None  # type: ignore[assignment]

    @pytest.fixture
    def destination(self, watched_streams):
        """Streams of each test's own."""
        return watched_streams


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A master whose sentinels and servers want a password."""
    with started(lambda: Watched(password="pass")) as watched:
        yield watched


def test_the_master_that_sentinels_name_is_followed(watched):
    url = f"redis+sentinel://:pass@{watched.hosts}/mymaster/0/shop?sentinel-password=pass"
    sent = [a_message("orders", n, key=f"k{n % 3}") for n in range(30)]
    with closing(RedisSender(url)) as sender:
        check_all_done(sender.send(sent[:20]), sent[:20])
        assert eventually(lambda: len(_bodies(watched.replica)) == 20)
        watched.master.kill()
        watched.fail_over()

        check_eventually_done(sender, sent[20:], seconds=60)

    assert _bodies(watched.master) == [message.body for message in sent]


def _bodies(server: RedisServer) -> list[bytes]:
    with Redis(port=server.port, password="pass") as client:
        return [fields[b"Outbox-Body"] for _, fields in client.xrange("shop:orders")]


def test_a_master_that_has_become_a_replica_is_left(watched):
    """Without a failure: the sentinels have told it to."""
    url = f"redis+sentinel://:pass@{watched.hosts}/mymaster?sentinel-password=pass"
    with closing(RedisSender(url)) as sender:
        check_all_done(sender.send(sent := [a_message("orders", 1, key="k")]), sent)
        with Redis(port=watched.master.port, password="pass") as client:
            client.replicaof("127.0.0.1", watched.replica.port)
        watched.fail_over()

        check_eventually_done(sender, sent, seconds=60)


@pytest.mark.parametrize(
    ("login", "rest", "why"),
    [
        (":pass", "other?sentinel-password=pass", "the sentinel knows no master 'other'"),
        (":pass", "mymaster", "Authentication required."),
        (":pass", "mymaster?sentinel-password=s3cr3t", "invalid username-password pair or user is disabled."),
        (":s3cr3t", "mymaster?sentinel-password=pass", "invalid username-password pair or user is disabled."),
        ("ann:s3cr3t", "mymaster?sentinel-password=pass", "invalid username-password pair or user is disabled."),
    ],
)
def test_what_is_wrong_with_sentinels_is_said_without_secrets(guarded, login, rest, why, caplog):
    with closing(RedisSender(f"redis+sentinel://{login}@{guarded.hosts}/{rest}")) as sender:
        [verdict] = sender.send([a_message("orders", 1)])

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert why in verdict.error
    assert "s3cr3t" not in caplog.text + verdict.error + repr(vars(sender))
