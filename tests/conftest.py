"""What tests share: one server a run, one database a test; a shop that uses them, and a destination."""

import gc
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
import sqlalchemy
from hypothesis import HealthCheck, settings
from sqlalchemy import Engine, text
from xdist.scheduler import LoadScopeScheduling

from outbox import Outbox, create_engine, migrate
from outbox.store.database import Channel
from outbox.store.dialects.postgresql.dialect import DIALECT as POSTGRESQL
from outbox.telemetry.events import EVERYWHERE
from outbox.testing.servers import NatsServer, PostgresServer, ServerMissing
from tests.support.crowd import Failures
from tests.support.destination import Destination
from tests.support.handles import awaited
from tests.support.orders import Base
from tests.support.servers.rabbitmq import RabbitServer
from tests.support.tiers import AREAS, Tier, area_of, tier_of

# The suite of a dialect is in files that pytest does not collect. Their failures say what differs, too.
pytest.register_assert_rewrite("tests.store.dialect_contract", "tests.store.dialect_parts")

TEMPLATE = "outbox_template"
#: How long a test may take at full scale.
_FULL_SECONDS = 1800
#: How many examples a property is tried with, where the test names no number; at full scale hypothesis's own 100.
_EXAMPLES = 40
#: Servers take seconds of processor time to start, and some of it while nobody uses them: files whose tests need the
#: same server are given to one worker. Spark's are given to two, so that no worker is left alone at the end of a run.
_TOGETHER = {
    "spark": "batch cluster crashes extract_in_spark pushdown races smoke spark_example spark_page stream",
    "reports": "cli_report report_archive report_delivery report_order report_reconciliation",
    "kafka": "broker_pages fastapi_page rewriting sender_kafka sender_kafka_faults sender_kafka_transactions",
    "rabbitmq": "rabbitmq_page recipes_page sender_rabbitmq sender_rabbitmq_faults workflows_page",
}
_GROUPS = {f"test_{name}": group for group, names in _TOGETHER.items() for name in names.split()}

Server = TypeVar("Server")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the suites at full scale")
    tiers = (*get_args(Tier), "all")
    parser.addoption(
        "--tier", choices=tiers, default="all", help="run the tests of one tier only: see tests/support/tiers.py"
    )
    parser.addoption("--failures", type=Path, help="write what failed into this file: see tests/support/crowd.py")
    parser.addoption("--area", choices=tuple(AREAS), help="run the tests of one area of a storm only")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples, which may take any time on a busy machine, and let Ctrl-C end the tests.

    A shell without job control has its background commands ignore Ctrl-C, and whatever they start inherits that.
    """
    most = 100 if config.getoption("--full") else _EXAMPLES
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("outbox", deadline=None, max_examples=most, suppress_health_check=slow)
    settings.load_profile("outbox")
    if config.getoption("--failures") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config.getoption("--failures")))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class OneWorkerAFile(LoadScopeScheduling):  # type: ignore[misc]  # the package has no types
    """Gives all tests of a file to one worker, which makes once what the file shares, and files of a group likewise."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return _GROUPS.get(path.stem, str(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneWorkerAFile | None:
    """Give files to workers, in the order of collection."""
    return OneWorkerAFile(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """At full scale some tests need more than five minutes, even more beside others; they say themselves if not.

    What takes longest begins first, so that all workers end at about the same time: tests with slow servers, tests that
    want the machine for themselves at full scale, and scenarios. Unit tests, whose files are short, come last.
    """
    groups = [*_TOGETHER, None]
    items.sort(
        key=lambda item: (
            groups.index(_GROUPS.get(item.path.stem)),
            item.get_closest_marker("alone") is None,
            "scenarios" not in item.path.parts,
            "unit" in item.path.parts,
        )
    )
    for item in items:
        if item.path.stem not in _GROUPS and {"spark", "kafka", "rabbitmq"} & {*getattr(item, "fixturenames", ())}:
            raise pytest.UsageError(
                f"{item.path}: name the file in _TOGETHER of tests/conftest.py, with its slow server"
            )
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("smoke", "timed"):
                (why,) = mark.args
                item.user_properties.append((mark.name, why))
    chosen = [item for item in items if _is_chosen(config, item)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
    for item in items if config.getoption("--full") else ():
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_FULL_SECONDS))


