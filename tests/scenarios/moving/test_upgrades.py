"""Tables of version 0.1.0 become those of today, and both versions work on them as far as the page says."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from outbox import Inbox, Message, Outbox, create_engine, migrate
from outbox.model.limits import HALF_TOPIC
from outbox.schema import VERSION
from outbox.spark.manifest import Archive
from outbox.testing.servers import PostgresServer
from tests.scenarios.moving.arrivals import arrivals, arrived
from tests.scenarios.moving.states import BACKLOG
from tests.scenarios.moving.test_repartition import DESTINATION, faults_of_kills
from tests.scenarios.moving.writers import many
from tests.scenarios.moving.writing import written
from tests.spark.extracts import extracted, run_here
from tests.support.command_line import outbox
from tests.support.destination import Destination, relay_to
from tests.support.earlier import COMMIT, Earlier, build, unpack_source
from tests.support.programs import Program
from tests.support.supervised import Supervised
from tests.support.waiting import eventually

#: What an earlier worker says of the tables of today.
REFUSED = f"the tables are of version {VERSION}, this is 1; install a newer outbox-log"
NOT_HALF = f"SELECT id FROM outbox_message WHERE topic <> '{HALF_TOPIC}' ORDER BY id"
SECONDS = 300
#: Upgrades and downgrades; after each, a worker may repeat a batch.
CHANGES = 3

#: In every table of 0.1.0 that an upgrade changes or reads: what the program `states` has left there.
STATES = {
    "SELECT DISTINCT state FROM outbox_parked ORDER BY state": ["blocked", "dead", "delayed", "retry", "waiting"],
    "SELECT op FROM outbox_op ORDER BY op": ["commit", "rollback"],
    "SELECT kind FROM outbox_subscription ORDER BY kind": ["check", "compensation", "consumer", "relay"],
    "SELECT count(*) FROM outbox_dedup": [1],
    "SELECT count(*) > 0 FROM outbox_inbox": [True],
    "SELECT count(*) > 0 FROM outbox_ack": [True],
    "SELECT count(*) FROM outbox_message WHERE direct = 'relay' AND topic = 'away'": [1],
    "SELECT count(*) > 0 FROM outbox_progress WHERE target IS NOT NULL AND after_id IS NOT NULL": [True],
    "SELECT count(*) > 0 FROM outbox_lease WHERE owner IS NOT NULL": [True],
}
BACKLOG_BODIES = [f"backlog {n:02}".encode() for n in range(BACKLOG)]


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    """Programs of 0.1.0."""
    return build(tmp_path_factory.mktemp("earlier"))


def test_a_clone_without_the_history_says_how_to_get_it(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    with pytest.raises(pytest.fail.Exception, match=rf"^{COMMIT:.8} is not in this clone: run git fetch --unshallow$"):
        unpack_source(tmp_path, tmp_path)


@pytest.fixture(params=["postgresql", "sqlite"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'shop.sqlite3'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.create_database(f"upgrade_{uuid.uuid4().hex}")
    engine = create_engine(url)
    yield engine
    engine.dispose()


def address(engine: Engine) -> str:
    """The URL for another process."""
    return engine.url.render_as_string(hide_password=False)


def ask(engine: Engine, query: str) -> list[object]:
    """The first column."""
    with engine.connect() as connection:
        return list(connection.scalars(text(query)))


@pytest.fixture
def left(earlier: Earlier, empty: Engine) -> tuple[Engine, str]:
    """A database of 0.1.0 with everything in it, and the id of a pending transaction."""
    code, said = earlier.run("-m", "tests.scenarios.moving.states", address(empty))
    assert code == 0, said
    assert {query: ask(empty, query) for query in STATES} == STATES
    (pending,) = [line for line in said.splitlines() if len(line) == len(str(uuid.uuid4()))]
    return empty, pending


def by_key(messages: Iterable[Message]) -> dict[str | None, list[bytes]]:
    """The bodies of each key in their order; what has no key once, sorted."""
    found: dict[str | None, list[bytes]] = defaultdict(list)
    for message in messages:
        found[message.key].append(message.body)
    return {**found, None: sorted(set(found[None]))}


def test_everything_in_the_tables_of_an_earlier_version_goes_on_in_those_of_today(left):
    """The relay begins again where writers may have left messages behind; the consumer repeats nothing."""
    engine, pending = left
    migrate.upgrade(engine)
    shop, sent, handled = Outbox(engine), Destination(), list[Message]()
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox_lease SET owner = NULL, lease_until = NULL"))  # of who has died
        connection.execute(text("UPDATE outbox_parked SET due_at = created_at WHERE due_at IS NOT NULL"))
    (sent_before,) = ask(engine, "SELECT message_id FROM outbox_dedup")
    with shop.begin() as session:
        shop.send(session, "orders", b"sent again", dedup_key="once")
        known = Inbox(engine, "billing").once(session, uuid.UUID(str(sent_before)))
    decided = [
        outbox(engine, *command.split()).code for command in (f"half commit {pending}", "parked replay --all --yes")
    ]

    relay_to(sent, shop).until_empty()
    consumer = shop.consumer("billing", topics=["orders"])
    consumer.on("orders")(handled.append)
    consumer.until_empty()

    assert by_key(sent.messages) == {
        "dead": [b"dead 1", b"behind 2"],
        "retry": [b"retry 1", b"behind 2"],
        "delayed": [b"delayed"],
        "waiting": [b"waiting"],
        "transactions": [b"committed", b"pending"],
        "backlog": BACKLOG_BODIES,
        None: [b"direct", b"left behind"],
    }
    assert by_key(handled) == {
        "delayed": [b"delayed"],
        "transactions": [b"pending"],
        "backlog": BACKLOG_BODIES,
        None: [b"direct"],
    }
    assert (known, decided) == (False, [0, 0])


@pytest.fixture
def at_work(earlier: Earlier, empty: Engine, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program of 0.1.0 that has made its tables and written to them, and waits for a line."""
    command = ["-m", "tests.scenarios.moving.beside", address(empty), str(tmp_path / "archive")]
    with earlier.program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "at work\n"
        yield program


