"""Messages in Django's transactions: what Django commits is there, what it rolls back is not."""

import asyncio
import os
import re
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import django
import psycopg
import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from sqlalchemy import Engine, text

from outbox import DatabaseError, Message, NoTransactionError, Outbox, TransactionAbortedError
from outbox.testing import Capture
from tests.support.command_line import the_tests_own_process
from tests.support.faults import arm_kill
from tests.support.handles import conninfo_of
from tests.support.readers import bodies

if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["outbox.django"], DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3"}}
    )
    django.setup()

from outbox.django import outbox_on, send, send_all
from outbox.django.databases import url_of
from outbox.django.management.commands.outbox import Command


@pytest.fixture
def shop(engine: Engine) -> Iterator[Engine]:
    """The database of the test, which is Django's default database."""
    with django_on(engine):
        yield engine


@pytest.fixture
def pg_shop(pg_engine: Engine) -> Iterator[Engine]:
    """PostgreSQL, as Django's default database."""
    with django_on(pg_engine):
        yield pg_engine


@contextmanager
def django_on(engine: Engine) -> Iterator[None]:
    """Django's default database is this one."""
    url, kind = engine.url, {"postgresql": "postgresql", "sqlite": "sqlite3"}[engine.dialect.name]
    connections.close_all()
    with suppress(AttributeError):
        del connections["default"]
    connections.settings["default"] |= {
        "ENGINE": f"django.db.backends.{kind}",
        "NAME": url.database,
        "USER": url.username or "",
        "HOST": url.host or "",
        "PORT": url.port or "",
    }
    with engine.begin() as business:
        business.execute(text("CREATE TABLE truth (n INTEGER)"))
    yield
    connections.close_all()


