"""The settings file: a value for each option, weaker than the environment and the command line."""

import pytest

from outbox.cli.config import SHARED, options_of
from tests.cli.test_cli_help import ALL
from tests.support.command_line import outbox

CANARY = "c4naryS3same"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The settings file of the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outbox.toml"


def sent(shop, *arguments: str, **environment: str) -> str:
    """Where an empty relay would send, as it says."""
    ended = outbox(shop, "relay", *arguments, **environment)
    assert ended.code == 0, ended.err
    return ended.err.splitlines()[0]


def test_the_command_line_beats_the_environment_and_the_environment_the_file(sqlite_engine, file):
    file.write_text('[relay]\nto = "file:///dev/null"\nname = "a"\ntopics = ["x", "y.*"]\nuntil_empty = true\n')

    assert [
        sent(sqlite_engine),
        sent(sqlite_engine, OUTBOX_RELAY_NAME="b"),
        sent(sqlite_engine, "--name", "c", OUTBOX_RELAY_NAME="b"),
    ] == [f"{name}: x,y.* to file:///dev/null, a new subscription that begins at earliest" for name in "abc"]


def test_the_file_is_named_by_the_option_or_by_the_variable(sqlite_engine, file, tmp_path):
    file.write_text("[status]\njson = true\n")
    other, third = tmp_path / "other.toml", tmp_path / "third.toml"
    other.write_text("")
    third.write_text("verbose = 'loud'\n")

    by_default = outbox(sqlite_engine, "status")
    by_option = outbox(sqlite_engine, "status", "--config", str(other), OUTBOX_CONFIG=str(third))
    by_variable = outbox(sqlite_engine, "status", OUTBOX_CONFIG=str(third))

    assert (by_default.json["version"], by_option.out.startswith("{")) == (1, False)
    assert (by_variable.code, f"Error: {third}: verbose: 'loud' is not a valid integer" in by_variable.err) == (2, True)


def test_a_stronger_destination_replaces_that_of_the_file(sqlite_engine, file, tmp_path):
    (tmp_path / "url").write_text("stdout:")
    file.write_text(f'[relay]\nto_file = "{tmp_path / "url"}"\nuntil_empty = true\n')
    by_file = sent(sqlite_engine, "--name", "a")
    by_route = sent(sqlite_engine, "--name", "b", "--route", "*=file:///dev/null")
    by_variable = sent(sqlite_engine, "--name", "c", OUTBOX_RELAY_TO="file:///dev/null")
    file.write_text('[relay]\nuntil_empty = true\n[routes."*"]\nto = "stdout:"\n')
    by_option = sent(sqlite_engine, "--name", "d", "--to", "file:///dev/null")
    file.write_text('[relay]\nto = "stdout:"\n[routes."*"]\nto = "stdout:"\n')
    refused = outbox(sqlite_engine, "relay", "--name", "e")

    said = [line.split(",")[0] for line in (by_file, by_route, by_variable, by_option)]
    assert said == [
        "a: all topics to stdout:", "b: all topics to file:///dev/null", "c: all topics to file:///dev/null",
        "d: all topics to file:///dev/null",
    ]  # fmt: skip
    assert "to in the settings file and routes in the settings file exclude each other" in refused.err


WRONG = {
    "unknown": ("xyz = 1", "FILE: xyz: is unknown; there are database, database_file, schema"),
    "almost known": ("[relay]\nleese = '1s'", "FILE: [relay] leese: is unknown; did you mean lease?"),
    "the name of the option": ("[relay]\non-dead = 'block'", "[relay] on-dead: is unknown; did you mean on_dead?"),
    "of all commands": (
        "[relay]\nlog_format = 'json'",
        "[relay] log_format: is unknown; write it before the",
    ),
    "no command": ("[rellay]\nto = 'stdout:'", "FILE: rellay: is unknown; did you mean relay?"),
    "no table": ("relay = 'stdout:'", "FILE: [relay] must be a table of settings, not 'stdout:'"),
    "a number of seconds": ("[relay]\nlease = 10", "FILE: [relay] lease: '10' is not a duration; write 90s"),
    "no choice": ("log_format = 'xml'", "FILE: log_format: 'xml' is not one of 'text', 'json'"),
    "a list": ("[relay]\nto = ['stdout:']", "FILE: [relay] to: must be one value, not a list"),
    "a table": ("[relay]\nname = {a = 1}", "FILE: [relay] name: must be a text, a number, true or false"),
    "a variable": (
        "database = '${NO_SUCH}'",
        "FILE: database: takes the environment variable NO_SUCH,",
    ),
    "not TOML": ("[relay", "FILE: it is not TOML: "),
}


@pytest.mark.parametrize(("content", "error"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_named_with_its_file_and_setting(content, error, file):
    file.write_text(content)

    ended = outbox(None, "relay", "--to", "stdout:", "--config", str(file))

    assert (ended.code, error.replace("FILE", str(file)) in ended.err) == (2, True), ended.err


def test_a_secret_may_be_in_the_file_and_is_never_shown(file):
    """A variable in its place needs no secret file."""
    url = f"postgresql://ann:{CANARY}@127.0.0.1:1/shop"

    def said(text: str) -> str:
        file.write_text(f'database = ["{text}"]\n')
        return outbox(None, "status", SECRET=CANARY).err

    by_file, by_variable = said(url), said(url.replace(CANARY, "${SECRET}"))

    warning = f"warning: {file.name} holds a secret, and everybody on this machine may read it"
    assert [(warning in each, "127.0.0.1" in each, CANARY in each) for each in (by_file, by_variable)] == [
        (True, True, False), (False, True, False),
    ]  # fmt: skip


def test_every_command_reads_the_file_and_every_variable_is_a_setting():
    """A setting of all commands is the variable without OUTBOX_; any other is an option of a command."""
    shared, without = set(), []
    for path, command in ALL.items():
        if all(each.name != "config" for each in command.params):
            without.append(path)
        for name, option in options_of(command).items():
            if option.envvar == f"OUTBOX_{name.upper()}":
                shared.add(name)
    assert (without, shared) == ([], set(SHARED))
