"""`outbox db`, `status`, `purge` and `restore` as a user types them."""

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy import Engine, make_url, text
from sqlalchemy.orm import Session

from outbox import Inbox, Message, Outbox, Relay, create_engine, migrate
from outbox.errors import SchemaError
from outbox.schema import VERSION, VERSION_TABLE, metadata
from outbox.store.label import label_of
from tests.cli.test_cli_relay import PROGRAM, bodies, send
from tests.support.command_line import outbox
from tests.support.readers import next_moment
from tests.support.revisions import add_revision


@pytest.fixture
def empty(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


def test_upgrade_makes_the_tables_and_does_no_harm_again(empty):
    said = [outbox(empty, "db", "upgrade") for _ in range(2)]

    assert [(each.code, each.err) for each in said] == [
        (0, f"upgraded from nothing to {migrate.head_revision()}\n"),
        (0, f"the tables are up to date ({migrate.head_revision()})\n"),
    ]
    assert outbox(empty, "doctor").code == 0


def test_a_schema_is_made_with_its_tables(pg_engine):
    outbox(pg_engine, "db", "upgrade", "--schema", "shop")

    assert [outbox(pg_engine, *verb, "--schema", "shop").code for verb in (["doctor"], ["status"])] == [0, 0]


def test_an_upgrade_is_told_to_programs(tmp_path):
    url = f"sqlite:///{tmp_path / 'new.db'}"

    told = [outbox(url, "db", "upgrade", "--json", *more).json for more in ([], [], ["--record-only"])]

    head = {"version": 1, "more": False}
    assert told == [
        {**head, "action": "created", "before": None, "after": migrate.head_revision()},
        {**head, "action": "none", "before": migrate.head_revision(), "after": migrate.head_revision()},
        {**head, "action": "created", "before": None, "after": None},
    ]


def test_findings_are_told_and_end_with_1(engine):
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX outbox_decision_done_at"))

    plain, machine = outbox(engine, "doctor"), outbox(engine, "doctor", "--json")

    assert (plain.code, plain.out.startswith("index outbox_decision_done_at: is missing; CREATE INDEX")) == (1, True)
    assert (machine.code, [each["where"] for each in machine.json["findings"]]) == (
        1,
        ["index outbox_decision_done_at"],
    )


@pytest.mark.parametrize(
    "loss",
    [
        "DROP INDEX outbox_decision_done_at",
        "DROP TABLE outbox_parked",
        "ALTER TABLE outbox_subscription DROP COLUMN topics",
        "ALTER TABLE outbox_subscription DROP COLUMN grace_ms",
    ],
)
@pytest.mark.parametrize(
    "ours",
    [
        pytest.param(True, id="made by our migrations", marks=pytest.mark.storm),
        pytest.param(False, id="made by an application"),
    ],
)
def test_what_a_finding_advises_mends_it(engine, loss, ours):
    """An upgrade would find nothing to do, or refuse the tables."""
    with engine.begin() as connection:
        connection.execute(text(loss))
        if not ours:
            connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))
    (finding,) = outbox(engine, "doctor", "--json").json["findings"]

    with engine.begin() as connection:
        for statement in finding["fix"].split("; "):
            connection.execute(text(statement))

    assert outbox(engine, "doctor").code == 0
    assert outbox(engine, "db", "upgrade").code == 0


def test_what_a_revision_makes_is_left_to_it(engine, tmp_path, monkeypatch):
    """By hand it would stand in its way."""
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE outbox_dedup"))
    before = migrate.head_revision()
    add_revision(tmp_path, monkeypatch)

    found = outbox(engine, "doctor", "--json").json["findings"]

    assert [(each["where"], each["fix"]) for each in found] == [
        ("tables", "run: outbox db upgrade"),
        ("outbox_dedup", "run: outbox db upgrade"),
    ]
    assert outbox(engine, "db", "upgrade").err == f"upgraded from {before} to next\n"


def test_an_upgrade_restores_the_row_about_it_all_as_the_check_advises(engine):
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox_meta"))
    (finding,) = outbox(engine, "doctor", "--json").json["findings"]
    assert finding["fix"] == "run: outbox db upgrade, or start a worker"

    outbox(engine, "db", "upgrade")

    assert outbox(engine, "doctor").code == 0


