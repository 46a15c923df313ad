"""Help answers at once; every option has its variable; whatever fails ends as one line and an exit code."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from outbox.cli import main
from outbox.cli.relay import SECTIONS
from tests.support.command_line import outbox

HEAVY = ("sqlalchemy", "alembic", "psycopg", "tenacity", "nats")


def commands(command, path=()):
    """Every command with its words."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))
    else:
        yield path, command


ALL = {" ".join(path): command for path, command in commands(main)}


@pytest.mark.parametrize(
    "arguments", [["--help"], *([verb, "--help"] for verb in ("relay", "status", "parked", "purge", "extract"))]
)
def test_help_loads_nothing_heavy(arguments):
    script = f"""if True:
        import sys
        from outbox.cli import main
        try:
            main({arguments!r})
        except SystemExit as ended:
            sys.stderr.write(f"{{ended.code}} " + " ".join(each for each in {HEAVY!r} if each in sys.modules))
    """

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert (ended.stderr, ended.stdout.startswith("Usage: ")) == ("0 ", True)


def test_the_package_is_a_command_too():
    ended = subprocess.run([sys.executable, "-m", "outbox", "--help"], capture_output=True, text=True, check=True)

    assert ended.stdout.startswith("Usage: outbox [OPTIONS] COMMAND")


def test_the_help_lists_every_verb():
    shown = CliRunner().invoke(main, ["--help"]).stdout

    assert {path.split()[0] for path in ALL} <= set(shown.split())


def shown(path: str) -> str:
    """Return the help of a command."""
    return CliRunner().invoke(main, [*path.split(), "--help"], prog_name="outbox").stdout


#: The commands with options of their own in their help.
WITH_OPTIONS = [path for path in ALL if path != "demo"]


def test_no_variable_is_named_after_the_program():
    """As an option whose value has a name in Python that the option has not."""
    assert [path for path in WITH_OPTIONS if "_]" in shown(path).replace(";", "]").replace(",", "]")] == []


def test_every_option_can_be_set_by_the_environment():
    """Its variable is OUTBOX_ and the words of the command, or OUTBOX_ alone for what all commands share."""
    missing = {}
    for path in WITH_OPTIONS:
        said = " ".join(shown(path).split())
        options = [each for each in ALL[path].params if isinstance(each, click.Option)]
        words = [option.opts[-1].removeprefix("--").upper().replace("-", "_") for option in options]
        own = f"OUTBOX_{path.upper().replace(' ', '_').replace('-', '_')}"
        names = [(f"env var: {own}_{word}", f"env var: OUTBOX_{word}") for word in words]
        if unsaid := [pair for pair in names if pair[0] not in said and pair[1] not in said]:
            missing[path] = unsaid

    assert missing == {}


def test_the_relay_has_no_more_options_than_a_screen_shows():
    """What few users type is said in the file of routes."""
    assert len([each for each in ALL["relay"].params if isinstance(each, click.Option)]) <= 23


def test_a_variable_counts_as_the_option(sqlite_engine):
    by_variable = outbox(sqlite_engine, "status", OUTBOX_STATUS_JSON="1").json

    assert [each["name"] for each in by_variable["subscriptions"]] == ["relay"]


