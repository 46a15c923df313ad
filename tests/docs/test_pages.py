"""The pages of the site hold together: their code runs, the index has each of them, and Sphinx builds without a word.

Pages about a destination, Spark, RocketMQ, events, routes and consumers have tests of their own.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import click
import pytest
from sqlalchemy import text

from outbox import Outbox, Reject, Relay, RetryPolicy, Settings, errors, migrate
from outbox.cli import main
from outbox.cli.config import options_of
from outbox.consumer.options import RETRIES
from outbox.errors import OutboxError
from outbox.model import limits
from outbox.senders import aws_message, headers, nats, redis, webhook_format, webhook_signature
from outbox.testing.servers import PostgresServer
from tests.support.command_line import outbox
from tests.support.pages import TOP, blocks, broken_links, commands, run
from tests.support.site_search import SiteSearch

DOCS = TOP / "docs"
MILLISECOND = timedelta(milliseconds=1)
#: Pages whose code is run from top to bottom, with the lines that it prints.
RUN = {
    "sending": [],
    "embedded": ["orders order-1 placed"],
    "inbox": [],
    "from-a-table": [],
    "configuration": [],
}

#: Texts of Python and of PostgreSQL.
OF_OTHERS = {"ModuleNotFoundError", 'violates check constraint "outbox_message_slot"'}

#: What a user types into the search of the site, and the page with the answer.
SEARCHED = {
    "crash lose": "errors", "Kafka down": "errors", "delete person": "retention", "rights": "rights",
    "alert": "monitoring", "test": "testing", "cost write": "errors", "asyncpg": "errors", "check-back": "rocketmq",
    "several databases": "errors", "multiple databases": "partitions", "GDPR": "retention", "permissions": "rights",
    "performance": "errors",
}  # fmt: skip


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder with nothing in it but the tables that `outbox db upgrade` makes."""
    from outbox import create_engine

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["shop.py"])
    migrate.upgrade(create_engine("sqlite:///shop.db"))
    migrate.upgrade_inbox(create_engine("sqlite:///billing.db"))


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / f"{name}.md").read_text()


def listed() -> list[str]:
    """The pages in the tables of contents of the index."""
    toctrees = re.findall(r"^```\{toctree\}\n(.*?)^```$", page("index"), re.MULTILINE | re.DOTALL)
    return [line for tree in toctrees for line in tree.splitlines() if line and not line.startswith(":")]


@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(name, shop, capsys):
    run(page(name), f"docs/{name}.md")

    assert re.sub(r"[0-9a-f-]{36}", "ID", capsys.readouterr().out).splitlines() == RUN[name]


def test_the_destination_of_ones_own_runs(shop, capsys):
    """The files for task queues have tests of their own."""
    run(page("own-destination").partition("\n## Task queues\n")[0], "docs/own-destination.md")

    assert capsys.readouterr().out == """orders order-1 b'{"id":1}'\n"""


def test_the_two_files_of_the_first_message_run(shop, monkeypatch, capsys):
    first, *more = blocks(page("first-message"), "python")
    file = ModuleType("__main__")

    exec(compile(first, "shop.py", "exec"), vars(file))
    monkeypatch.setitem(sys.modules, "shop", file)
    exec(compile("".join(more), "more.py", "exec"), {})

    assert capsys.readouterr().out.splitlines() == [
        "order 1",
        "orders order-1 {'id': 1, 'total': 42, 'status': 'placed', 'version': 1}",
        "orders order-2 {'id': 2, 'total': 7, 'status': 'placed', 'version': 1}",
    ]


def test_nothing_is_wrong_after_the_first_message(shop, monkeypatch, capsys):
    """With the commands and both files of the page, in its order."""
    first, *more = blocks(page("first-message"), "python")
    file = ModuleType("__main__")
    exec(compile(first, "shop.py", "exec"), vars(file))
    monkeypatch.setitem(sys.modules, "shop", file)
    (relay,) = (line for line in commands(page("first-message")) if line.startswith("outbox relay "))
    sent = outbox("sqlite:///shop.db", *shlex.split(relay)[1:])
    exec(compile("".join(more), "more.py", "exec"), {})

    checked = outbox("sqlite:///shop.db", "status", "--check")

    assert (json.loads(sent.out)["key"], checked.code, checked.err) == ("order-1", 0, "")


def test_what_was_moved_from_a_table_is_sent_after_what_was_written_since(shop):
    moved = run(page("from-a-table"), "docs/from-a-table.md")

    sent: list[tuple[str | None, bytes]] = []
    Relay(moved["outbox"], lambda message: sent.append((message.key, message.body)), name="list").until_empty()
    assert sent == [("order-3", b'{"id":3}'), ("order-2", b'{"id": 2}')]


