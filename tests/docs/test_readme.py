"""What the README and the pages beside it say is so: their code runs, their commands exist, their names resolve."""

import re
import shlex
import shutil
import tomllib

import click
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine

from outbox import Outbox, Relay, create_engine, migrate
from outbox.cli import main
from outbox.rocketmq import TransactionMQProducer
from tests.support.command_line import the_tests_own_process
from tests.support.pages import TOP, blocks, broken_links, commands, names, resolve, run
from tests.support.refusals import refusal

PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").glob("*.md"))]
MOST_LINES_OF_THE_README = 150
ALL = "\n".join(page.read_text() for page in PAGES)
README = PAGES[0].read_text()
#: The commands of blocks that a reader runs one after another.
EXECUTED = [*dict.fromkeys(line for line in commands(ALL) if line.startswith("outbox "))]


def test_the_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """One namespace, on SQLite, in a folder with nothing in it but the tables that `outbox db upgrade` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade(create_engine("sqlite:///readme.db"))

    outbox = run(README, "README.md")["outbox"]

    Relay(outbox, lambda message: print(message.topic, message.key, message.text()), name="list").until_empty()
    assert capsys.readouterr().out == """orders ann {"customer":"ann","total":42}\n"""


def test_the_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES_OF_THE_README


def test_the_first_message_is_that_of_the_example():
    """What is shown is what the demo runs, but for where the database is and for the last lines."""
    page = (TOP / "docs" / "first-message.md").read_text()
    block = next(block for block in blocks(page, "python") if "def place_order(session: Session" in block)
    shown = block[: block.index("Base.metadata.create_all")]
    example = (TOP / "examples" / "orders.py").read_text()

    assert shown[shown.index("class Base") :].strip() in example


def test_the_command_line_takes_every_command():
    """The verb exists and every option, with such a value."""
    assert {line: problem for line in [*EXECUTED, *shown()] if (problem := misunderstood(line))} == {}


def test_every_command_that_ends_by_itself_runs(sqlite_template, tmp_path, monkeypatch):
    """Each runs in a folder and on a database of its own."""
    monkeypatch.setenv("OUTBOX_DATABASE", "sqlite:///shop.db")

    failed = {}
    for n, line in enumerate(filter(ends_by_itself, EXECUTED)):
        place = tmp_path / str(n)
        place.mkdir()
        monkeypatch.chdir(place)
        shutil.copyfile(sqlite_template, "shop.db")
        prepare(create_engine("sqlite:///shop.db"), arguments := shlex.split(line)[1:])
        ended = invoked(arguments)
        # 2: there are no parked messages and no such transactions to decide on. 1: nobody reads the log.
        expected = [(2, "parked"), (2, "half"), (1, "status")]
        if ended.exit_code != 0 and (ended.exit_code, arguments[0]) not in expected:
            failed[line] = ended.output

    assert failed == {}


def ends_by_itself(line: str) -> bool:
    """Return whether a command ends, and needs nothing but a database.

    Others run until they are interrupted, or start Spark or servers, or are about roles: tests of their own run them.
    """
    arguments = shlex.split(line)[1:]
    runs_on = "--watch" in arguments or (arguments[0] == "relay" and "--until-empty" not in arguments)
    needs_more = not {"--archive", "--writer"}.isdisjoint(arguments) or (
        arguments[0] == "doctor" and "--to" in arguments
    )
    return not (runs_on or needs_more or arguments[0] in ("consume", "dashboard", "extract", "report", "demo"))


def prepare(engine: Engine, arguments: list[str]) -> None:
    """Have a producer of the group `orders` at work, and do what has to come before a command."""
    TransactionMQProducer("orders", Outbox(engine)).begin_transaction(verdict="join").send("orders", b"1")
    if arguments[:2] in (["subscriptions", "split"], ["subscriptions", "backfill"]) or "--on-dead" in arguments:
        Relay(Outbox(engine), "stdout:", name=arguments[2]).once()  # only what a relay has declared
    if arguments[:2] == ["subscriptions", "resume"]:
        assert invoked(["subscriptions", "pause", *arguments[2:]]).exit_code == 0
    if arguments[0] == "consumers":
        consumer = Outbox(engine).consumer("billing")
        consumer.on("orders")(print)
        consumer.once()


def misunderstood(line: str) -> str | None:
    """Return why the command line does not take a command; None if it does."""
    try:
        left = parsed(main, shlex.split(line)[1:]).args
    except click.ClickException as error:
        return error.format_message()
    return f"what are {left}?" if left else None


def invoked(arguments: list[str]) -> Result:
    """What comes of the command, whose own settings of the process end with it."""
    with the_tests_own_process():
        return CliRunner().invoke(main, arguments)


def parsed(command: click.Command, arguments: list[str]) -> click.Context:
    """What click makes of the arguments, down to the last verb."""
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), name := arguments.pop(0))
        if found is None:
            raise click.UsageError(f"there is no {name}")
        command = found
    return command.make_context("outbox", arguments)


def shown() -> list[str]:
    """The commands of `outbox` in blocks that are only shown: they need servers, files, or another terminal."""
    texts = "\n".join(block for kind in ("text", "shell", "ini", "yaml") for block in blocks(ALL, kind))
    lines = re.sub(r"\\\n\s*", "", texts).splitlines()
    found = [re.search(r"(?:^|until |ExecStart=\S*/|command: |billing )(outbox [a-z].*)$", line) for line in lines]
    return sorted({match[1].partition(";")[0] for match in found if match})


def test_every_other_command_is_one_of_make_or_an_installation():
    targets = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = [line for line in commands(ALL) if not line.startswith(("outbox ", "export OUTBOX_DATABASE="))]

    for line in others:
        install = re.fullmatch(r"pip install 'outbox-log\[([a-z,]+)\]'", line)
        make = re.fullmatch(r"make ([a-z-]+)(?: VERSION=[0-9.]+)?", line)
        assert install or make or line == "bash .ci/matrix", line
        assert not install or set(install[1].split(",")) <= set(extras)
        assert not make or make[1] in targets


def test_every_name_resolves():
    """Of the module, or of an `Outbox`, which the pages call by the same name."""
    assert {name: problem for name in names(ALL) if (problem := refusal(resolve, name))} == {}


def test_every_link_leads_to_a_file():
    assert [problem for page in PAGES for problem in broken_links(page)] == []


@pytest.mark.parametrize("link", ["docs/nothing.md", "README.md#nothing", "#nothing"])
def test_a_broken_link_would_be_seen(tmp_path, link):
    (tmp_path / "README.md").write_text("# Something")
    page = tmp_path / "page.md"
    page.write_text(f"See [there]({link}), [this](#heading) and [that](README.md#something).\n\n# Heading\n")

    assert broken_links(page) == [link]
