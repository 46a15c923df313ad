"""A move from one broker to another, each a real one: `outbox relay` on both sides, and writers all the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox.senders.redis import read_message
from outbox.testing.servers import NatsServer
from tests.conftest import started
from tests.scenarios.moving.arrivals import Arrival, faults
from tests.scenarios.moving.writers import Writers
from tests.support.command_line import outbox
from tests.support.nats_streams import Stream
from tests.support.redis_streams import Streams
from tests.support.servers.proxy import TcpProxy
from tests.support.servers.redis import RedisServer
from tests.support.supervised import supervised
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm


@pytest.fixture
def stream(nats: NatsServer) -> Iterator[Stream]:
    """A stream of NATS."""
    with TcpProxy("127.0.0.1", nats.port) as proxy:
        stream = Stream(nats, proxy)
        yield stream
        stream.close()


@pytest.fixture
def streams() -> Iterator[Streams]:
    """The streams of a Redis."""
    with started(RedisServer) as server, TcpProxy("127.0.0.1", server.port) as proxy:
        streams = Streams(server, proxy)
        yield streams
        streams.close()


def in_nats(stream: Stream) -> list[Arrival]:
    """What a stream of NATS has, with the moment by the clock of its server."""
    stored = zip(stream.received(), stream.stored(), strict=True)
    return [
        Arrival(int(each.metadata.timestamp.timestamp() * 1000), message.key or "", int(message.body))
        for each, message in stored
    ]


def in_redis(streams: Streams) -> list[Arrival]:
    """What a stream of Redis has, with the moment that the id of an entry tells."""
    name = f"{streams.prefix}:orders"
    entries: Any = streams.client.xrange(name)
    read = [(int(number.partition(b"-")[0]), read_message("orders", fields)) for number, fields in entries]
    return [Arrival(at, message.key or "", int(message.body)) for at, message in read]


def test_from_nats_to_redis(pg_engine: Engine, stream: Stream, streams: Streams, tmp_path: Path) -> None:
    url = pg_engine.url.render_as_string(hide_password=False)
    relay = ["-c", "from outbox.cli import main; main()", "relay", "--database", url, "--lease", "3s", "--to"]
    for folder in ("olds", "news"):
        (tmp_path / folder).mkdir()
    with (
        Writers(pg_engine, 4, keys=5, pause=0.01) as writers,
        supervised([[*relay, stream.url]] * 2, tmp_path / "olds"),
    ):
        assert eventually(lambda: len(stream.received()) > 300)
        with supervised([[*relay, streams.url]] * 2, tmp_path / "news") as news:
            assert eventually(lambda: all("this worker asks for redis:" in each.said for each in news))
            ended = outbox(pg_engine, "subscriptions", "alter", "relay", "--to", streams.url)
            assert ended.code == 0, ended.err
            assert eventually(lambda: len(in_redis(streams)) > 300)
            written = writers.stop()
            eventually(lambda: len(stream.received()) + len(in_redis(streams)) >= len(written))

    assert faults(written, in_nats(stream), in_redis(streams)) == {}
