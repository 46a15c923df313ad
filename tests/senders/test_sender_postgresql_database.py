"""The PostgreSQL of another outbox: its tables, rights and sessions; the URL, and the credentials."""

import logging
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from outbox import SenderError, create_engine, migrate
from outbox.model.verdict import DONE, Unavailable
from outbox.schema import VERSION
from outbox.senders.postgresql import PostgresSender
from outbox.testing.sender_contract import a_message, check_all_done, check_stored
from outbox.testing.servers import PostgresServer
from tests.support.handles import conninfo_of
from tests.support.other_outbox import OtherOutbox, new_id, send, with_passwords
from tests.support.places import opened
from tests.support.remote import a_row
from tests.support.servers.proxy import TcpProxy
from tests.support.stand_ins import Eavesdropper

TOP = Path(__file__).parents[2]


sender = opened("other")


# What the database there has to be


def unavailable(other: OtherOutbox, reason: str) -> Unavailable:
    """The verdict on everything."""
    return Unavailable(f"PostgreSQL: {other.shown}: {reason}")


@contextmanager
def empty(postgres: PostgresServer) -> Iterator[OtherOutbox]:
    """A database without tables."""
    engine = create_engine(postgres.create_database(f"empty_{new_id()}"))
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        yield OtherOutbox(engine, proxy)
    engine.dispose()


def test_missing_tables_are_told_with_the_command_and_found_when_they_are_there(postgres):
    with empty(postgres) as other, closing(other.open()) as sender:
        sent = [a_message("orders", 1), a_message("orders", 2)]
        before = sender.send(sent)
        migrate.upgrade(other.engine)
        after = sender.send(sent)

    away = unavailable(other, "the outbox tables are not there; run there: outbox db upgrade")
    assert before == [away, away]
    assert all(isinstance(verdict, Unavailable) and verdict.everything for verdict in before)
    assert after == [DONE, DONE]


def test_a_missing_schema_is_told_with_its_name(postgres):
    with empty(postgres) as other:
        migrate.upgrade(other.engine)
        [verdict] = send(f"{other.url}?schema=shop", a_message("orders", 1))

    text = "the outbox tables are not there in schema shop; run there: outbox db upgrade --schema shop"
    assert verdict == unavailable(other, text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            "UPDATE outbox_meta SET version = 0",
            f"the outbox tables are of version 0, this is {VERSION}; run there: outbox db upgrade",
        ),
        (
            "UPDATE outbox_meta SET version = 99",
            f"the outbox tables are of version 99, this is {VERSION}; install a newer outbox-log here",
        ),
        ("DELETE FROM outbox_meta", "outbox_meta is empty; run there: outbox db upgrade"),
        (
            "UPDATE outbox_meta SET system_identifier = '42'",
            "the database is a copy of another one; run there: outbox restore",
        ),
        (
            "UPDATE outbox_meta SET database_oid = 42",
            "the database is a copy of another one; run there: outbox restore",
        ),
        ("DROP TABLE outbox_inbox", 'relation "outbox_inbox" does not exist (42P01)'),
    ],
    ids=["older", "newer", "empty", "another-server", "another-database", "incomplete"],
)
def test_tables_that_are_not_as_they_have_to_be_get_nothing(other, change, reason):
    other.execute(change)

    verdicts = send(other.url, a_message("orders", 1), a_message("orders", 2))

    assert verdicts == [unavailable(other, reason)] * 2
    assert all(verdict.everything for verdict in verdicts)
    assert other.rows() == []


