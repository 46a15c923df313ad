"""Private servers for tests and demos: PostgreSQL, NATS, Kafka, RabbitMQ and Redis, each a file of its name.

`proxy` is a network between them and their clients, which fails on demand. `local` and `process` are what servers are
made of, for other programs.
"""

from outbox.testing.servers.kafka import KafkaServer
from outbox.testing.servers.local import LocalServer, ServerMissing
from outbox.testing.servers.nats import NatsServer
from outbox.testing.servers.postgresql import PostgresServer
from outbox.testing.servers.process import ServerFailedError
from outbox.testing.servers.rabbitmq import RabbitServer
from outbox.testing.servers.redis import RedisServer

__all__ = [
    "KafkaServer",
    "LocalServer",
    "NatsServer",
    "PostgresServer",
    "RabbitServer",
    "RedisServer",
    "ServerFailedError",
    "ServerMissing",
]
