"""The database fails under load: nothing is lost, nothing is invented, and nobody has to lend a hand."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Relay, create_engine, migrate
from outbox.store.log.log import Limits
from outbox.testing.servers import PostgresServer
from outbox.worker.settings import Settings
from tests.conftest import started
from tests.support.destination import Destination
from tests.support.servers.proxy import TcpProxy
from tests.support.waiting import eventually

pytestmark = pytest.mark.storm

BATCH = 100
WRITERS = 3
SETTINGS = Settings(
    limits=Limits(rows=BATCH),
    poll=(timedelta(milliseconds=10), timedelta(milliseconds=100)),
    lease=timedelta(seconds=2),
    renew_every=timedelta(milliseconds=400),
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of these tests, with durable commits: it is to be killed."""
    with started(lambda: PostgresServer(durable=True)) as server:
        yield server


@pytest.fixture
def engine(server: PostgresServer) -> Iterator[Engine]:
    """Its database, with the outbox and the business table."""
    engine = create_engine(server.create_database(f"test_{uuid.uuid4().hex}") + "?application_name=writer")
    migrate.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE truth (writer integer, n integer, PRIMARY KEY (writer, n))"))
    yield engine
    engine.dispose()


@pytest.fixture
def proxied(server: PostgresServer, engine: Engine) -> Iterator[tuple[TcpProxy, Engine]]:
    """The same database for the worker, behind a network that fails on demand."""
    with TcpProxy("127.0.0.1", server.port) as proxy:
        behind = again(engine, "relay", port=proxy.port)
        yield proxy, behind
        behind.dispose()


def again(engine: Engine, name: str, port: int | None = None) -> Engine:
    """The same database under another application name, or through another port."""
    url = engine.url.set(query={"application_name": name}, port=port or engine.url.port)
    return create_engine(url.render_as_string(hide_password=False))


class Load:
    """Writers whose every transaction holds a row of business and its message; a fifth of them is rolled back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outbox = Outbox(engine)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(number,)) for number in range(WRITERS)]

    def start(self) -> None:
        """Begin to write."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End when what is under way is over."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def committed(self) -> dict[str, list[int]]:
        """What the business table says, by key: whatever became of a COMMIT whose answer was lost, this tells."""
        with self._engine.connect() as connection:
            rows = connection.execute(text("SELECT writer, n FROM truth ORDER BY n")).all()
        found: dict[str, list[int]] = {}
        for writer, n in rows:
            found.setdefault(f"{writer}-{n % 5}", []).append(n)
        return found

    def _write(self, writer: int) -> None:
        n = 0
        while not self._over.wait(0.03):
            n += 1
            try:
                self._place(writer, n)
            except DBAPIError:
                self._over.wait(0.1)

    def _place(self, writer: int, n: int) -> None:
        with self._engine.connect() as connection, connection.begin() as transaction:
            connection.execute(text("INSERT INTO truth VALUES (:writer, :n)"), {"writer": writer, "n": n})
            self._outbox.send(connection, "orders", str(n), key=f"{writer}-{n % 5}")
            if n % 5 == 3:
                transaction.rollback()


def delivered(destination: Destination) -> dict[str, list[int]]:
    """First copies by key, in the order of their arrival."""
    found: dict[str, list[int]] = {}
    for message in list(destination.messages):
        found.setdefault(message.key or "", []).append(int(message.body))
    return {key: list(dict.fromkeys(numbers)) for key, numbers in found.items()}


@contextmanager
def working(engine: Engine, behind: Engine, faults: int) -> Iterator[Destination]:
    """Writers and a relay at work. In the end everything that was committed has come, in order, once but for faults."""
    destination, load = Destination(), Load(engine)
    relay = Relay(Outbox(behind), destination, settings=SETTINGS)
    load.start()
    relay.start()
    try:
        assert eventually(lambda: len(destination.messages) > 60), "it did not begin"
        yield destination
    finally:
        load.stop()
        wanted = load.committed()
        eventually(lambda: delivered(destination) == wanted, 240)
        relay.stop()
        relay.join(60)
    assert delivered(destination) == wanted
    repeated = len(destination.messages) - sum(len(numbers) for numbers in wanted.values())
    assert repeated <= faults * BATCH, f"{repeated} came twice"