def test_tables_that_change_while_a_sender_is_connected_are_looked_at_again(other, sender):
    """The first failure closes the connection; the next one says what to do."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    other.execute("ALTER TABLE outbox_message RENAME COLUMN tags TO labels; UPDATE outbox_meta SET version = 99")

    reasons = [sender.send([a_message("orders", 2)])[0].error for _ in range(2)]

    newer = f"the outbox tables are of version 99, this is {VERSION}; install a newer outbox-log here"
    assert reasons == [
        f'PostgreSQL: {other.shown}: column "tags" of relation "outbox_message" does not exist (42703)',
        f"PostgreSQL: {other.shown}: {newer}",
    ]


@pytest.mark.parametrize("rule", ["CHECK (tags IS NOT NULL) NOT VALID", "UNIQUE (topic)"])
def test_tables_that_were_upgraded_meanwhile_reject_nothing(other, sender, rule):
    """Before a row is blamed the version is compared again: other tables may have other rules for every row."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    other.execute(f"ALTER TABLE outbox_message ADD CONSTRAINT new {rule}; UPDATE outbox_meta SET version = 99")

    verdicts = sender.send([a_message("orders", 2), a_message("orders", 3)])

    newer = f"the outbox tables are of version 99, this is {VERSION}; install a newer outbox-log here"
    assert verdicts == [unavailable(other, newer)] * 2


GRANTS = """
    GRANT USAGE ON SCHEMA public TO {role};
    GRANT SELECT ON outbox_meta TO {role};
    GRANT INSERT, SELECT ON outbox_inbox TO {role};
    GRANT INSERT (message_id, topic, key, slot, tags, headers, content_type, created_at, deliver_at, expires_at, body) ON outbox_message TO {role}
"""  # noqa: E501 - as the page shows it


def test_a_role_needs_no_more_rights_than_the_page_says(other):
    """And says which one is missing."""
    page = (TOP / "docs" / "postgresql.md").read_text()
    grants = [line.strip().replace("{role}", "sales") for line in GRANTS.replace(";", "").splitlines() if line.strip()]
    role = new_id()
    other.execute(f"CREATE ROLE {role} LOGIN")
    other.execute(GRANTS.format(role=role))
    url = other.url.replace("postgres@", f"{role}@")
    granted = send(url, a_message("orders", 1, key="k"))
    other.execute(f"REVOKE ALL ON outbox_message FROM {role}")
    revoked = send(url, a_message("orders", 2))
    other.execute(f"DROP OWNED BY {role}")
    other.execute(f"DROP ROLE {role}")

    assert granted == [DONE]
    assert revoked == [unavailable(other, "permission denied for table outbox_message (42501)")]
    assert [grant for grant in grants if grant not in page] == []


