"""What the README and the pages beside it say is so: their code runs, their commands exist, their names resolve."""

import re
import shlex
import tomllib

import click
import pytest
from click.testing import CliRunner, Result

from outbox import Outbox, Relay, create_engine, migrate
from outbox.cli import main
from outbox.rocketmq import TransactionMQProducer
from tests.support.command_line import the_tests_own_process
from tests.support.pages import TOP, blocks, broken_links, commands, names, resolve, run

PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted((TOP / "docs").glob("*.md"))]
MOST_LINES_OF_THE_README = 150
ALL = "\n".join(page.read_text() for page in PAGES)
README = PAGES[0].read_text()


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


@pytest.mark.parametrize("line", [line for line in commands(ALL) if line.startswith("outbox ")])
def test_the_command_line_takes_a_command(line, tmp_path, monkeypatch):
    """The verb exists and every option, with such a value; what comes to an end by itself is run, where a producer of
    the group `orders` has been at work.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX_DATABASE", "sqlite:///shop.db")
    migrate.upgrade(engine := create_engine("sqlite:///shop.db"))
    TransactionMQProducer("orders", Outbox(engine)).begin_transaction(verdict="join").send("orders", b"1")
    arguments = shlex.split(line)[1:]
    if arguments[:2] in (["subscriptions", "split"], ["subscriptions", "backfill"]) or "--on-dead" in arguments:
        Relay(Outbox(engine), "stdout:", name=arguments[2]).once()  # only what a relay has declared

    if arguments[:2] == ["subscriptions", "resume"]:
        invoked(["subscriptions", "pause", *arguments[2:]])
    if arguments[0] == "consumers":
        consumer = Outbox(engine).consumer("billing")
        consumer.on("orders")(print)
        consumer.once()

    if arguments[0] == "subscriptions" and "resume" in arguments:
        assert invoked(["pause" if word == "resume" else word for word in arguments]).exit_code == 0

    assert parsed(main, list(arguments)).args == []
    if (
        line.endswith("--watch")
        or arguments[0] == "consume"
        or (arguments[0] == "relay" and "--until-empty" not in arguments)
    ):
        return  # they run until they are interrupted
    if arguments[0] in ("extract", "report", "demo") or not {"--archive", "--writer"}.isdisjoint(arguments):
        return  # they start Spark or servers, or are about roles: tests of their own run them
    ended = invoked(arguments)

    # 2: there are no parked messages and no such transactions to decide on. 1: nobody reads the log.
    expected = [(2, "parked"), (2, "half"), (1, "status")]
    assert ended.exit_code == 0 or (ended.exit_code, arguments[0]) in expected, ended.output


def invoked(arguments: list[str]) -> Result:
    """What comes of the command, whose own settings of the process end with it."""
    with the_tests_own_process():
        return CliRunner().invoke(main, arguments)


def parsed(command: click.Command, arguments: list[str]) -> click.Context:
    """What click makes of the arguments, down to the last verb."""
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), name := arguments.pop(0))
        assert found is not None, f"there is no {name}"
        command = found
    return command.make_context("outbox", arguments)


def shown() -> list[str]:
    """The commands of `outbox` in blocks that are only shown: they need servers, files, or another terminal."""
    texts = "\n".join(block for kind in ("text", "shell", "ini", "yaml") for block in blocks(ALL, kind))
    lines = re.sub(r"\\\n\s*", "", texts).splitlines()
    found = [re.search(r"(?:^|until |ExecStart=\S*/|command: |billing )(outbox [a-z].*)$", line) for line in lines]
    return sorted({match[1].partition(";")[0] for match in found if match})


@pytest.mark.parametrize("line", shown())
def test_the_command_line_takes_a_command_that_is_only_shown(line):
    assert parsed(main, shlex.split(line)[1:]).args == []


def test_every_other_command_is_one_of_make_or_an_installation():
    targets = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = [line for line in commands(ALL) if not line.startswith(("outbox ", "export OUTBOX_DATABASE="))]

    for line in others:
        install = re.fullmatch(r"pip install 'outbox-log\[([a-z,]+)\]'", line)
        make = re.fullmatch(r"make ([a-z-]+)", line)
        assert install or make or line == "bash .ci/matrix", line
        assert not install or set(install[1].split(",")) <= set(extras)
        assert not make or make[1] in targets


@pytest.mark.parametrize("name", names(ALL))
def test_a_name_resolves(name):
    """Of the module, or of an `Outbox`, which the pages call by the same name."""
    resolve(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("link", ["docs/nothing.md", "README.md#nothing", "#nothing"])
def test_a_broken_link_would_be_seen(tmp_path, link):
    (tmp_path / "README.md").write_text("# Something")
    page = tmp_path / "page.md"
    page.write_text(f"See [there]({link}), [this](#heading) and [that](README.md#something).\n\n# Heading\n")

    assert broken_links(page) == [link]
