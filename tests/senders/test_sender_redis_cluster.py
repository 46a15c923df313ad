"""Redis Cluster and Sentinel: the contract, failovers, and streams that move to other nodes while messages are sent."""

import pytest

from outbox.testing.sender_contract import SenderContract
from tests.support.places import begun, opened, placed
from tests.support.redis_streams import ClusterStreams
from tests.support.remote import RemoteSenderContract
from tests.support.servers.redis_cluster import RedisCluster

cluster = begun(lambda: RedisCluster(settings={"appendfsync": "always"}))
streams = mortal = placed(ClusterStreams, "cluster", port=None)
sender = opened("streams")


class TestRedisCluster(SenderContract):
    """Streams of a cluster pass the contract."""

    @pytest.fixture
    def destination(self, streams):
        """Streams of each test's own."""
        return streams


class TestBadWeather(RemoteSenderContract):
    """As in front of a single server."""

    at = "streams"
    closing_ends_calls = False
    body = 5_000
    topics = ("alpha", "beta")
    cuts = range(0, 900, 129)
    slack = 4
