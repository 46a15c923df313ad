"""No secret is taken as an argument, and none is ever shown."""

import base64
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from sqlalchemy import Engine, text

from outbox import Outbox
from outbox.errors import OutboxError
from outbox.model.verdict import Done, Verdict
from outbox.senders.opening import open_sender
from outbox.senders.port import destination_of
from outbox.testing.sender_contract import a_message
from tests.conftest import started
from tests.support.command_line import outbox
from tests.support.deadlines import patience_ends_with_a_refusal
from tests.support.guarded_servers import GUARDED, Door
from tests.support.waiting import eventually

CANARY = "c4nary/Sesame"
ENCODED = "c4nary%2FSesame"
#: A password stands in a URL encoded, in an error of a driver as it is.
TRACES = ("c4nary", "Sesame")
#: As it stands in the credentials of HTTP.
IN_BASE64 = tuple(base64.b64encode(f"ann:{CANARY}{end}".encode()).decode()[:16] for end in ("", "x"))


def shows(ended) -> bool:
    return any(trace in ended.out + ended.err for trace in TRACES)


def traces_in(said: str) -> list[str]:
    return [trace for trace in (*TRACES, *IN_BASE64) if trace in said]


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--database", f"postgresql://ann:{ENCODED}@localhost:1/shop"],
        ["status", f"--database=postgresql://ann:{CANARY}@localhost:1/shop"],
        ["status", "--database", f"postgresql://ann@localhost:1/shop?password={ENCODED}"],
        ["status", "--database", f"postgresql://ann@localhost:1/shop?sslpassword={ENCODED}"],
        ["status", "--database", f"host=localhost password={CANARY}"],
        ["db", "upgrade", "--database", f"postgresql://ann:{CANARY}@localhost:1/shop"],
    ],
)
def test_a_database_password_as_an_argument_is_refused(arguments):
    ended = outbox(None, *arguments)

    fixes = "OUTBOX_DATABASE" in ended.err and "--database-file" in ended.err
    assert (ended.code, fixes, shows(ended)) == (2, True, False)


@pytest.mark.parametrize(
    ("command", "variable"), [(["relay"], "OUTBOX_RELAY_TO"), (["subscriptions", "alter", "relay"], "_ALTER_TO")]
)
@pytest.mark.parametrize("url", [f"nats://ann:{ENCODED}@localhost:1", f"nats://{CANARY}@localhost:1"])
def test_a_destination_password_as_an_argument_is_refused(command, variable, url):
    """A single name before the @ is a token."""
    ended = outbox("postgresql://localhost:1/shop", *command, "--to", url)

    fixes = variable in ended.err and "--to-file" in ended.err
    assert (ended.code, fixes, shows(ended)) == (2, True, False)


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        (f"sig={ENCODED}", "its parameter 'sig'"),
        (f"key={ENCODED}&most=4", "its parameter 'key'"),
        (f"most=4&code={CANARY}", "its parameter 'code'"),
        (f"%66ormat={ENCODED}", "its parameter '%66ormat'"),
        (ENCODED, "its query"),
        (f"{ENCODED}=", "its query"),
        (f"most=4&{ENCODED}", "its query"),
        (f"proxy=http%3A%2F%2Fann%3A{ENCODED}%40proxy%3A3128", "its parameter 'proxy'"),
        (f"proxy=http://ann:{ENCODED}@proxy:3128", "its parameter 'proxy'"),
        (f"oauth-client=x&oauth-url=https%3A%2F%2Fann%3A{ENCODED}%40login", "its parameter 'oauth-url'"),
    ],
)
@pytest.mark.parametrize(("command", "before"), [("relay --to", ""), ("relay --route", "orders=")])
def test_a_secret_of_an_endpoint_as_an_argument_is_refused(parameters, where, command, before):
    """Every parameter that is no option of ours may be one."""
    url = f"{before}https://127.0.0.1:1/hook?{parameters}"
    ended = outbox("postgresql://localhost:1/shop", *command.split(), url)

    assert (ended.code, "holds a password" in ended.err, where in ended.err, shows(ended)) == (2, True, True, False)


def test_the_options_of_a_webhook_are_no_secrets(sqlite_engine):
    url = "https://127.0.0.1:1/hook?most=4&per-connection=5&proxy=http://proxy:3128"
    ended = outbox(sqlite_engine, "relay", "--until-empty", "--to", url)

    assert ended.code == 0, ended.err


