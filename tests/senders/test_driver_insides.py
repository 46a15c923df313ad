"""What the outbox and its senders lean on inside drivers: attributes and methods that no documentation promises.

A new version of a driver is tried here before the upper bound in pyproject.toml is raised.
"""

import inspect
import logging
import re
import tomllib
from importlib.metadata import version

import aiormq
import asyncpg
import psycopg
import pytest
from aiormq.abc import ChannelFrame
from asyncpg.transaction import Transaction
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.httpsession import URLLib3Session
from botocore.loaders import create_loader
from botocore.session import get_session
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from opentelemetry import trace
from pg8000.core import CoreConnection
from redis import Redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.connection import AbstractConnection, Connection, DefaultParser, SSLConnection

from tests.support.pages import TOP

#: Each driver that a sender or a writer uses, and the extra that brings it; the library itself brings psycopg.
DRIVERS = {
    "nats-py": "nats",
    "nkeys": "nats",
    "confluent-kafka": "kafka",
    "redis": "redis",
    "hiredis": "redis",
    "httpcore2": "http",
    "aio-pika": "rabbitmq",
    "aiormq": "rabbitmq",
    "pamqp": "rabbitmq",
    "botocore": "aws",
    "psycopg": "",
    "asyncpg": "asyncpg",
    "pg8000": "pg8000",
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_is_declared_with_an_upper_bound_above_what_is_installed(driver):
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extra = DRIVERS[driver]
    declared = project["optional-dependencies"][extra] if extra else project["dependencies"]
    [wanted] = [each for each in declared if re.fullmatch(rf"{driver}(\[\w+\])?>=.*", each)]

    [bound] = re.findall(r"<([0-9.]+)$", wanted)
    assert numbers(version(driver)) < numbers(bound)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", text)]


def test_asyncpg():
    """A transaction commits by the `execute` of its connection, which the connection knows it by."""
    assert {"_top_xact"} <= set(asyncpg.Connection.__slots__)
    assert "_connection" in Transaction.__mro__[1].__slots__
    source = inspect.getsource(Transaction)
    assert "await self._connection.execute(query)" in source
    assert "query = 'COMMIT;'" in source


def test_opentelemetry():
    """Its API knows in a variable whether a provider of spans is set."""
    assert trace._TRACER_PROVIDER is None or isinstance(trace._TRACER_PROVIDER, trace.TracerProvider)


def test_pg8000():
    """It keeps the letter that the server ends each answer with, and forgets nothing of it."""
    assert "self._transaction_status = data" in inspect.getsource(CoreConnection.handle_READY_FOR_QUERY)


def test_botocore():
    """A session takes the descriptions of services from a component; the logger of credentials is filtered.

    The pools of a client are replaced before the first connection. No redirect is followed.
    """
    session = get_session()
    session.register_component("data_loader", services := create_loader())
    assert session.get_component("data_loader") is services
    client = session.create_client("sqs", region_name="eu-central-1", aws_access_key_id="a", aws_secret_access_key="b")
    http = client._endpoint.http_session
    assert type(http) is URLLib3Session
    assert http._pool_classes_by_scheme == {"http": AWSHTTPConnectionPool, "https": AWSHTTPSConnectionPool}
    assert http._manager.pool_classes_by_scheme is http._pool_classes_by_scheme
    assert (AWSHTTPConnectionPool.ConnectionCls, AWSHTTPSConnectionPool.ConnectionCls) == (
        AWSHTTPConnection,
        AWSHTTPSConnection,
    )
    sending = inspect.getsource(URLLib3Session)
    assert "proxy_manager.pool_classes_by_scheme = self._pool_classes_by_scheme" in sending
    assert "retries=Retry(False)" in sending
    assert "botocore.credentials" in logging.root.manager.loggerDict


def test_nats_py():
    """Its end of a connection and its log-in are replaced; what it still wants to write is thrown away."""
    client = Client()
    assert inspect.iscoroutinefunction(client._close)
    assert isinstance(client._pending, list)
    assert client._pending_data_size == 0
    assert client._server_info == {}
    assert client._current_server is None
    assert client._transport is None
    assert inspect.signature(client._connect_command).parameters == {}
    assert (TcpTransport()._io_writer, TcpTransport()._io_reader) == (None, None)


def test_aiormq():
    """Frames are put into the queue of its writer, and confirmations among those that it waits for."""
    of_channel = set(re.findall(r"self\.(\w+)", inspect.getsource(aiormq.Channel)))
    assert {"write_queue", "delivery_tag", "confirmations", "message_id_delivery_tag", "number"} <= of_channel
    assert callable(aiormq.Channel.create_future)
    assert isinstance(inspect.getattr_static(aiormq.Channel, "closing"), property)
    assert ChannelFrame(payload=b"", should_close=False).payload == b""
    assert {"vhost", "connection_tune"} <= set(re.findall(r"self\.(\w+)", inspect.getsource(aiormq.Connection)))
    assert list(inspect.signature(aiormq.TransportFactory.create).parameters) == ["self", "url", "kwargs"]
    assert {"aiormq.connection", "aiormq.channel"} <= set(logging.root.manager.loggerDict)


def test_redis_py():
    """Its parser and the way in which it connects get a deadline; packed commands go over a connection of its pool."""
    client, parser = Redis(), vars(DefaultParser)
    assert isinstance(client.connection_pool.connection_kwargs, dict)
    for kind in (Connection, SSLConnection):
        assert "_connect" in vars(kind)
    assert {"socket_connect_timeout", "socket_timeout", "_sock"} <= set(dir(Connection()))
    assert client.connection_pool.connection_class is Connection
    assert "parser_class" in inspect.signature(AbstractConnection.__init__).parameters
    assert list(inspect.signature(parser["read_from_socket"]).parameters)[:2] == ["self", "timeout"]
    assert list(inspect.signature(parser["on_connect"]).parameters)[:2] == ["self", "connection"]
    assert callable(AbstractConnection.send_packed_command)
    assert callable(AbstractConnection.read_response)
    assert "_parser" in vars(Connection())
    reading = inspect.getsource(parser["on_connect"])
    assert "self._reader = hiredis.Reader(**kwargs)" in reading
    assert '"notEnoughData": NOT_ENOUGH_DATA' in reading
    assert "inuse_connections" in inspect.signature(client.connection_pool.disconnect).parameters
    assert "command_name" in inspect.signature(client.connection_pool.get_connection).parameters
    assert parser["on_connect"].__globals__["NOT_ENOUGH_DATA"] is NOT_ENOUGH_DATA
    assert "ERR" in DefaultParser.EXCEPTION_CLASSES


def test_psycopg():
    """A connection that is left open warns when it is collected; ours does not."""
    assert "__del__" in vars(psycopg.AsyncConnection) or any(
        "__del__" in vars(each) for each in psycopg.AsyncConnection.__mro__
    )
