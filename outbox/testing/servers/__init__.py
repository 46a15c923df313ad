"""Private servers for tests and the demo: PostgreSQL and NATS. `local` and `process` are the parts of any server."""

from outbox.testing.servers.local import LocalServer, ServerMissing
from outbox.testing.servers.nats import NatsServer
from outbox.testing.servers.postgresql import PostgresServer
from outbox.testing.servers.process import ServerFailedError

__all__ = ["LocalServer", "NatsServer", "PostgresServer", "ServerFailedError", "ServerMissing"]