@pytest.mark.storm
def test_a_lock_is_waited_for_within_the_deadline(other, sender):
    """A migration there, for example; nothing is blamed on a message, and nothing is left behind."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)
    with other.locked("outbox_inbox"):
        verdicts = sender.send(waiting := [a_message("orders", 2)])

    assert verdicts == [unavailable(other, "canceling statement due to lock timeout (55P03)")]
    check_all_done(sender.send(waiting), waiting)
    check_stored(other, sent + waiting)


@pytest.mark.storm
def test_a_slow_server_gives_up_by_itself(other, sender):
    other.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NEW; END $$"
    )
    other.execute("CREATE TRIGGER t BEFORE INSERT ON outbox_message FOR EACH ROW EXECUTE FUNCTION slow()")

    verdicts = sender.send([a_message("orders", 1)])

    assert verdicts == [unavailable(other, "canceling statement due to statement timeout (57014)")]


def test_a_commit_waits_for_the_disk_whatever_the_defaults_are(other, sender):
    """And the isolation is that for which the statement is written."""
    name = other.engine.url.database
    for setting in ("synchronous_commit = off", "default_transaction_isolation = 'serializable'"):
        other.execute(f"ALTER DATABASE {name} SET {setting}")
    other.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert_written = """
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.tags = concat_ws(' ',
        current_setting('synchronous_commit'), current_setting('transaction_isolation')); RETURN NEW; END $$
    """
    with psycopg.connect(conninfo_of(other.engine.url), autocommit=True) as owner:
        owner.execute("SET default_transaction_read_only = off")
        owner.execute(assert_written.encode())
        owner.execute("CREATE TRIGGER t BEFORE INSERT ON outbox_message FOR EACH ROW EXECUTE FUNCTION note()")

    assert send(other.url, a_message("orders", 1)) == [DONE]

    assert [row["tags"] for row in other.rows()] == ["on read committed"]


def test_nothing_stays_in_a_session_that_a_pooler_may_give_to_another_client(other, sender):
    other.fail("beta")
    sender.send([a_message("beta", 1)])
    for n in range(10):
        assert sender.send([a_message("orders", n)]) == [DONE]
    names = ("statement_timeout", "lock_timeout", "synchronous_commit", "transaction_isolation", "search_path")
    look = "SELECT name, setting, source FROM pg_settings WHERE name = ANY(%s) ORDER BY name"

    async def session(link: Any) -> Any:
        driver = link._connection._driver
        settings = await (await driver.execute(look, (list(names),))).fetchall()
        prepared = await (await driver.execute("SELECT count(*) FROM pg_prepared_statements")).fetchone()
        return settings, prepared

    found = sender._loop.run(session, timeout=60)

    with psycopg.connect(conninfo_of(other.engine.url), autocommit=True) as fresh:
        assert found == (fresh.execute(look, (list(names),)).fetchall(), (0,))


def test_an_idle_connection_is_kept_alive(other, sender):
    """Every 30 s, because a network in between would forget it."""
    check_all_done(sender.send(sent := [a_message("orders", 1)]), sent)

    async def options(link: Any) -> tuple[int, int]:
        with link._connection._socket() as peer:
            return (
                peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            )

    assert sender._loop.run(options, timeout=60) == (1, 30)


def test_an_old_libpq_without_pipelines_does_the_same(other, monkeypatch):
    monkeypatch.setattr(psycopg.AsyncPipeline, "is_supported", classmethod(lambda cls: False))
    other.fail("beta")
    sent = [a_message("beta" if n == 7 else "alpha", n, key=f"k{n % 3}" if n % 2 else None) for n in range(20)]

    verdicts = send(other.url, *sent)

    assert [n for n, verdict in enumerate(verdicts) if verdict is not DONE] == [7, 13, 19]
    assert [row["message_id"] for row in other.rows()] == [
        message.message_id for message, verdict in zip(sent, verdicts, strict=True) if verdict is DONE
    ]


# URL and credentials


@pytest.fixture(scope="module")
def strict() -> Iterator[PostgresServer]:
    """A server that asks for passwords."""
    with PostgresServer() as server:
        engine = create_engine(server.create_database("shop"))
        migrate.upgrade(engine)
        engine.dispose()
        with_passwords(server, ann="s3cr3t", bob="p@ss:w/rd?#%' \\")
        with psycopg.connect(f"host=127.0.0.1 port={server.port} user=postgres dbname=shop", autocommit=True) as owner:
            for role in ("ann", "bob"):
                owner.execute(GRANTS.format(role=role).encode())
        yield server


def url_of(server: PostgresServer, user: str, password: str) -> str:
    """The server's URL for a user with a password."""
    return f"postgresql://{user}:{quote(password, safe='')}@127.0.0.1:{server.port}/shop"


def test_credentials_may_hold_any_character(strict):
    assert send(url_of(strict, "bob", "p@ss:w/rd?#%' \\"), a_message("orders", 1)) == [DONE]


def test_wrong_credentials_are_unavailable_and_never_told(strict, caplog):
    caplog.set_level(logging.DEBUG)
    with closing(PostgresSender(url_of(strict, "ann", "wr0ng"))) as sender:
        [verdict] = sender.send([a_message("orders", 1)])
        told = caplog.text + repr(verdict) + repr(sender) + repr(vars(sender)) + sender.destination

    shown = f"postgresql://127.0.0.1:{strict.port}/shop"
    reason = 'FATAL: password authentication failed for user "ann"'
    assert verdict == Unavailable(f"PostgreSQL: {shown}: {reason}")
    assert verdict.everything
    assert "wr0ng" not in told


