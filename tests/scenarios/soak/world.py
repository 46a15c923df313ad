"""The world of a soak: a database, two destinations behind proxies, writers and relays as processes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

import psutil
import psycopg
from sqlalchemy import NullPool
from sqlalchemy import create_engine as create_plain_engine

from outbox import migrate
from outbox.store.database import Database
from outbox.store.operations.status import statuses
from outbox.testing.servers import PostgresServer
from outbox.testing.servers.process import free_port
from tests.scenarios.destinations import relays
from tests.scenarios.exactness.business import facts, set_up
from tests.scenarios.exactness.history import Delivery, Fact, delivery_of
from tests.scenarios.soak import watched, writing
from tests.scenarios.soak.judge import Call, Trouble
from tests.scenarios.soak.plan import RELAYS, WRITERS
from tests.scenarios.soak.writing import KEYS, TOPICS, topic_of
from tests.support.durable_destinations import PREFIX, DurableDestination, JetStream, Kafka
from tests.support.programs import run
from tests.support.records import RecordFile
from tests.support.servers.postgresql import backend_pids
from tests.support.servers.proxy import TcpProxy
from tests.support.supervised import Supervised

#: Of the relays.
BATCH, LEASE_SECONDS, DEADLINE_SECONDS = 50, 5.0, 3.0
_RELAY_OPTIONS = ("--lease", f"{LEASE_SECONDS:g}s")
_COMMAND_SECONDS = 300.0
_AGAIN_SECONDS = 1.0


class CommandFailedError(Exception):
    """A command failed again and again."""


class World:
    """Everything that runs. Its methods may be called in several threads."""

    def __init__(self, folder: Path, *, in_memory: bool) -> None:
        self._folder = folder
        self.postgresql = PostgresServer(durable=True, in_memory=in_memory)
        self._running = ExitStack()
        self._journal = RecordFile(folder / "journal")
        self.refusing = folder / "refusing"
        self._routes = folder / "routes.toml"
        self._environment = {
            watched.JOURNAL: str(folder / "journal"),
            watched.REFUSING: str(self.refusing),
            **watched.installed(folder / "installed"),
        }
        self.troubles: list[Trouble] = []
        #: The times in which a destination did not work.
        self.outages: list[Trouble] = []
        self.relays: list[Supervised] = []
        self.writers: list[Supervised] = []
        #: Where topics go, by pattern.
        self.routes: dict[str, str] = {}

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self._start(starting)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def _start(self, running: ExitStack) -> None:
        running.enter_context(self.postgresql)
        self.url = self.postgresql.create_database("shop")
        self.engine = create_plain_engine(self.url, poolclass=NullPool)
        migrate.upgrade(self.engine)
        set_up(self.engine, KEYS)
        self._environment["OUTBOX_DATABASE"] = self.url
        nats = JetStream()
        running.enter_context(nats.server)
        nats_proxy = running.enter_context(TcpProxy("127.0.0.1", nats.server.port))
        far = free_port()
        kafka_proxy = running.enter_context(TcpProxy("127.0.0.1", far))
        kafka = Kafka(*TOPICS, far=(far, kafka_proxy.port))
        running.enter_context(kafka.server)
        self.destinations: Mapping[str, DurableDestination] = {"nats": nats, "kafka": kafka}
        self.proxies: Mapping[str, TcpProxy] = {"nats": nats_proxy, "kafka": kafka_proxy}
        self.routes = {"stock": "kafka", "*": "nats"}
        self.write_routes()
        running.callback(self.end_processes)
        self.relays = [self._relay(number) for number in range(RELAYS)]
        self.writers = [self._writer(number) for number in range(WRITERS)]
        for process in (*self.relays, *self.writers):
            process.start()

    # Processes

    def _relay(self, number: int) -> Supervised:
        command = ["-m", relays.__name__, "relay", "-v", "--config", str(self._routes), *_RELAY_OPTIONS]
        log = self._folder / f"relay-{number}.log"
        return Supervised(command, log, environment=self._environment, pause=_AGAIN_SECONDS)

    def _writer(self, number: int) -> Supervised:
        command = ["-m", writing.__name__, self.url, str(number)]
        return Supervised(command, self._folder / f"writer-{number}.log", pause=_AGAIN_SECONDS)

    def end_processes(self) -> None:
        """End the writers, then the relays; none is started again."""
        for process in (*self.writers, *self.relays):
            process.send(signal.SIGCONT)
            process.stop()

    # Destinations

    def url_of(self, destination: str) -> str:
        """The URL by which relays know a destination."""
        port = self.proxies[destination].port
        return watched.watched(f"{destination}://127.0.0.1:{port}/{PREFIX}?timeout={DEADLINE_SECONDS:g}")

    def write_routes(self) -> None:
        """Write the file that relays read when they start."""
        tables = (f'[routes."{pattern}"]\nto = "{self.url_of(to)}"\n' for pattern, to in self.routes.items())
        self._routes.write_text(f"[relay]\nbatch_size = {BATCH}\n{''.join(tables)}")

    # Commands

    def command(self, *arguments: str, is_done: Callable[[], bool], until: float) -> None:
        """Run `outbox …`, again and again until it succeeds, as a person does whose database is away."""
        while True:
            try:
                done = run(["-m", "outbox", *arguments], environment=self._environment, timeout=_COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                raise CommandFailedError(f"outbox {' '.join(arguments)} does not end") from None
            if done.returncode == 0:
                return
            with (self._folder / "commands.log").open("a") as log:
                log.write(
                    f"{time.monotonic():.2f} {' '.join(arguments)}: {done.returncode} {done.stdout}{done.stderr}\n"
                )
            if is_done():
                return
            if time.monotonic() > until:
                raise CommandFailedError(f"outbox {' '.join(arguments)}: {done.stdout}{done.stderr}")
            time.sleep(_AGAIN_SECONDS)

    # What there is

    def rows(self, question: str) -> list[tuple[object, ...]]:
        """Ask the database."""
        with psycopg.connect(self.url.replace("+psycopg", ""), connect_timeout=5) as connection:
            return connection.execute(question.encode()).fetchall()

    def rows_at_last(self, question: str) -> list[tuple[object, ...]]:
        """Ask the database until it answers."""
        until = time.monotonic() + _COMMAND_SECONDS
        while True:
            try:
                return self.rows(question)
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def all_sent(self) -> bool:
        """Whether nothing waits any more."""
        with closing(Database(self.engine).open()) as channel:
            _, found = statuses(channel)
        return not any(number for each in found for number in (each.backlog, *each.parked.values()))

    def facts(self) -> list[Fact]:
        """What was committed."""
        return [replace(fact, key=_unit(topic_of(fact.name), fact.key)) for fact in facts(self.engine)]

    def stored(self) -> dict[str, list[Delivery]]:
        """What is at each destination."""
        found = {}
        for name, destination in self.destinations.items():
            messages = destination.read(destination.source)
            found[name] = [replace(delivery_of(message), key=_unit(message.topic, message.key)) for message in messages]
        return found

    def calls(self) -> list[Call]:
        """What relays have handed over."""
        return watched.calls(self._journal)

    def memory(self) -> dict[str, float]:
        """The resident memory of each process, in MB."""
        found = {}
        for kind, processes in (("relay", self.relays), ("writer", self.writers)):
            for number, process in enumerate(processes):
                try:
                    rss = psutil.Process(process.pid or 0).memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                found[f"{kind} {number} (process {process.pid})"] = rss / 1024**2
        return found

    def connections(self) -> int:
        """How many connections the database has."""
        return len(backend_pids(self.postgresql, "shop"))

    def said(self) -> str:
        """What the processes said last, for a failure."""
        logs: Sequence[Path] = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)


def _unit(topic: str, key: str | None) -> str | None:
    """The unit of order at a destination that has a topic: the key of this topic."""
    return None if key is None else f"{topic}/{key}"


@contextmanager
def noted(times: list[Trouble]) -> Iterator[None]:
    """Add the time that the block takes."""
    began = time.monotonic()
    try:
        yield
    finally:
        times.append(Trouble(began, time.monotonic()))