@pytest.mark.parametrize("destination", [("--to", ""), ("--route", "*=")])
def test_a_user_of_another_postgresql_without_password_is_no_secret(sqlite_engine, destination):
    option, before = destination
    ended = outbox(sqlite_engine, "relay", "--until-empty", option, f"{before}postgresql://ann@127.0.0.1:1/billing")

    assert ended.code == 0, ended.err


def test_a_token_for_spark_connect_as_an_argument_is_refused(sqlite_engine, tmp_path):
    ended = outbox(sqlite_engine, "extract", str(tmp_path), "--remote", f"sc://localhost:1/;token={ENCODED}")

    assert (ended.code, "--remote holds a password" in ended.err, shows(ended)) == (2, True, False)


@pytest.mark.parametrize(("option", "is_secret"), [("secret-file", False), ("pwd", True), ("pwd-files", True)])
def test_the_path_of_a_file_that_holds_a_secret_is_none(sqlite_engine, option, is_secret):
    ended = outbox(sqlite_engine, "relay", "--to", f"nowhere://localhost/hook?{option}=/etc/hook")

    secret = f"--to holds a password in its parameter {option!r}, for every user"
    told = secret if is_secret else "there is no sender for nowhere: URLs"
    assert (ended.code, told in ended.err) == (2, True)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{ENCODED}@localhost:1/shop",
        f"postgresql://ann:{CANARY}@localhost:1/shop",
        f"postgresql://ann:{CANARY}@x@localhost:1/shop",
        f"postgresql://ann:{CANARY}@localhost:port/shop",
        f"postgresql://ann@localhost:1/shop?password={ENCODED}",
        f"postgresql://ann@localhost:1/shop?password={ENCODED}&{CANARY}=1",
        f"postgresql+asyncpg://ann:{CANARY}@localhost:1/shop",
        f"mysql://ann:{CANARY}@localhost:1/shop",
        f"nonsense://ann:{CANARY}@localhost:1/shop",
        f"ann:{CANARY}@localhost",
        f"sqlite:////nonexistent/x.db?password={ENCODED}",
        f"host=localhost password={CANARY}",
    ],
)
def test_a_password_from_the_environment_is_never_shown(url):
    ended = [
        outbox(url, *arguments, "-vv") for arguments in (["status"], ["db", "upgrade"], ["relay", "--to", "stdout:"])
    ]

    assert [(each.code in (1, 2, 3), shows(each)) for each in ended] == [(True, False)] * 3


@pytest.fixture
def waiting(sqlite_engine: Engine) -> Engine:
    """A database with a message that waits to be sent."""
    with (shop := Outbox(sqlite_engine)).begin() as session:
        shop.send(session, "orders", b"1", key="k")
    shop.close()
    return sqlite_engine


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_destination_password_is_never_shown(waiting, form, tmp_path):
    """Nor logged, at any level, while the destination refuses."""
    to = tmp_path / "destination"
    to.write_text(f"nats://ann:{ENCODED}@localhost:1/\n")

    with patience_ends_with_a_refusal():
        ended = outbox(waiting, "relay", "--to-file", str(to), "--until-empty", "-vv", "--log-format", form)
    listed = outbox(waiting, "subscriptions", "list", "--json")

    assert (ended.code, shows(ended), shows(listed), listed.json["subscriptions"][0]["destination"]) == (
        4,
        False,
        False,
        "nats://localhost:1",
    )


def test_the_text_of_a_mistake_shows_no_password_either():
    """Whatever is taken for an argument is echoed by the parser."""
    ended = outbox(None, "status", f"postgresql://ann:{ENCODED}@localhost:1/shop")

    assert (ended.code, shows(ended)) == (2, False)


def test_what_a_text_says_to_write_is_shown(sqlite_engine):
    ended = outbox(sqlite_engine, "relay", "--to", "kafka://host?mechanism=plain", "--until-empty")

    assert "write kafka://user:password@host:9092" in ended.err


def test_a_file_gives_the_database(sqlite_engine, tmp_path):
    file = tmp_path / "url"
    file.write_text(sqlite_engine.url.render_as_string(hide_password=False) + "\n")

    from_file = outbox(None, "status", "--database-file", str(file), "--json")
    named = outbox(None, "status", "--json", OUTBOX_DATABASE_FILE=str(file))
    preferred = outbox("postgresql://localhost:1/x", "status", "--database-file", str(file), "--json")

    assert [len(each.json["subscriptions"]) for each in (from_file, named, preferred)] == [1, 1, 1]


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe"])
def test_a_file_that_holds_something_else_is_refused(tmp_path, content):
    file = tmp_path / "url"
    file.write_bytes(content)

    assert outbox(None, "status", "--database-file", str(file)).code == 2