def test_right_credentials_are_never_told_either(strict, caplog):
    caplog.set_level(logging.DEBUG)
    with closing(PostgresSender(url_of(strict, "ann", "s3cr3t"))) as sender:
        verdicts = sender.send([a_message("orders", 1), a_row(topic="a b")])
        told = caplog.text + repr(verdicts) + repr(sender) + repr(vars(sender)) + sender.destination

    assert verdicts[0] == DONE
    assert "s3cr3t" not in told
    assert f"PostgreSQL: connected to postgresql://127.0.0.1:{strict.port}/shop" in caplog.text


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
def test_a_server_without_tls_gets_no_credentials_where_tls_is_asked_for(mode):
    with Eavesdropper(answer=b"N") as server:
        root = "&sslrootcert=system" if mode == "verify-full" else ""
        url = f"postgresql://ann:s3cr3t@127.0.0.1:{server.port}/shop?timeout=60&sslmode={mode}{root}"
        [verdict] = send(url, a_message("orders", 1))

    assert isinstance(verdict, Unavailable)
    assert verdict.error.startswith(f"PostgreSQL: postgresql://127.0.0.1:{server.port}/shop: ")
    assert "server does not support SSL, but SSL was required" in verdict.error or mode == "verify-ca"
    assert b"ann" not in server.heard
    assert b"s3cr3t" not in server.heard


DATABASE = "write one database behind the host, as in postgresql://user:password@host:port/database"
OPTIONS = "its options are schema, as, timeout, sslmode, sslrootcert, sslcert, sslkey, each once"
MODES = "sslmode must be one of disable, allow, prefer, require, verify-ca, verify-full"
PLAIN = "schema must be of letters, digits and _"
NAME = "as must be 1 to 255 printable characters"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql:///shop", "postgresql:///shop: write postgresql://user:password@host:port/database"),
        ("postgresql://ann:s3cr3t@host", f"postgresql://host: {DATABASE}"),
        ("postgresql://ann:s3cr3t@host/a/b", f"postgresql://host/a/b: {DATABASE}"),
        ("postgresql://ann:s3cr3t%00@host/shop", "postgresql://host/shop: no part of it may hold %00"),
        ("postgresql://ann:s3cr3t@a,b/shop", "postgresql://a,b/shop: write one host"),
        ("postgresql://ann:s3cr3t@host/shop?schema=a-b", f"postgresql://host/shop: {PLAIN}"),
        (f"postgresql://ann:s3cr3t@host/shop?schema={'s' * 64}", f"postgresql://host/shop: {PLAIN}"),
        ("postgresql://ann:s3cr3t@host/shop?as=", f"postgresql://host/shop: {NAME}"),
        (f"postgresql://ann:s3cr3t@host/shop?as={'a' * 256}", f"postgresql://host/shop: {NAME}"),
        ("postgresql://ann:s3cr3t@host/shop?as=a%0Ab", f"postgresql://host/shop: {NAME}"),
        ("postgresql://ann:s3cr3t@host/shop?sslmode=on", f"postgresql://host/shop: {MODES}"),
        ("postgresql://ann:s3cr3t@host/shop?timeout=0", "postgresql://host/shop: timeout must be a number of seconds"),
        (
            "postgresql://ann:s3cr3t@host/shop?password=s3cr3t",
            f"postgresql://host/shop: {OPTIONS}; 'password' is none of them",
        ),
        ("postgresql://ann:s3cr3t@host/shop?as=a&as=b", f"postgresql://host/shop: {OPTIONS}; 'as' is given twice"),
    ],
)
def test_a_bad_url_is_an_error_without_its_secrets(url, reason):
    with pytest.raises(SenderError) as caught:
        PostgresSender(url)

    assert str(caught.value) == reason


def test_a_host_without_a_port_is_at_the_usual_one():
    sender = PostgresSender("postgresql://ann@127.0.0.2/shop?timeout=60")
    [verdict] = sender.send([a_message("orders", 1)])
    sender.close()

    assert verdict == Unavailable("PostgreSQL: postgresql://127.0.0.2/shop: Connection refused")
    assert (sender.destination, sender.deadline) == ("postgresql://127.0.0.2/shop", timedelta(seconds=60))


def test_a_name_that_nobody_knows_is_unavailable():
    [verdict] = send("postgresql://nowhere.invalid/shop?timeout=3", a_message("orders", 1))

    assert isinstance(verdict, Unavailable)
    assert verdict.everything