def _is_chosen(config: pytest.Config, item: pytest.Item) -> bool:
    """Whether the scale, the tier and the area that were asked for have this test."""
    if item.get_closest_marker("full") and not config.getoption("--full"):
        return False
    tier, area = config.getoption("--tier"), config.getoption("--area")
    return tier in ("all", tier_of(item)) and area in (None, area_of(item))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among thousands of tests that are all kept, neither now nor in any later collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """A command has its process collect garbage rarely and tell of events. In the process of the tests this ends."""
    functions, thresholds = EVERYWHERE._functions, gc.get_threshold()
    yield
    EVERYWHERE._functions = functions
    gc.set_threshold(*thresholds)


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A test leaves the library's log as it was, or the log lines of a later test would be missing.

    A framework may configure the log of its whole process; after the test the fixture takes that back.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    log = logging.getLogger("outbox")
    assert (log.level, log.propagate, log.handlers) == (logging.NOTSET, True, [])


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the run is at full scale."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def postgres(full: bool) -> Iterator[PostgresServer]:
    """A PostgreSQL server of this run; its crashes are not to be tested, others use it. At full scale it gets large."""
    with started(lambda: PostgresServer(in_memory=not full)) as server:
        yield server


@pytest.fixture(scope="session")
def nats() -> Iterator[NatsServer]:
    """A NATS server of this run, with JetStream; streams are each test's own."""
    with started(NatsServer) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitServer]:
    """A RabbitMQ server of this run; exchanges and queues are each test's own."""
    with started(RabbitServer) as server:
        yield server


@pytest.fixture(scope="session")
def pg_template(postgres: PostgresServer) -> str:
    """The name of a migrated database to copy."""
    engine = sqlalchemy.create_engine(postgres.create_database(TEMPLATE))
    migrate.upgrade(engine)
    engine.dispose()
    return TEMPLATE


@pytest.fixture
def pg_engine(postgres: PostgresServer, pg_template: str) -> Iterator[Engine]:
    """A migrated PostgreSQL database of this test."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_engine(postgres.create_database(name, template=pg_template))
    adopt(engine)
    yield engine
    engine.dispose()
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file to copy."""
    path = tmp_path_factory.mktemp("template") / "outbox.sqlite3"
    engine = create_engine(f"sqlite:///{path}")
    migrate.upgrade(engine)
    engine.dispose()
    return path


@pytest.fixture
def sqlite_engine(sqlite_template: Path, tmp_path: Path) -> Iterator[Engine]:
    """A migrated SQLite database of this test."""
    path = tmp_path / "outbox.sqlite3"
    shutil.copy(sqlite_template, path)
    engine = create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """A migrated database of this test, on every supported kind."""
    fixture = {"postgresql": "pg_engine", "sqlite": "sqlite_engine"}[request.param]
    found: Engine = request.getfixturevalue(fixture)
    return found


def started(server: Callable[[], Server]) -> Server:
    """Make a server; without its programs tests are skipped, except in CI, where that would hide them."""
    try:
        return server()
    except ServerMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def adopt(engine: Engine) -> None:
    """Make a copied database the home of its outbox, which otherwise belongs to the one that it was copied from."""
    with engine.begin() as connection:
        system, database = connection.execute(text(POSTGRESQL.home.identity)).one()
        update = text("UPDATE outbox_meta SET system_identifier = :system, database_oid = :database")
        connection.execute(update, {"system": system, "database": database})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the programs of this environment at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX_DATABASE", "sqlite:///shop.db")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def channel(engine: Engine) -> Iterator[Channel]:
    """A connection of this test's own."""
    with closing(Outbox(engine).database.open()) as opened:
        yield opened


@pytest.fixture
def destination() -> Destination:
    """Where messages go, which remembers them."""
    return Destination()


@pytest.fixture
def shop(engine: Engine) -> Iterator[Outbox]:
    """An outbox beside a business table."""
    Base.metadata.create_all(engine)
    outbox = Outbox(engine)
    yield outbox
    outbox.close()


@pytest.fixture
def async_shop(engine: Engine) -> Iterator[Outbox]:
    """The same on an AsyncEngine."""
    Base.metadata.create_all(engine)
    outbox = Outbox(awaited(engine))
    yield outbox
    outbox.close()
