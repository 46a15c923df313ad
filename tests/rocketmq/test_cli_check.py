"""`outbox half check`: whom it asks, and until when; and the records of a business database, which it may ask."""

import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from datetime import timedelta
from shlex import quote

import pytest
from sqlalchemy import URL, Engine, make_url, text
from sqlalchemy.orm import Session

from outbox import Outbox, SchemaError, create_engine, migrate
from outbox.model.lease import Partition
from outbox.rocketmq import TransactionMQProducer
from outbox.store.label import label_of
from outbox.store.subscriptions.leases import Leases
from tests.cli.test_cli_relay import PROGRAM
from tests.rocketmq.halves import AT_ANY_AGE, ask, begun
from tests.rocketmq.parts import ONE_DATABASE
from tests.support.command_line import outbox
from tests.support.readers import delivered
from tests.support.waiting import eventually

CANARY = "c4nary/Sesame"

LISTENERS = """
import pathlib, time

from outbox.rocketmq import LocalTransactionState, TransactionResolution


class Listener:
    def check_local_transaction(self, message):
        return LocalTransactionState.COMMIT_MESSAGE


class Checker:
    def check(self, message):
        return TransactionResolution.ROLLBACK


class Shop:
    listener = Listener()


listener, checker, nothing, five = Listener(), Checker(), None, 5


def question(message):
    return TransactionResolution.COMMIT


def slow(message):
    pathlib.Path("asked").touch()
    time.sleep(1)
    return TransactionResolution.COMMIT


async def awaited(message):
    return TransactionResolution.COMMIT
"""


