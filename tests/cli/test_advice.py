"""Every command that the product advises acts, as printed, on the outbox that the text is about."""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine, make_url, text

from outbox import Done, Outbox, Reject, Relay, Relays, Retry, migrate, routes
from outbox.cli.options import Target, about_databases
from outbox.cli.relaying import looks_at
from outbox.errors import SubscriptionError
from outbox.model.command import Commands
from outbox.rocketmq import TransactionMQProducer, TransactionResolution
from outbox.rocketmq.checker import CheckPolicy
from outbox.runtime.document import json_text
from outbox.store.database import Database
from outbox.store.failure import in_one_line
from outbox.store.label import option_of
from outbox.store.subscriptions.decisions import Decisions
from outbox.store.subscriptions.readers import Readers
from tests.support.command_line import outbox as run
from tests.support.command_line import the_tests_own_process
from tests.support.guests import owner_and_guest
from tests.support.revisions import make_earlier

SCHEMA = "tenant_a"
#: What stands in an advice for what only a person knows.
PLACEHOLDERS = {"URL": "stdout:", "TIME": "2026-01-01T00:00:00Z"}
#: Of these routes each needs a destination.
ROUTE = re.compile("=URL$")
#: These run until a signal, or ask at a terminal.
ENDS = {"relay": ["--until-empty"], "drop": ["--yes"], "reset": ["--yes"], "restore": ["--yes"]}


@pytest.fixture
def where(pg_engine: Engine) -> tuple[str, ...]:
    """The options that lead to the second of two outboxes of a database, which has the same subscription."""
    migrate.upgrade(pg_engine, SCHEMA)
    return "--schema", SCHEMA, "--database", option_of(pg_engine.url)


def commands_in(said: str, where: tuple[str, ...]) -> list[list[str]]:
    """The commands of a text, each of which ends with the options that lead to the outbox."""
    end = shlex.join(where)
    found = re.findall(rf"\boutbox [a-z].*?{re.escape(end)}(?: -- \S+)?", said)
    assert len(found) == len(re.findall(r"\boutbox (?=[a-z])(?!tables)", said)), said
    return [[ROUTE.sub("=stdout:", PLACEHOLDERS.get(word, word)) for word in shlex.split(each)[1:]] for each in found]


def followed(said: str, where: tuple[str, ...]) -> list[int]:
    """Run each command of a text, without any environment; return how they ended."""
    found = commands_in(said, where)
    ended = [run(None, *words, *next((ENDS[word] for word in words[:2] if word in ENDS), [])) for words in found]
    assert found, said
    assert [each.err for each in ended if each.code] == []
    return [each.code for each in ended]


def write(outbox: Outbox, *topics: str) -> None:
    with outbox.begin() as session:
        for topic in topics:
            outbox.send(session, topic, b"1", key="k")


def sent(engine: Engine, answer=lambda _: Done()) -> Outbox:
    """The outbox of the tenant, whose relay has handled a message."""
    outbox = Outbox(engine, schema=SCHEMA)
    write(outbox, "orders")
    Relay(outbox, "stdout:" if answer is None else answer, topics=["orders"]).until_empty()
    return outbox


def state(engine: Engine, schema: str) -> list[str]:
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT name, destination, topics, pauses FROM {schema}.outbox_subscription"))
        return sorted(map(str, rows))


def test_findings_of_a_schema_name_commands_that_act_there(pg_engine, where, tmp_path):
    """A dead letter, a relay that no longer runs, and a pause, in one status."""
    other = state(pg_engine, "public")
    tenant = sent(pg_engine, lambda _: Reject("odd"))
    write(tenant, "orders")
    tenant.admin.pause("relay", key="it's")
    tenant.admin.alter("relay", destination=f"file://{tmp_path}/sent")
    _age(pg_engine)

    told = run(None, "status", *where)
    found = commands_in(told.out + told.err, where)

    assert [words[:2] for words in found] == [["subscriptions", "resume"], ["parked", "list"], ["relay", "--name"]]
    assert (followed(told.out + told.err, where), state(pg_engine, "public")) == ([0, 0, 0], other)
    assert tenant.admin.statuses("relay")[0].pauses == ()


