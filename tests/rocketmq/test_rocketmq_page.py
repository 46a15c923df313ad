"""What `docs/rocketmq.md` says is so; its commands, names and links are tested with those of the README."""

import inspect
import re
from datetime import timedelta

from outbox import Relay, create_engine, migrate
from outbox.rocketmq import TransactionMQProducer
from tests.support.pages import TOP, run

PAGE = (TOP / "docs" / "rocketmq.md").read_text()


def test_the_code_runs_from_top_to_bottom_and_its_messages_are_delivered(tmp_path, monkeypatch):
    """One namespace, on SQLite, in a folder with nothing in it but the tables that `outbox db upgrade` makes."""
    monkeypatch.chdir(tmp_path)
    migrate.upgrade(create_engine("sqlite:///shop.db"))

    page = run(PAGE, "docs/rocketmq.md")

    delivered: list[str] = []
    Relay(page["outbox"], lambda message: delivered.append(message.text()), name="list").until_empty()
    page["outbox"].close()
    assert delivered == [
        '{"customer":"ann"}',
        '{"customer":"bob"}',
        '{"customer":"eve"}',
        "Thank you!",
        '{"customer":"joe"}',
        '{"customer":"kim"}',
        '{"customer":"lea"}',
    ]


def test_the_defaults_are_those_of_the_table():
    """And every argument is in it, but for the three that the examples show."""
    told = re.findall(r"^\| `([a-z_]+)` \| (?:`(\w+)`|(\d+)(?: (s|min|h))?) \|", PAGE, re.MULTILINE)
    units = {"s": "seconds", "min": "minutes", "h": "hours"}
    table = {
        name: word == "True" if word else timedelta(**{units[unit]: int(number)}) if unit else int(number)
        for name, word, number, unit in told
    }
    parameters = inspect.signature(TransactionMQProducer).parameters

    shown = {"group", "outbox", "listener", "business"}
    assert table == {name: each.default for name, each in parameters.items() if name not in shown}