def test_tables_of_a_newer_version_need_a_newer_library(engine):
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
        connection.execute(text("UPDATE outbox_meta SET version = 9999"))

    found, upgraded = outbox(engine, "doctor", "--json").json["findings"], outbox(engine, "db", "upgrade")

    assert [each["fix"] for each in found] == ["install a newer outbox-log"]
    assert (upgraded.code, upgraded.err) == (
        1,
        "Error: the tables are of revision 9999, which this version does not know; install a newer outbox-log\n",
    )
    refused = f"Error: the tables are of version 9999, this is {VERSION}; install a newer outbox-log\n"
    for verb in (["status"], ["subscriptions", "list"], ["purge", "--older-than", "7d"]):
        told = outbox(engine, *verb)
        assert (told.code, told.err) == (1, refused), verb


def test_tables_that_an_application_has_begun_to_make_are_refused_in_one_line(empty):
    engine = create_engine(empty)
    with engine.begin() as connection:
        metadata(dialect="sqlite").create_all(connection)
        connection.execute(text("DROP TABLE outbox_inbox"))

    ended = outbox(empty, "db", "upgrade")

    assert (ended.code, ended.err.count("\n"), "outbox_inbox is missing" in ended.err) == (1, 1, True)


def test_a_check_makes_no_file(empty, tmp_path):
    assert (outbox(empty, "doctor").code, list(tmp_path.iterdir())) == (3, [])


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_the_sql_needs_no_database(dialect):
    ended = outbox(None, "db", "sql", "--dialect", dialect)

    assert (ended.code, "CREATE TABLE outbox_message" in ended.out) == (0, True)


def test_another_number_of_slots_than_the_tables_have_is_told(empty):
    outbox(empty, "db", "upgrade", "--slots", "16")

    told = [outbox(empty, "db", "upgrade", *options) for options in ([], ["--slots", "16"], ["--slots", "32"])]

    fixed = "warning: the tables have 16 slots, not 32: the number was fixed when they were made"
    assert [(each.code, fixed in each.err) for each in told] == [(0, False), (0, False), (0, True)]


