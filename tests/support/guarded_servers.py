"""Servers that let in those who know a password, or a token, for tests that secrets stay secret."""

import base64
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, repeat
from urllib.parse import quote

import psycopg
from confluent_kafka.admin import AdminClient, NewTopic

from outbox import create_engine, migrate
from outbox.testing.servers import NatsServer, PostgresServer
from outbox.testing.servers.process import free_port
from tests.support.nats_streams import make_stream
from tests.support.other_outbox import with_passwords
from tests.support.rabbit_exchanges import user
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.redis_cluster import Watched
from tests.support.webhook_endpoint import Answer, Endpoint, Received

#: Takes a secret, and returns the URL with which a relay tries to come in.
Door = Callable[[str], str]


@contextmanager
def nats(password: str) -> Iterator[Door]:
    """A stream for `ann`."""
    users = f'{{ users: [ {{ user: ann, password: "{password}" }} ] }}'
    with NatsServer(settings={"authorization": users}) as server:
        make_stream(server.url, "orders", user="ann", password=password)
        yield lambda given: server.url.replace("//", f"//ann:{quote(given, safe='')}@")


@contextmanager
def nats_by_token(token: str) -> Iterator[Door]:
    """A stream for whoever has the token."""
    with NatsServer(settings={"authorization": f'{{ token: "{token}" }}'}) as server:
        make_stream(server.url, "orders", token=token)
        yield lambda given: server.url.replace("//", f"//{quote(given, safe='')}@")


@contextmanager
def kafka(password: str) -> Iterator[Door]:
    """A topic for `ann`."""
    module, port = "org.apache.kafka.common.security.plain.PlainLoginModule", free_port()
    settings = {
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,FAR:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.far.plain.sasl.jaas.config": f'{module} required user_ann="{password}";',
    }
    with KafkaServer(settings=settings, far=(port, port)) as server:
        admin = AdminClient({"bootstrap.servers": server.servers})
        for future in admin.create_topics([NewTopic("orders", 1, 1)]).values():
            future.result(60)
        yield lambda given: f"kafka://ann:{quote(given, safe='')}@127.0.0.1:{port}"


@contextmanager
def rabbitmq(password: str) -> Iterator[Door]:
    """A queue for `ann`."""
    everything = {"user": "ann", "vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    queue = {"name": "orders", "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
    definitions = {
        "users": [user("ann", password)], "vhosts": [{"name": "/"}], "permissions": [everything], "queues": [queue],
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(definitions, file)
        file.flush()
        with RabbitServer(settings={"load_definitions": file.name}) as server:
            yield lambda given: f"amqp://ann:{quote(given, safe='')}@127.0.0.1:{server.port}/"


@contextmanager
def redis(password: str) -> Iterator[Door]:
    """A Redis with a password."""
    with RedisServer(settings={"requirepass": password}) as server:
        yield lambda given: server.url.replace("//", f"//default:{quote(given, safe='')}@")


@contextmanager
def sentinels(password: str) -> Iterator[Door]:
    """Sentinels with a password, and the servers that they know with the same password."""
    with Watched(password=password) as watched:

        def url(given: str) -> str:
            secret = quote(given, safe="")
            return f"redis+sentinel://:{secret}@{watched.hosts}/mymaster?sentinel-password={secret}"

        yield url


@contextmanager
def webhook(password: str) -> Iterator[Door]:
    """An endpoint that refuses with everything that it was sent: at first the user, then the message."""
    statuses = chain([401], repeat(422))
    credentials = base64.b64encode(f"ann:{password}".encode()).decode()

    def judge(received: Received) -> Answer:
        is_known = received.headers["Authorization"] == f"Basic {credentials}"
        return Answer() if is_known else Answer(next(statuses), repr(received).encode())

    with Endpoint() as endpoint:
        endpoint.judge = judge
        yield (
            lambda given: (
                endpoint.url.replace("//", f"//ann:{quote(given, safe='')}@") + f"/hook?key={quote(given, safe='')}"
            )
        )


@contextmanager
def postgresql(password: str) -> Iterator[Door]:
    """An outbox for `ann`."""
    with PostgresServer() as server:
        engine = create_engine(server.create_database("shop"))
        migrate.upgrade(engine)
        engine.dispose()
        with_passwords(server, ann=password)
        with psycopg.connect(server.url("shop").replace("+psycopg", "")) as connection:
            connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO ann")
        yield lambda given: f"postgresql://ann:{quote(given, safe='')}@127.0.0.1:{server.port}/shop"


GUARDED: dict[str, Callable[[str], AbstractContextManager[Door]]] = {
    "nats": nats,
    "nats-token": nats_by_token,
    "kafka": kafka,
    "amqp": rabbitmq,
    "redis": redis,
    "redis+sentinel": sentinels,
    "http": webhook,
    "postgresql": postgresql,
}