def recovers(destination: Destination, seconds: float = 240.0) -> None:
    """Fresh messages arrive again."""
    before = len(destination.messages)
    assert eventually(lambda: len(destination.messages) > before + 30, seconds), "the worker did not come back"


def backend_of(engine: Engine, name: str, query: str = "%") -> int:
    """The server process of a connection of that name, by what it was asked last."""
    question = text(
        "SELECT pid FROM pg_stat_activity"
        " WHERE application_name = :name AND query LIKE :query AND pid <> pg_backend_pid() LIMIT 1"
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            pid = connection.execute(question, {"name": name, "query": query}).scalar_one_or_none()
        if pid:
            return int(pid)
        time.sleep(0.005)
    raise AssertionError(f"no connection of {name} is at {query}")


SETTLES, RENEWS, READS = "%INTO outbox_progress%", "%renewals = renewals%", "%pg_current_snapshot%"


def test_a_killed_backend_loses_nothing(engine):
    """SIGKILL: the server ends every connection and recovers. The worker's own, its lease's, a writer's."""
    relay = again(engine, "relay")
    victims = [("relay", SETTLES), ("relay", RENEWS), ("writer", "%")]

    with working(engine, relay, faults=len(victims)) as destination:
        for name, query in victims:
            os.kill(backend_of(engine, name, query), signal.SIGKILL)
            time.sleep(1)
            recovers(destination)
    relay.dispose()


@pytest.mark.parametrize("query", [SETTLES, RENEWS, READS], ids=["settles", "renews", "reads"])
def test_a_terminated_connection_is_replaced(engine, query):
    """One connection alone is ended, and its process with it."""
    relay = again(engine, "relay")

    with working(engine, relay, faults=1) as destination:
        victim = backend_of(engine, "relay", query)
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": victim})
        recovers(destination)
    relay.dispose()


def test_a_killed_server_loses_nothing_and_the_log_stays_readable(server, engine, caplog):
    """The postmaster dies twice; once it stays away for a while."""
    relay = again(engine, "relay")
    caplog.set_level(logging.WARNING, logger="outbox")

    with working(engine, relay, faults=2) as destination:
        server.kill()
        server.start()
        recovers(destination)
        caplog.clear()
        server.kill()
        # After the first time away the next line may wait for a while.
        assert eventually(lambda: caplog.records)
        time.sleep(6)
        lines = [record.getMessage() for record in caplog.records]
        server.start()
        recovers(destination)
    relay.dispose()

    assert len(lines) <= 3, lines


def refuse(proxy: TcpProxy) -> None:
    proxy.refuse()
    time.sleep(2)
    proxy.pass_through()


def black_hole(proxy: TcpProxy) -> None:
    """Longer than the lease."""
    proxy.black_hole()
    time.sleep(4)
    proxy.pass_through()


def black_hole_and_reset(proxy: TcpProxy) -> None:
    proxy.black_hole()
    time.sleep(4)
    proxy.reset_all()
    proxy.pass_through()


def lose_answers(proxy: TcpProxy) -> None:
    """What was asked was done, and nobody hears of it."""
    for _ in range(5):
        proxy.cut_after(0, "to_client")
        time.sleep(0.5)


def lose_questions(proxy: TcpProxy) -> None:
    for _ in range(5):
        proxy.cut_after(10, "to_server")
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("trouble", "faults"),
    [(TcpProxy.reset_all, 1), (refuse, 1), (black_hole, 1), (black_hole_and_reset, 1), (lose_answers, 5),
     (lose_questions, 5)],
    ids=["reset", "refused", "black hole", "black hole and reset", "lost answers", "lost questions"],
)  # fmt: skip
def test_a_network_that_fails_loses_nothing(
    engine: Engine, proxied: tuple[TcpProxy, Engine], trouble: Callable[[TcpProxy], None], faults: int
) -> None:
    proxy, behind = proxied

    with working(engine, behind, faults=faults) as destination:
        trouble(proxy)
        recovers(destination)
