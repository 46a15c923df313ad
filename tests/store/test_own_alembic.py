"""An application's own Alembic beside our tables, and with our tables in its migrations, as docs/deploy.md says."""

import io
import re
import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import psycopg
import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Engine, inspect
from sqlalchemy.pool import NullPool

from outbox import Outbox, Relay, migrate, schema
from outbox.testing.servers import PostgresServer
from tests.support.command_line import Ended, outbox

MODELS = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
"""
CONFIGURE = "connection=connection, target_metadata=target_metadata"
MADE = re.compile(r"op\.create_table\('(\w+)'")
TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "deploy.md").read_text()
#: What the page has an application write.
(TARGET,) = re.findall(r"^target_metadata = (.*)$", PAGE, re.MULTILINE)
(SEED,) = re.findall(r"^(from outbox import migrate\n\nmigrate\.seed\(.*\))$", PAGE, re.MULTILINE)


@dataclass(frozen=True)
class Shop:
    """An application with a table and an Alembic of its own, in a folder of its own."""

    folder: Path
    url: URL
    schema: str | None

    @property
    def engine(self) -> Engine:
        """As the application makes it."""
        return sqlalchemy.create_engine(self.url, poolclass=NullPool)

    def alembic(self, do: Callable[..., object], *arguments: str, **options: bool) -> str:
        """Run a command of Alembic; return the script that it wrote."""
        output = io.StringIO()
        config = Config(self.folder / "alembic.ini", stdout=io.StringIO(), output_buffer=output)
        do(config, *arguments, **options)
        return output.getvalue()

    def autogenerate(self) -> Path:
        """The revision that Alembic writes by itself."""
        before = self._revisions()
        self.alembic(command.revision, autogenerate=True)
        (made,) = self._revisions() - before
        return made

    def _revisions(self) -> set[Path]:
        return set((self.folder / "migrations" / "versions").glob("*.py"))

    def outbox(self, *verb: str) -> Ended:
        """Run a command of ours on its database."""
        return outbox(self.engine, *verb, *(["--schema", self.schema] if self.schema else []))

    def tables(self) -> set[str]:
        """The names of our tables that are there."""
        names = inspect(self.engine).get_table_names(self.schema)
        return {name for name in names if name.startswith(schema.PREFIX)}

    def delivered(self) -> list[bytes]:
        """The messages that the relay delivers after one more was sent."""
        sender = Outbox(self.engine, schema=self.schema)
        with sender.begin() as session:
            sender.send(session, "orders", b"placed", key="k")
        came: list[bytes] = []
        Relay(sender, lambda message: came.append(message.body)).until_empty()
        return came


OURS = set(schema.metadata().tables)


@pytest.fixture(params=["postgresql", "a schema of postgresql", "sqlite"])
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of database."""
    found: str = request.param
    return found


@pytest.fixture(autouse=True)
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alembic adds the folder of an application to where modules are looked for."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def where(kind: str) -> str | None:
    """The schema of our tables."""
    return "app" if kind == "a schema of postgresql" else None


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[URL]:
    """An empty database."""
    if kind == "sqlite":
        yield sqlalchemy.make_url(f"sqlite:///{tmp_path / 'shop.db'}")
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    name = f"shop_{uuid.uuid4().hex}"
    yield sqlalchemy.make_url(postgres.create_database(name))
    postgres.drop_database(name)


@pytest.fixture
def embedding(tmp_path: Path, url: URL, where: str | None) -> Shop:
    """An application that has our tables in its own migrations."""
    target = TARGET.replace('"postgresql"', f"{url.get_backend_name()!r}{in_schema(where)}")
    return start(Shop(tmp_path, url, where), target=target, configure=several_schemas(where))


@pytest.fixture
def neighbour(tmp_path: Path, url: URL, where: str | None) -> Shop:
    """An application whose migrations leave our tables alone."""
    configure = f"{several_schemas(where)}include_name=outbox.schema.include_name"
    return start(Shop(tmp_path, url, where), target="Base.metadata", configure=configure)


def several_schemas(where: str | None) -> str:
    """What `context.configure` needs, where our tables have a schema of their own."""
    return "" if where is None else "include_schemas=True, "


def start(shop: Shop, *, target: str, configure: str) -> Shop:
    """Run `alembic init`, and write into the files what an application writes there."""
    models = f"shop_{uuid.uuid4().hex}"
    (shop.folder / f"{models}.py").write_text(MODELS)
    shop.alembic(command.init, str(shop.folder / "migrations"))
    ini, env = shop.folder / "alembic.ini", shop.folder / "migrations" / "env.py"
    url = shop.url.render_as_string(hide_password=False)
    options = re.sub("(?m)^sqlalchemy.url = .*$", lambda _: f"sqlalchemy.url = {url}", ini.read_text())
    ini.write_text(re.sub("(?m)^prepend_sys_path = .*$", f"prepend_sys_path = {shop.folder}", options))
    imports = f"import outbox.schema\nfrom {models} import Base\n\n"
    written = env.read_text().replace("target_metadata = None", f"{imports}target_metadata = {target}")
    # The process is that of the tests, which have a log of their own.
    written = written.replace("fileConfig(config.config_file_name)", "pass")
    env.write_text(written.replace(CONFIGURE, f"{CONFIGURE}, {configure}"))
    assert target in env.read_text() and f"{CONFIGURE}, {configure}" in env.read_text()
    return shop