def test_an_inbox_of_the_page_has_an_effect_once(shop):
    found = run(page("inbox"), "docs/inbox.md")

    with found["engine"].connect() as connection:
        assert sorted(connection.scalars(text('SELECT "order" FROM invoices'))) == [7, 8]


def test_each_tenant_has_its_messages(shop, capsys):
    run(page("partitions"), "docs/partitions.md")


@pytest.mark.storm
def test_the_tests_of_the_page_about_testing_pass(tmp_path):
    first, second = blocks(page("testing"), "python")
    (tmp_path / "test_shop.py").write_text(first)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "test_shop.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
        env=os.environ | {"PYTHONPATH": str(TOP)},
    )  # fmt: skip

    assert "4 passed" in ended.stdout, ended.stdout
    assert "with PostgresServer() as server:" in second
    assert hasattr(PostgresServer, "create_database")


def test_what_the_tutorials_show_is_in_the_files():
    files = (TOP / "examples" / "fastapi_orders.py").read_text() + page("kafka")
    shop = "".join(path.read_text() for path in sorted((TOP / "examples" / "django_shop").rglob("*.py")))

    assert [block for block in blocks(page("fastapi"), "python") if block not in files] == []
    assert [block for block in blocks(page("django"), "python") if block not in shop] == []


def test_the_limits_are_those_of_the_library():
    named = page("messages") + page("configuration")

    retry, settings = RetryPolicy(), Settings()
    numbers = [
        f"1 to {limits.MAX_TOPIC} of", f"1 to {limits.MAX_KEY_BYTES} bytes", f"at most {limits.MAX_TAGS} characters",
        f"at most {limits.MAX_HEADERS}, {limits.MAX_HEADER_BYTES // 1024} KiB", f"{settings.limits.rows} rows or 8 MiB",
        f"{retry.attempts}, after 1 s to 10 min; of a consumer {RETRIES.attempts}, after",
        f"{settings.poll[0] / MILLISECOND:.0f} ms to 1 s",
        f"{settings.lease.seconds} s, renewed every {settings.renew_every.seconds} s",
    ]  # fmt: skip
    assert [number for number in numbers if number not in named] == []
    assert (settings.limits.bytes, settings.poll[1].total_seconds()) == (8 * 1024 * 1024, 1)


def test_the_fields_on_the_wire_are_those_of_the_senders():
    named = set(re.findall(r"`((?:Outbox|Nats|webhook)-[\w-]+)`", page("messages")))

    written = {
        headers.ID,
        headers.KEY,
        headers.TAGS,
        headers.CREATED_AT,
        aws_message.ENCODING,
        nats.MESSAGE_ID,
        redis.BODY,
    }
    assert named == written | {webhook_signature.ID, headers.TOPIC, webhook_format.OWN_HEADERS}


def test_the_variables_are_those_of_the_commands():
    pattern = r"^\| `(OUTBOX_\w+)` \| `(?:outbox (\w+) )?(--[\w-]+)` \| (?:`(?:\[(\w+)\] )?(\w+)` )?\|"
    rows = re.findall(pattern, page("configuration"), re.MULTILINE)

    context = click.Context(main, info_name="outbox", auto_envvar_prefix="OUTBOX")
    relay = main.get_command(context, "relay")
    assert relay is not None
    inner = click.Context(relay, info_name="relay", parent=context)
    options = [each for each in relay.params if isinstance(each, click.Option)]
    variables = {name: each.get_help_extra(inner)["envvars"] for each in options for name in each.opts}
    settings = {each.opts[-1]: name for name, each in options_of(relay).items()}
    assert len(rows) >= 7
    assert [row for row in rows if row[0] not in variables[row[2]]] == []
    assert [row for row in rows if (row[1], settings.get(row[2], "")) != row[3:]] == []


def test_the_settings_file_is_read_by_the_commands_that_it_names(tmp_path, monkeypatch):
    """Each is told what it lacks, and has no setting to complain of."""
    (file,) = blocks(page("configuration"), "toml")
    monkeypatch.chdir(tmp_path)
    Path("outbox.toml").write_text(file)

    told = [json.loads(outbox(None, *command.split(), NATS_HOST="nats").err)["message"] for command in (
        "relay --database x --schema x", "purge --database x", "subscriptions list --database x",
    )]  # fmt: skip

    assert {each.partition(";")[0] for each in told} == {"the database is not given as a URL"}, told


def test_every_error_is_on_its_page():
    named = set(re.findall(r"^\| `(\w+)` \|", page("errors"), re.MULTILINE))

    assert named == {name for name, each in vars(errors).items() if isinstance(each, type) and each is not OutboxError}