def book(number: int) -> None:
    """A row of the business."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO truth VALUES (%s)", [number])


def order(number: int) -> None:
    """A row and its message."""
    book(number)
    send("orders", str(number), key="k")


def left(engine: Engine) -> tuple[list[bytes], list[bytes]]:
    """The rows, written as bodies, and the messages."""
    with engine.connect() as observer:
        rows = [str(n).encode() for n in observer.execute(text("SELECT n FROM truth ORDER BY n")).scalars()]
    return rows, bodies(engine)


def both(*numbers: int) -> tuple[list[bytes], list[bytes]]:
    """Both hold these orders."""
    texts = [str(number).encode() for number in numbers]
    return texts, texts


def commit() -> None:
    with transaction.atomic():
        order(1)
        with transaction.atomic():
            order(2)


def roll_back() -> None:
    with transaction.atomic():
        order(1)
        transaction.set_rollback(True)


def roll_back_a_savepoint() -> None:
    with transaction.atomic():
        order(1)
        with transaction.atomic():
            order(2)
            transaction.set_rollback(True)
        order(3)


def raise_out() -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        order(1)
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("block", "numbers"), [(commit, [1, 2]), (roll_back, []), (roll_back_a_savepoint, [1, 3]), (raise_out, [])]
)
def test_a_message_shares_the_fate_of_the_rows(shop, block: Callable[[], None], numbers: list[int]):
    block()

    assert left(shop) == both(*numbers)


def test_many_messages_are_sent_at_once_and_a_dedup_key_counts(shop):
    with transaction.atomic():
        send_all([Message("orders", str(n), headers={"to": "ann"}) for n in range(60)])
        first, second = (send("orders", "once", dedup_key="d") for _ in range(2))

    assert first == second
    assert bodies(shop) == [*(str(n).encode() for n in range(60)), b"once"]


def test_outside_of_a_block_nothing_is_sent(shop):
    with pytest.raises(NoTransactionError, match=r"outside of transaction.atomic\(\) Django commits every statement"):
        send("orders", b"")

    assert bodies(shop) == []


def test_a_block_of_another_database_is_named(shop):
    connections.settings["other"] = {**connections.settings["default"]}
    try:
        with (
            pytest.raises(NoTransactionError, match="runs on 'other', not on 'default'; send with using='other'"),
            transaction.atomic(using="other"),
        ):
            send("orders", b"")
    finally:
        connections["other"].close()
        del connections["other"], connections.settings["other"]

    assert bodies(shop) == []


def test_a_transaction_by_hand_is_told_from_none(shop):
    transaction.set_autocommit(False)
    try:
        with pytest.raises(NoTransactionError, match="autocommit is off for 'default'"):
            send("orders", b"")
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_a_coroutine_is_sent_to_a_thread(shop):
    async def order() -> None:
        send("orders", b"")

    with pytest.raises(NoTransactionError, match="call the function by sync_to_async"):
        asyncio.run(order())


def test_a_broken_block_takes_no_message(shop):
    with pytest.raises(TransactionManagementError), transaction.atomic():
        transaction.set_rollback(True)
        send("orders", b"")

    assert bodies(shop) == []


def test_a_swallowed_error_does_not_pretend_to_commit(pg_shop):
    """PostgreSQL would roll back in silence, and Django would call it a commit. Afterwards the connection is fit."""
    with pytest.raises(TransactionAbortedError, match="roll back, or use a savepoint"), transaction.atomic():
        order(1)
        with pytest.raises(django.db.Error):
            send("orders", b"") and connection.cursor().execute("SELECT 1/0")
    commit()

    assert left(pg_shop) == both(1, 2)


def test_a_commit_with_messages_wakes_workers_and_no_other_does(pg_shop):
    with psycopg.connect(conninfo_of(pg_shop.url), autocommit=True) as listening:
        listening.execute('LISTEN "outbox"')
        roll_back()
        with transaction.atomic():
            book(3)
        assert list(listening.notifies(timeout=0.3)) == []

        commit()
        assert len(list(listening.notifies(timeout=60, stop_after=1))) == 1


def test_a_capture_sees_what_a_test_rolls_back_at_its_end(shop):
    with Capture() as capture, transaction.atomic():
        roll_back_a_savepoint()
        assert [message.body for message in capture.messages] == [b"1", b"3"]
        transaction.set_rollback(True)

    assert capture.committed == []


@pytest.mark.parametrize("point", ["before_insert", "after_insert", "before_commit", "after_commit"])
def test_a_writer_that_is_killed_leaves_both_or_neither(shop, point):
    connections.close_all()
    child = os.fork()
    if child == 0:
        try:
            arm_kill(f"outbox.{point}", 3)
            for number in range(9):
                with transaction.atomic():
                    order(number)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 9

    rows, messages = left(shop)
    assert rows == messages
    assert len(rows) == (3 if point == "after_commit" else 2)


def test_the_options_that_libpq_knows_are_those_of_workers(monkeypatch):
    found = {
        "ENGINE": "django.db.backends.postgresql", "NAME": "shop", "USER": "ann", "PASSWORD": "se/cret",
        "HOST": "db1", "PORT": "5433", "OPTIONS": {"sslmode": "require", "pool": {"min_size": 2}, "isolation_level": 2},
    }  # fmt: skip
    monkeypatch.setitem(connections.settings, "other", connections.settings["default"] | found)

    url = outbox_on("other").engine.url

    assert (
        url.render_as_string(hide_password=False) == "postgresql+psycopg://ann:se%2Fcret@db1:5433/shop?sslmode=require"
    )


def test_a_database_without_an_outbox_is_refused(monkeypatch):
    monkeypatch.setattr(connection, "vendor", "oracle")

    with pytest.raises(DatabaseError, match="'default' is oracle; an outbox needs PostgreSQL or SQLite"):
        url_of(connections["default"])


def test_an_advice_is_given_to_the_program_that_was_called(shop, capsys, monkeypatch):
    # First set, so that the end of the test takes away what the command sets.
    monkeypatch.setenv("OUTBOX_DATABASE", "")
    monkeypatch.delenv("OUTBOX_DATABASE")

    _, said = manage(capsys, "status")
    found = re.search(r"run: python manage.py outbox (.*) --to URL$", said, re.MULTILINE)
    assert found is not None, said

    assert manage(capsys, *shlex.split(found[1]), "--to", "stdout:", "--until-empty")[0] == 0
    assert manage(capsys, "status", "--check")[0] == 0


def manage(capsys, *arguments: str) -> tuple[object, str]:
    """Run `manage.py outbox`; return how it ended, and what it told."""
    with the_tests_own_process(), pytest.raises(SystemExit) as ended:
        Command().handle(arguments=[*arguments])
    return ended.value.code, capsys.readouterr().err


def test_a_connection_of_sqlite3_is_a_handle(sqlite_engine):
    """With rows of its own kind, in every mode of the driver."""
    outbox = Outbox(sqlite_engine)
    with sqlite3.connect(sqlite_engine.url.database) as own:
        own.row_factory = sqlite3.Row
        outbox.send(own, "orders", b"1")
        outbox.send(own, "orders", b"2", dedup_key="d")
        own.rollback()
        outbox.send_all(own, [Message("orders", b"3", dedup_key="d"), Message("orders", b"4", key="k")])
    own.isolation_level = None
    with pytest.raises(NoTransactionError):
        outbox.send(own, "orders", b"5")
    own.close()

    assert bodies(sqlite_engine) == [b"3", b"4"]