@pytest.mark.parametrize(
    ("url", "arguments", "code", "says"),
    [
        (None, ["status"], 2, "OUTBOX_DATABASE"),
        ("nonsense", ["status"], 2, "not given as a URL"),
        ("postgresql://a:1,b:2/shop", ["status"], 2, "write several hosts as postgresql:///name?host=db1:5432&host="),
        ("mysql://localhost/x", ["status"], 2, "no outbox lives in mysql"),
        ("sqlite://", ["status"], 2, "use a file"),
        ("sqlite://shop.db", ["status"], 2, "write sqlite:///shop.db"),
        ("sqlite://var/shop.db", ["relay", "--to", "stdout:"], 2, "write sqlite:///var/shop.db"),
        ("sqlite:////nonexistent/x.db", ["status"], 3, "no file"),
        ("postgresql://localhost:1/x", ["status"], 3, "cannot be reached"),
        ("postgresql://localhost:1/x", ["relay", "--to", "stdout:"], 3, "cannot be reached"),
        ("postgresql://localhost:1/x", ["db", "upgrade"], 3, "cannot be reached"),
        ("postgresql://localhost:1/x", ["status", "--schema", 'a"b'], 2, "plain identifier"),
        ("postgresql://localhost:1/x", ["relay"], 2, "no destination"),
        ("postgresql://localhost:1/x", ["relay", "--to", "stdout:", "--topics", "a,,b"], 2, "names with a comma"),
        ("postgresql://localhost:1/x", ["relay", "--to", "stdout:", "--lease", "10"], 2, "is not a duration"),
        ("postgresql://localhost:1/x", ["purge", "--older-than", "100001w"], 2, "'100001w' is longer than 36525d"),
        ("postgresql://localhost:1/x", ["relay", "--to", "stdout:", "--from", "soon"], 2, "2026-01-31T12:00:00Z"),
        ("postgresql://localhost:1/x", ["relay", "--to", "stdout:", "--from", "2026-01-31"], 2, "append Z"),
        ("postgresql://localhost:1/x", ["relay", "--to", "teapot://x"], 2, "no sender for teapot"),
        ("postgresql://localhost:1/x", ["parked", "replay"], 2, "give ids, or --all"),
        ("postgresql://localhost:1/x", ["parked", "discard", "1"], 2, "--reason"),
        ("postgresql://localhost:1/x", ["subscriptions", "alter", "relay"], 2, "nothing to alter"),
    ],
)
def test_an_obvious_mistake_is_told_in_a_line(url, arguments, code, says):
    ended = outbox(url, *arguments)

    last = ended.err.strip().splitlines()[-1]
    assert (ended.code, last.startswith("Error: "), says in last, "Traceback" in ended.err) == (code, True, True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statsu"], "there is no command statsu; did you mean status?"),
        (["parked", "lsit"], "there is no command lsit; did you mean list?"),
        (["db", "x"], "there is no command x; there are downgrade, grants, sql, upgrade"),
    ],
)
def test_a_mistyped_command_is_told_what_it_is_like(arguments, said):
    ended = outbox(None, *arguments)

    assert (ended.code, ended.err.splitlines()[-1]) == (2, f"Error: {said}")


@pytest.mark.parametrize("path", [[], *([name] for name in ("parked", "db", "half", "subscriptions", "consumers"))])
def test_no_help_is_cut(path):
    shown = CliRunner().invoke(main, [*path, "--help"], prog_name="outbox").stdout

    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.storm
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_in_a_line(sqlite_engine):
    """And a pipe that is not read to its end, in none."""
    command = [sys.executable, "-c", "from outbox.cli import main; main()", "status", "--json"]
    run = partial(
        subprocess.run,
        command,
        check=False,
        env={**os.environ, "OUTBOX_DATABASE": sqlite_engine.url.render_as_string()},
        stderr=subprocess.PIPE,
        text=True,
    )

    with Path("/dev/full").open("w") as full:
        ended = run(stdout=full)
    reader, writer = os.pipe()
    os.close(reader)
    unread = run(stdout=writer)
    os.close(writer)

    assert (ended.returncode, ended.stderr) == (1, "Error: standard output: No space left on device\n")
    assert (unread.returncode, unread.stderr) == (1, "")


def test_missing_tables_are_told_with_what_to_do(tmp_path):
    url = f"sqlite:///{tmp_path / 'x.db'}"
    (tmp_path / "x.db").touch()

    told = [outbox(url, *arguments) for arguments in (["status"], ["parked", "list"], ["purge", "--older-than", "7d"])]

    assert [(ended.code, ended.err) for ended in told] == [
        (1, f"Error: the outbox tables are not there in {tmp_path / 'x.db'}; run: outbox db upgrade\n")
    ] * 3


@pytest.mark.parametrize("driver", ["", "+aiosqlite"])
def test_the_url_of_an_application_may_name_a_driver_for_asyncio(sqlite_engine, driver):
    ended = outbox(f"sqlite{driver}:///{sqlite_engine.url.database}", "status", "--json")

    assert (ended.code, ended.json["subscriptions"][0]["name"]) == (0, "relay")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg_async", "psycopg", "psycopg2", "pg8000"])
def test_that_of_postgresql_too(pg_engine, driver):
    url = pg_engine.url.set(drivername=f"postgresql+{driver}")
    own = {"ssl": "prefer", "prepared_statement_cache_size": "0"}
    url = url.update_query_dict(own) if driver == "asyncpg" else url

    ended = outbox(url.render_as_string(hide_password=False), "status", "--json")

    assert (ended.code, ended.json["subscriptions"][0]["name"]) == (0, "relay")


@pytest.mark.parametrize("command", [["status"], ["db", "upgrade"]])
def test_a_missing_folder_is_named(tmp_path, command):
    ended = outbox(f"sqlite:///{tmp_path}/nodir/x.db", *command)

    text = f"Error: there is no file {tmp_path}/nodir/x.db, and no folder {tmp_path}/nodir to make it in\n"
    assert (ended.code, ended.err) == (3, text)


def test_each_option_of_the_relay_is_in_a_section_of_its_help():
    parameters = {each.name for each in ALL["relay"].params}

    assert {name for names in SECTIONS.values() for name in names} == {*parameters, "help"}
    assert "Examples:\n  Send every message" in outbox(None, "relay", "--help").out