def test_the_texts_that_people_ask_about_are_those_of_the_product():
    """A number, and what stands for a name, may be anything."""
    texts = [" ".join(each.split()) for each in texts_of_the_product()]
    asked = [
        text
        for bold in re.findall(r"\*\*(.*?)\*\*", page("errors").replace("\n", " "))
        for text in re.findall(r'^"(.*)"', bold)
    ]
    pieces = {piece.strip() for text in asked for piece in re.split(r"…|\d+|outbox db grants", text)} - {"", *OF_OTHERS}

    assert {piece for piece in pieces if not any(piece in text for text in texts)} == set()
    assert {"names several servers, and a new connection may reach a standby", "is not from 0 to"} <= {*asked}


def test_no_text_of_the_product_leads_to_a_page_that_is_not_there():
    """A user has the site, and no folder `docs`."""
    site = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    said = "\n".join(texts_of_the_product())

    pages = re.findall(rf"{re.escape(site)}([\w-]+)\.html|\bdocs/[\w-]+\.md", said)
    assert set(pages) - {path.stem for path in DOCS.glob("*.md")} == set()


@cache
def texts_of_the_product() -> set[str]:
    trees = (ast.parse(file.read_text()) for file in (TOP / "outbox").rglob("*.py"))
    values = (each.value for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Constant))
    return {each for each in values if isinstance(each, str)}


def test_the_queries_of_a_monitor_run(pg_engine):
    with pg_engine.begin() as connection:
        Outbox(pg_engine).send(connection, "orders", b"1", key="a")
    Relay(Outbox(pg_engine), lambda _: Reject("no"), name="look").until_empty()

    with pg_engine.connect() as connection:
        dead, waiting, orphans, ages, size = (
            connection.execute(text(query)).all() for query in blocks(page("monitoring"), "sql")
        )

    assert [tuple(row) for row in dead] == [("look", 1)]
    assert waiting == []
    assert sorted(row.name for row in orphans) == ["look", "relay"]
    assert "look" in {row.subscription for row in ages}
    assert size[0].bytes > 0


def test_the_index_has_every_page_once():
    assert sorted(listed()) == sorted(path.stem for path in DOCS.glob("*.md") if path.stem != "index")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; a warning is an error."""
    if find_spec("sphinx") is None and not os.environ.get("CI"):
        pytest.skip("the site is built by Sphinx, of the extra docs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-d", str(folder / "trees")]
    ended = subprocess.run(
        [*build, "-b", "html", str(DOCS), str(folder / "html")], capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return folder / "html"


@pytest.mark.storm
def test_the_site_has_each_page_as_html_and_as_markdown(site):
    pages = {path.stem for path in DOCS.glob("*.md")}

    assert pages - {path.stem for path in site.glob("*.html")} == set()
    assert {path.stem for path in site.glob("*.md")} == pages
    assert {path.stem: broken for path in site.glob("*.md") if (broken := broken_links(path))} == {}


def test_the_list_for_machines_has_each_page_with_a_sentence(site):
    lines = re.findall(
        r"^- \[[^]]+\]\(https://[^)]*/([\w-]+)\.md\): (.*)", (site / "llms.txt").read_text(), re.MULTILINE
    )

    assert [name for name, _ in lines] == ["index", *listed()]
    assert {name: said for name, said in lines if not re.match(r"[A-Z`].* .*[.:]$", said)} == {}


def test_the_search_of_the_site_answers_questions(site):
    """Among the first three pages that the search shows."""
    search = SiteSearch(site)

    assert {words: page for words, page in SEARCHED.items() if page not in search.pages(words)[:3]} == {}


def test_the_reference_has_every_command_and_every_name(site):
    import outbox
    from tests.cli.test_cli_help import ALL as COMMANDS

    commands, names = ((site / name).read_text() for name in ("cli.md", "api.md"))

    assert [path for path in COMMANDS if f"\n## outbox {path}\n" not in commands] == []
    assert "`OUTBOX_STATUS_MAX_LAG`" in commands
    assert [name for name in outbox.__all__ if f"\n## {name}\n" not in names] == []
    assert [name for name in ("send", "admin") if f"\n### Outbox.{name}\n" not in names] == []


def test_signatures_of_the_reference_are_those_of_python(site):
    names = (site / "api.md").read_text()

    assert 'Outbox.begin(propagation: Propagation = "required") -> AbstractContextManager[Session]' in names
    assert ("Inbox.prune() -> int" in names, " at 0x" in names, "- ` " in names) == (True, False, False)


def test_the_page_of_commands_has_the_examples_of_the_help(site):
    from outbox.cli.relay import relay

    assert [each for each in relay.examples.values() if f"\n{each}\n" not in (site / "cli.md").read_text()] == []