def test_a_url_and_a_file_of_the_same_rank_are_refused(tmp_path):
    ended = outbox("sqlite:///x.db", "status", OUTBOX_DATABASE_FILE=str(tmp_path / "url"))

    assert (ended.code, "leave one out" in ended.err) == (2, True)


#: Their servers take seconds to start, or another one of the kind is asked at once: a storm asks these.
LATER = ("nats-token", "amqp", "redis+sentinel")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.storm] if each in LATER else []) for each in GUARDED],
)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """A server of each kind that lets in whoever knows the secret."""
    with ExitStack() as stack:
        yield started(lambda: stack.enter_context(GUARDED[request.param](CANARY)))


LISTS = ("status --json", "subscriptions list --json", "parked list --json")


def said_of(url: str, engine: Engine, caplog: pytest.LogCaptureFixture) -> tuple[str, list[Verdict]]:
    """Whatever is to be seen while a relay sends to a destination: logs, errors, verdicts, output, and the tables."""
    caplog.set_level(logging.DEBUG)
    verdicts: list[Verdict] = []
    said: list[object] = []
    try:
        sender = open_sender(url)
        said += [sender, vars(sender), vars(sender._sender), destination_of(url)]
        verdicts += sender.send([a_message("orders", 1)])
        sender.close()
    except OutboxError as error:
        said += traceback.format_exception(error)
    for command in ("relay --until-empty -vv", "status", *LISTS):
        with patience_ends_with_a_refusal():
            ended = outbox(engine, *command.split(), OUTBOX_RELAY_TO=url)
        said += [ended.out, ended.err]
    with engine.connect() as connection:
        for table in ("outbox_subscription", "outbox_lease", "outbox_parked"):
            said += connection.execute(text(f"SELECT * FROM {table}"))
    return "\n".join(map(str, [*said, *verdicts, caplog.text])), verdicts


def test_the_secrets_of_a_destination_are_shown_nowhere(door: Door, waiting: Engine, caplog):
    """Not by a server that refuses them, nor by one that works."""
    refused, [verdict] = said_of(door(CANARY + "x"), waiting, caplog)
    accepted, works = said_of(door(CANARY), waiting, caplog)

    assert (isinstance(verdict, Done), [isinstance(each, Done) for each in works]) == (False, [True])
    assert traces_in(refused + accepted) == []
    assert "127.0.0.1" in refused


@pytest.mark.parametrize(
    "parameters",
    [
        f"sig={ENCODED}",
        f"{ENCODED}",
        f"code={CANARY}",
        f"proxy=http%3A%2F%2Fann%3A{ENCODED.replace('%', '%25')}%40127.0.0.1%3A1",
    ],
)
def test_the_secrets_of_an_endpoint_are_shown_nowhere(parameters, waiting, caplog):
    said, [verdict] = said_of(f"http://127.0.0.1:1/hook?{parameters}", waiting, caplog)

    assert not isinstance(verdict, Done)
    assert traces_in(said) == []


@pytest.mark.parametrize(
    "option", ["to", *(pytest.param(each, marks=pytest.mark.storm) for each in ("database", "config")), "secret"]
)
def test_a_file_with_a_secret_that_others_may_read_is_warned_of(option, waiting, tmp_path):
    """Once, with the command that mends it; not where the file holds no secret, or only its owner may read it."""
    file = tmp_path / "file of a secret"
    content = {
        "to": f"nats://ann:{ENCODED}@127.0.0.1:1",
        "database": f"postgresql://ann:{ENCODED}@127.0.0.1:1/shop",
        "config": f'[routes."*"]\nto = "nats://ann:{ENCODED}@127.0.0.1:1"\n',
        "secret": f"whsec_{base64.b64encode(CANARY.encode()).decode()}",
    }[option]
    to = f"http://127.0.0.1:1/hook?secret-file={quote(str(file))}" if option == "secret" else "stdout:"
    given = {
        "to": ["--to-file", str(file)],
        "database": ["--database-file", str(file), "--to", "stdout:"],
        "config": ["--config", str(file)],
        "secret": ["--to", to],
    }[option]

    def warned(mode: int, text: str) -> bool:
        file.write_text(text)
        file.chmod(mode)
        ended = outbox(waiting, "relay", "--until-empty", "--give-up-after", "100ms", *given)
        return f"everybody on this machine may read it; run: chmod o-r '{file}'" in ended.err

    harmless = content.replace(f"ann:{ENCODED}@", "")
    assert [warned(0o644, content), warned(0o640, content)] == [True, False]
    assert warned(0o644, harmless) == (option == "secret")