def test_another_number_of_slots_is_the_databases_own_matter(empty, tmp_path):
    """Whoever made the tables chose it; commands do not have to be told."""
    outbox(empty, "db", "upgrade", "--slots", "16")
    engine = create_engine(empty)
    with (sender := Outbox(engine, slots=16)).begin() as session:
        sender.send(session, "orders", b"1", key="k")

    ended = outbox(empty, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty")

    assert (ended.code, bodies(tmp_path / "out"), outbox(empty, "doctor").code) == (0, ["1"], 0)


@pytest.fixture(params=["postgresql", "sqlite"])
def billing(request, tmp_path):
    """The database of a consumer that has no outbox, with its own tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'billing.db'}"
    else:
        postgres = request.getfixturevalue("postgres")
        url = postgres.create_database("billing_inbox")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE invoices (id int)"))
    yield engine
    engine.dispose()
    if request.param == "postgresql":
        postgres.drop_database("billing_inbox")


def tables_of(engine) -> list[str]:
    return sorted(sqlalchemy.inspect(engine).get_table_names())


def test_a_consumers_own_database_gets_an_inbox_and_nothing_else(billing):
    """Nothing there warns of what a consumer has not."""
    said = [outbox(billing, "db", "upgrade", "--inbox-only") for _ in range(2)]
    inbox = Inbox(billing, consumer="billing")
    with Session(billing) as session, session.begin():
        first = inbox.once(session, Message("orders", b"1"))
    pruned = inbox.prune()
    checked = [outbox(billing, "doctor", *only) for only in ([], ["--inbox-only"])]
    status, as_json = outbox(billing, "status", "--check"), outbox(billing, "status", "--json").json

    place = label_of(billing.url)
    assert [(each.code, each.err) for each in said] == [
        (0, f"{place}: made the table outbox_inbox\n"),
        (0, f"{place}: the table outbox_inbox is there already\n"),
    ]
    assert (tables_of(billing), first, pruned) == (["invoices", "outbox_inbox"], True, 0)
    assert [(each.code, each.err) for each in checked] == [(0, "everything is as it should be\n")] * 2
    assert (status.code, status.err) == (0, f"{place}: only the inbox of a consumer is here, where nothing waits\n")
    assert (as_json["findings"], as_json["subscriptions"]) == ([], [])


def test_an_inbox_that_is_damaged_is_found(billing):
    without = outbox(billing, "doctor", "--inbox-only", "--json")
    outbox(billing, "db", "upgrade", "--inbox-only")
    with billing.begin() as connection:
        connection.execute(text("DROP INDEX outbox_inbox_expires_at"))
    damaged = [outbox(billing, "doctor", "--json", *only).json["findings"] for only in ([], ["--inbox-only"])]

    (missing,) = without.json["findings"]
    assert (missing["where"], missing["fix"].endswith("run: outbox db upgrade --inbox-only")) == ("outbox_inbox", True)
    assert [[each["where"] for each in found] for found in damaged] == [["index outbox_inbox_expires_at"]] * 2


def test_a_command_about_messages_says_that_there_is_only_an_inbox(billing):
    outbox(billing, "db", "upgrade", "--inbox-only")

    ended = outbox(billing, "relay", "--to", "stdout:", "--until-empty")

    assert (ended.code, "only the inbox of a consumer is here" in ended.err) == (1, True)


def test_a_consumer_that_lacks_its_inbox_is_told_what_makes_it(billing):
    makes = "outbox_inbox is not there; run: outbox db upgrade --inbox-only --database"
    with pytest.raises(SchemaError, match=makes), Session(billing) as session:
        Inbox(billing, consumer="billing").once(session, Message("orders", b"1"))


def test_an_inbox_becomes_a_whole_outbox_with_what_it_remembers(billing):
    outbox(billing, "db", "upgrade", "--inbox-only")
    message = Message("orders", b"1")
    with Session(billing) as session, session.begin():
        assert Inbox(billing, consumer="billing").once(session, message)

    upgraded = outbox(billing, "db", "upgrade")
    with Session(billing) as session:
        again = Inbox(billing, consumer="billing").once(session, message)

    assert (upgraded.code, outbox(billing, "doctor").code, again) == (0, 0, False)
    assert [each["name"] for each in outbox(billing, "status", "--json").json["subscriptions"]] == ["relay"]


def test_an_inbox_beside_an_outbox_is_warned_of(engine):
    """Its outbox has one already."""
    ended = outbox(engine, "db", "upgrade", "--inbox-only")

    assert (ended.code, "has an outbox, and its inbox" in ended.err) == (0, True)


@pytest.mark.parametrize("more", [["--slots", "8"], ["--record-only"]])
@pytest.mark.parametrize("verb", [("db", "upgrade"), ("doctor",)])
def test_an_inbox_excludes_what_it_does_not_have(empty, verb, more):
    assert (outbox(empty, *verb, "--inbox-only", *more).code, Path(make_url(empty).database or "").exists()) == (
        2,
        False,
    )


def test_status_is_a_table(sqlite_engine):
    send(sqlite_engine, "1", "2", "3")

    ended = outbox(sqlite_engine, "status")

    header, row = (line.split() for line in ended.out.splitlines())
    assert (header[:2], row[:2], row[-1]) == (["SUBSCRIPTION", "BACKLOG"], ["relay", "3"], "nobody")
    told = "no worker has run yet: no message is purged before the first run; to begin, run"
    assert ended.err == f"warning: relay: {told}: outbox relay --name relay --to URL\n"


def test_a_subscription_that_nobody_needs_is_told_with_how_to_be_rid_of_it(sqlite_engine):
    """The other one has just stopped: that may be a restart, and is no warning yet."""
    Relay(Outbox(sqlite_engine), lambda _message: None, name="other").until_empty()

    fresh = outbox(sqlite_engine, "status").err
    with sqlite_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_progress SET settled_at = datetime(settled_at, '-2 minutes')"))
    idle = outbox(sqlite_engine, "status").err

    told = (
        "warning: relay: no worker has run yet: no message is purged before the first run; if no worker is to, run:"
        " outbox subscriptions drop relay\n"
    )
    assert fresh == told
    stopped = r"warning: other: no worker runs \(since 2(\.\d)? min\): later messages are not purged; start .*\n"
    assert re.fullmatch(stopped + re.escape(told), idle)


@pytest.mark.storm
def test_status_is_watched_until_interrupted(engine):
    """Also over the loss of nothing at all: one line of JSON a look."""
    environment = {**os.environ, "OUTBOX_DATABASE": engine.url.render_as_string(hide_password=False)}
    arguments = [*PROGRAM, "status", "--watch", "--json"]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    looks = [process.stdout.readline() for _ in range(2)]

    process.send_signal(signal.SIGINT)
    process.stdout.close()

    assert (process.wait(60), [look.startswith('{"version":1,') for look in looks]) == (0, [True] * 2)


def pass_a_moment(engine: Engine) -> None:
    """Wait until all that is there is older than nothing."""
    with closing(Outbox(engine).database.open()) as channel:
        next_moment(channel)


def test_purge_tells_what_it_did(engine, tmp_path):
    send(engine, "1", "2")
    outbox(engine, "relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty")
    pass_a_moment(engine)

    rehearsed = outbox(engine, "purge", "--older-than", "0s", "--dry-run", "--json").json
    purged = outbox(engine, "purge", "--older-than", "0s", "--json").json

    assert [(each["rows"], each["held_by"], each["dry_run"]) for each in (rehearsed, purged)] == [
        (2, [], True),
        (2, [], False),
    ]


def test_purge_names_who_holds_messages_back(sqlite_engine):
    send(sqlite_engine, "1")
    pass_a_moment(sqlite_engine)

    ended = outbox(sqlite_engine, "purge", "--older-than", "0s")

    assert (ended.code, "older messages stay for relay" in ended.err) == (0, True)


def test_a_file_needs_no_restoring(sqlite_engine):
    said = outbox(sqlite_engine, "restore", "--yes")

    assert (said.code, said.err) == (0, "there is nothing to restore: the ids of an SQLite file are its own\n")


def test_a_copied_log_is_restored(pg_engine, tmp_path):
    send(pg_engine, "1")
    with pg_engine.begin() as connection:
        connection.execute(text("UPDATE outbox_meta SET system_identifier = '42'"))
    relay = ["relay", "--to", f"file://{tmp_path / 'out'}", "--until-empty"]

    refused, asked = outbox(pg_engine, *relay), outbox(pg_engine, "restore")
    restored, sent = outbox(pg_engine, "restore", "--yes"), outbox(pg_engine, *relay)

    assert [each.code for each in (refused, asked, restored, sent)] == [2, 2, 0, 0]
    assert bodies(tmp_path / "out") == ["1"]


def far_apart(engine):
    """Two messages that `fast` has sent, of which `relay` has the first only."""
    for body, names in (("1", ["fast", "relay"]), ("2", ["fast"])):
        send(engine, body)
        for name in names:
            Relay(Outbox(engine), lambda _message: None, name=name).until_empty()


def test_a_log_that_was_not_copied_is_left_as_it_is(pg_engine):
    """Else `fast` would send a message again, and every row would be written anew."""
    far_apart(pg_engine)
    before = stamps(pg_engine)

    plain, rehearsed, accepted = (
        outbox(pg_engine, "restore", *options) for options in ([], ["--dry-run"], ["--accept", "--yes"])
    )

    for ended in (plain, rehearsed, accepted):
        assert (ended.code, ended.err.startswith("this log was not copied, nothing to restore")) == (0, True)
    assert stamps(pg_engine) == before
    assert outbox(pg_engine, "restore", "--json").json["action"] == "none"


def test_a_restore_says_who_sends_how_many_messages_again(pg_engine):
    """Before it is done, in the question and as a rehearsal; a person may insist on it."""
    far_apart(pg_engine)
    before = stamps(pg_engine)

    asked = outbox(pg_engine, "restore", "--force")
    rehearsed = outbox(pg_engine, "restore", "--force", "--dry-run", "--json")
    unchanged = stamps(pg_engine) == before
    restored = outbox(pg_engine, "restore", "--force", "--yes")

    assert (asked.code, "of this server (fast reads 1 message again)? There is no terminal" in asked.err) == (2, True)
    assert rehearsed.json == {
        "version": 1, "more": False, "action": "restored", "dry_run": True, "read_again": 1,
        "again": {"fast": 1, "relay": 0},
    }  # fmt: skip
    assert (unchanged, restored.code, restored.err) == (True, 0, "the log is restored: fast reads 1 message again\n")


def stamps(engine):
    """What tells of each row when it was committed."""
    with engine.connect() as connection:
        return connection.execute(text("SELECT id, xact_id, xmin::text FROM outbox_message ORDER BY id")).all()


def test_a_role_that_may_not_is_told_so(pg_engine):
    with pg_engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS visitor"))
        connection.execute(text("CREATE ROLE visitor LOGIN"))
    url = sqlalchemy.make_url(str(pg_engine.url)).set(username="visitor")

    ended = outbox(url.render_as_string(hide_password=False), "status")

    said = "the database refused: permission denied for table outbox_meta; for the rights of each role, run"
    assert (ended.code, ended.err) == (1, f"Error: {said}: outbox db grants --relay ROLE\n")


def test_it_runs_as_a_program():
    ended = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True)

    assert (ended.stdout.startswith("outbox, version "), sys.version_info >= (3, 11)) == (True, True)


def test_the_tables_go_back_to_an_earlier_revision(engine):
    head = migrate.head_revision()

    back = [outbox(engine, "db", "downgrade", "--to", "0001") for _ in range(2)]

    assert [(each.code, each.err) for each in back] == [
        (0, f"downgraded from {head} to 0001\n"),
        (0, "the tables are of revision 0001 already\n"),
    ]
    refused = f"Error: the tables are of version 1, this is {VERSION}; run: outbox db upgrade"
    assert outbox(engine, "status").err.startswith(refused)