def test_json_and_the_answer_to_a_probe_name_the_same_commands(pg_engine, where):
    sent(pg_engine, lambda _: Reject("odd"))
    _age(pg_engine)

    document = run(None, "status", "--json", *where).json
    target = Target(pg_engine.url.render_as_string(hide_password=False), Commands(schema=SCHEMA, where=where[2:]))
    (look,) = looks_at([target]).values()
    answer = json.loads(json_text(look().document()))

    advised = [each["next_command"] for each in document["findings"] if each["next_command"]]
    assert advised == [each["next_command"] for each in answer["findings"] if each["next_command"]]
    assert advised == [target.commands.line("parked", "list", "--name", "relay", "--state", "dead")]


def test_a_worker_that_is_refused_is_altered_where_it_works(pg_engine, where):
    sent(pg_engine, None)
    other = state(pg_engine, "public")
    relay = ("relay", "--to", "stdout:", "--topics", "orders,bills", "--until-empty", *where)

    refused = run(None, *relay)
    codes = followed(refused.err, where)

    assert (refused.code, codes, run(None, *relay).code, state(pg_engine, "public")) == (2, [0], 0, other)


def test_a_refusal_of_a_command_names_the_next_one_there(pg_engine, where):
    """A backfill under way, a subscription without a pause, an unread message, and no such transaction."""
    sent(pg_engine, None)
    run(None, "subscriptions", "backfill", "relay", "--topics", "orders", *where)
    refusals = (
        ("subscriptions", "backfill", "relay", "--topics", "orders"),
        ("subscriptions", "resume", "relay"),
        ("parked", "replay", "1"),
        ("half", "show", "nothing"),
    )

    told = [run(None, *words, *where).err for words in refusals]

    assert [[words[:2] for words in commands_in(each, where)] for each in told] == [
        [["subscriptions", "drop"]],
        [["status", "--schema"]],
        [["log", "show"]],
        [["half", "list"]],
    ]
    assert (followed(told[0], where), [each.name for each in _of(pg_engine)]) == ([0], ["relay"])


def test_a_finding_of_the_doctor_is_mended_there(pg_engine, where):
    with pg_engine.begin() as connection:
        connection.execute(text(f"UPDATE {SCHEMA}.outbox_meta SET system_identifier = '1'"))

    told = run(None, "doctor", *where)

    assert (followed(told.out, where), run(None, "doctor", *where).code) == ([0], 0)


def test_a_shell_runs_a_command_as_it_is_printed(sqlite_engine, tmp_path):
    """A file with the URL, whose folder has a blank in its name, and a subscription with quotes."""
    folder = tmp_path / "my files"
    folder.mkdir()
    file = folder / "database"
    file.write_text(sqlite_engine.url.render_as_string())
    outbox = Outbox(sqlite_engine)
    write(outbox, "orders")
    Relay(outbox, lambda _: Reject("odd"), name="it's $1").until_empty()

    told = run(None, "status", "--database-file", str(file)).err
    command = re.search(r"to decide, run: (outbox .*)", told)
    assert command is not None
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    surroundings = {**os.environ, "PATH": path}
    ended = subprocess.run(["sh", "-c", command[1]], check=False, capture_output=True, text=True, env=surroundings)

    assert (ended.returncode, "orders" in ended.stdout) == (0, True), ended.stderr


def test_a_database_of_several_is_named_without_its_password(pg_engine):
    url = pg_engine.url.set(username="ann", password="secret").render_as_string(hide_password=False)

    said = run(f"{url} sqlite:///other.db", "relay", "--to", "stdout:", "--schema", "no_such", "--until-empty").err

    assert "secret" not in said


@pytest.mark.parametrize(
    ("schema", "options", "line"),
    [
        (None, (), "outbox parked show 7"),
        ("a", ("--database", "sqlite:///my file"), "outbox parked show 7 --schema a --database 'sqlite:///my file'"),
    ],
)
def test_a_command_is_complete(schema, options, line):
    assert Commands(schema=schema, where=options).line("parked", "show", 7) == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("resume", "-eu", "--key", "-7"), "resume --key -7 --schema a -- -eu"),
        (("resume", "--name", "-eu"), "resume --name -eu --schema a"),
        (("alter", "relay", "--topics", "!a,-b"), "alter relay --topics '!a,-b' --schema a"),
    ],
)
def test_a_name_that_begins_with_a_hyphen_is_no_option(words, line):
    assert Commands(schema="a").line("subscriptions", *words) == f"outbox subscriptions {line}"


