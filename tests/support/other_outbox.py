"""The outbox of another database, for tests of the sender that writes to it."""

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import Engine

from outbox.model.message import Message
from outbox.senders.postgresql import PostgresSender
from outbox.testing.sender_contract import Stored
from outbox.testing.servers import PostgresServer
from tests.support.handles import conninfo_of
from tests.support.remote import Place
from tests.support.servers.proxy import TcpProxy

_FIELDS = ("message_id", "topic", "key", "tags", "headers", "content_type", "body")


class OtherOutbox(Place):
    """A migrated database, reached through a proxy."""

    sender = PostgresSender

    def __init__(self, engine: Engine, proxy: TcpProxy) -> None:
        self.engine = engine
        super().__init__(proxy)
        self.url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{engine.url.database}"
        #: The URL as log lines and verdicts show it.
        self.shown = self.url.replace("postgres@", "")

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """What a statement returns, past the proxy."""
        with psycopg.connect(conninfo_of(self.engine.url), autocommit=True, row_factory=dict_row) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> list[dict[str, Any]]:
        """The log, in the order of its ids."""
        return self.execute("SELECT * FROM outbox_message ORDER BY id")

    def stored(self) -> list[Stored]:
        """The log; no message is in it twice."""
        rows = self.rows()
        assert len({row["message_id"] for row in rows}) == len(rows), "a message is in the log twice"
        return [_stored(row) for row in rows]

    def fail(self, topic: str) -> None:
        """Have a constraint that refuses the topic."""
        self.execute(f"ALTER TABLE outbox_message ADD CONSTRAINT no_{topic} CHECK (topic <> '{topic}') NOT VALID")

    @contextmanager
    def locked(self, table: str) -> Iterator[None]:
        """Hold a lock with which nobody can write to the table."""
        with psycopg.connect(conninfo_of(self.engine.url)) as connection:
            connection.execute(f"LOCK TABLE {table} IN SHARE MODE".encode())
            yield


def _stored(row: dict[str, Any]) -> Stored:
    headers = {} if row["headers"] is None else json.loads(row["headers"])
    return Stored(**{name: row[name] for name in _FIELDS} | {"headers": headers})


def with_passwords(server: PostgresServer, **passwords: str) -> None:
    """Create roles, and let nobody but the superuser in without a password."""
    rules = ["host all postgres 127.0.0.1/32 trust", "host all all 127.0.0.1/32 scram-sha-256"]
    (server.data / "pg_hba.conf").write_text("".join(f"{rule}\n" for rule in rules))
    with psycopg.connect(conninfo_of_server(server), autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("SET password_encryption = 'scram-sha-256'")  # before PostgreSQL 14 not the default
        for name, password in passwords.items():
            role, secret = psycopg.sql.Identifier(name), psycopg.sql.Literal(password)
            connection.execute(psycopg.sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, secret))


def conninfo_of_server(server: PostgresServer) -> str:
    """The server's own database, for the superuser."""
    return f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"


def new_id() -> str:
    """A name that no other test has."""
    return f"n{uuid.uuid4().hex[:12]}"


def send(url: str, *messages: Message, **options: Any) -> list[Any]:
    """The verdicts of a sender that is used once."""
    with closing(PostgresSender(url, **options)) as sender:
        return list(sender.send(messages))