@pytest.fixture
def listeners(tmp_path, monkeypatch):
    """A folder with modules of listeners, in which commands are run."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "shop_listeners.py").write_text(LISTENERS)
    (folder / "shop_without_extra.py").write_text("import no_such_extra")
    (folder / "shop_broken.py").write_text("raise KeyError('SHOP_URL')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("shop_")]:
        del sys.modules[name]


@pytest.fixture
def business(tmp_path, engine):
    """A business database without an outbox, where a record can be written."""
    found = create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    migrate.upgrade_record(found)
    yield found
    found.dispose()


@contextmanager
def running(engine: Engine, *arguments: str):
    """The command as a process of its own."""
    environment = {**os.environ, "OUTBOX_DATABASE": engine.url.render_as_string(hide_password=False)}
    process = subprocess.Popen(
        [*PROGRAM, "half", "check", *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ops(engine):
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT transaction_id, op FROM outbox_op"))
        return {row.transaction_id: row.op for row in rows}


def bodies(engine):
    return [message.body for message in delivered(Outbox(engine).database)]


# Once


@pytest.mark.parametrize(
    ("name", "op"),
    [("listener", "commit"), ("checker", "rollback"), ("question", "commit"), ("Shop.listener", "commit")],
)
@ONE_DATABASE
def test_a_listener_is_loaded_from_the_folder_and_asked(engine, listeners, name, op):
    transaction = begun(engine)

    ended = outbox(engine, "half", "check", "--listener", f"shop_listeners:{name}", "--once")

    assert (ended.code, ops(engine), len(bodies(engine))) == (0, {transaction.id: op}, int(op == "commit"))
    assert ended.err == (
        f"check:shop: asks shop_listeners:{name}, after 0 s\ncheck:shop: done; 0 transactions are pending\n"
    )


def test_without_a_listener_only_the_database_decides(engine):
    asked, joined = begun(engine), begun(engine, verdict="join")

    ended = outbox(engine, "half", "check", "--once")

    assert (ended.code, ops(engine)) == (0, {joined.id: "rollback"})
    assert ended.err == (
        "check:shop: asks nobody but the outbox's own database, after 0 s\n"
        "check:shop: done; 1 transaction is pending, 1 of them for want of --listener\n"
    )
    (left,) = outbox(engine, "half", "list", "--json").json["transactions"]
    assert (left["transaction_id"], left["checks"], left["last_answer"]) == (asked.id, 0, "no listener here")


def test_the_business_database_is_asked_for_its_record(engine, business):
    producer = TransactionMQProducer("shop", Outbox(engine), business=business, policy=AT_ANY_AGE)
    done, not_done = (producer.begin_transaction(verdict="record") for _ in range(2))
    for each in (done, not_done):
        each.send("orders", b"1")
    with Session(business) as session:
        done.join(session)
        session.commit()

    ended = outbox(engine, "half", "check", "--once", OUTBOX_BUSINESS=f"sqlite:///{business.url.database}")

    assert (ended.code, ops(engine)) == (0, {done.id: "commit", not_done.id: "rollback"})
    assert "check:shop: asks the business database for records, after 0 s\n" in ended.err


def test_what_was_given_up_is_told_at_the_end(engine, listeners):
    begun(engine)
    ask(engine)

    ended = outbox(engine, "half", "check", "--listener", "shop_listeners:listener", "--once")

    assert ended.err.endswith("check:shop: done; 1 transaction is pending, 1 of them given up\n")


@ONE_DATABASE
def test_it_waits_as_long_as_the_producers_of_the_group_say(engine):
    begun(engine, timeout=timedelta(seconds=1))

    assert "after 1 s" in outbox(engine, "half", "check", "--once").err


@ONE_DATABASE
def test_which_group_is_meant_must_be_clear(engine):
    none = outbox(engine, "half", "check", "--once")
    begun(engine)
    begun(engine, group="depot")

    several, unknown, illegal = (
        outbox(engine, "half", "check", "--once", *options)
        for options in ([], ["--group", "shoop"], ["--group", "a b"])
    )

    assert [each.code for each in (none, several, unknown, illegal)] == [2, 2, 1, 2]
    assert "no producer has begun a transaction here yet" in none.err
    assert "say which producer group by --group; there are depot, shop" in several.err
    assert "no producer of group shoop has begun a transaction here yet; there are depot, shop" in unknown.err
    assert "illegal characters" in illegal.err
    assert [each["name"] for each in outbox(engine, "subscriptions", "list", "--json").json["subscriptions"]] == [
        "check:depot", "check:shop", "relay",
    ]  # fmt: skip


@ONE_DATABASE
def test_once_does_not_wait_for_another_worker(engine):
    begun(engine)
    database = Outbox(engine).database
    with closing(database.open()) as channel:
        assert Leases(channel).acquire(Partition("check:shop"), "w0rker", timedelta(minutes=5))

    ended = outbox(engine, "half", "check", "--once")

    assert (ended.code, ended.err) == (4, "Error: worker w0rker checks back on group shop already\n")


# Mistakes


@pytest.mark.parametrize(
    ("listener", "says"),
    [
        ("shop_listeners", "write module:object, for example shop.orders:listener"),
        ("shop_listeners:", "write module:object"),
        ("no_such_module:listener", "there is no module no_such_module, neither in "),
        ("shop_listeners:nobody", "shop_listeners has no nobody"),
        ("shop_listeners:Listener", "a listener is an object, not a class: pass Listener()"),
        ("shop_listeners:awaited", "write its check without async"),
        ("shop_listeners:five", "int is no listener"),
        ("shop_listeners:nothing", "it is None"),
        ("shop_without_extra:listener", "cannot be imported: ModuleNotFoundError: No module named 'no_such_extra'"),
        ("shop_broken:listener", "cannot be imported: KeyError: 'SHOP_URL'"),
    ],
)
@ONE_DATABASE
def test_a_listener_that_cannot_be_asked_is_told_in_a_line(engine, listeners, listener, says):
    ended = outbox(engine, "half", "check", "--listener", listener, "--group", "shop")

    last = ended.err.strip().splitlines()[-1]
    assert (ended.code, last.startswith(f"Error: --listener {listener}: "), says in last) == (2, True, True)


@pytest.mark.parametrize("option", ["--check-interval", "--check-timeout", "--age-limit"])
@ONE_DATABASE
def test_a_time_of_nothing_is_refused(engine, option):
    ended = outbox(engine, "half", "check", "--group", "shop", option, "0s")

    assert (ended.code, f"Error: {option} must be greater than 0" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("sqlite:////nonexistent/x.db", 3, "Error: --business: there is no file"),
        ("mysql://localhost/x", 2, "Error: --business: no outbox lives in mysql"),
        ("postgresql://localhost:1/x", 3, "Error: --business: the database cannot be reached"),
        (f"postgresql://ann:{CANARY}@localhost:1/shop", 3, "Error: --business: the database cannot be reached"),
    ],
)
@ONE_DATABASE
def test_a_business_database_that_cannot_be_asked_is_told_without_its_password(engine, url, code, says):
    begun(engine)

    ended = outbox(engine, "half", "check", "--once", "-vv", OUTBOX_BUSINESS=url)

    assert (ended.code, says in ended.err, "c4nary" in ended.err, "Sesame" in ended.err) == (code, True, False, False)


@ONE_DATABASE
def test_a_business_database_without_records_is_told_with_what_makes_them(engine, tmp_path):
    begun(engine)
    (tmp_path / "shop.db").touch()

    ended = outbox(engine, "half", "check", "--once", "--business", f"sqlite:///{tmp_path / 'shop.db'}")

    assert (ended.code, ended.err) == (
        1, f"Error: --business: the table outbox_record is not there; run: {makes(f'sqlite:///{tmp_path}/shop.db')}\n",
    )  # fmt: skip


@ONE_DATABASE
def test_the_password_of_a_business_database_is_no_argument(engine):
    ended = outbox(engine, "half", "check", "--business", f"postgresql://ann:{CANARY}@localhost:1/shop")

    fixes = "OUTBOX_BUSINESS" in ended.err and "--business-file" in ended.err
    assert (ended.code, fixes, "c4nary" in ended.err) == (2, True, False)


# Until stopped


@pytest.mark.storm
@pytest.mark.parametrize(
    ("engine", "number"), [("postgresql", signal.SIGTERM), ("sqlite", signal.SIGINT)], indirect=["engine"]
)
def test_it_checks_back_until_it_is_stopped_after_the_question_under_way(engine, listeners, number):
    first = begun(engine)
    with running(engine, "--listener", "shop_listeners:slow") as process:
        assert eventually(lambda: first.id in ops(engine))
        (listeners / "asked").unlink()
        second = begun(engine)
        assert eventually((listeners / "asked").exists)

        process.send_signal(number)
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err.splitlines()[-1]) == (0, "check:shop: stopped")
    assert (ops(engine), bodies(engine)) == ({first.id: "commit", second.id: "commit"}, [b"of orders"] * 2)


@ONE_DATABASE
def test_a_group_that_is_new_is_told(engine, listeners):
    """Its producers may be started later; or it is a mistake."""
    begun(engine, group="depot")
    with running(engine, "--group", "shop", "--listener", "shop_listeners:listener") as process:
        assert eventually(
            lambda: "check:shop" in [each["name"] for each in outbox(engine, "status", "--json").json["subscriptions"]]
        )
        transaction = begun(engine, timeout=timedelta(seconds=6))

        process.terminate()
        _, err = process.communicate(timeout=60)

    assert err.splitlines()[0] == (
        "warning: no producer of group shop has begun a transaction here yet; there are depot"
    )
    assert transaction.id not in ops(engine)


# Records


def makes(url):
    """The command that makes the table, without the password."""
    found = make_url(url)
    user = {"user": found.username} if found.username else {}
    plain = URL.create(found.get_backend_name(), host=found.host, port=found.port, database=found.database, query=user)
    return f"outbox db upgrade --record-only --database {quote(plain.render_as_string())}"


@pytest.fixture(params=["postgresql", "sqlite"])
def empty(request, tmp_path):
    """A business database without anything."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shop.db'}"
        return
    postgres = request.getfixturevalue("postgres")
    yield postgres.create_database("shop_records")
    postgres.drop_database("shop_records")