def test_an_advice_about_a_name_with_a_hyphen_is_followed(pg_engine, where):
    tenant = Outbox(pg_engine, schema=SCHEMA)
    tenant.admin.create("-eu", destination="stdout:")
    tenant.admin.pause("-eu", key="-7")

    assert followed(run(None, "status", *where).err, where)[0] == 0
    assert tenant.admin.statuses("-eu")[0].pauses == ()


def test_a_missing_right_is_advised_for_the_schema_that_lacks_it(pg_engine, where):
    """Of a command, and of an embedded relay, whose error the supervisor tells."""
    with owner_and_guest(pg_engine) as (owner, guest):
        with owner.begin() as connection:
            connection.execute(text(f"GRANT USAGE ON SCHEMA {SCHEMA} TO guest_{owner.url.database}"))
        told = run(None, "status", "--schema", SCHEMA, "--database", option_of(guest.url)).err
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the driver's own, whichever
            Outbox(guest, schema=SCHEMA).admin.look()

    advice = f"for the rights of each role, run: outbox db grants --relay ROLE --schema {SCHEMA}"
    assert (told.strip().endswith(advice), in_one_line(raised.value)[0].endswith(advice)) == (True, True)


def test_tables_of_an_earlier_version_are_upgraded_by_the_advice(pg_engine, where):
    """Else a deployment in the wrong order says only that a column does not exist."""
    with pg_engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {SCHEMA} CASCADE"))
    make_earlier(pg_engine, "0001", SCHEMA)
    refused = [run(None, *words, *where) for words in (["status"], ["relay", "--to", "stdout:", "--until-empty"])]

    assert [followed(each.err, where) for each in refused] == [[0], [0]]
    assert [run(None, "doctor", *where).code, run(None, "status", *where).code] == [0, 0]


def test_a_refused_consumer_of_an_application_is_altered_where_it_works(pg_engine, where):
    """A shell beside an application may know another database."""
    outbox = Outbox(pg_engine, schema=SCHEMA)
    for topics in (["orders"], ["orders", "bills"]):
        consumer = outbox.consumer("billing")
        for topic in topics:
            consumer.on(topic)(lambda _: None)
        try:
            consumer.until_empty()
        except SubscriptionError as error:
            refused = str(error)

    assert commands_in(refused, where)[0][:5] == ["subscriptions", "alter", "billing", "--topics", "bills,orders"]
    assert followed(refused, where) == [0]


@pytest.mark.parametrize(
    ("url", "option"),
    [
        (
            "postgresql+asyncpg://ann:c4nary@db1:5432/shop?ssl=require",
            "postgresql://db1:5432/shop?sslmode=require&user=ann",
        ),
        ("postgresql+psycopg:///shop?host=db1&host=db2&password=c4nary", "postgresql:///shop?host=db1&host=db2"),
        ("sqlite:///shop.db", f"sqlite:///{Path.cwd()}/shop.db"),
        ("sqlite+aiosqlite:////var/shop.db", "sqlite:////var/shop.db"),
    ],
)
def test_a_library_names_its_database_for_a_shell(url, option):
    assert Database(create_engine(url)).commands.where == ("--database", option)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql+psycopg://"])
def test_a_url_that_alone_leads_to_no_database_is_not_advised(url):
    assert Database(create_engine(url)).commands.where == ()


def test_an_advised_url_takes_the_password_of_the_environment():
    known = make_url("postgresql://ann:c4nary@db1:5432/shop")
    urls = f"sqlite:///other.db {known.render_as_string(hide_password=False)}"

    given = [urls_given(urls, option_of(asked)) for asked in (known, known.set(username="bob"))]

    assert given == [(known.render_as_string(hide_password=False),), (option_of(known.set(username="bob")),)]


