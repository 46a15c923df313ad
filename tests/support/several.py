"""Several outboxes for one test."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy import Engine

from outbox import Outbox, create_engine
from outbox.testing.servers import PostgresServer
from tests.conftest import adopt
from tests.support.servers.proxy import TcpProxy


@contextmanager
def new_database(server: PostgresServer, template: str, *, adopted: bool = True) -> Iterator[Engine]:
    """A migrated PostgreSQL database, or a mere copy of one."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(server.create_database(name, template=template))
    if adopted:
        adopt(engine)
    yield engine
    engine.dispose()
    server.drop_database(name)


@contextmanager
def new_databases(server: PostgresServer, template: str, count: int) -> Iterator[list[Engine]]:
    """So many of them."""
    with ExitStack() as stack:
        yield [stack.enter_context(new_database(server, template)) for _ in range(count)]


@contextmanager
def behind(proxy: TcpProxy, engine: Engine) -> Iterator[Engine]:
    """The same database, for whoever reaches it through the proxy."""
    through = create_engine(engine.url.set(port=proxy.port).render_as_string(hide_password=False))
    yield through
    through.dispose()


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def send(engine: Engine, *bodies: str, schema: str | None = None) -> None:
    with (outbox := Outbox(engine, schema=schema)).begin() as session:
        for body in bodies:
            outbox.send(session, "orders", body)
    outbox.close()