def test_the_table_of_records_is_made_and_does_no_harm_again(empty):
    said = [outbox(empty, "db", "upgrade", "--record-only") for _ in range(2)]

    place = label_of(make_url(empty))
    assert [(each.code, each.err) for each in said] == [
        (0, f"{place}: made the table outbox_record\n"),
        (0, f"{place}: the table outbox_record is there already\n"),
    ]
    checked = outbox(empty, "doctor", "--record-only")
    assert (checked.code, checked.err) == (0, "everything is as it should be\n")


def test_a_business_database_is_checked_for_its_records_only(empty):
    made = create_engine(empty)
    with made.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id int)"))
    without = outbox(empty, "doctor", "--record-only", "--json")

    outbox(empty, "db", "upgrade", "--record-only")
    with made.begin() as connection:
        connection.execute(text("ALTER TABLE outbox_record DROP COLUMN decided_at"))
    made.dispose()
    damaged = outbox(empty, "doctor", "--record-only", "--json")

    assert (without.code, without.json["findings"]) == (
        1,
        [
            {
                "where": "outbox_record",
                "problem": "is not there",
                "evidence": None,
                "fix": "run: outbox db upgrade --record-only",
            }
        ],
    )
    assert (damaged.code, [each["where"] for each in damaged.json["findings"]]) == (1, ["outbox_record.decided_at"])


def test_records_may_have_a_schema(pg_engine):
    outbox(pg_engine, "db", "upgrade", "--record-only", "--schema", "shop")

    checked = [outbox(pg_engine, "doctor", "--record-only", *where).code for where in (["--schema", "shop"], [])]

    assert checked == [0, 1]


def test_records_have_no_slots(empty):
    ended = [outbox(empty, *verb, "--record-only", "--slots", "8") for verb in (("db", "upgrade"), ("doctor",))]

    assert [(each.code, "records have no keys" in each.err) for each in ended] == [(2, True)] * 2


def test_a_business_transaction_without_the_table_is_told_what_makes_it(sqlite_engine, tmp_path):
    shop = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    transaction = TransactionMQProducer("shop", Outbox(sqlite_engine), business=shop).begin_transaction(
        verdict="record"
    )
    transaction.send("orders", b"1")

    missing = "outbox_record is not there; run: outbox db upgrade --record-only"
    with pytest.raises(SchemaError, match=missing), Session(shop) as session:
        transaction.join(session)
    shop.dispose()