def urls_given(environment: str, url: str) -> tuple[str, ...]:
    """The URLs that a command opens when `url` is an argument."""
    found: list[str] = []

    @click.command()
    @about_databases
    def command(*, targets: tuple[Target, ...]) -> None:
        found.extend(each.url for each in targets)

    with the_tests_own_process():
        ended = CliRunner(env={"OUTBOX_DATABASE": environment}).invoke(command, ["--database", url])
    assert ended.exit_code == 0, ended.output
    return tuple(found)


def _unread(tenant: Outbox, *_) -> str:
    tenant.admin.drop("relay")
    write(tenant, "orders")
    return _of_status(tenant)


def _unpurged(tenant: Outbox, *_) -> str:
    write(tenant, "orders")
    execute(tenant, "UPDATE {}.outbox_message SET created_at = created_at - interval '30 days'")
    return _of_status(tenant)


def _seeded_relay_beside_another(tenant: Outbox, *_) -> str:
    Relay(tenant, "stdout:", name="audit").until_empty()
    return _of_status(tenant)


def _failing(tenant: Outbox, *_) -> str:
    write(tenant, "orders")
    Relay(tenant, lambda _: Retry("odd")).once()
    execute(tenant, "UPDATE {}.outbox_parked SET parked_at = parked_at - interval '1 hour'")
    return _of_status(tenant)


def _undone(tenant: Outbox, *_) -> str:
    write(tenant, "orders")
    Relay(tenant, lambda _: Reject("odd")).once()
    with closing(tenant.database.open()) as channel, channel.transaction():
        Decisions(channel, "relay").write("replay", [1], by="ann", reason=None)
    execute(tenant, "UPDATE {}.outbox_decision SET at = at - interval '1 hour'")
    return _of_status(tenant)


def _unanswered(tenant: Outbox, *_) -> str:
    begun(tenant)
    execute(tenant, "UPDATE {}.outbox_progress SET settled_at = settled_at - interval '10 hours'")
    return _of_status(tenant)