def add(revision: Path, where: str | None, *, seed: str) -> None:
    """Write into the upgrade of a revision what the page says."""
    upgrade, down, downgrade = revision.read_text().partition("def downgrade()")
    if where is not None:
        begin = "    # ### commands auto generated"
        assert begin in upgrade
        upgrade = upgrade.replace(begin, f'    op.execute("CREATE SCHEMA IF NOT EXISTS {where}")\n{begin}')
    revision.write_text(f"{upgrade.rstrip()}\n{seed}\n\n\n{down}{downgrade}")


def seed(where: str | None) -> str:
    """The lines that write the first rows."""
    return indent(SEED.replace("get_bind()", f"get_bind(){in_schema(where)}"), "    ")


def in_schema(where: str | None) -> str:
    """One more argument, where our tables have a schema of their own."""
    return "" if where is None else f", schema={where!r}"


@pytest.mark.storm
def test_an_application_has_the_tables_in_its_own_migrations(embedding):
    revision = embedding.autogenerate()
    assert "outbox" not in revision.read_text().partition("def upgrade()")[0], "nothing of ours to be imported"
    add(revision, embedding.schema, seed=seed(embedding.schema))

    embedding.alembic(command.upgrade, "head")

    assert (embedding.tables(), embedding.delivered()) == (OURS, [b"placed"])
    assert embedding.outbox("doctor").err == "everything is as it should be\n"
    assert [each["name"] for each in embedding.outbox("status", "--json").json["subscriptions"]] == ["relay"]
    assert "op." not in embedding.autogenerate().read_text()


@pytest.mark.storm
def test_its_migrations_go_down_and_up_again(embedding):
    add(embedding.autogenerate(), embedding.schema, seed=seed(embedding.schema))
    embedding.alembic(command.upgrade, "head")

    embedding.alembic(command.downgrade, "base")
    assert embedding.tables() == set()
    embedding.alembic(command.upgrade, "head")

    upgraded = embedding.outbox("db", "upgrade")
    assert upgraded.err == f"the tables are up to date ({migrate.head_revision()})\n"
    assert (embedding.outbox("doctor").code, embedding.delivered()) == (0, [b"placed"])
    assert "op." not in embedding.autogenerate().read_text()


def test_its_tables_are_taken_over_where_it_has_not_seeded_them(embedding):
    """As the check advises."""
    add(embedding.autogenerate(), embedding.schema, seed="")
    embedding.alembic(command.upgrade, "head")
    (finding,) = embedding.outbox("doctor", "--json").json["findings"]
    said = (finding["problem"], finding["fix"].partition(",")[0])
    assert said == ("is empty", f"run: outbox db upgrade{' --schema app' if embedding.schema else ''}")

    upgraded = embedding.outbox("db", "upgrade")

    assert upgraded.err == f"took over the tables that were there, as they are complete ({migrate.head_revision()})\n"
    assert (embedding.outbox("doctor").code, embedding.delivered()) == (0, [b"placed"])
    assert "op." not in embedding.autogenerate().read_text()


def test_tables_that_it_has_not_seeded_are_told_with_the_fix(embedding):
    add(embedding.autogenerate(), embedding.schema, seed="")
    embedding.alembic(command.upgrade, "head")

    status, purge = embedding.outbox("status"), embedding.outbox("purge", "--older-than", "1d")

    said = f"outbox_meta is empty; run: outbox db upgrade{' --schema app' if embedding.schema else ''}"
    assert [(each.code, said in each.err) for each in (status, purge)] == [(1, True)] * 2


def test_its_migrations_may_be_written_as_a_script(embedding):
    add(embedding.autogenerate(), embedding.schema, seed=seed(embedding.schema))

    script = embedding.alembic(command.upgrade, "head", sql=True)

    run(embedding.url, script)
    assert embedding.outbox("doctor").err == "everything is as it should be\n"
    assert embedding.delivered() == [b"placed"]


def run(url: URL, script: str) -> None:
    """Execute a script for an empty database by the driver alone."""
    script = f"DROP TABLE alembic_version; {script}"  # the autogenerate has left it
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(str(url.database))) as file:
            file.executescript(script)
        return
    where = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(where, autocommit=True) as connection:
        connection.execute(script.encode())


def test_an_application_leaves_our_tables_alone(neighbour):
    neighbour.outbox("db", "upgrade")

    revision = neighbour.autogenerate()
    neighbour.alembic(command.upgrade, "head")

    assert MADE.findall(revision.read_text()) == ["orders"]
    assert "op." not in neighbour.autogenerate().read_text()
    neighbour.alembic(command.upgrade, "head")
    neighbour.alembic(command.downgrade, "base")
    assert (neighbour.tables(), neighbour.outbox("doctor").code, neighbour.delivered()) == (OURS, 0, [b"placed"])