@pytest.mark.smoke("a program of the earlier version goes on over the upgrade")
def test_writers_of_an_earlier_version_go_on_and_its_workers_stop_with_an_error_that_says_why(
    at_work, empty, tmp_path, monkeypatch
):
    """A producer of transactions goes on for the minute in which it knows its tables; one that begins is refused."""
    migrate.upgrade(empty)
    said, _ = at_work.communicate("go on\n", timeout=60)
    sent = Destination()
    relay_to(sent, Outbox(empty)).until_empty()
    monkeypatch.setattr("outbox.spark.job.run", run_here)
    extracted(empty, tmp_path / "archive")

    refused = f"SchemaError: {REFUSED}"
    assert json.loads(said) == {
        **dict.fromkeys(("send", "use_an_inbox", "send_by")),
        **dict.fromkeys(("send_half_messages", "relay", "consume", "extract"), refused),
    }
    assert by_key(sent.messages) == {
        "k": [str(n).encode() for n in range(1, 100)] * 2,
        "by word": [b"by word"] * 2,
        "joined": [b"joined"] * 2,
        None: [],
    }
    assert sorted(archived_ids(tmp_path / "archive")) == ask(empty, NOT_HALF)


def archived_ids(path: Path) -> list[int]:
    """The ids in the files of an archive."""
    archive = Archive(path)
    files = [archive.path / file.path for manifest in archive.manifests() for file in manifest.files]
    return [id for file in files for id in pq.ParquetFile(file).read(["id"]).column("id").to_pylist()]


@dataclass
class Load:
    """Writers, relays and a consumer, each of a version that changes meanwhile."""

    engine: Engine
    earlier: Earlier
    folder: Path
    least: int
    running: ExitStack

    def start(self, version: str, role: str, *arguments: str) -> Supervised:
        """Start a program of `moving` in one version, again whenever it ends."""
        command = ["-m", f"tests.scenarios.moving.{role}", address(self.engine), *arguments]
        log = self.folder / f"{version}-{role}-{uuid.uuid4().hex}.log"
        program = self.earlier.program if version == "earlier" else Program
        found = Supervised(command, log, program=program, pause=2.0)  # a start takes a second of a core
        found.start()
        self.running.callback(found.stop)
        return found

    def writer(self, version: str, name: str) -> Supervised:
        """One writer of its keys, which goes on where the one before has ended."""
        return self.start(version, "writing", str(self.folder / f"written-{name}"), name)

    def workers(self, version: str) -> list[Supervised]:
        """Two relays and a consumer."""
        sent, handled = str(self.folder / "sent"), str(self.folder / "handled")
        relays = [self.start(version, "stumbling", sent, DESTINATION) for _ in range(2)]
        return [*relays, self.start(version, "consuming", handled)]

    def wait(self) -> None:
        """Wait until relays and consumers have gone on for a while."""
        for file in ("sent", "handled"):
            more = arrived(self.folder / file) + self.least
            assert eventually(lambda file=file, more=more: arrived(self.folder / file) > more, SECONDS), file  # type: ignore[misc]

    def change(self, *command: str) -> None:
        """Change the tables, as an operator does who tries again."""
        assert eventually(lambda: outbox(self.engine, "db", *command).code == 0, SECONDS)

    def faults(self, file: str, written: list[tuple[str, int]]) -> dict[str, int]:
        """What was lost, was never written, or came out of order."""
        wanted = set(written)
        eventually(lambda: wanted <= {(each.key, each.number) for each in arrivals(self.folder / file)}, SECONDS)
        return faults_of_kills(written, arrivals(self.folder / file), CHANGES)


def say(workers: Iterable[Supervised], reason: str) -> None:
    """Wait until each of these workers has ended with the reason."""
    for each in workers:
        assert eventually(lambda each=each: reason in each.said, SECONDS), each.said  # type: ignore[misc]


@pytest.mark.storm
@pytest.mark.timeout(2700)
def test_an_upgrade_and_the_way_back_under_load_lose_nothing_and_keep_the_order_of_keys(earlier, empty, tmp_path, full):
    """Writers of both versions go on all the time. Workers stop with an error where the tables are not theirs."""
    newest = str(migrate.head_revision())
    assert earlier.run("-m", "outbox", "db", "upgrade", OUTBOX_DATABASE=address(empty))[0] == 0
    with ExitStack() as running:
        load = Load(empty, earlier, tmp_path, many(empty, full=full), running)
        writers = {name: load.writer("earlier", name) for name in ("a", "b")}
        workers = load.workers("earlier")
        load.wait()

        load.change("upgrade")
        say(workers, REFUSED)
        of_today = load.workers("today")
        load.wait()
        writers["a"].stop()
        writers["a"] = load.writer("today", "a")
        load.wait()

        load.change("downgrade", "--to", "0001")
        say(of_today, f"the tables are of version 1, this is {VERSION}; run: outbox db upgrade")
        load.wait()
        writers["a"].stop()
        writers["a"] = load.writer("earlier", "a")
        load.change("upgrade")
        load.wait()

        for writer in writers.values():
            writer.stop()
        committed = [each for name in writers for each in written(tmp_path / f"written-{name}")]
        assert (load.faults("sent", committed), load.faults("handled", committed)) == ({}, {})
        assert [writer.said for writer in writers.values()] == ["", ""]
    assert migrate.current_revision(empty) == newest