def _topics_left_out(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    Relay(tenant, "stdout:").until_empty()
    return run(None, "relay", "--to", "stdout:", "--topics", "*,!bills", "--until-empty", *where).err


def _topics_of_a_route(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    Relays(routes(tenant, {"orders.*": "stdout:", "*": "stdout:"})).until_empty()
    return run(None, "relay", "--to", "stdout:", "--topics", "*", "--until-empty", *where).err


def _route_that_is_not_there(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders.eu")
    Relay(tenant, "stdout:").until_empty()
    ended = run(None, "relay", "--route", "orders.*=stdout:", "--route", "*=stdout:", "--until-empty", *where)
    # The error of each route names the same split.
    return ended.err.splitlines()[-1]


def _partitions(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    Relay(tenant, "stdout:").until_empty()
    return run(None, "relay", "--to", "stdout:", "--partitions", "2", "--until-empty", *where).err


def _new_topic(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders", "bills")
    Relay(tenant, "stdout:", topics=["orders"]).until_empty()
    return run(None, "subscriptions", "alter", "relay", "--topics", "orders,bills", *where).err


def _backfill_before_the_alter(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders", "bills")
    Relay(tenant, "stdout:", topics=["orders"]).until_empty()
    return run(None, "subscriptions", "backfill", "relay", "--topics", "bills", *where).err


def _all_topics_split(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    Relay(tenant, "stdout:", topics=["orders"]).until_empty()
    return run(None, "subscriptions", "split", "relay", "--topics", "orders", "--to", "stdout:", *where).err


def _parked_elsewhere(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders")
    Relay(tenant, lambda _: Reject("odd")).until_empty()
    id = tenant.admin.parked()[0].id
    return run(None, "parked", "discard", f"{id}", "--name", "relay", "--state", "retry", "--reason", "odd", *where).err


def _behind(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    return run(None, "parked", "replay", "--all", "--state", "behind", *where).err


def _erased_too_early(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders")
    transaction = begun(tenant)
    return run(None, "erase", "--key", "k", "--key", transaction, *where).err


def _purged_too_early(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    write(tenant, "orders")
    execute(tenant, "UPDATE {}.outbox_message SET created_at = created_at - interval '30 days'")
    return run(None, "purge", "--older-than", "7d", *where).err


def _no_consumer(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    return run(None, "consumers", "show", "relay", *where).err


def _drop_of_a_check(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    begun(tenant)
    return run(None, "subscriptions", "drop", "check:shop", *where).err


def _inbox_where_an_outbox_is(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    return run(None, "db", "upgrade", "--inbox-only", *where).err


def _position_ahead(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    """The doctor's own advice; the reset comes before the restore that the next line names."""
    write(tenant, "orders")
    Relay(tenant, "stdout:").until_empty()
    execute(tenant, "UPDATE {}.outbox_progress SET base = '900000000:900000000:'")
    return run(None, "doctor", *where).out


def _copy(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    execute(tenant, "UPDATE {}.outbox_meta SET system_identifier = '1'")
    return run(None, "relay", "--to", "stdout:", "--until-empty", *where).err


def _archive_elsewhere(tenant: Outbox, engine: Engine, where: tuple[str, ...]) -> str:
    with closing(tenant.database.open()) as channel:
        readers = Readers(channel)
        readers.register("archive", archive="/a", hold=timedelta(days=1))
        with pytest.raises(SubscriptionError) as refused:
            readers.register("archive", archive="/b", hold=timedelta(days=1))
    return str(refused.value)


#: Each situation, and the commands that its text advises.
SITUATIONS = {
    _unread: ["relay --to"],
    _unpurged: ["purge --older-than", "relay --name"],
    _seeded_relay_beside_another: ["subscriptions drop"],
    _failing: ["parked list"],
    _undone: ["parked list", "decisions --name"],
    _unanswered: ["half list", "relay --name"],
    _topics_left_out: ["subscriptions split"],
    _topics_of_a_route: ["relay --name"],
    _route_that_is_not_there: ["subscriptions split"],
    _partitions: ["subscriptions alter"],
    _new_topic: ["subscriptions backfill"],
    _backfill_before_the_alter: ["subscriptions alter", "status --schema"],
    _all_topics_split: ["subscriptions alter"],
    _parked_elsewhere: ["parked show"],
    _behind: ["parked list"],
    _erased_too_early: ["status --schema", "status --schema", "half list"],
    _purged_too_early: ["status --schema"],
    _no_consumer: ["status --schema"],
    _drop_of_a_check: ["half list"],
    _inbox_where_an_outbox_is: ["db upgrade"],
    _position_ahead: ["subscriptions reset"],
    _copy: ["restore --schema"],
    _archive_elsewhere: ["subscriptions drop"],
}


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.__name__.strip("_").replace("_", " "))
def test_an_advice_runs_as_printed_and_touches_no_other_outbox(pg_engine, where, situation):
    other = state(pg_engine, "public")

    said = situation(Outbox(pg_engine, schema=SCHEMA), pg_engine, where)

    assert [" ".join(words[:2]) for words in commands_in(said, where)] == SITUATIONS[situation]
    assert (followed(said, where), state(pg_engine, "public")) == ([0] * len(SITUATIONS[situation]), other)


def begun(tenant: Outbox) -> str:
    """Begin a transaction of group shop whose producer goes away; return its id."""
    policy = CheckPolicy(transaction_timeout=timedelta(0))
    producer = TransactionMQProducer("shop", tenant, lambda _: TransactionResolution.UNKNOWN, policy=policy)
    transaction = producer.begin_transaction(verdict="listener")
    transaction.send("orders", b"1")
    return transaction.id


def execute(tenant: Outbox, statement: str) -> None:
    with tenant.engine.begin() as connection:
        connection.execute(text(statement.format(SCHEMA)))


def _of_status(tenant: Outbox) -> str:
    return run(None, "status", "--schema", SCHEMA, "--database", option_of(tenant.engine.url)).err


def _of(engine: Engine):
    return Outbox(engine, schema=SCHEMA).admin.subscriptions()


def _age(engine: Engine) -> None:
    """Let the last settle be ten hours ago."""
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {SCHEMA}.outbox_progress SET settled_at = settled_at - interval '10 hours'"))
