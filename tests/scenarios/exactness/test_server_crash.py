"""A crashed server gives out ids again that were drawn and not yet flushed: no position may live in memory alone."""

from collections.abc import Generator, Iterator
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, create_engine, migrate
from outbox.runtime.stop import Stop
from outbox.testing.servers import PostgresServer
from outbox.worker import partition
from outbox.worker.fetch import Prefetcher
from outbox.worker.partition import PartitionWorker
from outbox.worker.settings import Settings
from outbox.worker.waiting import Wait
from tests.conftest import started
from tests.scenarios.exactness import twins
from tests.support.readers import Collector, Worker, declared, job

pytestmark = pytest.mark.storm

#: The lease outlives the crash; nothing but the scripts writes meanwhile, and a commit would flush what came before.
SLOW_RENEWALS = Settings(lease=timedelta(seconds=6), renew_every=timedelta(seconds=3))
#: The background writer of the log would flush the rollbacks after 0.2 s.
SERVER = {"wal_writer_delay": "10s", "autovacuum": "off"}
BURNT = 120
TRIES = 5
STEP = PartitionWorker.step


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server whose crashes are to be tested, with durable commits."""
    with started(lambda: PostgresServer(durable=True, settings=SERVER)) as server:
        yield server


@pytest.fixture
def engine(server: PostgresServer) -> Iterator[Engine]:
    """A migrated database of that server."""
    engine = create_engine(server.url())
    migrate.upgrade(engine)
    yield engine
    engine.dispose()


class Crash:
    """Burns ids, lets the worker look, kills the server, and appends a message to the one that comes back."""

    def __init__(self, server: PostgresServer, engine: Engine) -> None:
        self._server = server
        self._engine = engine
        self._outbox = Outbox(engine)
        self.sent: list[bytes] = []
        self.enough = Stop()
        #: Crashes after which the new message drew an id that had been drawn before.
        self.given_out_again = 0

    def step(self, held: PartitionWorker, *, postpone: bool) -> Generator[Wait, None, int]:
        """What a worker does between two looks at the log, and what happens around it."""
        if found := (yield from STEP(held, postpone=postpone)):
            return found
        if self.given_out_again or len(self.sent) == TRIES:
            self.enough.ask()
            return 0
        highest = self._burn()
        yield from STEP(held, postpone=postpone)
        self._server.kill()
        self._engine.dispose()
        self._server.start()
        self.given_out_again += self._append() <= highest
        # Once the server has come past its former position, nothing about it looks odd any more.
        while self._burn() <= highest:
            pass
        return 1

    def _burn(self) -> int:
        with psycopg.connect(self._server.url().replace("+psycopg", ""), autocommit=True) as connection:
            ids = [self._rolled_back(connection) for _ in range(BURNT)]
        return max(ids)

    @staticmethod
    def _rolled_back(connection: psycopg.Connection) -> int:
        with connection.transaction(force_rollback=True):
            row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return int(row[0])

    def _append(self) -> int:
        body = str(len(self.sent)).encode()
        with self._engine.begin() as connection:
            self._outbox.send(connection, "orders", body)
        self.sent.append(body)
        with self._engine.connect() as connection:
            return int(connection.execute(text("SELECT max(xact_id) FROM outbox_message")).scalar_one())


@pytest.mark.parametrize(("kind", "loses"), [(Prefetcher, False), (twins.RemembersItsBase, True)])
def test_a_message_with_an_id_from_before_the_crash_is_delivered(
    server: PostgresServer, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[Prefetcher], loses: bool
) -> None:
    """The worker had seen a position above that id; a twin that keeps it in its memory takes the message for old."""
    monkeypatch.setattr(partition, "Prefetcher", kind)
    handler, crash = Collector(), Crash(server, engine)
    monkeypatch.setattr(PartitionWorker, "step", lambda held, *, postpone: crash.step(held, postpone=postpone))

    Worker(Outbox(engine).database, [job(declared(), handler)], SLOW_RENEWALS, stop=crash.enough).run()

    assert crash.given_out_again == 1, "the server never gave an id out again: nothing was tried"
    assert (handler.bodies == crash.sent) is not loses
