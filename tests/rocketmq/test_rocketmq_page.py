"""What the pages about RocketMQ say is so; their commands, names and links are tested with those of the README."""

import re
from dataclasses import asdict
from datetime import timedelta

from outbox import Relay, create_engine, migrate
from outbox.rocketmq import CheckPolicy
from tests.support.pages import TOP, run

PAGE, CONSUMERS = ((TOP / "docs" / f"{name}.md").read_text() for name in ("rocketmq", "from-rocketmq"))


def test_the_code_runs_from_top_to_bottom_and_its_messages_are_delivered(tmp_path, monkeypatch):
    """One namespace, on SQLite, in a folder with nothing in it but the tables that `outbox db upgrade` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade(create_engine("sqlite:///rocketmq.db"))

    page = run(PAGE + CONSUMERS, "the pages about RocketMQ")

    delivered: list[str] = []
    Relay(page["outbox"], lambda message: delivered.append(message.text()), name="list").until_empty()
    page["outbox"].close()
    assert delivered == [
        '{"customer":"ann"}',
        '{"customer":"bob"}',
        '{"customer":"eve"}',
        "Thank you!",
        '{"customer":"joe"}',
        '{"customer":"lea"}',
        *("placed", "paid", "shipped"),
        *("0", "1", "2"),
    ]


def test_the_defaults_are_those_of_the_table():
    told = re.findall(r"^\| `([a-z_]+)` \| (\d+)(?: (s|h))? \|", PAGE, re.MULTILINE)
    units = {"s": "seconds", "h": "hours"}
    table = {name: timedelta(**{units[unit]: int(number)}) if unit else int(number) for name, number, unit in told}

    assert table == asdict(CheckPolicy())