SCHEMES = {
    "nats": "/shop", "tls": "/shop", "kafka": "/shop", "kafkas": "/shop", "amqp": "/shop?exchange=orders",
    "amqps": "/shop", "redis": "/0/shop", "rediss": "/0",
    "redis+cluster": "/shop", "redis+sentinel": f"/mymaster?sentinel-password={ENCODED}",
    "http": "/hook?tenant=7", "https": f"/hook?key={ENCODED}",
    "postgresql": "/shop?schema=public",
}  # fmt: skip


#: One that goes through each way of reading a URL; the others follow in a storm.
AT_ONCE = ("nats", "amqp", "redis+sentinel", "https", "postgresql")


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=[pytest.mark.storm] if each not in AT_ONCE else []) for each in SCHEMES]
)
def test_the_secrets_of_a_destination_that_is_away_are_shown_nowhere(scheme, waiting, caplog):
    said, [verdict] = said_of(f"{scheme}://ann:{ENCODED}@127.0.0.1:1{SCHEMES[scheme]}", waiting, caplog)

    assert not isinstance(verdict, Done)
    assert traces_in(said) == []


MALFORMED = (
    f"ann:{CANARY}@host",
    f"ann:{CANARY}@x@host",
    f"ann:{ENCODED}@host:port",
    f"ann:{ENCODED}",
    f"ann:{ENCODED}@",
    f"ann:{ENCODED}@[host",
    f"ann:{ENCODED}@host/%00?password={ENCODED}&password=1",
    f"host/x?timeout={ENCODED}&sslmode={ENCODED}&format={ENCODED}&wait={ENCODED}&mechanism={ENCODED}",
    f"host#{ENCODED}",
)


def test_the_secrets_in_a_malformed_url_are_shown_nowhere():
    """Most of them are refused when they are opened; some schemes take what others refuse."""
    urls = [f"{scheme}://{rest}" for scheme in SCHEMES for rest in MALFORMED]

    assert {url: traces for url in urls if (traces := traces_in(shown_of_opening(url)))} == {}


def shown_of_opening(url: str) -> str:
    """Return what a log would show of the sender of a URL, or of the error with its causes."""
    try:
        sender = open_sender(url)
    except OutboxError as error:
        return "".join(traceback.format_exception(error))
    return repr([sender, vars(sender), vars(sender._sender)])


def test_the_list_of_processes_shows_no_secret(waiting, full, tmp_path):
    """The URL of a relay is in its environment, which nobody else may read; it starts no program with the URL."""
    schemes = list(SCHEMES) if full else ["postgresql"]
    relays = [relay_process(waiting, each, tmp_path / each) for each in schemes]
    try:
        assert eventually(lambda: all("all topics to" in (tmp_path / each).read_text() for each in schemes))
        shown = [line for each in relays for line in shown_by_ps(each.pid)]
    finally:
        for each in relays:
            each.kill()
            each.wait()

    assert (len(shown) >= len(schemes), traces_in("\n".join(shown))) == (True, [])


def relay_process(engine: Engine, scheme: str, log: Path) -> subprocess.Popen[bytes]:
    """A relay to a destination that is away, told by its environment."""
    to, database = f"{scheme}://ann:{ENCODED}@127.0.0.1:1{SCHEMES[scheme]}", engine.url.render_as_string()
    with log.open("wb") as output:
        return subprocess.Popen(
            [Path(sys.executable).with_name("outbox"), "relay", "--name", scheme],
            env={**os.environ, "OUTBOX_DATABASE": database, "OUTBOX_RELAY_TO": to},
            stderr=output,
        )


def shown_by_ps(pid: int) -> list[str]:
    """The arguments of a process and of those that it has started."""
    process = psutil.Process(pid)
    return [" ".join(each.cmdline()) for each in (process, *process.children(recursive=True))]
