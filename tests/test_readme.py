"""What the README says is so: its code runs, its commands exist, its names resolve."""

import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import outbox
from outbox import create_engine, migrate
from outbox.cli import main

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


def test_the_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """One namespace, on SQLite, in a folder with nothing in it but the tables that `outbox db upgrade` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade(create_engine("sqlite:///shop.db"))
    namespace: dict[str, Any] = {"__name__": "readme"}

    for number, block in enumerate(blocks("python"), 1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)

    assert capsys.readouterr().out.splitlines() == [
        """orders order-1 b'{"id":1,"status":"placed","version":1}'""",
        "mail None b'Thank you!'",
        """orders None b'{"total":1}'""",
        "orders None b'no key, no delay'",
    ]


def test_the_ten_lines_are_those_of_the_example():
    """What is shown is what the demo runs, but for where the database is."""
    shown = next(block for block in blocks("python") if "def place_order(session: Session" in block)
    example = (TOP / "examples" / "orders.py").read_text()

    assert shown[shown.index("class Base") :].strip() in example


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("outbox ")])
def test_the_command_line_takes_a_command(line, tmp_path, monkeypatch):
    """The verb exists and every option, with such a value; what comes to an end by itself is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX_DATABASE", "sqlite:///shop.db")
    migrate.upgrade(create_engine("sqlite:///shop.db"))
    arguments = shlex.split(line)[1:]

    assert parsed(main, list(arguments)).args == []
    if line.endswith(("--watch", "--to nats://nats:4222")):
        return  # they run until they are interrupted
    ended = CliRunner().invoke(main, arguments)

    # 1: there are no dead letters to decide on.
    assert ended.exit_code == 0 or (ended.exit_code, arguments[0]) == (1, "dead"), ended.output


def parsed(command: click.Command, arguments: list[str]) -> click.Context:
    """What click makes of the arguments, down to the last verb."""
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), name := arguments.pop(0))
        assert found is not None, f"there is no {name}"
        command = found
    return command.make_context("outbox", arguments)


def test_every_other_command_is_one_of_make_or_an_installation():
    targets = re.findall(r"^([a-z-]+):", (TOP / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    others = [line for line in commands() if not line.startswith(("outbox ", "export OUTBOX_DATABASE="))]

    for line in others:
        install = re.fullmatch(r"pip install 'outbox-log\[([a-z,]+)\]'", line)
        make = re.fullmatch(r"make ([a-z-]+)", line)
        assert install or make, line
        assert not install or set(install[1].split(",")) <= set(extras)
        assert not make or make[1] in targets


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`?\b(outbox(?:\.[a-z_]+)+)\b(?!/)", README))))
def test_a_name_resolves(name):
    """Of the module, or of an `Outbox`, which the README calls by the same name."""
    first, *rest = name.split(".")[1:]
    if hasattr(outbox.Outbox, first):
        found: Any = getattr(outbox.Outbox, first)
    elif hasattr(outbox, first):
        found = getattr(outbox, first)
    else:
        found = import_module(f"outbox.{first}")
    for attribute in rest:
        found = getattr(found, attribute, None) or import_module(f"{found.__name__}.{attribute}")


def test_every_link_leads_to_a_file():
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", README)

    assert [target for target in targets if not (TOP / target).exists()] == []
