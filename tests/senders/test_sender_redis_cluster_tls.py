"""Redis Cluster with TLS, whose nodes want certificates: from senders, and from each other."""

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outbox.model.verdict import DONE, Unavailable
from outbox.senders.redis import RedisSender
from outbox.testing.sender_contract import a_message, check_all_done, check_eventually_done
from tests.conftest import started
from tests.support.authority import Authority, options
from tests.support.places import placed
from tests.support.redis_streams import ClusterStreams
from tests.support.remote import send_through
from tests.support.servers.redis_cluster import Node, RedisCluster
from tests.support.tls import refused as refused_by_tls
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

#: Tests themselves use the ports without TLS, and need no password there.
USERS = "user default on nopass ~* &* +@all\nuser relay on >s3cr3t ~* +xadd +multi +exec +wait\n"
TOPICS = [f"t{n}" for n in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the files of the cluster, of the relay, and of a stranger."""
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Authority:
    """The authority of nodes and relays."""
    return Authority(folder / "ours")


@pytest.fixture(scope="module")
def relay(ours: Authority) -> str:
    """The options of a relay that the nodes know."""
    return options(ca=ours.ca, shown=ours.issue("relay"))


@pytest.fixture(scope="module")
def safe(folder: Path, ours: Authority) -> Mapping[str, str]:
    """The settings of a node that speaks TLS with everybody."""
    (folder / "users.acl").write_text(USERS)
    certificate, key = ours.issue("node")
    return {
        "aclfile": str(folder / "users.acl"), "appendfsync": "always", "tls-cluster": "yes", "tls-replication": "yes",
        "tls-ca-cert-file": str(ours.ca), "tls-cert-file": str(certificate), "tls-key-file": str(key),
    }  # fmt: skip


@pytest.fixture(scope="module")
def cluster(safe: Mapping[str, str]) -> Iterator[RedisCluster]:
    """A cluster whose certificates are for the address that its nodes tell."""
    with started(lambda: RedisCluster(settings=safe)) as cluster:
        yield cluster


streams = placed(ClusterStreams, "cluster", port=None)


def opened(streams: ClusterStreams, files: str) -> Any:
    """A sender to the streams by TLS."""
    return closing(RedisSender(f"{streams.url.replace('redis+cluster://', 'rediss+cluster://relay:s3cr3t@')}?{files}"))


def test_messages_go_to_all_nodes(cluster, streams, relay):
    sent = [a_message(topic, n, key=topic) for n, topic in enumerate(TOPICS * 3)]
    with opened(streams, relay) as sender:
        check_all_done(sender.send(sent), sent)

    assert {cluster.owner(f"{streams.prefix}:{topic}") for topic in TOPICS} == set(cluster.masters)
    streams.check_streams(sent)


@pytest.mark.parametrize("wrong", ["no certificate", "a certificate of a stranger", "another authority"])
def test_wrong_certificates_are_refused_and_nothing_is_told(streams, ours, tmp_path, wrong, caplog):
    caplog.set_level(logging.DEBUG)
    stranger = Authority(tmp_path / "theirs")
    files, why = {
        "no certificate": (options(ca=ours.ca), refused_by_tls()),
        "a certificate of a stranger": (options(ca=ours.ca, shown=stranger.issue("relay")), refused_by_tls()),
        "another authority": (options(ca=stranger.ca, shown=ours.issue("relay")), "its certificate is refused: .*"),
    }[wrong]
    with opened(streams, files) as sender:
        [verdict] = sender.send([a_message("orders", 1)])
        told = caplog.text + repr(verdict) + repr(sender) + repr(vars(sender))

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
    assert re.fullmatch("Redis: " + "; ".join([f"rediss://127.0.0.1:[0-9]+: {why}"] * 3), verdict.error)
    assert "s3cr3t" not in told
    assert "PRIVATE KEY" not in told


def test_streams_that_move_to_other_nodes_keep_the_order_of_a_key(cluster, streams, relay):
    def reshard() -> None:
        for topic in ("alpha", "beta") * 3:
            cluster.move(f"{streams.prefix}:{topic}")
            time.sleep(0.05)

    with opened(streams, relay) as sender:
        sent, _ = send_through(sender, reshard, topics=("alpha", "beta"))

    streams.check_streams(sent)


def test_a_replica_that_takes_over_has_everything_that_is_done_in_order(cluster, relay):
    """The replica copies its master by TLS, too."""
    cluster.begin_replica()
    tag = next(tag for tag in (f"{{{n}}}" for n in range(1_000)) if cluster.owner(tag) is cluster.master)

    def disaster() -> None:
        time.sleep(0.3)
        cluster.fail_over()

    with closing(ClusterStreams(cluster, tag=tag)) as streams:
        with opened(streams, f"{relay}&wait=1&timeout=2") as sender:
            sent, _ = send_through(sender, disaster, topics=("alpha", "beta"))
        streams.check_streams(sent)
    cluster.replica.stop()


def test_certificates_for_names_need_nodes_that_tell_their_names(safe, ours, relay):
    """A node has to know its name, and to prefer the name to its address."""
    certificate, key = ours.issue("named", host="DNS:localhost")
    named = {**safe, "tls-cert-file": str(certificate), "tls-key-file": str(key)}
    sent = [a_message(topic, n) for n, topic in enumerate(TOPICS)]
    with started(lambda: RedisCluster(settings=named)) as cluster, closing(ClusterStreams(cluster)) as streams:
        streams.url = streams.url.replace("127.0.0.1", "localhost")
        with opened(streams, relay) as sender:
            by_address = sender.send(sent)
            tell(cluster, "cluster-announce-hostname", "localhost")
            assert eventually(lambda: all(n_named(node) == 3 for node in cluster.masters))
            by_address_still = sender.send(sent)
            tell(cluster, "cluster-preferred-endpoint-type", "hostname")

            check_eventually_done(sender, sent)

    mismatch = "its certificate is refused: IP address mismatch, certificate is not valid for '127.0.0.1'."
    for verdicts in (by_address, by_address_still):
        refused = {verdict for verdict in verdicts if verdict is not DONE}
        assert {re.sub(":[0-9]+:", ":", verdict.error) for verdict in refused} == {
            f"Redis: rediss://127.0.0.1: {mismatch}"
        }


def tell(cluster: RedisCluster, setting: str, value: str) -> None:
    """Change a setting of the nodes that run."""
    for node in cluster.masters:
        node.run("CONFIG", "SET", setting, value)


def n_named(node: Node) -> int:
    """The number of nodes whose names a node knows."""
    return sum(known["hostname"] == "localhost" for known in node.run("CLUSTER NODES").values())
